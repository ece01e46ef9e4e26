"""Our kernels by Triton's compiler, down to the machine code of cards that are not here; what they compute: the tests
beside this one, by Triton's interpreter, and tests/gpu."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CAPABILITIES = (80, 90, 100)  # A100, H200, B200
SHARED_BYTES = 99 << 10  # of one program: well below what these cards have
HALF_AND_WHOLE = (torch.bfloat16, torch.float16, torch.float32)


class Card:
    """As much of a driver as a compiler asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What was compiled; nothing is launched."""
    found, run = list[Any](), JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.append(run(self, *args, grid=grid, warmup=True, **named))

    monkeypatch.setattr(JITFunction, "run", compiled)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return found


def rows() -> None:
    kernels = importlib.import_module("lockstep.kernels.cross_entropy_rows")
    targets, scales, gradient = torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.ones(())
    for dtype in HALF_AND_WHOLE:
        for columns, factor in ((128_256, 0.1), (128_256, None), (301, 1.0)):
            logits = torch.zeros(2, columns, dtype=dtype)
            kernels.take_rows(logits, targets, scales, ignored=-100, gradient_factor=factor)
        kernels.multiply(torch.zeros(7, dtype=dtype), gradient, done=1.0)
    kernels.take_rows(logits, targets, scales, ignored=-100, gradient_factor=None, normaliser_C=torch.zeros(2))


def adamw() -> None:
    kernels = importlib.import_module("lockstep.kernels.adamw")
    shared, how = torch.zeros(6), {"decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8}
    for dtype in (torch.float32, torch.bfloat16):
        moments = [torch.zeros(4096, dtype=dtype) for _ in range(2)]
        key = torch.zeros((), dtype=torch.int32)
        kernels.update(torch.zeros(4096), torch.zeros(4096), *moments, shared, key=key, begin=1 << 33, **how)


def digest() -> None:
    kernels = importlib.import_module("lockstep.kernels.digest")
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for count in range(1, kernels.TOGETHER + 1):
            pairs: list[list[Tensor]] = [[torch.zeros(40_000, dtype=dtype)] * count, [torch.zeros(2).long()] * count]
            kernels.add_digests(*pairs)


def tiles() -> None:
    kernels = importlib.import_module("lockstep.kernels.float8_tiles")
    logits, targets = torch.zeros(64, 128_256, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    kernels.deltas(logits, targets, torch.zeros(64), one=2.0**15)
    kernels.turn(logits[:, :4096].contiguous(), torch.ones(()))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("launches", "count"), [(rows, 13), (adamw, 2), (digest, 16), (tiles, 2)])
def test_every_launch_compiles(
    launches: Callable[[], None], count: int, capability: int, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_active", Card(capability))
    if launches is tiles and capability < 89:  # the control: what a card has not, the compiler says
        with pytest.raises(CompilationError, match="fp8e4nv not supported"):
            launches()
        return
    launches()
    assert len(made) == count
    for kernel in made:
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED_BYTES
