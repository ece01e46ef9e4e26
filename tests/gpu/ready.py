"""A run on a real GPU up to its first step, for tests of what `auto` finds there; and a guard against waiting."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.engine.build import Assembled, assemble, plan
from lockstep.rundir import RunDir
from lockstep.runtime.signals import StopRequest
from tests.gates.training import flags

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
    pytest.mark.timeout(900),
]
CUDA = torch.device("cuda", 0)
# Production width, one layer: 1.27 G parameters, about 105 KB of activations a token.
WIDE: dict[str, Any] = {
    "model.num_layers": 1, "training.eval_batches": 1, "training.max_steps": 2, "training.eval_interval": 0,
    "training.save_interval": 0, "data.dataset_name": "builtin", "data.tokenizer_name": "bytes", "data.num_workers": 0,
    "system.device": "cuda", "training.precision": "bf16",
}  # fmt: skip


def ready(folder: Path, settings: dict[str, Any]) -> Assembled:
    planned = plan(load("llama", preset="production", flags=flags({**WIDE, **settings})), CUDA)
    made = assemble(planned, RunDir(folder), point=None, sinks=[], stop=StopRequest())
    made.loader.close()
    return made


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """torch's own guard raises where the host waits for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
