"""The Model Check scripts, run inside this process: flags, layers, labels, documented files (contract items 11-61)."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import compat
from lockstep.compat import DOORS, parse, resolve
from lockstep.config.load import Loaded, to_dict
from lockstep.errors import ConfigError
from tests.conftest import Outcome
from tests.doors.conftest import MODEL_CHECK

Run = Callable[..., Outcome]
TAIL = (
    r"Step \[(\d+)/(\d+)\] \| Loss: (-?\d+\.\d{4}|nan|inf) \| LR: (\d\.\d{2}e[+-]\d{2})"
    r" \| Grad Norm: (\d+\.\d{4}|nan|inf) \| ETA: (\d+):(\d{2})"
)
TEST_CONFIG = str(MODEL_CHECK / "test_config.json")
CPU_NOTICE = "No GPUs detected: running the demo preset on the CPU"
OURS = [script for script, door in DOORS.items() if door.family == "llama"]
EXAMPLES = sorted(path.name for path in MODEL_CHECK.glob("*.json"))
QUICK = ("--config", TEST_CONFIG, "--device", "cpu", "report.tensorboard=false")


def resolved(script: str, *args: str) -> Loaded:
    return resolve(DOORS[script], *parse(DOORS[script], args))


def essence(loaded: Loaded) -> dict[str, object]:
    return to_dict(loaded.config)


# --- flags ---------------------------------------------------------------------------------------------------------


DOCUMENTED = {
    "--config": "x.json", "--preset": "debug", "--debug": "", "--max-steps": "10", "--model-path": "id",
    "--log-level": "DEBUG", "--log-file": "x.log", "--experiment-name": "mine", "--checkpoint": "x.pt",
    "--hf-token": "hf_x", "--log-prefix": "colon", "--log-dir": "logs", "--gradient-checkpointing": "",
    "--resume": "auto", "--device": "cpu", "--dry-run": "", "--deterministic": "", "--profile": "",
}  # fmt: skip


@pytest.mark.parametrize("flag", DOCUMENTED)
def test_every_documented_flag_with_hyphen_and_underscore(flag: str) -> None:
    value = [DOCUMENTED[flag]] if DOCUMENTED[flag] else []

    def understood(*words: str) -> tuple[object, list[tuple[str, str | None]]]:
        asked, settings = parse(DOORS["pretrain_main.py"], words)
        return asked, [(key.replace("-", "_"), text) for key, text in settings]

    hyphen = understood(flag, *value)
    assert hyphen == understood("--" + flag[2:].replace("-", "_"), *value)
    assert hyphen == understood("=".join([flag, *value]))
    assert hyphen != understood()


def test_native_settings_pass_through() -> None:
    words = ["--training.learning-rate", "3e-4", "model.num_layers=2", "--system.seed=7", "data.text_column=a=b"]
    config = resolved("run.sh", "--preset", "tiny", *words).config
    assert (config.training.learning_rate, config.model.num_layers, config.system.seed) == (3e-4, 2, 7)
    assert config.data.text_column == "a=b"


def test_a_setting_can_be_named_without_its_section() -> None:
    words = ["--batch-size", "3", "--lr", "1e-3", "--tensorboard", "--system.deterministic", "--use-amp", "false"]
    config = resolved("run.sh", "--preset", "tiny", *words).config
    assert (config.training.batch_size, config.training.learning_rate) == (3, 1e-3)
    assert config.report.tensorboard
    assert config.system.deterministic
    assert config.training.precision == "fp32"


def test_resume_with_and_without_a_path() -> None:
    door = DOORS["run.sh"]
    assert ("resume", "auto") in parse(door, ["--resume", "--debug"])[1]
    assert ("resume", "auto") in parse(door, ["--resume", "model.num_layers=2"])[1]
    assert ("resume", "runs/latest") in parse(door, ["--resume", "runs/latest"])[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-step", "3"], "did you mean --max-steps?"),
        (["--cofig", "x"], "did you mean --config?"),
        (["--config"], "--config: needs a value"),
        (["--debug=yes"], "--debug"),
        (["my_config.json"], "my_config.json"),
        (["-x"], "-x"),
        (["--model.num_layer", "3"], "model.num_layers"),
        (["--max-steps", "many"], "training.max_steps"),
    ],
)
def test_mistakes_exit_2_and_say_what_to_type(door: Run, words: list[str], said: str) -> None:
    outcome = door("pretrain_main.py", *words)
    assert outcome.code == 2
    assert said in outcome.err
    assert "Traceback" not in outcome.text


@pytest.mark.parametrize("script", OURS)
def test_help(door: Run, script: str) -> None:
    outcome = door(script, "--help")
    assert outcome.code == 0
    assert script in outcome.out
    for flag in DOCUMENTED:
        assert flag in outcome.out


# --- layers (11, 12, 14, 19, 20, 22) -------------------------------------------------------------------------------


def test_debug_is_the_debug_preset() -> None:
    by_switch, by_name = resolved("pretrain_main.py", "--debug"), resolved("pretrain_main.py", "--preset", "debug")
    assert essence(by_switch) == essence(by_name)
    config = by_switch.config
    assert (config.model.num_layers, config.training.max_steps) == (2, 10)
    assert (config.training.context_length, config.training.learning_rate) == (512, 1e-7)
    assert config.debug.enabled


def test_production_is_the_default_where_there_is_a_gpu(gpus: Callable[[int], None]) -> None:
    gpus(1)
    bare, named = resolved("pretrain_main.py"), resolved("pretrain_main.py", "--preset", "production")
    assert essence(bare) == essence(named)
    config = bare.config
    assert (config.model.num_layers, config.training.max_steps) == (4, 100)
    assert (config.training.context_length, config.training.learning_rate) == (8192, 1e-5)
    assert not config.debug.enabled


@pytest.mark.parametrize("script", OURS)
def test_without_a_gpu_every_script_runs_the_demo_and_says_so(gpus: Callable[[int], None], script: str) -> None:
    gpus(0)
    assert resolved(script).preset == "demo"
    assert CPU_NOTICE in resolved(script).notices
    for words in (["--preset", "production"], ["--debug"], ["--config", "my_config.json"]):
        loaded = resolved(script, *words)
        assert loaded.preset != "demo"
        assert CPU_NOTICE not in loaded.notices
    gpus(2)
    asked = resolved(script, "--device", "cpu")
    assert asked.preset == "demo"
    assert "demo preset" in asked.notices[0]


def test_a_preset_that_does_not_exist(door: Run) -> None:
    outcome = door("pretrain_main.py", "--preset", "nonsense")
    assert outcome.code == 2
    for name in ("debug", "demo", "full", "production", "stable", "tiny"):
        assert name in outcome.err


def test_a_missing_config_names_the_path_and_the_examples(door: Run, in_dir: Path) -> None:
    outcome = door("pretrain_main.py", "--config", "no/such.json")
    assert outcome.code == 2
    assert "no/such.json" in outcome.err
    assert "custom_config.json" in outcome.err


def test_the_examples_are_complete() -> None:
    named = "config_stable single_gpu custom_config my_config test_config debug_config"
    assert {f"{name}.json" for name in named.split()} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_loads(name: str, in_dir: Path) -> None:
    """By its path, and by its bare name from a folder that does not have it."""
    loaded = resolved("run.sh", "--config", name)
    assert any(str(MODEL_CHECK / name) in notice for notice in loaded.notices)
    by_path = resolved("run.sh", "--config", str(MODEL_CHECK / name))
    assert essence(loaded) == essence(by_path)
    assert any(origin.layer == "file" for origin in by_path.origins.values())


def test_the_custom_example_says_what_the_guide_says() -> None:
    loaded = resolved("pretrain_main.py", "--config", str(MODEL_CHECK / "custom_config.json"))
    config = loaded.config
    assert (config.model.num_layers, config.model.attention_backend) == (8, "flash_attn")
    assert (config.training.batch_size, config.training.learning_rate) == (4, 5e-6)
    assert (config.training.max_steps, config.training.context_length) == (500, 4096)
    assert (config.system.device, config.system.seed) == ("cuda", 42)
    assert loaded.origins["training.max_steps"].layer == "file"


def test_debug_with_another_preset_is_debug_output() -> None:
    config = resolved("pretrain_main.py", "--debug", "--preset", "tiny").config
    assert (config.model.model_path, config.debug.enabled, config.debug.log_level) == ("lockstep/tiny", True, "DEBUG")


def test_file_wins_over_debug_and_flags_over_the_file(in_dir: Path) -> None:
    (in_dir / "x.json").write_text('{"training": {"max_steps": 7, "learning_rate": 1e-3}}', encoding="utf-8")
    config = resolved("pretrain_main.py", "--debug", "--config", "x.json", "--max-steps", "3").config
    assert (config.model.num_layers, config.training.max_steps, config.training.learning_rate) == (2, 3, 1e-3)


def test_the_scripts_own_defaults_give_way(in_dir: Path) -> None:
    bare = resolved("pretrain_main.py", "--debug").config
    assert (bare.training.checkpoint_dir, bare.system.output_dir) == ("./.checkpoints", "./.outputs")
    assert bare.report.log_prefix == "colon"
    assert resolved("run.sh", "--debug").config.report.log_prefix == "bracket"
    (in_dir / "x.json").write_text(
        '{"training": {"checkpoint_dir": null}, "report": {"log_prefix": "bracket"}}', encoding="utf-8"
    )
    loaded = resolved("run_training.sh", "--config", "x.json", "--system.output-dir", "elsewhere")
    assert loaded.config.training.checkpoint_dir is None
    assert loaded.config.report.log_prefix == "bracket"
    assert loaded.config.system.output_dir == "elsewhere"


def test_dry_run_shows_each_value_and_its_origin(door: Run, in_dir: Path) -> None:
    outcome = door(
        "pretrain_main.py", "--config", str(MODEL_CHECK / "custom_config.json"), "--max-steps", "9", "--dry-run"
    )
    assert outcome.code == 0
    assert re.search(r"max_steps .*9 .*flag", outcome.out)
    assert re.search(r"num_layers .*8 .*custom_config\.json", outcome.out)
    assert re.search(r"log_prefix .*colon.* script pretrain_main\.py", outcome.out)
    assert "parameters        2,795," in outcome.out
    assert "memory per GPU    " in outcome.out
    assert list(in_dir.iterdir()) == []


# --- running (21, 45, 60, 61, 174) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["--max-steps", "--max_steps"])
def test_max_steps_are_counted_exactly(door: Run, in_dir: Path, spelling: str) -> None:
    outcome = door("pretrain_main.py", *QUICK, spelling, "3")
    assert outcome.code == 0, outcome.text
    lines = [line for line in outcome.out.splitlines() if "Step [" in line]
    assert [re.fullmatch(rf"INFO \| {TAIL}", line) is not None for line in lines] == [True] * 3
    assert [re.findall(r"\[(\d+)/(\d+)\]", line)[0] for line in lines] == [("0", "3"), ("1", "3"), ("2", "3")]


@pytest.mark.parametrize(
    ("variables", "label"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3", "GPU_RANK": "3"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "5,6"}, "5"),
    ],
)
def test_lines_carry_the_gpu(
    door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], label: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = door("pretrain_main.py", *QUICK, "--max-steps", "1")
    assert outcome.code == 0, outcome.text
    assert re.search(rf"^GPU{label}:INFO \| \[GPU {label}\] {TAIL}$", outcome.out, re.MULTILINE)
    assert {line.partition(":")[0] for line in outcome.out.splitlines()} == {f"GPU{label}"}


@pytest.mark.slow  # by default with two workers: tests/faults/test_doors_launching.py
def test_a_launcher_labels_logs_and_concludes(door: Run, in_dir: Path) -> None:
    outcome = door("run_training.sh", *QUICK, "--max-steps", "2")
    assert outcome.code == 0, outcome.text
    lines = outcome.out.splitlines()
    assert lines[-1] == "[SUCCESS] All GPU training completed successfully"
    folders = re.findall(r"Log directory: (/tmp/model_check_logs_\d+_\d+)$", outcome.out, re.MULTILINE)
    assert len(folders) == 2, "at the start and at the end"
    folder = Path(folders[0])
    try:
        logged = (folder / "gpu_0.log").read_text(encoding="utf-8")
        shown = [line.removeprefix("GPU0:") for line in lines if line.startswith("GPU0:")]
        assert sum("Step [" in line for line in shown) == 2
        assert logged.splitlines() == shown, "the screen without its prefix"
    finally:
        shutil.rmtree(folder)


def test_documented_files_and_no_others(door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASET_CACHE_DIR")
    outcome = door(
        "pretrain_main.py", *QUICK, "--max-steps", "2", "training.save_interval=1", "--experiment-name", "mine"
    )
    assert outcome.code == 0, outcome.text
    saved = json.loads((in_dir / ".outputs" / "mine_config.json").read_text(encoding="utf-8"))
    assert saved["training"]["max_steps"] == 2
    assert sorted(path.name for path in (in_dir / ".checkpoints").glob("step_*.pt"))
    assert {path.name for path in in_dir.iterdir()} == {".cache", ".checkpoints", ".outputs", "runs"}


def test_logs_folder_only_when_asked(door: Run, in_dir: Path) -> None:
    assert door("pretrain_main.py", *QUICK, "--max-steps", "1", "--log-dir", ".logs").code == 0
    logs = [path for path in (in_dir / ".logs").rglob("*") if path.is_file()]
    assert any("Step [0/1]" in path.read_text(encoding="utf-8") for path in logs)


def test_a_token_is_written_nowhere(door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, other = "hf_documented0123456789", "hf_environment987654321"
    monkeypatch.setenv("HF_TOKEN", other)
    monkeypatch.setattr("sys.argv", ["pretrain_main.py", "--hf-token", token])
    outcome = door("pretrain_main.py", *QUICK, "--max-steps", "1", "--hf-token", token, "debug.log_level=DEBUG")
    assert outcome.code == 0, outcome.text
    files = [path for path in in_dir.rglob("*") if path.is_file()]
    assert len(files) > 5
    for secret in (token, other):
        assert secret not in outcome.text
        assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []


def test_a_gpu_config_without_a_gpu_is_refused(door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    outcome = door("pretrain_main.py", "--config", str(MODEL_CHECK / "single_gpu.json"))
    assert outcome.code == 2
    assert "no GPU" in outcome.text
    assert "--device cpu" in outcome.text


def test_prepare_dataset_builds_once_and_then_says_so(door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASET_CACHE_DIR")
    first = door("prepare_dataset.py", "--config", TEST_CONFIG)
    assert first.code == 0, first.text
    for line in ("Preparing dataset cache...", "Dataset: builtin", "Model: lockstep/tiny", "Context length: 128"):
        assert line in first.out
    assert re.search(r"^Dataset ready: \d+ samples", first.out, re.MULTILINE)
    assert re.search(r"^Cache location: \S*\.cache/datasets", first.out, re.MULTILINE)
    assert "[Cache] Saved to" in first.out
    second = door("prepare_dataset.py", "--config", TEST_CONFIG)
    assert second.code == 0
    for line in ("Dataset: builtin", "Model: lockstep/tiny", "Context length: 128"):
        assert first.out.splitlines().count(line) == second.out.splitlines().count(line) == 1
    assert re.search(r"\[Cache\] Loaded train data from cache \(\d+ tokens\)", second.out)
    other = door("prepare_dataset.py", "--config", TEST_CONFIG, "training.context_length=64")
    assert "[Cache] Saved to" in other.out, "another configuration is another dataset"


# --- init (157) ----------------------------------------------------------------------------------------------------


def test_init_copies_every_script_and_changes_nothing(in_dir: Path) -> None:
    folder = in_dir / "work"
    written = {path.relative_to(folder).as_posix() for path in compat.init("llama", folder)}
    shipped = {path.relative_to(MODEL_CHECK).as_posix() for path in MODEL_CHECK.rglob("*") if path.is_file()}
    assert written == {name for name in shipped if "__pycache__" not in name}
    assert {"pretrain_main.py", "run.sh", "config.py", "config/presets/debug.json"} <= written
    assert not (folder / "config/presets/debug.json").is_symlink()
    assert compat.init("llama", folder) == [], "again: nothing to do"
    (folder / "run.sh").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.sh"):
        compat.init("llama", folder)
    assert (folder / "run.sh").read_text(encoding="utf-8") == "mine"


def test_init_claims_no_more_than_there_is(in_dir: Path) -> None:
    with pytest.raises(ConfigError, match="unknown family"):
        compat.init("nonsense", in_dir)
    assert list(in_dir.iterdir()) == []


def test_the_families_table_names_every_documented_command() -> None:
    table = compat.families_table()
    for script in (
        "run.sh",
        "run_training.sh",
        "pretrain_main.py",
        "prepare_dataset.py",
        "train_gpu.sh",
        "train_auto_gpu.sh",
        "train_multi_gpu.sh",
    ):
        assert script in table


def test_requirements_txt_is_what_pyproject_says() -> None:
    import tomllib

    project = tomllib.loads((MODEL_CHECK.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (MODEL_CHECK / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == project["dependencies"]


def test_config_py_is_the_documented_python_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MODEL_CHECK))
    monkeypatch.setitem(sys.modules, "config", None)
    monkeypatch.delitem(sys.modules, "config")
    from config import get_default_config

    assert get_default_config(preset="debug").training.max_steps == 10
    assert get_default_config(debug_mode=True).training.max_steps == 10
    assert get_default_config().training.max_steps == 100
