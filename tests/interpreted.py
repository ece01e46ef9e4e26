"""Our kernels by Triton's own interpreter: each of their lines runs where there is no GPU, on the memory of tensors."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import kernels

FLOATS = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def _converted(values: np.ndarray, kind: Any, wanted: Any, _rounding: Any) -> np.ndarray:
    """The bits of numbers in another format, rounded to the nearest, as a GPU does."""
    numbers = torch.from_numpy(np.ascontiguousarray(values)).view(FLOATS[kind.name]).to(FLOATS[wanted.name])
    return numbers.view(BITS[numbers.element_size()]).numpy().reshape(values.shape)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Another Triton beside the one that compiles: which of both it is, it decides when it is imported."""
    others = _taken_out()
    sys.modules.update(_modules)
    try:
        if not _modules:
            _prepare()
        yield
    finally:
        _modules.update(_taken_out())
        sys.modules.update(others)


_modules: dict[str, ModuleType] = {}


def _taken_out() -> dict[str, ModuleType]:
    """All modules of Triton, but for those in C, which are there once in a process."""
    names = [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]
    return {name: sys.modules.pop(name) for name in names}


def _prepare() -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    interpreter._convert_float = _converted  # its own loses a carry in float8, and cuts bf16 off
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx
    builder.set_grid_idx = lambda x, *others: place(builder.grid_dim[0] - 1 - x, *others)  # order must not matter


@contextlib.contextmanager
def module(patch: pytest.MonkeyPatch, name: str) -> Iterator[Any]:
    """A module of lockstep.kernels whose kernels run here."""
    full = f"lockstep.kernels.{name}"
    with patch.context() as inside, np.errstate(all="ignore"):  # a GPU warns of nothing
        inside.setenv("TRITON_INTERPRET", "1")
        inside.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
        inside.delitem(sys.modules, full, raising=False)
        inside.delattr(kernels, name, raising=False)
        try:
            with _interpreting():
                yield importlib.import_module(full)
        finally:
            sys.modules.pop(full, None)
            vars(kernels).pop(name, None)
