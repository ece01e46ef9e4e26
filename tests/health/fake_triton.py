"""As much of Triton as the digest kernel uses, in numpy: runs each of its lines where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch


class Values(np.ndarray):
    """An array with Triton's casts."""

    def to(self, dtype: Any) -> Values:
        return np.asarray(self).astype(dtype).view(Values)


class Pointer:
    def __init__(self, memory: np.ndarray, places: Any = 0) -> None:
        self.memory, self.places = memory, places

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.places + places)


class Kernel:
    """`kernel[(programs,)](...)` runs the programs one by one, from the last to the first: order must not matter."""

    def __init__(self, body: Callable[..., Any], language: Any) -> None:
        self.body, self.language = body, language

    def __call__(self, *args: Any) -> Any:
        return self.body(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: int) -> None:
            assert num_warps in (1, 2, 4, 8)
            given = [Pointer(arg.numpy()) if isinstance(arg, torch.Tensor) else arg for arg in args]
            for program in reversed(range(grid[0])):
                number = np.int32(program)
                self.language.program_id = lambda _axis, number=number: np.full((), number).view(Values)
                self.body(*given, **constants)

        return launch


def make() -> dict[str, ModuleType]:
    """What to put into sys.modules."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")

    def load(pointer: Pointer, mask: np.ndarray, other: int) -> Values:
        found = np.full(mask.shape, other, dtype=pointer.memory.dtype)
        found[mask] = pointer.memory[np.asarray(pointer.places)[mask]]
        return found.view(Values)

    def atomic_add(pointer: Pointer, value: Any, sem: str) -> None:
        assert sem == "relaxed"
        assert pointer.memory.dtype == np.int64
        assert np.asarray(value).dtype == np.int64
        with np.errstate(over="ignore"):
            pointer.memory[pointer.places] += np.int64(value)

    language.__dict__.update(
        constexpr=int,
        int64=np.int64,
        uint64=np.uint64,
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Values),
        arange=lambda first, last: np.arange(first, last, dtype=np.int32).view(Values),
        sum=lambda values, axis: np.full((), np.asarray(values).sum(axis, dtype=values.dtype)).view(Values),
        load=load,
        atomic_add=atomic_add,
    )
    triton.__dict__.update(jit=lambda body: Kernel(body, language), cdiv=lambda a, b: -(-a // b), language=language)
    return {"triton": triton, "triton.language": language}
