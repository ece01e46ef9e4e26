"""As much of Triton as our kernels use, in numpy: runs each of their lines where there is no GPU."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import kernels

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Values(np.ndarray):
    """An array with Triton's casts."""

    def to(self, dtype: Any, bitcast: bool = False) -> Values:
        same = np.asarray(self)
        if isinstance(dtype, torch.dtype):  # a float8 that numpy has not: its bits
            return torch.from_numpy(same.astype(np.float32)).to(dtype).view(torch.uint8).numpy().view(Values)
        return (same.view(dtype) if bitcast else same.astype(dtype)).view(Values)


class Pointer:
    def __init__(self, memory: np.ndarray, kind: Any, places: Any = 0) -> None:
        self.memory, self.kind, self.places = memory, kind, places
        self.dtype = SimpleNamespace(element_ty=kind)

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.kind, self.places + places)


class Kernel:
    """`kernel[(programs,)](...)` runs the programs one by one, from the last to the first: order must not matter."""

    def __init__(self, body: Callable[..., Any], language: Any) -> None:
        self.body, self.language = body, language

    def __call__(self, *args: Any) -> Any:
        return self.body(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: int) -> None:
            assert num_warps in (1, 2, 4, 8, 16)
            given = [_given(arg) for arg in args]
            for program in reversed(range(grid[0])):
                number = np.int32(program)
                self.language.program_id = lambda _axis, number=number: np.full((), number).view(Values)
                with np.errstate(all="ignore"):  # a GPU warns of nothing
                    self.body(*given, **constants)

        return launch


def _given(arg: Any) -> Any:
    """As Triton passes it on: a tensor is an address, whatever its strides, and a number of Python's is of 32 bits."""
    if isinstance(arg, torch.Tensor):
        behind = arg.untyped_storage().nbytes() // arg.element_size() - arg.storage_offset()
        flat = torch.as_strided(arg.detach(), (behind,), (1,))
        if arg.dtype in FLOAT8:
            return Pointer(flat.view(torch.uint8).numpy(), arg.dtype)
        return Pointer(memory := flat.numpy(), memory.dtype)
    return np.float32(arg) if isinstance(arg, float) else arg


@contextlib.contextmanager
def module(patch: pytest.MonkeyPatch, name: str) -> Iterator[Any]:
    """A module of lockstep.kernels whose kernels run here."""
    full = f"lockstep.kernels.{name}"
    with patch.context() as inside:
        for each, made in make().items():
            inside.setitem(sys.modules, each, made)
        inside.delitem(sys.modules, full, raising=False)
        inside.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
        loaded = importlib.import_module(full)
        inside.setattr(kernels, name, loaded, raising=False)
        yield loaded
        inside.delitem(sys.modules, full)


def make() -> dict[str, ModuleType]:
    """What to put into sys.modules."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")

    def load(pointer: Pointer, mask: np.ndarray | None = None, other: float = 0) -> Values:
        if mask is None:
            return np.asarray(pointer.memory[pointer.places]).view(Values)
        found = np.full(mask.shape, other, dtype=pointer.memory.dtype)
        found[mask] = pointer.memory[np.asarray(pointer.places)[mask]]
        return found.view(Values)

    def atomic_add(pointer: Pointer, value: Any, sem: str) -> None:
        assert sem == "relaxed"
        assert pointer.memory.dtype == np.int64
        assert np.asarray(value).dtype == np.int64
        with np.errstate(over="ignore"):
            pointer.memory[pointer.places] += np.int64(value)

    def store(pointer: Pointer, value: Any, mask: np.ndarray | None = None) -> None:
        if mask is None:
            pointer.memory[pointer.places] = value
        else:
            pointer.memory[np.asarray(pointer.places)[mask]] = np.asarray(value)[mask]

    language.__dict__.update(
        constexpr=int,
        float32=np.float32,
        full=lambda shape, value, dtype: np.full(shape, value, dtype).view(Values),
        maximum=np.fmax,  # as Triton's, which lets go of NaN
        max=lambda values, axis: np.fmax.reduce(values, axis),
        exp=np.exp,
        log=np.log,
        sqrt=np.sqrt,
        where=lambda condition, one, other: np.where(condition, one, other).view(Values),
        store=store,
        int16=np.int16,
        int64=np.int64,
        uint32=np.uint32,
        uint64=np.uint64,
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Values),
        arange=lambda first, last: np.arange(first, last, dtype=np.int32).view(Values),
        sum=lambda values, axis: np.full((), np.asarray(values).sum(axis, dtype=values.dtype)).view(Values),
        trans=np.transpose,
        cdiv=lambda a, b: -(-a // b),
        load=load,
        atomic_add=atomic_add,
    )
    triton.__dict__.update(jit=lambda body: Kernel(body, language), cdiv=lambda a, b: -(-a // b), language=language)
    return {"triton": triton, "triton.language": language}
