"""Small runs of every family that a bad number ends, and their bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.replay import replay
from lockstep.health.finding import Finding

SMALL: dict[str, Any] = {
    "training.max_steps": 4, "training.batch_size": 2, "training.grad_accum_nums": 2, "training.eval_interval": 0,
    "training.eval_batches": 1, "training.save_interval": 0, "training.warmup_steps": 1, "data.num_workers": 0,
    "system.threads": 1,
}  # fmt: skip
TEXT: dict[str, Any] = {**SMALL, "training.context_length": 16}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "mlm": TEXT,
    "llada": TEXT,
    "ad": {**SMALL, "training.context_length": 40, "data.train_source_timesteps": 80, "training.gen_episodes": 0},
}
FAMILIES = list(OF_FAMILY)
ALL_BUT_SLOWLY = [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])]


def brought_back(finding: Finding, *, code: int = 0, drop: int | None = None) -> str:
    """Replay what was kept of it, where it must come back; what is said of it."""
    done, was = replay(Path(finding.files["bundle"]), drop=drop, device="cpu")
    assert was.as_json() == finding.replace(files=was.files).as_json()
    assert done.exit_code == code, done.lines(was)
    assert done.reproduced == (code == 0)
    return done.verdict
