"""`--deterministic` at the production shape on a real GPU: bits repeat over 200 steps, and across a resume.

Takes 6 minutes, 50 GiB of the card and 24 GB of the disk.
On a machine without pytest-timeout: pytest -c /dev/null --rootdir=. -s tests/gpu/test_cuda_repeats.py
"""

from __future__ import annotations

import gc
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.contracts import StepRecord
from lockstep.engine.checkpoint import Checkpointer
from lockstep.errors import Stopped
from lockstep.runtime import determinism
from lockstep.runtime.signals import StopRequest
from tests.gates.training import Recorder, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
    pytest.mark.usefixtures("shared_cache"),
]
DEVICE, PRESET = "cuda", "production"
STEPS, HALF = 200, 100
SETTINGS: dict[str, Any] = {  # 4 layers of the 8B shape, 4 rows of 8,192 tokens
    "data.dataset_name": "synthetic", "data.num_workers": 0, "training.batch_size": 4, "training.grad_accum_nums": 1,
    "training.max_steps": STEPS, "training.eval_interval": 0, "training.save_interval": 0, "training.eval_batches": 1,
    "training.precision": "bf16", "report.sample_prompt": "", "system.deterministic": True, "debug.digest_interval": 10,
}  # fmt: skip


class Enough(Exception):
    """What was to be seen has been: the last save would be another 23 GB."""


@dataclass
class Listener(Recorder):
    """Ends a run when it hears of a step; or asks it to stop, as a signal does, and it saves."""

    last: int = STEPS - 1
    asks: int = STEPS
    stop: StopRequest = field(default_factory=StopRequest)

    def write(self, record: StepRecord) -> None:
        super().write(record)
        if record.step == self.asks:
            self.stop.signal = signal.SIGTERM
        if record.step == self.last:
            raise Enough


def heard(folder: Path, listener: Listener, *, point: Path | None = None, seed: int = 1) -> list[tuple[Any, ...]]:
    """The bits of every step of a run, from its beginning or from a checkpoint."""
    torch.compiler.reset()  # as a process of its own would begin
    settings, since = {"system.device": DEVICE, "system.seed": seed, **SETTINGS}, time.perf_counter()
    with pytest.raises((Enough, Stopped)):
        run(folder, settings, preset=PRESET, point=point, stop=listener.stop, recorder=listener)
    attention = listener.parts.stepper.model.attention if listener.parts else None
    print(f"{folder.name}: {len(listener.trace)} steps in {time.perf_counter() - since:.0f} s, {attention}", flush=True)
    listener.parts = None
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return listener.trace


@pytest.mark.timeout(1200)
def test_bits_repeat_over_200_steps_and_across_a_resume(tmp_path: Path) -> None:
    with determinism.mode(torch.device(DEVICE), deterministic=True, threads=0):
        whole = heard(tmp_path / "whole", Listener())
        begun = heard(tmp_path / "begun", Listener(asks=HALF - 1))
        (point,) = Checkpointer(tmp_path / "begun" / "checkpoints").found()
        rest = heard(tmp_path / "rest", Listener(), point=point)
        other = heard(tmp_path / "other", Listener(last=0), seed=2)
    assert [each[0] for each in whole] == list(range(STEPS))
    assert len({each[1] for each in whole}) > 0.9 * STEPS, "it learns: losses differ"
    assert HALF <= len(begun) < HALF + 4
    assert begun + rest == whole
    assert other[0] != whole[0], "the control"
