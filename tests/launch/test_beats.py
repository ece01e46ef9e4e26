"""The file that workers mark their progress in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import ExitCode, LockstepError
from lockstep.launch import beats


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A real one of 64 KiB, with nothing left."""
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: no tmpfs can be mounted, a full disk at the start of workers is not shown")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    try:
        (tmp_path / "filler").write_bytes(bytes(64 << 10))
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_an_error_and_no_crash(full_disk: Path) -> None:
    """A sparse file would be mapped without complaint, and the first mark would end the launcher by SIGBUS."""
    with pytest.raises(LockstepError, match="starting workers failed: No space left") as caught:
        beats.create(full_disk, 4)
    assert caught.value.exit_code == ExitCode.IO
