"""`lockstep` alone: what it proposes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.rundir import MANIFEST, write_json
from tests.conftest import Outcome

Run = Callable[..., Outcome]


def test_alone_it_proposes_a_prompt_that_suits_the_last_run(lockstep: Run, in_dir: Path) -> None:
    write_json(in_dir / "runs" / "one" / "config.json", {"family": "llama"})
    assert "lockstep sample" not in lockstep().out, "it has saved nothing"
    (saved := in_dir / "runs" / "one" / "checkpoints" / "step_00000001").mkdir(parents=True)
    write_json(saved / MANIFEST, {})
    assert 'lockstep sample one "The"' in lockstep().out
    write_json(in_dir / "runs" / "one" / "config.json", {"family": "mlm"})
    assert 'lockstep sample one "the [MASK] sat"' in lockstep().out
    assert 'try: lockstep sample runs/one "the [MASK] sat"' in lockstep("sample", "one").err
