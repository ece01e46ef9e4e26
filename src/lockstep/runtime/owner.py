"""Who runs a run: owner.json in its folder, and whether that very process is still there."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.rundir import read_json, write_json
from lockstep.runtime import env

FILE = "owner.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CLOCK_SLACK_SECONDS = 2.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Owner:
    """The process that a signal to the run goes to: the launcher, or the worker itself where there is none.

    A pid is given away again after its process has ended, so it comes with what makes it unique: the start of the
    process in ticks since the machine came up, and which start of the machine that was. Clocks may jump, these not.
    """

    pid: int
    host: str
    started: float
    command: str = ""
    identity: str = ""
    process_started: float = 0.0  # by the clock: for a record without identity

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether that process still runs here: not one that has got its number since, not one that only waits to be
        collected."""
        return self.is_here and _is_same(self)

    def terminate(self, timeout: float) -> bool:
        """SIGTERM to that process and no other; whether it has ended within the time."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except (OSError, AttributeError):  # no such call in this kernel
            return self._terminate_by_number(timeout)
        try:
            if not _is_same(self):  # asked while we hold the handle: from here on it cannot become another process
                return True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            return bool(select.select([handle], [], [], timeout)[0])
        finally:
            os.close(handle)

    def _terminate_by_number(self, timeout: float) -> bool:
        if not self.is_alive():
            return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        end = time.monotonic() + timeout
        while self.is_alive():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)
        return True


def write(root: Path, command: Sequence[str], *, pid: int | None = None) -> None:
    """Say in a run folder that process `pid` (this one) runs it."""
    pid = pid or os.getpid()
    record = {
        "pid": pid,
        "host": socket.gethostname(),
        "started": time.time(),
        "command": [env.redact(word) for word in command],
        "identity": _identity(pid),
    }
    write_json(root / FILE, record)


def leave(root: Path) -> None:
    """The run is over, its process may do other things: nobody shall signal it on the run's account."""
    with contextlib.suppress(OSError):
        (root / FILE).unlink(missing_ok=True)


def read(root: Path) -> Owner | None:
    """What owner.json says; None where there is none or it is unreadable."""
    try:
        record: dict[str, Any] = read_json(root / FILE)
        words: list[str] = record.get("command") or []
        return Owner(
            pid=int(record["pid"]),
            host=str(record["host"]),
            started=float(record["started"]),
            command=" ".join(words),
            identity=str(record.get("identity", "")),
            process_started=float(record.get("process_started") or 0.0),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_same(owner: Owner) -> bool:
    import psutil  # late: whoever only writes the record does not need it

    try:
        process = psutil.Process(owner.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if owner.identity:
            return _identity(owner.pid) == owner.identity
        began = process.create_time()
        if owner.process_started:
            return abs(began - owner.process_started) <= CLOCK_SLACK_SECONDS
        return began <= owner.started + CLOCK_SLACK_SECONDS  # it was there when the record was written
    except psutil.Error:
        return False


def _identity(pid: int) -> str:
    """`<boot id>:<start in ticks>`; '' where /proc does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return f"{BOOT_ID.read_text(encoding='utf-8').strip()}:{stat.rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""
