"""Processes as the system shows them: how one ended, who started it."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

PIDFD_INFO = struct.Struct("=QQ11Ii")  # Linux's struct pidfd_info: mask, cgroup, eleven ids, wait status
PIDFD_INFO_EXIT = 1 << 3
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)


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


def has(pid: int, wanted: bytes) -> bool:
    """Whether a living process was started with this NAME=value, as far as we may see."""
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # that of a zombie is empty
    except OSError:
        return False
