"""Places that cannot be written to are refused before data or model are loaded: item 172, row 30.

And one that another live run writes to is left to it: item 173.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lockstep import rundir
from lockstep.engine import folder
from lockstep.errors import ExitCode
from lockstep.runtime import torch_file
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


HOLD = (
    "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); sys.stdin.read()"
)


def test_documented_files_go_elsewhere_while_another_run_writes_there(in_dir: Path, lockstep: Cli) -> None:
    """Item 173: of two live runs each has its own step_2.pt; who was killed is in nobody's way."""
    words = ("train", "llama", "tiny", *QUICK, "--max-steps", "2", "training.warmup_steps=0")
    words = (*words, "training.checkpoint_dir=pt")
    (in_dir / "pt").mkdir()
    (in_dir / "pt" / "step_2.pt").write_text("of the first run")
    command = (sys.executable, "-c", HOLD, str(in_dir / "pt" / folder.FILES_LOCK))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.readline(), "it has the folder"
        second = lockstep(*words, "--name", "second")
        assert second.code == 0, second.text
        assert second.text.count("The .pt files of this run go to pt/second (another run is writing to pt now)") == 1
        first.kill()
    assert (in_dir / "pt" / "step_2.pt").read_text() == "of the first run"
    assert torch_file.read(in_dir / "pt" / "second" / "step_2.pt")["global_step"] == 2

    resumed = lockstep("resume", "second", "--max-steps", "4", "--checkpoint.allow-mismatch", "true")
    assert resumed.code == 0, resumed.text
    assert "The .pt files of this run go to pt/second (as before)" in resumed.text
    assert (in_dir / "pt" / "second" / "step_4.pt").is_file()
    third = lockstep(*words, "--name", "third")
    assert (third.code, "The .pt files" in third.text) == (0, False), third.text
    assert torch_file.read(in_dir / "pt" / "step_2.pt")["global_step"] == 2
    assert {path.name for path in (in_dir / "pt").rglob("*")} == {"second", "step_2.pt", "step_4.pt"}


@pytest.mark.parametrize(
    ("error", "place", "says"),
    [
        (PermissionError(13, "Permission denied"), "pt/mine", "The .pt files of this run go to pt/mine"),
        (OSError(37, "No locks available"), "pt", "Another run may write .pt files to pt, too: No locks available"),
    ],
)
def test_a_folder_that_cannot_be_kept_from_others_is_written_to_all_the_same(
    error: OSError, place: str, says: str, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of another user, or a file system that has none: no reason not to train."""
    real = FileLock.acquire

    def acquire(self: FileLock, *args: Any, **named: Any) -> Any:
        if Path(self.lock_file) == Path("pt", folder.FILES_LOCK):
            raise error
        return real(self, *args, **named)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    words = ("train", "llama", "tiny", *QUICK, "--max-steps", "2", "training.warmup_steps=0", "--name", "mine")
    done = lockstep(*words, "training.checkpoint_dir=pt")
    assert done.code == 0, done.text
    assert says in done.text
    assert (in_dir / place / "step_2.pt").is_file()


def test_what_a_killed_run_was_writing_goes_and_what_is_the_users_stays(in_dir: Path, lockstep: Cli) -> None:
    (in_dir / "pt").mkdir()
    for name in ("step_4.pt.tmp-00eaaff47a70", "mine.pt.tmp-1", ".lock"):
        (in_dir / "pt" / name).write_text("")
    words = ("train", "llama", "tiny", *QUICK, "--max-steps", "2", "training.warmup_steps=0")
    done = lockstep(*words, "training.checkpoint_dir=pt")
    assert done.code == 0, done.text
    assert {path.name for path in (in_dir / "pt").iterdir()} == {"step_2.pt", "mine.pt.tmp-1", ".lock"}
