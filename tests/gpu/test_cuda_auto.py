"""What `auto` finds on a real GPU: the largest micro-batch that fits, and nothing of the search stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import Loaded, load
from lockstep.contracts import Batch
from lockstep.engine import find_batch
from lockstep.engine.find_batch import Trial, divisors, resolved
from lockstep.engine.step import Stepper
from lockstep.runtime import determinism, hardware
from lockstep.runtime.group import Group
from tests.gates.training import flags, run
from tests.gpu.ready import CUDA, MARKS

pytestmark = MARKS
TINY: dict[str, Any] = {
    "system.device": "cuda", "training.batch_size": 3, "training.grad_accum_nums": 4, "training.max_steps": 6,
    "training.context_length": 128, "training.save_interval": 3, "training.eval_interval": 3, "model.dropout": 0.1,
    "debug.digest_interval": 1, "data.num_workers": 0, "system.deterministic": True, "training.precision": "bf16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(shared_cache: Path) -> Iterator[None]:
    torch.compiler.reset()
    hardware.let_go(CUDA)
    yield
    hardware.let_go(CUDA)


def production(rows: int) -> Loaded:
    words = {"training.batch_size": rows, "training.grad_accum_nums": 1, "data.dataset_name": "builtin",
             "data.tokenizer_name": "bytes", "model.init": "random", "system.device": "cuda"}  # fmt: skip
    return load("llama", preset="production", flags=flags(words))


def test_the_micro_batch_that_is_found_is_the_largest_that_fits() -> None:
    before = torch.cuda.memory_allocated(CUDA)
    bounds = hardware.memory_bounds(CUDA)
    found = find_batch.find(production(240), CUDA, sizes=divisors(240))
    print(found, bounds)
    assert found.rows
    assert found.peak_bytes <= find_batch.ROOM * bounds.limit - bounds.taken
    assert torch.cuda.memory_allocated(CUDA) <= before + (64 << 20), "the model of the search is gone"
    larger = next((size for size in divisors(240) if size > found.rows), 0)
    if larger:  # the truth: the next one is too much, by an error or by our limit
        needed = Trial(production(240), CUDA).peak_bytes(larger)
        print("next larger", larger, needed)
        assert needed > find_batch.ROOM * bounds.limit - bounds.taken


def test_bits_are_those_of_a_run_that_was_given_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of other sizes, compiled, leave no trace."""
    real, tried = Stepper.rehearse, list[int]()

    def rehearse(self: Stepper, batches: list[Batch]) -> Any:
        tried.append(batches[0].rows)
        if batches[0].rows > 4:
            torch.empty(1 << 50, dtype=torch.uint8, device=CUDA)  # really: there is not so much
        return real(self, batches)

    with determinism.mode(CUDA, deterministic=True, threads=0):
        with monkeypatch.context() as patch:
            patch.setattr(Stepper, "rehearse", rehearse)
            loaded = replace(load("llama", preset="tiny", flags=flags(TINY)), finds_batch=True)
            training = resolved(loaded, CUDA, Group()).config.training
        assert tried == [3, 6, 4]
        assert (training.batch_size, training.grad_accum_nums) == (4, 3)
        given = {**TINY, "training.batch_size": 4, "training.grad_accum_nums": 3}
        torch.compiler.reset()  # as train() does after the search
        _, found = run(tmp_path / "auto", given)
        torch.compiler.reset()
        _, plain = run(tmp_path / "plain", given)
    bits = [[(each.step, each.loss.hex(), each.digest) for each in one.records] for one in (found, plain)]
    assert bits[0] == bits[1]


def test_a_step_that_runs_out_of_memory_gives_it_back() -> None:
    """A real one, in the middle of a step; the memory after it is that of before."""
    trial = Trial(production(1), CUDA)
    small = trial.peak_bytes(1)
    before = torch.cuda.memory_allocated(CUDA)
    assert trial.peak_bytes(480) == float("inf"), "480 x 8192 tokens are 400 GB of activations"
    assert trial.peak_bytes(1) == pytest.approx(small, rel=0.02)
    gc.collect()
    assert torch.cuda.memory_allocated(CUDA) <= before + (64 << 20)
