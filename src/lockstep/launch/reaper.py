"""The last one standing: a shell that clears up after the launcher, also after one that was killed.

Workers die with the launcher by themselves. What they have started (a compiler) does not, and the work folder stays:
when the launcher's end of the pipe closes, the shell kills the process groups it was told last and removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

SCRIPT = """
trap '' HUP INT TERM USR1 USR2
while read -r line; do groups=$line; done
kill -s KILL -- $groups
rm -rf -- "$1"
"""


class Reaper:
    """The launcher's end. Start it before any worker."""

    def __init__(self, work: Path) -> None:
        self._groups: set[int] = set()
        null = subprocess.DEVNULL  # the reader of the launcher's output must see its end
        command = ["/bin/sh", "-c", SCRIPT, "lockstep-reaper", str(work)]
        # in a session of its own: a signal to the launcher's group is not for it
        self._shell = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, bufsize=0
        )

    def add(self, group: int) -> None:
        self._tell(self._groups | {group})

    def remove(self, group: int) -> None:
        self._tell(self._groups - {group})

    def close(self) -> None:
        """Let it do its work, and wait for that."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()

    def _tell(self, groups: set[int]) -> None:
        self._groups = groups
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it: the run goes on without
            os.write(self._shell.stdin.fileno(), f"{' '.join(f'-{group}' for group in groups)}\n".encode())
