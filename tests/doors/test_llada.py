"""The LLaDA scripts, run: what they say, write and read again (contract items 103, 105, 107, 117, 118, 163)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from lockstep import compat_llada
from lockstep.compat import DOORS, parse, resolve
from lockstep.runtime import env
from tests.conftest import Outcome
from tests.doors.windows import LLADA, QUICK, ROWS, VOCABULARY, make

Run = Callable[..., Outcome]
GOLDEN = (Path(__file__).parent / "golden" / "llada_launch.txt").read_text(encoding="utf-8")
KEYS = {"epoch", "train_losses", "val_losses", "vocab_size", "mask_token"}
TRAINER = "train_llada_pretrained.py"
TWO = (*QUICK, "--batch_size", "4", "--learning_rate", "1e-2", "--name", "run")


def subsequence(text: str, wanted: list[str]) -> bool:
    """Whether the lines stand in the text in this order."""
    lines = iter(text.splitlines())
    return all(any(line == each for line in lines) for each in wanted)


class Theirs(nn.Module):
    """A model that has the names of LLaDA's own files, and nothing else of it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.register_parameter(last, nn.Parameter(torch.zeros(tensor.shape)))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- lines


def test_the_example_line_by_line(door: Run, in_dir: Path, gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch,
                                  caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """Item 103, without the processes: what launcher and first of four workers say, with counts that are true."""
    make(in_dir / "shakespeare_processed")
    gpus(4)
    said: list[str] = []

    def start(loaded: Any, begin: Any) -> int:
        place = env.Env(rank=0, world=4, local_rank=0, local_world=4)
        monkeypatch.setattr(env, "detect", lambda *_: place)
        said.extend(begin.opening(loaded))
        with caplog.at_level("INFO"):
            facts = {"precision": "fp16", "vocab_size": 126464, "parameters": 8_015_581_184, "max_steps": 5}
            for sink in begin.listeners(loaded):
                sink.event("start", facts)
        return 0

    monkeypatch.setattr("lockstep.start.start", start)
    result = door("launch_training.sh", "4")
    assert result.code == 0, result.err
    launcher, *lines = result.out.splitlines()
    assert launcher == "Launching training on 4 GPUs with dataset: shakespeare_processed"
    facts = {"model": "GSAI-ML/LLaDA-8B-Instruct", "vocabulary": 126464, "parameters": "8,015,581,184"}
    assert [*lines, *said, *caplog.messages] == GOLDEN.format(**facts).splitlines()


def test_alone_it_trains_saves_and_says_so(
    door: Run, in_dir: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items 105, 107, 117, 118: its lines, the folder that was not there, the files, the guide's two lines."""
    make(in_dir / "shakespeare_processed")
    started: list[Any] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *words, **_: started.append(words))
    result = door(TRAINER, *TWO, "--epochs", "6", "--fp16", "--save_dir", "a/b/c")
    assert result.code == 0, result.text
    assert started == [], "no process group"
    saved = [f"Checkpoint saved to a/b/c/checkpoint_epoch_{number}.pt" for number in (1, 6)]
    assert subsequence(
        result.out,
        ["Single GPU training mode", "✓ Tokenizer loaded successfully", "Using 32-bit precision training",
         f"Vocabulary size: {ROWS}", "Starting training for 6 epochs...", *saved, "Training completed!"],
    )  # fmt: skip
    assert "fp16 needs a GPU: on the CPU this run uses fp32" in result.out
    epochs = re.findall(
        r"^Epoch (\d)/6 completed in \d+\.\d\ds\nTrain Loss: (\d\.\d{4})\nVal Loss: (\d\.\d{4})\n"
        r"Learning Rate: (0\.\d{6})$", result.out, re.MULTILINE,
    )  # fmt: skip
    assert [epoch[0] for epoch in epochs] == list("123456")
    rates = [float(epoch[3]) for epoch in epochs]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 2e-3 < rates[0] <= 1e-2
    best = min(float(epoch[2]) for epoch in epochs)
    assert f"Best validation loss: {best:.4f}\n" in result.out

    folder = in_dir / "a/b/c"
    names = {path.name for path in folder.iterdir()}
    numbers = {int(found[1]) for name in names if (found := re.fullmatch(r"checkpoint_epoch_(\d+)\.pt", name))}
    assert {1, 5, 6} <= numbers
    assert names == {f"checkpoint_epoch_{n}.pt" for n in numbers} | {f"stats_epoch_{n}.json" for n in numbers}
    said = re.findall(r"^Checkpoint saved to (.*)$", result.out, re.MULTILINE)
    assert len(said) == len(set(said)) == len(numbers), "never twice for one epoch"
    stats = json.loads((folder / "stats_epoch_6.json").read_text(encoding="utf-8"))
    assert stats.keys() == KEYS
    assert [f"{loss:.4f}" for loss in stats["val_losses"]] == [epoch[2] for epoch in epochs]
    improved = {n for n in range(1, 7) if stats["val_losses"][n - 1] < min([9.0, *stats["val_losses"][: n - 1]])}
    assert numbers == improved | {5, 6}

    checkpoint = torch.load(folder / "checkpoint_epoch_6.pt")
    assert checkpoint.keys() == KEYS | {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "lockstep"}
    assert {key: checkpoint[key] for key in KEYS} == stats
    assert (stats["epoch"], stats["vocab_size"], stats["mask_token"]) == (6, ROWS, VOCABULARY)
    assert not any(name.startswith("module.") for name in checkpoint["model_state_dict"])
    model = DistributedDataParallel(Theirs(checkpoint["model_state_dict"]))
    model.module.load_state_dict(checkpoint["model_state_dict"])
    loaded = dict(model.module.named_parameters())
    assert "model.transformer.blocks.1.ff_out.weight" in loaded
    assert loaded["model.transformer.ff_out.weight"].shape == (ROWS, 64)
    assert loaded["model.transformer.wte.weight"].abs().sum() > 0


def test_one_row_at_a_time_and_the_notice_only_where_it_is_true(door: Run, in_dir: Path) -> None:
    """Item 107: an explicit wish is honoured, and then there is nothing to notice."""
    make(in_dir / "shakespeare_processed")
    result = door(TRAINER, *QUICK, "--max-steps", "2", "--precision", "bf16")
    assert result.code == 0, result.text
    assert "✓ 16-bit mixed precision training enabled\n" in result.out
    assert "needs a GPU" not in result.out
    plain = resolve(DOORS[TRAINER], *parse(DOORS[TRAINER], [*QUICK, "--no_fp16"]))
    assert not any("needs a GPU" in line for line in compat_llada.DOOR.opening(plain))


# ------------------------------------------------------------------------------------------------------ going on


def digests(folder: Path) -> dict[int, str]:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return {event["step"]: event["digest"] for event in map(json.loads, lines) if event["kind"] == "step"}


def test_a_file_of_an_epoch_is_a_place_to_go_on_from(door: Run, in_dir: Path) -> None:
    """Items 117, 163: ours to the same bits; another program's too, if its tensors are those of the model."""
    make(in_dir / "shakespeare_processed")
    words = (*QUICK, "--batch_size", "4", "--learning_rate", "1e-2", "--epochs", "3", "debug.digest_interval=1")
    whole = door(TRAINER, *words, "--name", "whole")
    assert whole.code == 0, whole.text
    path = in_dir / "checkpoints_pretrained" / "checkpoint_epoch_1.pt"
    cut = door(TRAINER, *words, "--name", "cut", "--resume", str(path), "--save_dir", "again")
    assert cut.code == 0, cut.text
    assert "Resuming from step 6\n" in cut.out
    expected = digests(in_dir / "runs/whole")
    assert digests(in_dir / "runs/cut") == {step: value for step, value in expected.items() if step >= 6}
    files = [in_dir / name / "stats_epoch_3.json" for name in ("checkpoints_pretrained", "again")]
    assert files[0].read_text() == files[1].read_text(), "the history goes on too"

    content = torch.load(path)
    del content["lockstep"]
    order = list(content["model_state_dict"])
    content["model_state_dict"] = {f"module.{name}": content["model_state_dict"][name] for name in order}
    torch.save(content, "foreign.pt")
    foreign = door(TRAINER, *words, "--name", "foreign", "--resume", "foreign.pt", "--save_dir", "third")
    assert foreign.code == 0, foreign.text
    assert "begin at zero" in foreign.text
    assert "Resuming from step 6\n" in foreign.out
    del content["model_state_dict"][f"module.{order[0]}"]
    torch.save(content, "lacks.pt")
    refused = door(TRAINER, *words, "--name", "lacks", "--resume", "lacks.pt")
    assert refused.code == 65
    assert f"1 tensors are in the model or in the file only: {order[0]}" in refused.text


def test_what_lies_there_stays_whole_if_a_save_fails(door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 118: the disk is full in the middle of a file."""
    make(in_dir / "shakespeare_processed")
    words = (*TWO, "--epochs", "1")
    assert door(TRAINER, *words).code == 0
    folder = in_dir / "checkpoints_pretrained"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "checkpoint_epoch_9.pt.tmp-0123").write_text("left by a kill")
    real = torch.save

    def full(content: Any, file: Any, *more: Any) -> None:
        if isinstance(content, dict) and "model_state_dict" in content:
            file.write(b"half of it")
            raise OSError(28, "No space left on device")
        real(content, file, *more)

    monkeypatch.setattr(torch, "save", full)
    failed = door(TRAINER, *words, "--name", "again", "system.seed=1")
    assert failed.code == 74, failed.text
    assert "No space left on device" in failed.text
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_that_is_complete_makes_good_what_is_missing_and_writes_nothing_twice(door: Run, in_dir: Path) -> None:
    make(in_dir / "shakespeare_processed")
    words = (*TWO, "--epochs", "1")
    assert door(TRAINER, *words).code == 0
    path = in_dir / "checkpoints_pretrained" / "checkpoint_epoch_1.pt"
    written = path.stat().st_mtime_ns
    again = door(TRAINER, *words, "--resume")
    assert again.code == 0, again.text
    assert "Nothing left to do" in again.out
    assert "Checkpoint saved to" not in again.out
    assert path.stat().st_mtime_ns == written
    path.unlink()
    assert "Checkpoint saved to checkpoints_pretrained/checkpoint_epoch_1.pt" in door(TRAINER, *words, "--resume").out
    assert torch.load(path)["epoch"] == 1


# ---------------------------------------------------------------------------------------------------- the whole of it


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_launcher_prints_the_example(door: Run, lockstep: Run, in_dir: Path, smi: Callable[..., Path]) -> None:
    """Item 103: four GPUs of nvidia-smi, played by CPU workers under a real torchrun, and weights that are loaded."""
    assert lockstep("train", "llada", "tiny", "--device", "cpu", "--name", "first", "--max-steps", "1").code == 0
    assert lockstep("export", "runs/first", "weights", "--to", "hf").code == 0
    make(in_dir / "shakespeare_processed")
    smi(*((index, 0, 80000) for index in range(4)))
    words = [str(LLADA / "launch_training.sh"), "4", "shakespeare_processed", "--model_name", "weights",
             "--precision", "fp16", "--device", "cpu", "system.threads=1", "report.tensorboard=false",
             "report.sample_prompt="]  # fmt: skip
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint = torch.load(in_dir / "checkpoints_pretrained" / "checkpoint_epoch_5.pt")
    parameters = sum(tensor.numel() for tensor in checkpoint["model_state_dict"].values())
    golden = GOLDEN.format(model="weights", vocabulary=ROWS, parameters=f"{parameters:,}").splitlines()
    lines = done.stdout.splitlines()
    assert lines[1:13] == golden[:12]
    assert subsequence(done.stdout, golden)
    first = lines.index(golden[13])
    assert lines[first : first + 7] == golden[13:]
    for line in (*golden[12:], "Training completed!"):
        assert lines.count(line) == 1, "the main process alone speaks"


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 125 through the script, with its own model of 8 billion: nothing is asked of the hub, nothing is begun."""
    make(in_dir / "shakespeare_processed")
    monkeypatch.setattr("lockstep.runtime.hardware.free_memory_bytes", lambda _device: 80 << 30)
    result = door(TRAINER, "--batch_size", "1", "--epochs", "5", "--fp16", "--device", "cpu")
    assert result.code == 1, result.text
    assert result.text.index("Memory, estimated: 1") < result.text.index("the model does not fit: 8,015,581,184")
    assert "--model.lora-rank 16" in result.text
    assert {path.name for path in in_dir.iterdir()} == {"shakespeare_processed"}
