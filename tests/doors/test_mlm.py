"""The masked-LM scripts, run: what they train, say, write and return (contract items 77-81, 93, 94, 97, 99-101)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import compat_mlm_scripts
from lockstep.bench import estimate
from lockstep.bench.short_run import Measured
from lockstep.compat import DOORS, parse, resolve
from lockstep.config.load import Loaded
from lockstep.errors import ExitCode, LockstepError
from lockstep.runtime import devices
from lockstep.start import Start
from tests.bench.test_short_run import made
from tests.conftest import Outcome
from tests.doors.test_mlm_configs import GUIDE, MLM

Run = Callable[..., Outcome]
BANNER = ["Multi-GPU MLM Training Setup:", "  - World Size: ", "  - Local Rank: ", "  - Device: ", "  - Dataset: ",
          "  - Streaming: ", "  - Batch Size per GPU: ", "  - Total Batch Size: ", "  - Epochs: ",
          "  - Learning Rate: ", "  - Max Samples: "]  # fmt: skip
TEXT = "The old town was known for its bread long before anyone wrote about it. Ships came, and the rain with them.\n"
QUICK = ("--device", "cpu", "--data-path", "corpus.txt", "--no-streaming", "--epochs", "1", "--max-seq-len", "32",
         "--vocab-size", "400", "training.eval_batches=1", "report.tensorboard=false")  # fmt: skip


@pytest.fixture
def corpus(in_dir: Path) -> Path:
    """A working directory with a small text, a paragraph to a document."""
    (in_dir / "corpus.txt").write_text("\n".join(f"{number} {TEXT}" for number in range(300)), encoding="utf-8")
    return in_dir


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run that has been made. What a real one says: test_mlm_estimate.py."""

    def measure(loaded: Loaded, *, workers: int) -> Measured:
        training = loaded.config.training
        found, rows = made([0.1]), workers * training.batch_size * training.grad_accum_nums
        start = {**found.start, "device": "Fake H200"}
        return replace(found, workers=workers, start=start, rows_per_step=rows, memory_bytes=3 << 29)

    monkeypatch.setattr(estimate, "measure", measure)


def generate(folder: Path, name: str, program: Path = MLM / "multi_gpu_configs.py") -> Path:
    """The script of a configuration, made by the documented command."""
    command = [sys.executable, str(program), "generate", name]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / f"train_{name}.sh"


def bash(script: Path, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run([str(script), *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def in_order(text: str, parts: Sequence[str]) -> bool:
    """Whether the parts stand in the text one after the other, each at the beginning of a line."""
    return re.search(r"[\s\S]*?".join(f"^{re.escape(part)}" for part in parts), text, re.MULTILINE) is not None


# --- the trainer, in this process ----------------------------------------------------------------------------------


def test_results_and_running_again(door: Run, corpus: Path) -> None:
    """Items 93, 94: the four files; again: complete; --overwrite: anew."""
    import torch

    words = (*QUICK, "--epochs", "2")
    first = door("mlm_pretrain_v3.py", *words)
    assert first.code == 0, first.text
    assert in_order(first.out, BANNER)
    assert in_order(first.out, ["Epoch 1/2", "Train Loss: ", "MLM model saved to .mlm_pretrained_v3", "Epoch 2/2",
                                "MLM pre-training completed!"])  # fmt: skip
    assert "[MASK] at position" in first.out
    assert "head size 2" in first.out
    results = corpus / ".mlm_pretrained_v3"
    assert {path.name for path in results.iterdir()} == {
        "mlm_model.pth", "tokenizer.json", "mlm_training_history.json", "training_history.png"
    }  # fmt: skip
    weights = torch.load(results / "mlm_model.pth", weights_only=True)
    assert not any(name.startswith("module.") for name in weights)
    assert {name.partition(".")[0] for name in weights} == {"embedding", "encoder", "mlm_head"}
    vocabulary = json.loads((results / "tokenizer.json").read_text(encoding="utf-8"))
    assert [vocabulary[word] for word in ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")] == list(range(5))
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    history = json.loads((results / "mlm_training_history.json").read_text(encoding="utf-8"))
    assert len(history["train_losses"]) == len(history["val_losses"]) == 2
    picture = (results / "training_history.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(int.from_bytes(picture[at : at + 4]) for at in (16, 20)) > 200
    runs = set((corpus / "runs").iterdir())
    again = door("mlm_pretrain_v3.py", *words)
    assert again.code == 0, again.text
    assert "Nothing left to do" in again.out
    assert set((corpus / "runs").iterdir()) == runs
    anew = door("mlm_pretrain_v3.py", *words, "--overwrite")
    assert anew.code == 0, anew.text
    assert "Nothing left to do" not in anew.out
    assert len(set((corpus / "runs").iterdir()) - runs) == 1


def test_native_command(lockstep: Run, corpus: Path) -> None:
    """Item 159: `lockstep train mlm tiny`, with words of its own family."""
    words = ("--data-path", "corpus.txt", "--max-steps", "3", "--device", "cpu")
    ended = lockstep("train", "mlm", "tiny", "--mask-probability", "0.3", *words)
    assert ended.code == 0, ended.text
    shown = lockstep("train", "mlm", "--dry-run", "--device", "cpu", "--epochs", "3")
    assert "preset demo" in shown.out
    assert re.search(r"^training\.epochs +3\.0 ", shown.out, re.MULTILINE)
    assert lockstep("train", "llama", "tiny", "--epochs", "3").code == 2, "which knows no epochs"


# --- the launching scripts, up to the start --------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Start]]:
    """What would have been started."""
    seen: list[tuple[Any, Start]] = []

    def start(loaded: Any, begin: Start) -> int:
        seen.append((loaded.config, begin))
        return ExitCode.DONE

    monkeypatch.setattr("lockstep.start.start", start)
    return seen


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("hf", 32, 5, 3e-5, True, 500_000)),
        (["hf", "32", "5", "3e-5", "true"], ("hf", 32, 5, 3e-5, True, 500_000)),
        (["imdb", "16", "3", "1e-4", "false", "1.5M"], ("imdb", 16, 3, 1e-4, False, 1_500_000)),
        (["c4", "--epochs", "2", "--max-samples", "1k"], ("c4", 32, 2, 3e-5, True, 1000)),
    ],
)
def test_the_generic_script_passes_its_values(
    door: Run, in_dir: Path, gpus: Callable[[int], None], known_speed: None, started: list[tuple[Any, Start]],
    words: list[str], expected: tuple[object, ...],
) -> None:  # fmt: skip
    """Item 81."""
    gpus(8)
    result = door("run_multi_gpu_training.sh", *words)
    assert result.code == 0, result.err
    ((config, begin),) = started
    training, data = config.training, config.data
    given = (data.dataset_name, training.batch_size, training.epochs, training.learning_rate, data.streaming)
    assert (*given, data.max_train_samples) == expected
    assert config.system.gpus == "8"
    assert begin.module[:2] == ("lockstep.compat", "mlm_pretrain_v3.py")
    worker = resolve(DOORS["mlm_pretrain_v3.py"], *parse(DOORS["mlm_pretrain_v3.py"], begin.module[2:]))
    assert worker.config == config, "a worker understands the same"
    assert re.fullmatch(rf"logs/multi_gpu_training_{expected[0]}_\d{{8}}_\d{{6}}\.log", str(begin.transcript))
    assert "Warning" not in result.out
    assert f"Total batch size: {8 * training.batch_size}" in result.out


@pytest.mark.parametrize("words", [["hf", "1", "2", "3", "true", "5", "6"], ["hf", "many"], ["hf", "32", "--gpu", "2"]])
def test_the_generic_script_refuses_what_it_does_not_know(door: Run, in_dir: Path, words: list[str]) -> None:
    result = door("run_multi_gpu_training.sh", *words)
    assert result.code == 2
    assert "Starting training" not in result.out
    assert list(in_dir.iterdir()) == []


def script_words(*more: str) -> list[str]:
    return ["--title", "T", "--description", "D", "--num-gpus", "8", "--config-name", "h200_8gpu_fast", *more]


@pytest.mark.parametrize(("there", "used"), [(8, 8), (9, 8), (2, 2), (0, 1)])
def test_it_adjusts_to_the_gpus_that_are_there(
    door: Run, in_dir: Path, gpus: Callable[[int], None], known_speed: None, started: list[tuple[Any, Start]],
    there: int, used: int,
) -> None:  # fmt: skip
    """Item 77."""
    gpus(there)
    result = door("train_config.sh", *script_words())
    assert result.code == 0, result.err
    system = started[0][0].system
    assert len(devices.choose(system.gpus, cpu=system.device == "cpu")) == used, "what was adjusted to can be started"
    lines = result.out.splitlines()
    assert lines[:3] == ["=" * 42, "T", "=" * 42]
    assert [line.partition(":")[0] for line in lines[3:14]] == [
        "Description", "Dataset", "Batch size per GPU", "Total batch size", "Epochs", "Learning rate", "Number of GPUs",
        "Model", "Dataset samples", "Estimated time per epoch", "Estimated total time",
    ]  # fmt: skip
    assert "Model: 4L/4H/8D" in lines
    assert f"Available GPUs: {there}" in lines
    warning = f"Warning: Requested 8 GPUs but only {there} are available."
    assert (warning in lines) == (there < 8)
    assert ("Adjusting to use 2 GPUs." in lines) == (there == 2)
    assert ("Adjusting to use the CPU." in lines) == (there == 0)
    assert in_order(result.out, ["Starting training...", "Log file: logs/h200_8gpu_fast_training_"])
    assert in_order(result.out, ["Training completed!", "Results saved to: .mlm_pretrained_v3/", "Log file: logs/"])
    (log,) = (in_dir / "logs").iterdir()
    assert re.fullmatch(r"h200_8gpu_fast_training_\d{8}_\d{6}\.log", log.name)
    assert log.read_text(encoding="utf-8") == result.out
    assert ("Estimated memory per GPU: 1.50 GiB of 80.00 GiB (Fake)" in lines) == (there > 0)


def test_a_failure_keeps_its_code_and_says_nothing_of_completion(
    door: Run, in_dir: Path, gpus: Callable[[int], None], known_speed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 80, in short; the whole of it below."""
    gpus(8)
    monkeypatch.setattr("lockstep.start.start", lambda *_: 71)
    result = door("train_config.sh", *script_words())
    assert result.code == 71
    assert "Training completed!" not in result.text


def test_the_estimate_is_measured_or_not_given(
    door: Run, in_dir: Path, gpus: Callable[[int], None], known_speed: None, started: list[tuple[Any, Start]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """C4, item 101: so many samples at the speed that was measured; no figure where nothing could be measured."""
    gpus(8)
    words = script_words("--batch-size", "64", "--epochs", "3")
    text = door("train_config.sh", *words).out
    rate = 8 * 64 / 0.1
    assert f"(at most 450,000 samples at {rate:,.0f}/s, measured on 8 x Fake H200)" in text
    assert "Estimated time per epoch: 1 min" in text
    assert "Estimated total time: 4 min" in text
    limited = door("train_config.sh", *words, "--max-steps", "100").out
    assert "Estimated total time: 10 s" in limited, "the limit in steps counts too"

    def failing(*_: Any, **__: Any) -> Measured:
        raise LockstepError("training ended with code 1:\n    lockstep: error: no such thing\n      try: another")

    monkeypatch.setattr(estimate, "measure", failing)
    text = door("train_config.sh", *words).out
    assert "Estimated time per epoch: n/a (lockstep: error: no such thing)\n" in text
    assert "Estimated memory per GPU: n/a of 80.00 GiB (Fake)\n" in text


# --- the whole of it -------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_generated_script_trains_what_it_names(corpus: Path, smi: Callable[..., Path]) -> None:
    """Items 77, 78, 79, 97: two GPUs (played by CPU workers), the config's own model, one voice, all in the log."""
    import torch

    smi((0, 0, 80000), (1, 0, 80000))
    done = bash(generate(corpus, "h200_8gpu_fast"), *QUICK, cwd=corpus)
    assert done.returncode == 0, done.stdout + done.stderr
    assert in_order(done.stdout, ["Available GPUs: 2", "Warning: Requested 8 GPUs but only 2 are available.",
                                  "Adjusting to use 2 GPUs.", "Starting training...", *BANNER, "Epoch 1/1",
                                  "MLM pre-training completed!", "Training completed!"])  # fmt: skip
    assert "  - World Size: 2\n" in done.stdout
    assert "  - Batch Size per GPU: 64\n  - Total Batch Size: 128\n" in done.stdout
    assert re.search(r"^Estimated time per epoch: .* measured on 2 x CPU", done.stdout, re.MULTILINE)
    for line in ("Multi-GPU MLM Training Setup:", "MLM pre-training completed!", "Train Loss: "):
        assert done.stdout.count(line) == 1
    (log,) = (corpus / "logs").iterdir()
    assert log.read_text(encoding="utf-8") == done.stdout
    (run,) = (path for path in (corpus / "runs").iterdir() if not path.is_symlink())
    workers = {path.name for path in (run / "workers").iterdir()}
    assert workers == {"n0-GPU0", "n0-GPU1"}
    assert "Step [" in (run / "workers" / "n0-GPU1" / "log.txt").read_text(encoding="utf-8"), "what it says is kept"
    weights = torch.load(corpus / ".mlm_pretrained_v3" / "mlm_model.pth", weights_only=True)
    layers = {int(found[1]) for name in weights if (found := re.match(r"encoder\.(?:\w+\.)?(\d+)\.", name))}
    assert layers == {0, 1, 2, 3}
    assert weights[next(name for name in weights if name.startswith("embedding."))].shape[1] == 8


@pytest.mark.slow
@pytest.mark.ranks
def test_one_of_the_users_own_runs(corpus: Path) -> None:
    """Item 76, to the end."""
    from lockstep import compat

    compat.init("mlm", corpus)
    path = corpus / "multi_gpu_configs.py"
    path.write_text(path.read_text(encoding="utf-8") + GUIDE, encoding="utf-8")
    subprocess.run([sys.executable, str(path), "generate", "my_custom_config"], cwd=corpus, check=True)
    done = bash(corpus / "train_my_custom_config.sh", *QUICK, cwd=corpus)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training completed!" in done.stdout
    assert "Starting experiment: my_custom_config" in done.stdout
    assert list((corpus / "logs").glob("my_custom_config_training_*.log"))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_failing_training_fails_the_script(corpus: Path, smi: Callable[..., Path]) -> None:
    """Item 80; the control is the test above it."""
    smi((0, 0, 80000), (1, 0, 80000))
    done = bash(generate(corpus, "h200_8gpu_fast"), *QUICK, cwd=corpus, LOCKSTEP_FAULT="nan_grad@step=1,rank=1")
    assert done.returncode == 71, done.stdout + done.stderr
    assert "Training completed!" not in done.stdout
    assert "[FAILURE]" in done.stdout
    (log,) = (corpus / "logs").iterdir()
    assert log.read_text(encoding="utf-8") == done.stdout


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["", "flip_weight@rank=1,step=2,bit=3"])
def test_replicas_agree_or_the_one_that_does_not_is_named(corpus: Path, fault: str) -> None:
    """Exit 3 names a flipped bit; the control is the same run without it."""
    variables = {"LOCKSTEP_FAULT": fault} if fault else {}
    words = (*QUICK, "--gpus", "3", "--mode", "replicas")
    done = bash(generate(corpus, "h200_8gpu_fast"), *words, cwd=corpus, **variables)
    assert done.returncode == (ExitCode.BAD_DEVICE if fault else 0), done.stdout + done.stderr
    assert ("Training completed!" in done.stdout) == ("All 3 replicas agree" in done.stdout) == (not fault)
    named = re.search(r"GPU 1 ends step \d+ with other bits than the other 2 replicas", done.stdout)
    assert (named is not None) == bool(fault)
    assert ("[FAILURE] Training failed on GPU 1" in done.stdout) == bool(fault)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_everything(corpus: Path, smi: Callable[..., Path], number: signal.Signals) -> None:
    smi((0, 0, 80000), (1, 0, 80000))
    script = generate(corpus, "h200_8gpu_fast")
    with (corpus / "said").open("w") as out:
        process = subprocess.Popen(
            [str(script), *QUICK, "--epochs", "3000", "--data-path", str(corpus / "corpus.txt")],
            cwd=corpus, stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while "Step [0/" not in (corpus / "said").read_text():
            assert process.poll() is None, (corpus / "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(_processes(corpus)) >= 3, "the launcher and two workers"
        process.send_signal(number)
        code = process.wait(60)
    assert code == 128 + number
    assert "Training completed!" not in (corpus / "said").read_text()
    assert _processes(corpus) == []


def _processes(corpus: Path) -> list[str]:
    """Those that were started with this text on their command line."""
    found = subprocess.run(["pgrep", "-f", f"{corpus}/corpus.txt"], capture_output=True, text=True)
    return found.stdout.split()


@pytest.mark.slow
@pytest.mark.ranks
def test_under_torchrun_twice(corpus: Path) -> None:
    """Items 94, 97, 99: two jobs at once need no port of their own; a second run of the same does not hang."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(MLM / "mlm_pretrain_v3.py"), *QUICK, "--data-path", str(corpus / "corpus.txt")]  # fmt: skip
    folders = [corpus / "a", corpus / "b"]
    jobs = []
    for folder in folders:
        folder.mkdir()
        jobs.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [job.communicate(timeout=240)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
    for text in said:
        assert text.count("Multi-GPU MLM Training Setup:") == text.count("MLM pre-training completed!") == 1
    again = subprocess.run(command, cwd=folders[0], capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Nothing left to do" in again.stdout
    anew = subprocess.run([*command, "--overwrite"], cwd=folders[0], capture_output=True, text=True, timeout=240)
    assert anew.returncode == 0, anew.stdout + anew.stderr
    assert "Nothing left to do" not in anew.stdout


def test_a_port_that_is_taken_is_named(door: Run, corpus: Path, gpus: Callable[[int], None], known_speed: None) -> None:
    """Item 99."""
    gpus(0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, began = str(taken.getsockname()[1]), time.monotonic()
        result = door("train_config.sh", *script_words(*QUICK, "--gpus", "2", "--master_port", port))
    assert time.monotonic() - began < 30
    assert result.code != 0
    assert port in result.text
    assert "Training completed!" not in result.text


def test_the_generated_program_is_no_script_of_the_guide() -> None:
    assert compat_mlm_scripts.GENERATED not in {path.name for path in MLM.iterdir()}
