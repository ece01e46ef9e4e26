"""A recording as a CUDA graph makes one, on the CPU: operations and the memory they read and write, nothing of Python.

A replay does the same operations with the same tensors once more. What the host has read, counted or decided while
they were recorded stays as it was. Operations that a graph cannot record (a look at a number, a size that depends on
numbers) are refused with a RuntimeError; `tolist` and `numpy` are none, and only show by what stays as it was.
Recording computes in order to be able to go on, and puts back what it has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique", "bincount", "equal", "is_nonzero")


class Tape(TorchDispatchMode):
    """Keeps each operation with its arguments, and what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, dict[str, Any], list[Tensor | None]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what lay in memory that was there already
        self.own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        given, name = tensors((args, named)), func.__name__.split(".")[0]
        by_flags = name.startswith("index") and any(each.dtype == torch.bool for each in given[1:])
        if by_flags or name.startswith(REFUSED):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        written = self._written(func, args, named)
        for each in written:
            if place(each) not in self.own:
                whole = torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage())
                self.before.setdefault(place(each), (whole, whole.clone()))
        out = func(*args, **named)
        read = {place(each) for each in given}
        made = [each if place(each) not in read else None for each in tensors(out)]
        self.own |= {place(each) for each in made if each is not None}
        if written or any(each is not None for each in made):
            self.operations.append((func, args, named, made))
        return out

    def _written(self, func: Any, args: Any, named: dict[str, Any]) -> list[Tensor]:
        given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **named}
        changed = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
        return [each for name in changed for each in tensors(given.get(name))]


def tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.numel()]


def place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Taped:
    """For `graphs.choose(record=...)`."""

    def __init__(self, work: Callable[[], Tensor], rehearse: Callable[[], object], device: torch.device) -> None:
        assert device.type == "cpu"
        rehearse()
        self.tape, self.replays = Tape(), 0
        try:
            with self.tape:
                self.values = self._written = work()
        finally:
            with torch.no_grad():
                for memory, content in self.tape.before.values():
                    memory.copy_(content)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, named, made in self.tape.operations:
            for old, new in zip(made, tensors(func(*args, **named)), strict=True):
                if old is not None:
                    old.copy_(new)
        self.values = self._written.clone()  # who reads a GPU's has copied them by the next replay
