"""The command line: verbs, flags in both spellings, exit codes, secrets, and what it costs."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.arguments import SHORTS
from lockstep.config.load import load, to_dict
from lockstep.errors import ExitCode, NonFiniteError, Stopped
from lockstep.rundir import write_json
from lockstep.verb_arguments import ARGUMENTS

Run = Callable[..., Any]
CANARIES = {
    "HF_TOKEN": "hf_canaryAAAAAAAA",
    "WANDB_API_KEY": "canaryBBBBBBBBBBBB",
    "AWS_SECRET_ACCESS_KEY": "canaryCCCCCCCCCCCC",
    "HTTPS_PROXY": "http://user:canaryDDDDDDDD@proxy:3128",
    "MY_PASSWORD": "canaryEEEEEEEEEE",
}


def shown(text: str) -> dict[str, list[str]]:
    """Rows of `config show`: key -> [value, where...]."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line and not line.startswith("#")}


# ------------------------------------------------------------------------------------------------ verbs


def test_help_and_version(lockstep: Run) -> None:
    assert lockstep("--version").out == "lockstep 0.1.0\n"
    usage = lockstep("--help")
    assert usage.code == 0
    assert all(verb in usage.out for verb in cli.VERBS)
    assert cli.VERBS.keys() == ARGUMENTS.keys()


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(lockstep: Run, verb: str) -> None:
    result = lockstep(*verb.split(), "--help")
    assert result.code == 0
    assert f"usage: lockstep {verb}" in result.out


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"], ["config"], ["config", "nonsense"], ["train"], ["train", "nonsense"],
        ["train", "llama", "nonsense"], ["script", "slurm", "llama", "tiny", "--dry-run"], ["script", "torchrun"],
        ["train", "llama", "tiny", "demo"], ["train", "llama", "tiny", "--preset", "demo"], ["config", "list", "--foo"],
        ["sample"], ["sample", "x", "y", "--tokens", "0"], ["sample", "x", "y", "--temperature", "nan"],
        ["export", "x"], ["export", "x", "--to", "gguf"], ["config", "explain", "nonsense"], ["config", "schema", "x"],
        ["init", "nonsense"], ["train", "llama", "--config"], ["config", "validate", "nowhere.json"],
        ["train", "llama", "tiny", "\udcff=3"], ["train", "llama", "tiny", "--max-steps", "\udcff"],
        ["train", "llama", "tiny", "--run.tags", '{"a": "\udcff"}'], ["train", "llama", "tiny", "run.tags={\udcff: a}"],
        ["sample", "x", "\udcff"], ["eval", "x", "--answer", "\udcff"], ["eval", "x", "--prompt=\udcff"],
        ["resume", "x", "--checkpoint=y"], ["resume", "x", "--resume"], ["resume", "x", "checkpoint.resume=y"],
    ],
)  # fmt: skip
def test_usage_mistakes_are_exit_2_with_a_hint(lockstep: Run, in_dir: Path, words: list[str]) -> None:
    result = lockstep(*words)
    assert result.code == 2
    assert "Traceback" not in result.text
    assert not list(in_dir.iterdir())
    if words != ["config"]:
        assert result.err.startswith("lockstep: error: ")
        assert "  try: " in result.err


def test_an_unknown_verb_suggests(lockstep: Run) -> None:
    assert "did you mean 'train'?" in lockstep("traim").err


def test_alone_it_shows_devices_runs_and_three_commands(
    lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    empty = lockstep()
    assert empty.code == 0
    assert "no GPU" in empty.out
    assert "none yet" in empty.out
    assert empty.out.split("try\n")[1].count("\n") == 3
    for name, last in (
        ("one", '{"kind": "end", "exit_code": 0, "val_loss": 1.5}'),
        ("two", '{"kind": "fault", "cause": "NaN loss"}'),
        ("three", '{"kind": "step", "step": 7}\nhalf a li'),
    ):
        write_json(in_dir / "runs" / name / "config.json", {})
        (in_dir / "runs" / name / "events.jsonl").write_text(f'{{"kind": "start"}}\n{last}\n')
    listing = lockstep().out
    for words in (
        "one  just now, done, validation loss 1.5",
        "two  just now, failed: NaN loss",
        "three  just now, at step 7",
    ):
        assert words in listing


def test_families_lists_the_documented_commands(lockstep: Run) -> None:
    """Contract item 157."""
    text = lockstep("families").out
    for words in (
        "python3 pretrain_main.py",
        "bash run.sh",
        "./train_gpu.sh",
        "python multi_gpu_configs.py list",
        "./train_h200_8gpu_standard.sh",
        "./run_multi_gpu_training.sh",
        "python mlm_pretrain_v3.py",
        "torchrun --nproc_per_node=8 mlm_pretrain_v3.py",
        "python collect.py",
        "accelerate launch [--num_processes 2] [--mixed_precision fp16] train.py",
    ):
        assert words in text


def test_init_puts_the_scripts_into_a_folder(lockstep: Run, in_dir: Path) -> None:
    result = lockstep("init", "llama", "here")
    assert result.code == 0
    assert (in_dir / "here" / "pretrain_main.py").is_file()
    assert "pretrain_main.py" in result.out
    assert result.out.splitlines()[-1] == "next: cd here && bash run.sh --config test_config.json"
    assert lockstep("init", "llama", "here").out == "Everything is already in here\n"


def test_a_family_that_nobody_knows_is_refused_with_the_nearest(lockstep: Run) -> None:
    for words in (["train", "lama", "tiny"], ["init", "lama"], ["config", "explain", "--family", "lama"]):
        result = lockstep(*words)
        assert result.code == 2
        assert "unknown family 'lama'" in result.err
        assert "did you mean 'llama'?" in result.err


# ------------------------------------------------------------------------------------------------ flags

VALUES = {
    "--max-steps": "3", "--resume": "x", "--checkpoint": "x", "--name": "n", "--out": "o", "--seed": "3",
    "--device": "cpu", "--precision": "bf16", "--batch-size": "3", "--lr": "0.5", "--model-path": "lockstep/small",
    "--data-path": "x.txt", "--experiment-name": "e", "--log-level": "ERROR", "--log-file": "f", "--log-dir": "d",
    "--log-prefix": "colon", "--hf-token": "hf_abcdefgh", "--gpus": "0,2", "--mode": "fsdp",
}  # fmt: skip


@pytest.mark.parametrize("short", SHORTS, ids=lambda short: short.name)
def test_hyphen_and_underscore_are_the_same_in_every_flag(lockstep: Run, short: Any) -> None:
    """Contract item 158."""
    value = [VALUES[short.name]] if short.metavar else []
    plain = lockstep("config", "show", "llama", "tiny", "--json").out
    forms = [[short.name, *value], [f"--{short.name[2:].replace('-', '_')}", *value]]
    if value:
        forms += [[f"{form[0]}={value[0]}"] for form in forms]
    outputs = {lockstep("config", "show", "llama", "tiny", "--json", *form).out for form in forms}
    assert len(outputs) == 1
    assert outputs != {plain}
    assert outputs != {""}


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_flags_of_the_verb_too(lockstep: Run, flag: str) -> None:
    assert "parameters" in lockstep("train", "llama", "tiny", flag).out


def test_settings_in_all_three_forms_and_any_place(lockstep: Run) -> None:
    forms = [
        ["--training.max-steps", "3", "llama", "tiny"],
        ["llama", "--training.max_steps=3", "tiny"],
        ["llama", "tiny", "training.max_steps=3"],
        ["llama", "training.max-steps=3", "tiny"],
        ["llama", "tiny", "max_steps=3"],
    ]
    outputs = {lockstep("config", "show", *form, "--json").out for form in forms}
    assert len(outputs) == 1
    assert json.loads(outputs.pop())["training"]["max_steps"] == 3


def test_switches_do_not_swallow_the_next_word(lockstep: Run) -> None:
    rows = shown(lockstep("config", "show", "--deterministic", "llama", "--profile", "tiny").out)
    assert rows["system.deterministic"][0] == rows["report.profile"][0] == "true"
    assert shown(lockstep("config", "show", "llama", "tiny", "--profile", "false").out)["report.profile"][0] == "false"


def test_resume_alone_means_auto(lockstep: Run) -> None:
    for words in (
        ["llama", "tiny", "--resume"],
        ["llama", "tiny", "--resume", "seed=3"],
        ["llama", "--resume", "auto", "tiny"],
    ):
        assert shown(lockstep("config", "show", *words).out)["checkpoint.resume"][0] == '"auto"'


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--debg"], "--debug"), (["--dry-runs"], "--dry-run"), (["--max-step", "3"], "--max-steps"),
        (["--learnin-rate", "1"], "--learning-rate"), (["max_stepss=3"], "--max-steps"),
        (["--conifg", "x"], "--config"),
    ],
)  # fmt: skip
def test_a_slip_in_a_flag_is_recognised(lockstep: Run, words: list[str], meant: str) -> None:
    result = lockstep("train", "llama", "tiny", *words)
    assert result.code == 2
    assert f"did you mean {meant}?" in result.err


def test_a_flag_of_a_later_version_is_no_setting(lockstep: Run) -> None:
    result = lockstep("train", "llama", "tiny", "--wandb")
    assert result.code == 2
    assert result.err.startswith("lockstep: error: --wandb: no such flag of lockstep train")


def test_negative_numbers_are_values(lockstep: Run) -> None:
    assert (
        shown(lockstep("config", "show", "llama", "tiny", "--max-grad-norm", "-1").out)["training.max_grad_norm"][0]
        == "-1.0"
    )


# ------------------------------------------------------------------------------------------------ other people's verbs


def test_train_hands_the_configuration_to_the_engine(lockstep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.engine import train as engine

    seen: list[Any] = []

    def fake(loaded: Any) -> Any:
        seen.append(loaded)
        return engine.Result(Path("x"), 3, 1.0, None, exit_code=7)

    monkeypatch.setattr(engine, "train", fake)
    assert lockstep("train", "llama", "tiny", "--max_steps", "3").code == 7
    assert seen[0].config.training.max_steps == 3


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (NonFiniteError("NaN loss"), 71, "lockstep: error: NaN loss"),
        (Stopped("stopped by SIGTERM", exit_code=ExitCode.TERMINATED), 143, "lockstep: stopped by SIGTERM"),
        (KeyboardInterrupt(), 130, "lockstep: interrupted"),
        (ModuleNotFoundError("No module named 'h5py'", name="h5py"), 1, "lockstep: error: "),
    ],
)
def test_exit_codes_are_kept(
    lockstep: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, start: str
) -> None:
    from lockstep.engine import train as engine

    def fail(_: Any) -> Any:
        raise error

    monkeypatch.setattr(engine, "train", fail)
    result = lockstep("train", "llama", "tiny")
    assert result.code == code
    assert result.err.startswith(start)
    assert "Traceback" not in result.err


def make_run(folder: Path) -> None:
    config = load("llama", preset="tiny", flags=[("seed", "5")]).config
    write_json(folder / "config.json", {"family": "llama", "preset": "tiny", "config": to_dict(config)})


def test_resume_uses_the_settings_of_the_run(lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.engine import train as engine

    seen: list[Any] = []
    make_run(in_dir / "runs" / "mine")
    monkeypatch.setattr(engine, "train", lambda loaded: seen.append(loaded) or engine.Result(Path("x"), 3, 1.0, None))
    assert lockstep("resume", "mine").code == 0
    assert (seen[0].config.system.seed, seen[0].config.checkpoint.resume) == (5, "runs/mine")
    refused = lockstep("resume", "mine", "--canonical", "--mode", "fsdp")
    assert (refused.code, len(seen)) == (2, 1), "as a run that begins with them"
    missing = lockstep("resume", "yours")
    assert missing.code == 66
    assert "mine" in missing.err


def test_sample_and_export_reach_the_engine(lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.engine import inference

    make_run(in_dir / "runs" / "mine")
    seen: list[Any] = []
    monkeypatch.setattr(inference, "sample_run", lambda *given: seen.append(given) or "spoken")
    monkeypatch.setattr(inference, "export_run", lambda *given: seen.append(given) or given[1])
    result = lockstep("sample", "mine", "--top_k", "3", "Once=upon a", "--tokens=9", "--temperature", "0")
    assert result.out == "spoken\n"
    path, prompt, given = seen[0]
    assert (path, prompt) == (Path("runs/mine"), "Once=upon a")
    assert given == {"tokens": 9, "temperature": 0.0, "top_k": 3}  # what is left out is as suits the model
    assert lockstep("sample", "mine", "--", "--odd").code == 0
    assert seen[1][1] == "--odd"
    assert lockstep("export", "mine", "--to", "hf", "there", "--dtype", "bfloat16").code == 0
    assert seen[2] == (Path("runs/mine"), in_dir / "there", "bf16")
    assert lockstep("export", "mine", "--to", "hf").out == "Exported to runs/mine/hf\n"
    wrong = lockstep("export", "mine", "--to", "hf", "--dtype", "int8")
    assert wrong.code == 2
    assert wrong.err.endswith("try: one of fp32, bf16, fp16\n")
    for name in ("hf", "hf-2"):
        write_json(in_dir / "runs" / "mine" / name / "config.json", {})
    again = lockstep("export", "mine", "--to", "hf")
    assert again.code == 73
    assert "runs/mine/hf: exists and is not empty" in again.err
    assert "try: lockstep export mine runs/mine/hf-3 --to hf" in again.err
    assert lockstep("export", "mine", "x" * 300, "--to", "hf").code == 73
    full = lockstep("export", "mine", "runs/mine/hf/..", "--to", "hf")
    assert f"{in_dir}/runs/mine: exists and is not empty\n  try: lockstep export mine {in_dir}/runs/mine-2" in full.err


def test_prepared_datasets_are_listed_checked_and_removed(lockstep: Run, in_dir: Path) -> None:
    assert "No prepared dataset" in lockstep("prepare", "llama", "tiny", "--list").out
    assert "Nothing to remove" in lockstep("prepare", "llama", "tiny", "--clean").out


@pytest.mark.parametrize("text", ["", "just one line\n"])
def test_too_little_text_names_the_file(lockstep: Run, in_dir: Path, text: str) -> None:
    (in_dir / "notes.txt").write_text(text)
    result = lockstep("prepare", "llama", "tiny", "--data-path", "notes.txt")
    assert result.code == 65
    assert "notes.txt: " in result.err
    assert "too few to keep one for validation" in result.err
    assert "data_path replaces the dataset builtin of preset tiny" in result.out


# ------------------------------------------------------------------------------------------------ faults and secrets


def crash(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    from lockstep.config import show

    def broken(_: str | None) -> str:
        raise RuntimeError(message)

    monkeypatch.setattr(show, "list_presets", broken)


def test_an_unforeseen_error_is_a_short_block(lockstep: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARIES["HF_TOKEN"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    crash(monkeypatch, f"boom {CANARIES['HF_TOKEN']}")
    result = lockstep("config", "list")
    assert result.code == 1
    assert result.err.startswith("lockstep: unexpected RuntimeError: boom ***")
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 5
    (report,) = tmp_path.glob("lockstep-crash-*")
    assert str(report) in result.err
    assert "Traceback" in report.read_text()
    assert CANARIES["HF_TOKEN"] not in report.read_text()
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "1")
    assert "Traceback" in lockstep("config", "list").err


def test_no_secret_is_ever_printed_or_written(lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """faults.md row 40 and contract item 174, for the commands that need no training."""
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(in_dir))
    flag, filed = "hf_canaryFLAG1111", "hf_canaryFILE2222"
    (in_dir / "c.json").write_text(f'{{"hf_token": "{filed}"}}')
    (in_dir / "bad.json").write_text(f'{{"data": {{"hf_token": ["{filed}"]}}}}')
    (in_dir / "worse.json").write_text(f'{{"data": {{"hf_token": "{filed}" "x"}}}}')
    text = ""
    commands = [
        [], ["--help"], ["config", "list"], ["config", "show", "llama", "tiny", "--hf-token", flag],
        ["config", "show", "llama", "tiny", f"--data.hf_token={flag}", "--json"],
        ["config", "show", "llama", "tiny", f"hf_token={flag}", f"run.name=../{flag}"],
        ["train", "llama", "c.json", "--dry-run"], ["config", "validate", "c.json"],
        ["config", "validate", "bad.json"], ["config", "validate", "worse.json"],
        ["config", "explain", "data.hf_token"], ["config", "show", "llama", CANARIES["HF_TOKEN"]],
        ["config", "show", "llama", f"--nonsense={CANARIES['HF_TOKEN']}"],
        ["train", "llama", "tiny", "--max-steps", CANARIES["WANDB_API_KEY"]], ["sample", CANARIES["MY_PASSWORD"], "x"],
        ["config", "show", "llama", "tiny", "--run.name", "user:canaryDDDDDDDD"],
    ]  # fmt: skip
    for words in commands:
        text += lockstep(*words).text
    crash(monkeypatch, f"boom {flag} {CANARIES['AWS_SECRET_ACCESS_KEY']}")
    text += lockstep("config", "list", "--hf-token", flag).text + lockstep("config", "list").text
    written = "".join(path.read_text() for path in in_dir.glob("lockstep-crash-*"))
    assert "boom" in text + written
    assert [
        name for name in ("canaryA", "canaryB", "canaryC", "canaryD", "canaryE", "canaryF") if name in text + written
    ] == []
    assert "***" in text


def test_the_search_for_secrets_would_find_one(lockstep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.runtime import env

    monkeypatch.setattr(env, "redact", lambda text: text)
    assert "hf_canaryAAAAAAAA" in lockstep("sample", CANARIES["HF_TOKEN"], "x").err
