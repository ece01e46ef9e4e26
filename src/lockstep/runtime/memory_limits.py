"""What a process may have of memory, by whom, and what it has had at most."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
V1, V2 = "memory.oom_control", "memory.events"  # where each version of control groups counts kills
LIMIT_AND_PEAK = {V1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"), V2: ("memory.max", "memory.peak")}
V1_NOW = ("memory.usage_in_bytes", "total_inactive_file")
NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True)
class Bounds:
    """The most that was used, what is allowed, and in whose words. `shared`: by all processes beside this one."""

    peak: int
    limit: int
    words: str
    shared: bool = False
    taken: int = 0  # of what is allowed: by others


def of_machine(peak: int) -> Bounds:
    """What the kernel holds a process to: its control group, else all there is. `peak` is the process's own."""
    group = of_group()
    if group is not None:
        used, limit = group
        return Bounds(max(peak, used), limit, "its cgroup allows", shared=True)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Bounds(peak, total, "the machine has", shared=True)


def resident_peak_bytes() -> int:
    """The most memory this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def of_group() -> tuple[int, int] | None:
    """(most used, allowed) of this process's control group, or of one around it that allows less; None: no limit."""
    found: list[tuple[int, int]] = []
    for path in group_files():
        limit_name, peak_name = LIMIT_AND_PEAK[path.name]
        around = [folder for folder in path.parent.parents if folder.is_relative_to(CGROUPS)]
        for folder in (path.parent, *around):
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / limit_name).read_text())
                if limit < NO_LIMIT_BYTES:
                    found.append((_read(folder / peak_name), limit))
    return min(found, key=lambda pair: pair[1], default=None)


def free_bytes() -> int:
    """What this process could still have: what the machine has free and its control group allows."""
    import psutil

    free = [psutil.virtual_memory().available]
    for path in group_files():
        limit_name, _ = LIMIT_AND_PEAK[path.name]
        now_name, cache_name = ("memory.current", "inactive_file") if path.name == V2 else V1_NOW
        around = [folder for folder in path.parent.parents if folder.is_relative_to(CGROUPS)]
        for folder in (path.parent, *around):
            with contextlib.suppress(OSError, ValueError, KeyError):
                limit, used = int((folder / limit_name).read_text()), int((folder / now_name).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free.append(limit - used + int(stat[cache_name]))  # the kernel takes back what it only caches
    return max(0, min(free))


def kills() -> int | None:
    """How often the kernel killed for want of memory in this process's cgroup; None where it does not say."""
    counts = [count for path in group_files() if (count := _read_kills(path)) is not None]
    return max(counts, default=None)


def group_files() -> list[Path]:
    """Where this process's control groups count what the kernel kills, in both versions."""
    files: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _number, controllers, place = line.split(":", 2)
        if not controllers:
            root, name = CGROUPS, V2
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", V1
        else:
            continue
        # inside a container its own group is the root of what is mounted
        files += [root / place.lstrip("/") / name, root / name]
    return files


def _read(path: Path) -> int:
    """A peak; 0 where the kernel is too old to tell."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _read_kills(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None
