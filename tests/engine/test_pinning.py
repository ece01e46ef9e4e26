"""Pinned memory for saves, without a GPU: who gets it, and that it is always given back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.engine import snapshot
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.engine.saving import Saver
from lockstep.engine.snapshot import Snapshot

CPU = torch.device("cpu")


def test_pinned_memory_is_for_all_ranks_of_a_machine_and_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, size = list[int](), 3 * snapshot.ALIGN_BYTES
    monkeypatch.setattr(snapshot, "_pin", lambda room, _device: pinned.append(room.numel()))
    monkeypatch.setattr(snapshot, "_unpin", lambda room, _bytes: pinned.remove(room.numel()))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(snapshot, "free_bytes", lambda: snapshot.SPARE_BYTES + 2 * size)
    state = State({str(number): torch.ones(3) for number in range(3)}, {}, {})
    for ranks, sharded in ((3, True), (2, True), (3, False)):
        saver = Saver(Checkpointer(tmp_path, sharded=sharded), Snapshot(CPU))
        saver.snapshot.on_cuda = True
        saver.make_room(state, ranks=ranks)
        assert saver.snapshot.is_kept is (ranks < 3 or not sharded)
        if saver.snapshot.is_kept:
            saver.snapshot._room(size)
            assert pinned == [size]
            saver.snapshot._room(size + 1)  # more: what was too small is given back
            assert pinned == [size + 1]
        saver.snapshot.free()
        assert pinned == []
        assert not saver.snapshot.is_kept
    lost = Snapshot(CPU)
    lost._pin_room(size)
    del lost  # by an error, before anybody could free it
    assert pinned == []


def test_what_could_not_be_pinned_is_not_unpinned(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """CUDA reports an error of these calls at the next launch of a kernel, which would be one of training."""
    pinned, size, events = set[int](), snapshot.ALIGN_BYTES, list[object]()

    def register(address: int, _size: int, _flags: int) -> int:
        if len(pinned) == 2:
            return 1
        pinned.add(address)
        return 0

    def launch(_size: int, *, device: torch.device) -> None:
        events.append(device)
        raise RuntimeError("CUDA error: invalid argument")

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(snapshot, "PIN_BYTES", size)
    monkeypatch.setattr(torch, "zeros", launch)
    own = Snapshot(CPU)
    own._pin_room(5 * size)
    assert len(pinned) == 2
    assert events == [CPU], "the error is called for at once"
    assert "cannot be pinned (CUDA error 1)" in caplog.text
    assert not own._forget.atexit, "CUDA may be gone by then"
    own._taken = SimpleNamespace(synchronize=lambda: events.append(len(pinned)))  # pyright: ignore[reportAttributeAccessIssue]
    own.free()  # `remove` raises KeyError for what is not there
    assert not pinned
    assert events[1:] == [2], "the GPU writes to these pages until its copy is there"
