"""The copy of a state on a GPU: made on a stream of its own, into pinned memory, while training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.config.load import load
from lockstep.engine import checkpoint
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.engine.saving import Saver
from lockstep.engine.snapshot import Snapshot, needed_bytes
from lockstep.engine.train import train
from lockstep.runtime.marks import NoMarks
from tests.gates.training import flags

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]


def test_a_copy_is_of_before_the_update_that_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.engine.snapshot.PIN_BYTES", 1 << 20)  # most tensors then lie in several such pieces
    device = torch.device("cuda", 0)
    shapes = {"a": (4096, 4096), "b": (3, 1000), "none": (0, 4)}
    model = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    moments = {f"m.{name}": tensor.to(torch.bfloat16) for name, tensor in model.items()}
    state = State(model, moments, {"step": 0})
    snapshot = Snapshot(device)
    saver = Saver(Checkpointer(tmp_path, keep_last=1), snapshot)
    snapshot.reserve(needed_bytes(state))
    for step in range(1, 6):
        wanted = {name: tensor.cpu().clone() for name, tensor in {**model, **moments}.items()}
        assert snapshot.fits(state, ranks=1)
        saver.begin(step, state)
        snapshot.before_change()
        for tensor in (*model.values(), *moments.values()):
            tensor.mul_(-1.5)
        saved = saver.land(NoMarks())
        assert saved
        found = checkpoint.load(saved.path)
        for name, tensor in wanted.items():
            assert torch.equal({**found.model, **found.optimizer}[name], tensor), f"{name}, save {step}"
    taken = snapshot.take(state)
    snapshot.wait()
    assert taken.model["a"].is_pinned()
    assert taken.model["a"].device.type == "cpu"
    snapshot.free()


def test_what_nobody_freed_is_not_pinned_any_more() -> None:
    """Or the next tensor at that address would belong to two pieces: CUDA then refuses to copy, or writes into it."""
    snapshot = Snapshot(torch.device("cuda", 0))
    room = snapshot._room(1 << 20)
    assert room.is_pinned()
    del snapshot
    assert not room.is_pinned()


def test_two_trainings_in_one_process_save_the_same(tmp_path: Path) -> None:
    """The second has to get memory of its own pinned, at an address that the first may have had."""
    settings = {
        "system.device": "cuda", "system.deterministic": True, "training.max_steps": 8, "training.save_interval": 3,
        "training.eval_interval": 0, "report.sample_prompt": "", "data.cache_dir": tmp_path / "cache",
        "run.out": tmp_path / "runs",
    }  # fmt: skip
    found = list[State]()
    for name in ("one", "two"):
        train(load("llama", preset="tiny", flags=flags({**settings, "run.name": name})))
        found.append(checkpoint.load(tmp_path / "runs" / name / "checkpoints" / "step_00000008"))
    for part in ("model", "optimizer"):
        one, two = (getattr(state, part) for state in found)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
