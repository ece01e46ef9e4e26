"""Places that cannot be written to are refused before data or model are loaded: item 172, row 30."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import rundir
from lockstep.errors import ExitCode
from tests.conftest import Outcome

pytestmark = pytest.mark.usefixtures("shared_cache")
Cli = Callable[..., Outcome]
QUICK = ("--device", "cpu", "training.eval_batches=1", "system.threads=1", "report.sample_prompt=")

PLACES = ("run.out", "training.checkpoint_dir", "report.results_dir", "report.log_file", "system.log_dir")


@pytest.mark.parametrize("key", [*PLACES, "system.output_dir"])
def test_unwritable_output_is_refused_before_anything_is_loaded(
    key: str, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 172."""
    (in_dir / "file").write_text("")

    def never(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("data was prepared first")

    monkeypatch.setattr("lockstep.engine.build.prepare", never)
    refused = lockstep("train", "llama", "tiny", *QUICK, f"{key}=file/place")
    assert refused.code == ExitCode.CANNOT_CREATE
    assert "file/place" in refused.err


def test_unwritable_output_of_a_run_that_goes_on_is_refused_too(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 172."""
    (in_dir / "file").write_text("")
    words = ("train", "llama", "tiny", *QUICK, "--max-steps", "4", "training.warmup_steps=0")
    assert lockstep(*words, "--name", "mine").code == 0
    monkeypatch.setattr("lockstep.engine.build.prepare", lambda *_, **__: pytest.fail("data was prepared first"))
    for key in PLACES[1:]:
        refused = lockstep(*words, "--resume", "runs/mine", f"{key}=file/place")
        assert (key, refused.code) == (key, ExitCode.CANNOT_CREATE), refused.text
        assert "file/place" in refused.err
    real = rundir.probe

    def locked(folder: Path, **more: Any) -> None:  # by a mode that root would not heed
        real(in_dir / "file" / "place" if folder.name == "checkpoints" else folder, **more)

    monkeypatch.setattr(rundir, "probe", locked)
    refused = lockstep(*words, "--resume", "runs/mine")
    assert refused.code == ExitCode.CANNOT_CREATE, "the folder of the checkpoints itself"
