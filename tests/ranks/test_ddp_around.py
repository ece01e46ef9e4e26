"""Around the step on several ranks: replicas, resuming elsewhere, signs of life, files, compiling."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import replicas
from lockstep.engine.build import assemble, plan
from lockstep.errors import LockstepError
from lockstep.rundir import RunDir
from lockstep.runtime.group import Group, is_lost_peer
from lockstep.runtime.signals import StopRequest
from tests.gates.training import Recorder, flags, run
from tests.ranks.data_parallel import SMALL, Trained, end, train
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

SHORT = {**SMALL, "training.max_steps": 4, "training.batch_size": 1, "training.grad_accum_nums": 2}


def train_replica(group: Group, folder: Path) -> tuple[str, int, bool, str]:
    """A replica trains alone; at the end all are compared."""
    parts, recorder = run(folder, {**SHORT, "system.mode": "replicas", "training.save_interval": 2}, group=group)
    try:
        replicas.compare(parts, group, mode="replicas")
    except LockstepError as error:
        return str(error), int(error.exit_code), is_lost_peer(error), recorder.records[-1].loss.hex()
    return "", 0, False, recorder.records[-1].loss.hex()


def test_equal_replicas_agree_and_train_what_one_process_trains(ranks: Pool, tmp_path: Path) -> None:
    results = ranks(3, train_replica, tmp_path / "many")
    assert {result[:3] for result in results} == {("", 0, False)}
    _, alone = run(tmp_path / "one", SHORT)
    assert {result[3] for result in results} == {alone.records[-1].loss.hex()}
    assert sorted(path.name for path in (tmp_path / "many/checkpoints").iterdir()) == ["step_00000002", "step_00000004"]


def test_the_replica_with_other_bits_is_named(ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "flip_weight@rank=1,step=2,bit=3")
    results = ranks(3, train_replica, tmp_path)
    assert {result[0].splitlines()[0] for result in results} == {
        "GPU 1 ends step 2 with other bits than the other 2 replicas, first in weights:tok_embed.weight"
    }
    assert {result[1] for result in results} == {3}
    assert [result[2] for result in results] == [True, False, True], "the one that differs speaks for all"
    assert "no majority" in ranks(2, train_replica, tmp_path / "two")[0][0]


def resumed(group: Group, folder: Path, settings: Mapping[str, Any], saved: Path) -> tuple[str, str, int, int, int]:
    """(error, its hint, rows in all, rows of a micro-batch, micro-batches) of a run that goes on from a checkpoint."""
    try:
        parts, _ = run(folder, settings, point=saved, group=group)
    except LockstepError as error:
        return str(error), error.hint, 0, 0, 0
    training = parts.config.training
    return "", "", parts.about["batch_rows"], training.batch_size, training.grad_accum_nums


def test_another_number_of_workers_keeps_the_global_batch_or_says_what_fits(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, end, tmp_path, {"training.max_steps": 4, "training.save_interval": 2})
    saved = tmp_path / "checkpoints" / "step_00000002"
    about = json.loads((saved / "run.json").read_text())["about"]
    assert (about["world"], about["batch_rows"]) == (3, 6)
    one = {**SHORT, "training.save_interval": 0}
    assert resumed(Group(), tmp_path / "alone", one, saved) == ("", "", 6, 1, 6)
    assert set(ranks(2, resumed, tmp_path / "two", one, saved)) == {("", "", 6, 1, 3)}
    ((error, hint, *_),) = set(ranks(4, resumed, tmp_path / "four", one, saved))
    assert "6 rows in each global batch, this run 8: 4 workers" in error
    assert hint == "as many workers as give workers x batch_size x grad_accum_nums = 6"
    run(tmp_path / "allowed", {**one, "checkpoint.allow_mismatch": True}, point=saved)


class Diary:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int]] = []
        self.seconds: dict[int, float] = {}

    def enter(self, section: str, step: int = -1) -> None:
        self.entries.append((section, step))

    def busy(self, step: int, seconds: float) -> None:
        self.seconds[step] = seconds


def watched(group: Group, folder: Path, settings: Mapping[str, Any]) -> tuple[list[tuple[str, int]], dict[int, float]]:
    from lockstep.config.load import load
    from lockstep.engine import loop

    device = torch.device("cpu")
    planned = plan(load("llama", preset="tiny", flags=flags({"system.device": "cpu", **settings})), device)
    diary = Diary()
    made = assemble(
        planned, RunDir(folder), point=None, sinks=[Recorder()], stop=StopRequest(), group=group, link=diary
    )
    loop.run(made.parts)
    made.loader.close()
    return diary.entries, diary.seconds


def test_the_marks_say_who_works_and_who_waits(ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sleeps in step 2: its own work takes long, that of the others does not, though all wait for it."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "hang@rank=1,step=2,where=forward,seconds=1.5")
    results = ranks(2, watched, tmp_path, {**SHORT, "training.eval_interval": 2})
    for entries, _ in results:
        sections = [section for section, _ in entries]
        assert {"start", "data", "forward", "backward", "communication", "save", "evaluate"} == set(sections)
        steps = [step for section, step in entries if section == "forward" and step >= 0]
        assert steps == [0, 1, 2, 3]
        first = sections[sections.index("forward") :]
        assert first[:7] == ["forward", "forward", "backward", "forward", "backward", "communication", "backward"]
    (_, quick), (_, slow) = results
    assert sorted(quick) == sorted(slow) == [0, 1, 2, 3]
    assert slow[2] >= 1.5
    assert quick[2] < 1.5, "the wait for rank 1 is not rank 0's work"


def test_one_process_marks_no_communication(tmp_path: Path) -> None:
    entries, seconds = watched(Group(), tmp_path, SHORT)
    assert "communication" not in {section for section, _ in entries}
    assert sorted(seconds) == [0, 1, 2, 3]


def save_documented(group: Group, folder: Path) -> list[str]:
    settings = {**SHORT, "training.checkpoint_dir": str(folder / "documented")}
    run(folder, settings, group=group)
    return sorted(path.name for path in (folder / "documented").iterdir())


def test_the_documented_file_is_written_once(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2, save_documented, tmp_path) == [["step_4.pt"]] * 2


def train_compiled(group: Group, folder: Path, settings: Mapping[str, Any]) -> Trained:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        return train(group, folder, {**settings, "model.compile": "on"})


@pytest.mark.slow
def test_compiled_blocks_are_reduced_like_any_others(ranks: Pool, tmp_path: Path) -> None:
    settings = {"training.max_steps": 5, "training.precision": "fp64", "training.batch_size": 1}
    plain = train(Group(), tmp_path / "one", settings)
    compiled = ranks(2, train_compiled, tmp_path / "two", settings, timeout_seconds=280.0)
    for one, two in zip(plain.numbers, compiled[0].numbers, strict=True):
        assert two == pytest.approx(one, rel=1e-9)
    assert compiled[0].numbers == compiled[1].numbers


def ddp_of_torch(group: Group, resume_at: int, steps: int) -> list[str]:
    """Losses of torch's own DistributedDataParallel, begun anew (same weights and moments) before `resume_at`."""
    torch.manual_seed(0)
    sizes = [(48, 96), (96, 80), (80, 64), (64, 8)]
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    bits: list[str] = []
    for step in range(steps):
        if step == resume_at:
            wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        torch.manual_seed(1000 * step + group.rank)
        optimizer.zero_grad()
        loss = wrapped(torch.randn(16, 48)).square().mean()
        loss.backward()
        optimizer.step()
        bits.append(float(loss.detach()).hex())
    bits.append(str(sum(int(p.detach().view(torch.int32).long().sum()) for p in model.parameters())))
    return bits


@pytest.mark.slow
def test_torchs_own_ddp_does_not_resume_to_the_same_bits_at_3_ranks(ranks: Pool) -> None:
    """Why gradients are reduced here by buckets that are fixed: the negative control of the resume gate."""
    straight = ranks(3, ddp_of_torch, -1, 8)
    again = ranks(3, ddp_of_torch, -1, 8)
    assert straight == again, "it does repeat a whole run"
    resumed = ranks(3, ddp_of_torch, 4, 8)
    assert resumed != straight
