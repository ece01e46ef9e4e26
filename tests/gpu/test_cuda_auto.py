"""What `auto` finds on a real GPU: the largest micro-batch that fits, and again at once."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.contracts import Batch
from lockstep.engine import micro_batch
from lockstep.engine.micro_batch import Attempts, Place, Search, divisors
from lockstep.engine.step import Stepper
from lockstep.runtime import determinism, hardware, measured
from tests.gates.training import run
from tests.gpu.ready import CUDA, MARKS, ready

pytestmark = MARKS
TINY: dict[str, Any] = {
    "system.device": "cuda", "training.batch_size": "auto:3", "training.grad_accum_nums": 4, "training.max_steps": 6,
    "training.context_length": 128, "training.save_interval": 3, "training.eval_interval": 3, "model.dropout": 0.1,
    "debug.digest_interval": 1, "data.num_workers": 0, "system.deterministic": True, "training.precision": "bf16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared_cache: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def test_the_micro_batch_that_is_found_is_the_largest_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Place] = []
    tried: list[int] = []
    rooms: list[int] = []  # what others left of the card
    largest = Search.largest
    monkeypatch.setattr(Search, "largest", lambda self: (rooms.append(self.room), largest(self))[1])
    settled, attempt = micro_batch.settled, Attempts.__call__

    def noted(self: Attempts, rows: int) -> int | None:
        tried.append(rows)
        return attempt(self, rows)

    monkeypatch.setattr(micro_batch, "settled", lambda at: (places.append(at), settled(at))[1])
    monkeypatch.setattr(Attempts, "__call__", noted)
    made = ready(tmp_path / "one", {"training.batch_size": "auto:240", "training.grad_accum_nums": 1})
    line, training = made.built.notices[-1], made.parts.config.training
    print(line, "tried", tried)
    assert training.batch_size * training.grad_accum_nums == 240
    assert f"batch: {training.batch_size} rows x {training.grad_accum_nums} (auto: largest that fits " in line
    assert ", measured now, peak " in line
    assert line.endswith("GiB; global batch 240 rows)")
    card = torch.cuda.get_device_properties(CUDA).total_memory
    peak = float(re.findall(r"peak ([\d.]+) of ([\d.]+) GiB", line)[0][0]) * 2**30
    (room,) = rooms
    assert peak - 0.05 * 2**30 <= room < micro_batch.ROOM * card  # as it is printed
    larger = next((size for size in divisors(240) if size > training.batch_size), 0)
    if larger:  # the truth: the next one is too much, by an error or by our limit
        needed = Attempts(places[0])(larger)
        print("next larger", larger, needed)
        assert needed is None or needed > 0.975 * room, "within one divisor, but for a guess"
    del made, places[:]
    gc.collect()
    torch.cuda.empty_cache()
    tried.clear()
    again = ready(tmp_path / "two", {"training.batch_size": "auto:240", "training.grad_accum_nums": 1})
    assert again.parts.config.training.batch_size == training.batch_size
    assert f", measured {measured.today()}, peak " in again.built.notices[-1]
    assert tried == [training.batch_size], "the second start does not search"


def test_bits_are_those_of_a_run_that_was_given_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of other sizes, compiled, leave no trace; and a resumed run goes on bit for bit."""
    real, tried = Stepper.rehearse_alone, list[int]()

    def rehearse_alone(self: Stepper, batches: list[Batch]) -> None:
        tried.append(batches[0].rows)
        if batches[0].rows > 4:
            torch.empty(1 << 50, dtype=torch.uint8, device=CUDA)  # really: there is not so much
        real(self, batches)

    monkeypatch.setattr(Stepper, "rehearse_alone", rehearse_alone)
    with determinism.mode(CUDA, deterministic=True, threads=0):
        parts, found = run(tmp_path / "auto", TINY)
        assert tried == [12, 6, 4]
        assert (parts.config.training.batch_size, parts.config.training.grad_accum_nums) == (4, 3)
        torch.compiler.reset()
        given = {**TINY, "training.batch_size": 4, "training.grad_accum_nums": 3}
        _, plain = run(tmp_path / "plain", given)
        torch.compiler.reset()
        begun = tmp_path / "auto" / "checkpoints" / "step_00000003"
        _, resumed = run(tmp_path / "again", given, point=begun)
    bits = [[(each.step, each.loss.hex(), each.digest) for each in one.records] for one in (found, plain, resumed)]
    assert bits[0] == bits[1]
    assert bits[2] == bits[0][3:]
    validated = [[event["val_loss"] for kind, event in one.events if kind == "eval"] for one in (found, plain)]
    assert validated[0] == validated[1]


def test_a_step_that_runs_out_of_memory_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, in the middle of a step; the memory after it is that of before."""
    places: list[Place] = []
    settled = micro_batch.settled
    monkeypatch.setattr(micro_batch, "settled", lambda at: (places.append(at), settled(at))[1])
    made = ready(tmp_path / "one", {"training.batch_size": 1, "training.grad_accum_nums": 960})
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(CUDA)
    attempts = Attempts(places[0])
    assert attempts(480) is None, "480 x 8192 tokens are 400 GB of activations"
    attempts.end(1)
    assert torch.cuda.memory_allocated(CUDA) <= before + (64 << 20)
    small = attempts(1)
    assert small is not None
    assert small < hardware.memory_bounds(CUDA).limit / 2
    del made
