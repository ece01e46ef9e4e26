"""What lies in the caches, as `lockstep prepare --list` and `--verify` show it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from lockstep.data.cache import check, entries
from lockstep.errors import LockstepError


def describe(roots: Sequence[Path], *, verify: bool = False) -> tuple[list[str], int]:
    """(name, rows, size and folder of each cache; how many are damaged). `verify`: every byte is read."""
    lines: list[str] = []
    damaged = 0
    for entry in (entry for root in roots for entry in entries(root)):
        size, state = f"{entry.bytes / 2**20:,.1f} MiB", ""
        if entry.folder.suffix == ".parts":
            lines += [f"fetched for an unfinished dataset: {size}", f"  {entry.folder}"]
            continue
        if verify:
            wrong = _damage(entry.folder)
            damaged += bool(wrong)
            state = f"  DAMAGED: {wrong}" if wrong else "  intact"
        rows = sum(cast("dict[str, int]", entry.meta.get("rows", {})).values())
        lines += [f"{entry.meta.get('source')}: {rows:,} rows, {size}", f"  {entry.folder}{state}"]
    return lines or [f"No prepared dataset in {' or '.join(str(root) for root in roots)}"], damaged


def _damage(folder: Path) -> str:
    """What is wrong with a cache; empty if nothing is."""
    try:
        check(folder, full=True)
    except (LockstepError, OSError) as error:
        return str(error) if folder.exists() else ""  # taken away meanwhile: not damaged
    return ""
