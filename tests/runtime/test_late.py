"""The loop never waits: a step is read after the next one was launched, and launching asks the device nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.contracts import Batch
from lockstep.engine.step import Pending, Reading, Stepper
from tests.gates.training import run

QUIET = {"training.save_interval": 0, "training.eval_interval": 0, "data.num_workers": 0, "system.threads": 1}


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`launch 3` and `read 3`, in the order in which they happen."""
    order: list[str] = []
    names: dict[int, str] = {}
    launch, read = Stepper.launch, Pending.read

    def launched(self: Stepper, step: int, batches: Sequence[Batch]) -> Pending:
        pending = launch(self, step, batches)
        names[id(pending)] = str(step)
        order.append(f"launch {step}")
        return pending

    def was_read(self: Pending) -> Reading:
        if id(self) in names:  # the rehearsal has no number
            order.append(f"read {names[id(self)]}")
        return read(self)

    monkeypatch.setattr(Stepper, "launch", launched)
    monkeypatch.setattr(Pending, "read", was_read)
    return order


def test_a_step_is_read_after_the_next_was_launched(happened: list[str], tmp_path: Path, shared_cache: Path) -> None:
    run(tmp_path, {**QUIET, "training.max_steps": 4})
    assert happened == [
        "launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3",
    ]  # fmt: skip


def test_debug_reads_every_step_at_once(happened: list[str], tmp_path: Path, shared_cache: Path) -> None:
    run(tmp_path, {**QUIET, "training.max_steps": 3, "debug.enabled": True})
    assert happened == ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2"]


def test_what_is_due_is_read_before_it_is_acted_on(happened: list[str], tmp_path: Path, shared_cache: Path) -> None:
    run(tmp_path, {**QUIET, "training.max_steps": 4, "training.eval_interval": 2, "training.eval_batches": 1})
    assert happened == ["launch 0", "launch 1", "read 0", "read 1", "launch 2", "launch 3", "read 2", "read 3"]


class Looks(TorchDispatchMode):
    """Counts the questions that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def looks_of(work: Callable[[], object]) -> int:
    with Looks() as looks, pytest.MonkeyPatch.context() as patch:
        to_list = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:  # on the CPU it asks the dispatcher nothing
            looks.count += 1
            return to_list(tensor)

        patch.setattr(torch.Tensor, "tolist", counted)
        work()
    return looks.count


def test_the_counter_sees_a_look() -> None:
    """Each of the ways in which a step could come to wait."""
    three, index = torch.arange(3.0), torch.tensor(1)
    for work in (three.sum().item, lambda: bool(three.any()), lambda: three[index], lambda: three.tolist()):
        assert looks_of(work) == 1, work
    assert looks_of(lambda: three.take(index)) == 0


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each launch of a step looks."""
    counts: list[int] = []
    launch = Stepper.launch

    def launched(self: Stepper, step: int, batches: Sequence[Batch]) -> Pending:
        made: list[Pending] = []
        counts.append(looks_of(lambda: made.append(launch(self, step, batches))))
        return made[0]

    monkeypatch.setattr(Stepper, "launch", launched)
    return counts


@pytest.mark.parametrize(("precision", "clip"), [("fp32", 1.0), ("fp32", 0.0), ("bf16", 1.0), ("fp16", 1.0)])
def test_launching_a_step_asks_the_device_nothing(
    precision: str, clip: float, looks: list[int], tmp_path: Path, shared_cache: Path
) -> None:
    settings = {"training.max_steps": 3, "training.precision": precision, "training.max_grad_norm": clip}
    run(tmp_path, {**QUIET, **settings, "training.grad_accum_nums": 2, "training.context_length": 16})
    assert looks == [0, 0, 0]


def test_debug_is_seen_to_look(looks: list[int], tmp_path: Path, shared_cache: Path) -> None:
    """The negative control inside the real step: debug looks at the gradients."""
    run(tmp_path, {**QUIET, "training.max_steps": 1, "debug.enabled": True})
    assert looks[0] > 0
