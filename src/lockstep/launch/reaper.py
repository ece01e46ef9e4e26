"""The last one standing: a forked process that clears up after a launcher that was killed, and does nothing else.

Workers die with the launcher by themselves. What they have started (a loader, a compiler) may not, and the work folder
stays: when the launcher's end of the pipe closes, the groups it had named are killed and the folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

from lockstep.launch import processes


class Reaper:
    """The launcher's end. Start it first, from a process with one thread."""

    def __init__(self, work: Path, run_id: str) -> None:
        read_end, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                _wait(read_end, work, run_id)
            finally:  # whatever happens: this copy of the launcher must not go on as one
                os._exit(0)
        os.close(read_end)

    def add(self, group: int) -> None:
        self._tell(f"+{group}")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}")

    def close(self) -> None:
        """All is cleared up: it may go without doing anything."""
        self._tell("done")
        os.close(self._pipe)
        os.waitpid(self._pid, 0)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # somebody has killed it: the run goes on without
            os.write(self._pipe, f"{line}\n".encode())


def _wait(pipe: int, work: Path, run_id: str) -> None:
    os.setsid()  # a signal to the launcher's group is not for us
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the reader of the launcher's output must see its end
        os.dup2(null, stream)
    keep = {0, 1, 2, pipe}
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - names are numbers
        if descriptor not in keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    with os.fdopen(pipe, "rb") as file:
        text = file.read().decode()
    if text.endswith("done\n"):
        return
    groups: set[int] = set()
    for line in text.split():
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    processes.kill_leaked(run_id)
    shutil.rmtree(work, ignore_errors=True)
