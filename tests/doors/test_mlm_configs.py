"""The named configurations of masked-LM and the flags of its trainer (contract items 71-76, 85, 86, 88, 98, 157)."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import compat, compat_mlm_scripts
from lockstep.compat import DOORS, parse, resolve
from lockstep.config.load import Loaded, to_dict
from lockstep.errors import ConfigError
from lockstep.named_configs import CONFIGS, TrainingConfig, flags
from tests.conftest import Outcome

Run = Callable[..., Outcome]
MLM = Path(__file__).resolve().parents[2] / "doors" / "mlm"
GOLDEN = Path(__file__).parent / "golden"
TRAINER = DOORS["mlm_pretrain_v3.py"]
TOTALS = {
    "h200_8gpu_fast": 512, "h200_8gpu_standard": 256, "h200_8gpu_quality": 128, "4gpu_standard": 128,
    "2gpu_standard": 64, "1gpu_standard": 16,
}  # fmt: skip
GUIDE = """
# Add custom configuration
CONFIGS["my_custom_config"] = TrainingConfig(
    name="My Custom Training",
    description="Custom training setup",
    num_gpus=4,
    batch_size_per_gpu=16,
    epochs=10,
    learning_rate=1e-5,
    model_config={
        "n_layers": 6,
        "n_heads": 8,
        "n_embed": 16,
        "max_seq_len": 128
    },
    dataset_config={
        "max_samples": 1_000_000,
        "streaming": True,
        "min_words": 5
    },
    optimization_config={
        "gradient_clip": 1.0,
        "warmup_ratio": 0.1,
        "weight_decay": 0.01,
        "mixed_precision": True
    }
)
"""  # as the guide has it


def configs(door: Run, *words: str) -> Outcome:
    return door("multi_gpu_configs.py", *words)


def trained(*words: str) -> Loaded:
    return resolve(TRAINER, *parse(TRAINER, words))


# --- multi_gpu_configs.py ------------------------------------------------------------------------------------------


def test_without_a_command_it_prints_the_usage_and_exits_1(door: Run) -> None:
    """Item 71."""
    result = configs(door)
    assert result.code == 1
    assert result.out.strip() == compat_mlm_scripts.USAGE
    assert configs(door, "--help").code == 0
    removed = configs(door, "estimate", "h200_8gpu_fast")
    assert removed.code == 2
    assert "multi_gpu_configs.py estimate: was removed" in removed.err
    assert configs(door, "info").code == 1


def test_the_list(door: Run) -> None:
    """Item 72."""
    result = configs(door, "list")
    assert result.code == 0
    assert result.out == (GOLDEN / "mlm_list.txt").read_text(encoding="utf-8")
    assert re.findall(r"^(\w+):$", result.out, re.MULTILINE) == list(TOTALS)


def test_info_shows_every_field(door: Run) -> None:
    """Item 73."""
    result = configs(door, "info", "h200_8gpu_quality")
    assert result.code == 0
    assert result.out == (GOLDEN / "mlm_info.txt").read_text(encoding="utf-8")
    for name, total in TOTALS.items():
        assert f"Total batch size: {total}\n" in configs(door, "info", name).out


def test_generate(door: Run, in_dir: Path) -> None:
    """Item 74."""
    for name in TOTALS:
        result = configs(door, "generate", name)
        assert (result.code, result.out) == (0, f"Training script generated: train_{name}.sh\n"), result.err
        script = in_dir / f"train_{name}.sh"
        assert stat.S_IMODE(script.stat().st_mode) == 0o755
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
        first = script.read_text(encoding="utf-8").splitlines()
        assert first[1:3] == [
            f"# Auto-generated training script for {CONFIGS[name].name}",
            f"# Generated from configuration: {name}",
        ]
    if tool := shutil.which("shellcheck"):
        scripts = [*in_dir.glob("train_*.sh"), MLM / "run_multi_gpu_training.sh"]
        checked = subprocess.run([tool, "-x", "-e", "SC1091", *map(str, scripts)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


def test_an_unknown_name_or_command_lists_what_there_is(door: Run, in_dir: Path) -> None:
    """Item 75."""
    result = configs(door, "generate", "nope")
    assert result.code == 2
    assert result.err == f"Error: Configuration 'nope' not found. Available: {list(TOTALS)}\n"
    assert configs(door, "info", "nope").code == 2
    assert {configs(door, *words).code for words in (("list", "extra"), ("info", "nope", "extra"))} == {2}
    assert "Usage:" in configs(door, "list", "extra").out
    result = configs(door, "nope")
    assert result.code == 2
    assert all(word in result.err for word in ("list", "info", "generate"))
    assert list(in_dir.iterdir()) == []


@pytest.mark.parametrize("place", ["end", "before the main line"])
def test_one_of_the_users_own(in_dir: Path, place: str) -> None:
    """Item 76: added to the file as the guide says, wherever in it; listed, generated with every value, understood."""
    compat.init("mlm", in_dir)
    path = in_dir / "multi_gpu_configs.py"
    text = path.read_text(encoding="utf-8")
    main = 'if __name__ == "__main__":'
    assert main in text
    path.write_text(text + GUIDE if place == "end" else text.replace(main, f"{GUIDE}\n{main}"), encoding="utf-8")

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, str(path), *words], capture_output=True, text=True, cwd=in_dir)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "my_custom_config:\n  Description: Custom training setup\n  GPUs: 4\n" in run("list")
    assert run("generate", "my_custom_config") == "Training script generated: train_my_custom_config.sh\n"
    words = _words_of(in_dir / "train_my_custom_config.sh")
    path.unlink()  # the script must not need it
    loaded = trained(*words[words.index("--config-name") :])
    config: Any = loaded.config
    assert config.run.experiment_name == "my_custom_config"
    assert (config.model.num_layers, config.model.num_attention_heads, config.model.hidden_size) == (6, 8, 16)
    assert (config.training.batch_size, config.training.epochs, config.training.learning_rate) == (16, 10, 1e-5)
    assert config.data.max_train_samples == 1_000_000
    assert words[words.index("--num-gpus") + 1] == "4"


def _words_of(script: Path) -> list[str]:
    """The words that a generated script hands on, as bash understands them."""
    shown = script.read_text(encoding="utf-8").replace('exec "$python" -m lockstep.compat', "printf '%s\\n'")
    return subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout.splitlines()[1:]


def test_words_of_a_configuration_are_quoted(door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    title = "a 'b' $(touch broken) `x` \\ é\nexit 1"
    monkeypatch.setitem(CONFIGS, "mine", TrainingConfig(**{**vars(CONFIGS["1gpu_standard"]), "name": title}))
    assert configs(door, "generate", "mine").code == 0
    script = in_dir / "train_mine.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    shown = script.read_text(encoding="utf-8").replace('exec "$python" -m lockstep.compat', "printf '%s\\0'")
    words = subprocess.run(["bash", "-c", shown], capture_output=True, cwd=in_dir, check=True).stdout.split(b"\0")
    assert words[2].decode() == title
    assert not (in_dir / "broken").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_gpus": 0}, "mine.num_gpus"),
        ({"model_config": {"n_layers": 6}}, "has no n_heads, n_embed, max_seq_len"),
        ({"model_config": {"n_layers": 6, "n_heads": 5, "n_embed": 16, "max_seq_len": 128}}, "num_attention_heads"),
        ({"dataset_config": {"max_sample": 5}}, "did you mean"),
        ({"epochs": "many"}, "training.epochs"),
    ],
)
def test_what_cannot_be_trained_gets_no_script(
    door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.setitem(CONFIGS, "mine", TrainingConfig(**{**vars(CONFIGS["1gpu_standard"]), **change}))
    result = configs(door, "generate", "mine")
    assert result.code == 2
    assert said in result.err, result.err
    assert "Traceback" not in result.err
    assert list(in_dir.iterdir()) == []


def test_a_slip_in_the_users_own_file_is_named(in_dir: Path) -> None:
    compat.init("mlm", in_dir)
    path = in_dir / "multi_gpu_configs.py"
    path.write_text(path.read_text(encoding="utf-8") + '\nCONFIGS["x"] = TrainingConfig(name="x")\n', encoding="utf-8")
    done = subprocess.run([sys.executable, str(path), "list"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "TypeError" in done.stderr
    assert "num_gpus" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_python_names_are_those_of_the_guide() -> None:
    words = [sys.executable, "-c", "from multi_gpu_configs import CONFIGS, TrainingConfig; print(len(CONFIGS))"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=MLM, env=os.environ)
    assert done.stdout == "6\n", done.stderr


# --- named configurations reach the trainer ------------------------------------------------------------------------


REACHES = {
    "model.num_layers": 3, "model.num_attention_heads": 2, "model.hidden_size": 32, "training.context_length": 96,
    "training.max_grad_norm": 0.25, "training.warmup_ratio": 0.3, "training.weight_decay": 0.2,
    "training.precision": "fp32", "data.min_words": 9, "data.max_train_samples": 777, "data.streaming": False,
    "training.batch_size": 3, "training.epochs": 4.0, "training.learning_rate": 7e-4,
}  # fmt: skip
UNUSUAL = TrainingConfig(
    name="x", description="y", num_gpus=2, batch_size_per_gpu=3, epochs=4, learning_rate=7e-4,
    model_config={"n_layers": 3, "n_heads": 2, "n_embed": 32, "max_seq_len": 96},
    dataset_config={"max_samples": 777, "streaming": False, "min_words": 9},
    optimization_config={"gradient_clip": 0.25, "warmup_ratio": 0.3, "weight_decay": 0.2, "mixed_precision": False},
)  # fmt: skip


def test_each_value_of_a_configuration_reaches_the_run(door: Run) -> None:
    """Item 98: by --dry-run; each value is another than the default, so none can be there by chance."""
    shown = door("mlm_pretrain_v3.py", "--dry-run", "--device", "cpu", *flags("mine", UNUSUAL))
    assert shown.code == 0, shown.err
    usual = to_dict(trained().config)
    for key, value in REACHES.items():
        section, _, name = key.partition(".")
        assert usual[section][name] != value
        text = f'"{value}"' if isinstance(value, str) else str(value).lower()
        assert re.search(rf"^{key} +{re.escape(text)} ", shown.out, re.MULTILINE), key


def test_a_known_name_brings_its_values(monkeypatch: pytest.MonkeyPatch, in_dir: Path) -> None:
    """C5: by its name alone; a flag or a file counts more, wherever it stands."""
    monkeypatch.setitem(CONFIGS, "mine", UNUSUAL)
    tree = to_dict(trained("--config-name", "mine").config)
    for key, value in REACHES.items():
        section, _, name = key.partition(".")
        assert tree[section][name] == value
    assert trained("--config-name", "mine").origins["model.num_layers"].layer == "script"
    (in_dir / "x.json").write_text('{"model": {"num_layers": 5}}', encoding="utf-8")
    changed: Any = trained("--n-heads", "4", "--config-name", "mine", "--config", "x.json", "--lr", "1e-3").config
    assert (changed.model.num_layers, changed.model.num_attention_heads, changed.model.hidden_size) == (5, 4, 32)
    assert changed.training.learning_rate == 1e-3
    fast: Any = trained("--config-name", "h200_8gpu_quality").config
    assert (fast.model.num_layers, fast.model.num_attention_heads, fast.model.hidden_size) == (8, 12, 24)


def test_a_name_that_nobody_knows_is_only_a_label_for_a_whole_configuration() -> None:
    with pytest.raises(ConfigError, match="generate NAME"):
        trained("--config-name", "nobodys", "--n-layers", "2")
    assert trained(*flags("nobodys", UNUSUAL)).config.run.experiment_name == "nobodys"


def test_overwrite_starts_anew() -> None:
    assert trained("--overwrite").config.checkpoint.resume is None
    assert trained("--checkpoint", "runs/x").config.checkpoint.resume == "runs/x"


def test_init_puts_the_scripts_of_the_family(in_dir: Path) -> None:
    """Item 157."""
    made = {path.name for path in compat.init("mlm", in_dir)}
    assert made == {
        "mlm_pretrain_v3.py", "multi_gpu_configs.py", "run_multi_gpu_training.sh", "python.sh", "install_hint.py",
    }  # fmt: skip
    for command in (["mlm_pretrain_v3.py"], ["multi_gpu_configs.py"]):
        done = subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True, cwd=in_dir)
        assert done.returncode == 0, done.stderr
    script = [str(in_dir / "run_multi_gpu_training.sh"), "--help"]
    done = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ./run_multi_gpu_training.sh [dataset] [batch-size]")


def test_the_two_folders_share_what_is_the_same() -> None:
    for name in ("python.sh", "install_hint.py"):
        assert (MLM / name).read_bytes() == (MLM.parent / "model_check" / name).read_bytes()


def test_an_error_says_that_it_is_one_where_no_label_does(door: Run, in_dir: Path) -> None:
    """After the banner errors go to the log, whose lines have no label here."""
    result = door("mlm_pretrain_v3.py", "--device", "cpu", "--data-path", "nothing.txt", "--no-streaming")
    assert result.code == 66
    assert re.search(r"^lockstep: error: nothing\.txt: no such file or folder$", result.out, re.MULTILINE)


def test_long_words_keep_the_column_of_the_probabilities() -> None:
    from lockstep.engine.inference import Blank, Filled

    blank = Blank(position=2, words=(("bufferedincrementaldecoder", 0.5), ("a", 0.25)))
    _, _, first, second = Filled("the a", (blank,)).lines()
    assert first.index("0.5000") == second.index("0.2500")
