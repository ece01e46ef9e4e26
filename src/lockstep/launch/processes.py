"""Processes as the system shows them: how one ended, whose children are left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

RUN_ID = "LOCKSTEP_RUN_ID"
PIDFD_INFO = struct.Struct("=QQ11Ii")  # Linux's struct pidfd_info: mask, cgroup, eleven ids, wait status
PIDFD_INFO_EXIT = 1 << 3
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)


@dataclass(frozen=True)
class Leaked:
    """A process of the run that nobody waited for."""

    pid: int
    command: str


def exit_code(wait_status: int) -> int:
    """The code a shell would show: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code


def ended_status(pid: int) -> int | None:
    """The wait status of a process that has ended but is not yet waited for, though it is not our child."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] in (b"Z", b"X") else None


def forgotten_status(handle: int) -> int | None:
    """The wait status of a process that its parent has waited for already: Linux 6.15 and later remember it."""
    asked = bytearray(PIDFD_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(handle, PIDFD_GET_INFO, asked)
    except OSError:  # an older kernel
        return None
    mask, *_ids, status = PIDFD_INFO.unpack(asked)
    return status if mask & PIDFD_INFO_EXIT else None


def of_run(run_id: str) -> list[int]:
    """Every process that has the run's id in its environment, this one excepted."""
    wanted = f"{RUN_ID}={run_id}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and has(int(entry.name), wanted):
            found.append(int(entry.name))
    return sorted(found)


def ancestors(pid: int | None = None) -> list[int]:
    """The parent, its parent and so on; of this process unless told otherwise."""
    found: list[int] = []
    pid = os.getppid() if pid is None else _parent(pid)
    while pid > 0 and pid not in found:
        found.append(pid)
        pid = _parent(pid)
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def kill_leaked(run_id: str, groups: Collection[int] = ()) -> list[Leaked]:
    """Find what is left of a run by its id and kill it by its pid; who that was. Never whoever started us.

    `groups` were killed as such with their worker: a member may take a moment to vanish, and has not run away.
    """
    leaked: list[Leaked] = []
    wanted = f"{RUN_ID}={run_id}".encode()
    family = ancestors()
    for pid in of_run(run_id):
        if pid in family:
            continue
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:  # asked again with the handle held: the number cannot change hands now
                if has(pid, wanted):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
                    ran_away = os.getpgid(pid) not in groups
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    if ran_away:
                        leaked.append(Leaked(pid, words.decode("utf-8", "backslashreplace")))
            finally:
                os.close(handle)
    return leaked


def has(pid: int, wanted: bytes) -> bool:
    """Whether a living process was started with this NAME=value, as far as we may see."""
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # that of a zombie is empty
    except OSError:
        return False
