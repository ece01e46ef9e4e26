"""The flags of train_llada_pretrained.py and launch_training.sh (contract items 102, 106, 108, 120, 121, 158)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep import compat_llada
from lockstep.compat import DOORS, parse, resolve
from lockstep.errors import ConfigError, ExitCode
from lockstep.launch import supervise
from lockstep.runtime import env
from lockstep.start import Start
from tests.conftest import Outcome
from tests.doors.windows import LENGTH, LLADA, QUICK, make

Run = Callable[..., Outcome]
TRAINER = DOORS["train_llada_pretrained.py"]
FLAGS = {  # flag -> (value, the setting it is, what that becomes)
    "--data_dir": ("other", "data.data_path", "other"),
    "--model_name": ("lockstep/llada-tiny", "model.model_path", "lockstep/llada-tiny"),
    "--batch_size": ("3", "training.batch_size", 3),
    "--epochs": ("2", "training.epochs", 2.0),
    "--learning_rate": ("2e-4", "training.learning_rate", 2e-4),
    "--save_dir": ("a/b/c", "report.results_dir", "a/b/c"),
    "--fp16": (None, "training.precision", "fp16"),
    "--no_fp16": (None, "training.precision", "fp32"),
    "--precision": ("bf16", "training.precision", "bf16"),
    "--gradient_accumulation_steps": ("4", "training.grad_accum_nums", 4),
    "--resume": (None, "checkpoint.resume", "auto"),
}


@pytest.fixture(autouse=True)
def windows(in_dir: Path) -> None:
    for name in ("shakespeare_processed", "other"):
        make(in_dir / name)


def config(*words: str) -> Any:
    return resolve(TRAINER, *parse(TRAINER, words)).config


def value(resolved: Any, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(resolved, section), name)


def test_the_documented_defaults(gpus: Callable[[int], None]) -> None:
    gpus(1)
    plain = config()
    training = plain.training
    assert (plain.data.data_path, plain.report.results_dir) == ("shakespeare_processed", "checkpoints_pretrained")
    assert (plain.model.model_path, plain.model.init) == ("GSAI-ML/LLaDA-8B-Instruct", "pretrained")
    assert (training.batch_size, training.grad_accum_nums, training.epochs, training.learning_rate) == (1, 1, 5, 1e-5)
    assert (training.weight_decay, training.max_grad_norm) == (0.01, 1.0)
    assert (training.schedule, training.warmup_ratio, training.min_lr_ratio) == ("one_cycle", 0.1, 4e-6)
    assert (training.context_length, plain.data.documents) == (LENGTH, "joined"), "as metadata.json says"


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("spelling", ["_", "-"])
def test_every_flag_in_both_spellings(flag: str, spelling: str, gpus: Callable[[int], None]) -> None:
    """Items 106, 158; with and without an equals sign."""
    gpus(1)
    text, key, expected = FLAGS[flag]
    written = f"--{flag[2:].replace('_', spelling)}"
    assert value(config(written, *([text] if text else [])), key) == expected
    if text:
        assert value(config(f"{written}={text}"), key) == expected
    assert value(config(), key) != expected or flag == "--fp16"


def test_a_shape_of_our_own_has_no_weights_to_load() -> None:
    assert config("--model_name", "lockstep/llada-tiny").model.init == "random"
    with pytest.raises(ConfigError, match="is a shape without weights"):
        config("--model_name", "lockstep/llada-tiny", "model.init=pretrained")


def test_no_epochs_are_a_slip_unless_steps_are_given() -> None:
    with pytest.raises(ConfigError, match="0 epochs train nothing"):
        config("--epochs", "0")
    assert config("--epochs", "0", "--max-steps", "7").training.max_steps == 7


@pytest.mark.parametrize(
    ("words", "on_gpu", "on_cpu"),
    [
        ([], "fp16", "auto"),
        (["--fp16"], "fp16", "auto"),
        (["--no_fp16"], "fp32", "fp32"),
        (["--fp16", "--no_fp16"], "fp32", "fp32"),
        (["--no-fp16", "--fp16"], "fp32", "fp32"),
        (["--fp16", "--precision", "bf16"], "bf16", "bf16"),
        (["--precision", "fp16"], "fp16", "fp16"),
        (["--config", "file.json"], "bf16", "bf16"),
        (["--config", "file.json", "--no_fp16"], "fp32", "fp32"),
        (["--config", "file.json", "--fp16"], "fp16", "auto"),
    ],
)
def test_which_precision(words: list[str], on_gpu: str, on_cpu: str, gpus: Callable[[int], None]) -> None:
    """Items 106, 107, D10: the two words are one, --no_fp16 is stronger, and both are stronger than a file."""
    Path("file.json").write_text('{"training": {"precision": "bf16"}}', encoding="utf-8")
    gpus(2)
    assert config(*words).training.precision == on_gpu
    assert config(*words, "--device", "cpu").training.precision == on_cpu
    gpus(0)
    assert config(*words).training.precision == on_cpu


@pytest.mark.parametrize(("text", "precision"), [("fp16: true", "fp16"), ("fp16: false", "fp32"),
                                                  ("no_fp16: true", "fp32"), ("bf16: true", "bf16")])  # fmt: skip
def test_the_words_in_a_file(text: str, precision: str) -> None:
    Path("words.yaml").write_text(f"{text}\ndata_dir: other\nsave_dir: here\nmodel_name: x/y\n", encoding="utf-8")
    read = config("--config", "words.yaml")
    assert (read.training.precision, read.data.data_path) == (precision, "other")
    assert (read.report.results_dir, read.model.model_path) == ("here", "x/y")


@pytest.mark.parametrize("lack", ["train_data.npy", "val_data.npy", "metadata.json"])
def test_a_dataset_that_lacks_a_file(door: Run, in_dir: Path, lack: str) -> None:
    """Item 108."""
    (in_dir / "other" / lack).unlink()
    result = door("train_llada_pretrained.py", "--data_dir", "other", *QUICK)
    assert result.code == ExitCode.NOT_FOUND
    assert f"{lack} missing" in result.err
    assert "--data-path TEXT.txt --to other" in result.err


@pytest.mark.parametrize("script", ["train_llada_pretrained.py", "launch_training.sh"])
def test_a_dataset_that_is_not_there(door: Run, in_dir: Path, script: str) -> None:
    """Items 102, 108: the documented line, and the command that makes it."""
    words = ("2", "nowhere") if script.endswith(".sh") else ("--data_dir", "nowhere")
    result = door(script, *words, *QUICK)
    assert result.code == ExitCode.NOT_FOUND
    assert "Dataset directory 'nowhere' not found." in result.err
    assert result.err.startswith("Error: ") == script.endswith(".sh")
    assert (
        "try: lockstep prepare llada --model-path lockstep/llada-tiny --data-path TEXT.txt --to nowhere" in result.err
    )
    assert "Starting" not in result.out


@pytest.mark.parametrize("script", ["train_llada_pretrained.py", "launch_training.sh"])
def test_help(door: Run, script: str) -> None:
    """Item 157."""
    result = door(script, "--help")
    assert result.code == 0
    for flag in FLAGS:
        assert flag.replace("_", "-") in result.out
    assert (LLADA / script).is_file()


def test_init_puts_the_scripts_of_llada_there(lockstep: Run, in_dir: Path) -> None:
    """Item 157."""
    assert lockstep("init", "llada", "here").code == 0
    assert {"train_llada_pretrained.py", "launch_training.sh"} <= {path.name for path in (in_dir / "here").iterdir()}
    assert (in_dir / "here" / "launch_training.sh").stat().st_mode & 0o111
    listed = lockstep("families").out
    assert "./launch_training.sh [2] [shakespeare_processed]" in listed
    assert "python train_llada_pretrained.py --data_dir shakespeare_processed" in listed


# ------------------------------------------------------------------------------------------------------ the launcher


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Start]]:
    """What would have been started."""
    seen: list[tuple[Any, Start]] = []

    def start(loaded: Any, begin: Start) -> int:
        seen.append((loaded, begin))
        return ExitCode.DONE

    monkeypatch.setattr("lockstep.start.start", start)
    return seen


@pytest.mark.parametrize(
    ("words", "gpus_used", "folder"),
    [([], 2, "shakespeare_processed"), (["4"], 4, "shakespeare_processed"), (["2", "other"], 2, "other"),
     (["1", "other", "--epochs", "1", "--batch_size", "2"], 1, "other")],
)  # fmt: skip
def test_the_launcher_passes_its_values(
    door: Run, gpus: Callable[[int], None], started: list[tuple[Any, Start]], words: list[str], gpus_used: int,
    folder: str,
) -> None:  # fmt: skip
    """Item 102."""
    gpus(8)
    result = door("launch_training.sh", *words)
    assert result.code == 0, result.err
    ((loaded, begin),) = started
    config = loaded.config
    assert (config.system.gpus, config.data.data_path, begin.how) == (str(gpus_used), folder, "torchrun")
    assert begin.module[:2] == ("lockstep.compat", "train_llada_pretrained.py")
    assert resolve(TRAINER, *parse(TRAINER, begin.module[2:])).config == config, "a worker understands the same"
    assert "Warning" not in result.out
    lines = result.out.splitlines()
    assert lines[0] == f"Launching training on {gpus_used} GPUs with dataset: {folder}"
    assert f"Total batch size: {gpus_used * config.training.batch_size}" in lines


@pytest.mark.parametrize("words", [["two"], ["0"], ["-1"], ["2", "other", "more"], ["2", "other", "--epoch", "1"]])
def test_the_launcher_refuses_what_it_does_not_know(
    door: Run, started: list[tuple[Any, Start]], words: list[str]
) -> None:
    assert door("launch_training.sh", *words).code == 2
    assert not started


@pytest.mark.parametrize(("there", "used"), [(4, 4), (3, 3), (1, 1), (0, 1)])
def test_it_adjusts_to_the_gpus_that_are_there(
    door: Run, gpus: Callable[[int], None], started: list[tuple[Any, Start]], there: int, used: int
) -> None:
    gpus(there)
    result = door("launch_training.sh", "4")
    assert result.code == 0, result.err
    system = started[0][0].config.system
    assert (system.gpus, system.device) == (str(used), "auto" if there else "cpu")
    lines = result.out.splitlines()
    assert f"Available GPUs: {there}" in lines
    assert (f"Warning: Requested 4 GPUs but only {there} are available." in lines) == (there < 4)
    adjusting = [line for line in lines if line.startswith("Adjusting")]
    words = f"Adjusting to use {there} GPUs." if there else "Adjusting to use the CPU."
    assert adjusting == ([words] if there < 4 else [])
    counted = f"{used} GPUs" if there else "1 CPU worker"
    assert lines[0] == f"Launching training on {counted} with dataset: shakespeare_processed"


def test_workers_on_the_cpu_are_not_called_gpus(
    door: Run, gpus: Callable[[int], None], started: list[tuple[Any, Start]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    gpus(0)
    lines = door("launch_training.sh", "2", "--gpus", "3").out.splitlines()
    assert lines[:3] == [
        "Launching training on 3 CPU workers with dataset: shakespeare_processed",
        "Available GPUs: 0",
        "Starting training with torchrun...",
    ]
    assert lines[-2] == "Number of GPUs: 3 (CPU workers)"
    ((loaded, begin),) = started
    monkeypatch.setattr(env, "detect", lambda *_: env.Env(world=3))
    for sink in begin.listeners(loaded):
        with caplog.at_level("INFO"):
            sink.event("start", {"precision": "fp32", "vocab_size": 1, "parameters": 1, "max_steps": 1})
    assert caplog.messages[-1] == "Training on 3 CPU workers"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[supervise.Proc]:
    """The processes that would have been started."""
    seen: list[supervise.Proc] = []

    def watch(procs: Sequence[supervise.Proc], *_: object) -> supervise.Outcome:
        seen.extend(procs)
        return supervise.Outcome(0)

    monkeypatch.setattr("lockstep.launch.supervise.supervise", watch)
    monkeypatch.setattr("lockstep.start._prepare_first", lambda *_: ExitCode.DONE)
    return seen


def test_torchrun_gets_processes_port_and_nccl_words(
    door: Run, in_dir: Path, planned: list[supervise.Proc], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items 102, 120, 121: what a stub of torchrun would record."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    port = str(env.free_port())
    assert door("launch_training.sh", "3", "other", "--master_port", port, "--nccl-debug", *QUICK).code == 0
    (agent,) = planned
    command = " ".join(agent.command)
    assert "torch.distributed.run --nproc_per_node=3 --nnodes=1 --node_rank=0" in command
    assert f"--master_port={port} -m lockstep.compat train_llada_pretrained.py --data_dir other" in command
    assert agent.environ["NCCL_DEBUG"] == "INFO"
    assert agent.environ["NCCL_DEBUG_FILE"] == str(in_dir / "logs" / "nccl.%h.%p.log")
    assert (in_dir / "logs").is_dir()


def test_nccl_debug_of_the_user_reaches_the_workers(
    door: Run, planned: list[supervise.Proc], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 121, and without a port that was given any free one will do."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert door("launch_training.sh", "2", "other", *QUICK).code == 0
    assert planned[0].environ["NCCL_DEBUG"] == "WARN"
    assert "NCCL_DEBUG_FILE" not in planned[0].environ
    assert "--standalone" in planned[0].command


def test_the_lines_of_the_launcher_are_those_of_the_guide() -> None:
    """46 signs of equality (contract 3.4)."""
    assert compat_llada.RULE == "=" * 46
