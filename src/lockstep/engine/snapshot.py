"""A copy of the state as it is now, so that it can be written while training goes on.

On the CPU it is a plain copy, made before the next step begins and given back after the save. A GPU copies by itself,
on a stream of its own, into memory that is pinned: the next step computes meanwhile, and only its update, which changes
what is being copied, waits. Pinning takes longer than copying, so such memory is kept for the next save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.checkpoint import State
from lockstep.runtime.memory_limits import free_bytes
from lockstep.runtime.parallel import local, with_rows
from lockstep.runtime.signals import UNSTOPPABLE

logger = logging.getLogger(__name__)

ALIGN_BYTES = 64  # where each tensor begins
PIN_BYTES = 1 << 26  # pinned at once: meanwhile the driver takes no work
SPARE_BYTES = 64 << 20  # to be left for everybody else


class Snapshot:
    """Room for copies of one state after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.on_cuda else None
        self._kept: Tensor | None = None  # pinned
        self._taken: torch.cuda.Event | None = None
        self._pinning: threading.Thread | None = None

    def reserve(self, size: int) -> None:
        """Pin memory for the first save while training has not come to it; nothing to do on the CPU."""
        if self.on_cuda:
            self._pinning = threading.Thread(target=self._pin_room, args=(size,), name=UNSTOPPABLE, daemon=True)
            self._pinning.start()

    @property
    def is_kept(self) -> bool:
        """Whether there is memory that was pinned before, or will be in a moment."""
        return self._kept is not None or self._pinning is not None

    @property
    def is_pinning(self) -> bool:
        """Whether a save would still have to wait for its memory."""
        return self._pinning is not None and self._pinning.is_alive()

    def fits(self, state: State, *, ranks: int) -> bool:
        """Whether the memory of this machine has room for a copy by each of `ranks` of its processes."""
        return self.is_kept or ranks * needed_bytes(state) + SPARE_BYTES <= free_bytes()

    @torch.no_grad()
    def take(self, state: State) -> State:
        """The same state in memory of its own. On a GPU it is only on its way: see `before_change` and `wait`."""
        room = self._room(needed_bytes(state))
        if self._stream is None:
            return _copied(state, room)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copy = _copied(state, room)
            self._taken = torch.cuda.Event()
            self._taken.record(self._stream)
        return copy

    def before_change(self) -> None:
        """Let the GPU's work of training wait for the copy from here on; the host does not wait."""
        if self._taken is not None:
            torch.cuda.current_stream(self.device).wait_event(self._taken)

    def wait(self) -> None:
        """Until every number is here."""
        if self._taken is not None:
            self._taken.synchronize()

    def _room(self, size: int) -> Tensor:
        if not self.on_cuda:
            return torch.empty(size, dtype=torch.uint8)
        if self._pinning is not None:
            self._pinning.join()
            self._pinning = None
        if self._kept is None or self._kept.numel() < size:
            self.free()
            self._pin_room(size)
        assert self._kept is not None
        return self._kept

    def _pin_room(self, size: int) -> None:
        torch.cuda.set_device(self.device.index or 0)  # of the thread that pins
        room = torch.empty(size, dtype=torch.uint8).fill_(0)  # the system hands memory out when it is first written to
        pinned = _pin(room, self.device)
        self._kept = room
        self._forget = weakref.finalize(self, _unpin, room, pinned)  # should nobody call `free`, after an error
        self._forget.atexit = False

    def free(self) -> None:
        """Let the GPU forget what was kept: it would go on writing to these pages when others lie at their address."""
        if self._pinning is not None:
            self._pinning.join()
            self._pinning = None
        if self._kept is not None:
            with contextlib.suppress(RuntimeError):  # of a GPU that has failed
                self.wait()
            self._forget()
            self._kept = None


def needed_bytes(state: State) -> int:
    """Of a copy of what lies on this rank."""
    return sum(_padded(local(tensor).nbytes) for part in (state.model, state.optimizer) for tensor in part.values())


def _copied(state: State, room: Tensor) -> State:
    places = _places(state, room)

    def filled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pairs = zip(tensors.items(), places, strict=False)
        return {name: with_rows(tensor, _fill(place, local(tensor), room)) for (name, tensor), place in pairs}

    return State(filled(state.model), filled(state.optimizer), state.run)


def _fill(place: Tensor, source: Tensor, room: Tensor) -> Tensor:
    """Copy, a part after the other that was pinned as one: CUDA refuses to copy across two."""
    target, bits = place.view(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8)
    begin, first = place.data_ptr() - room.data_ptr(), 0
    while first < target.numel():
        last = min(target.numel(), PIN_BYTES - (begin + first) % PIN_BYTES + first)
        target[first:last].copy_(bits[first:last], non_blocking=True)
        first = last
    return place


def _places(state: State, room: Tensor) -> Iterator[Tensor]:
    """A piece of the room for each tensor, of its kind and shape.

    By way of numpy each has a storage of its own: torch.save writes whole storages.
    """
    start = 0
    for part in (state.model, state.optimizer):
        for tensor in part.values():
            own = local(tensor)
            piece = room[start : start + own.nbytes]
            if own.numel():
                yield torch.from_numpy(piece.numpy()).view(own.dtype).view(own.shape)
            else:  # the last ranks may have no row
                yield torch.empty(own.shape, dtype=own.dtype)
            start += _padded(own.nbytes)


def _padded(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _pin(room: Tensor, device: torch.device) -> int:
    """Let the GPU reach this memory by itself; without, copies work too and take longer. How many bytes it reaches."""
    runtime: Any = torch.cuda.cudart()
    for start in range(0, room.numel(), PIN_BYTES):
        size = min(PIN_BYTES, room.numel() - start)
        if code := int(runtime.cudaHostRegister(room.data_ptr() + start, size, 0)):
            logger.warning("Memory for saves cannot be pinned (CUDA error %d): they hold up training for longer", code)
            with contextlib.suppress(RuntimeError):  # the next launch has to report it: be it this
                torch.zeros(1, device=device)
            return start
    return room.numel()


def _unpin(room: Tensor, pinned: int) -> None:
    runtime: Any = torch.cuda.cudart()
    for start in range(0, pinned, PIN_BYTES):
        runtime.cudaHostUnregister(room.data_ptr() + start)
