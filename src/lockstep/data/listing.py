"""What lies in the caches, as `lockstep prepare --list` and `--verify` show it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from lockstep.data.cache import Entry, check, entries
from lockstep.errors import LockstepError

COLUMNS, NAME_COLUMNS = 80, 21
TITLES = f"{'dataset':<{NAME_COLUMNS}} {'rows':>11} {'tokens':>8} {'size':>9} {'age':>7}  state"


def describe(roots: Sequence[Path], *, verify: bool = False) -> tuple[list[str], int]:
    """(lines of 80 columns, longer only where a path is; how many caches are damaged). `verify`: every byte is read."""
    lines: list[str] = []
    damaged = 0
    for entry in (entry for root in roots for entry in entries(root)):
        lines += [] if lines else [TITLES]
        lines += [_row(entry), *_made_of(entry), f"  {entry.folder}"]
        if verify and entry.state != "unfinished":
            wrong = _damage(entry)
            damaged += bool(wrong)
            lines[-1] += f"  {'DAMAGED' if wrong else 'intact'}"
            lines += [f"  {wrong}"] if wrong else []
    return lines or [f"No prepared dataset in {' or '.join(str(root) for root in roots)}"], damaged


def _row(entry: Entry) -> str:
    shown = _cut(str(entry.meta.get("source", "?")), NAME_COLUMNS)
    rows, tokens = _sum(entry, "rows"), _sum(entry, "tokens")
    size, age = _short(entry.bytes, ("B", "KiB", "MiB", "GiB", "TiB"), 1024), _age(entry.age_seconds)
    counted = _short(tokens, ("", "k", "M", "G", "T"), 1000)
    return f"{shown:<{NAME_COLUMNS}} {rows:>11,} {counted:>8} {size:>9} {age:>7}  {entry.state}"


def _made_of(entry: Entry) -> list[str]:
    """The files that were read, where the description names them."""
    names = entry.meta.get("made_of")
    return [_cut(f"  from {names}", COLUMNS)] if isinstance(names, str) and names else []


def _cut(text: str, columns: int) -> str:
    """What fits; a name may hold anything, also a line end."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain if len(plain) <= columns else f"{plain[: columns - 1]}…"


def _sum(entry: Entry, name: str) -> int:
    """Of both splits; what a damaged description does not say counts nothing."""
    splits: Any = entry.meta.get(name)
    counts = [*cast("dict[str, Any]", splits).values()] if isinstance(splits, dict) else []
    return sum(count for count in counts if isinstance(count, int))


def _short(count: float, units: tuple[str, ...], step: int) -> str:
    """1536 -> 1.5 KiB."""
    for unit in units[:-1]:
        if count < step:
            return f"{count:.0f} {unit}" if unit == units[0] else f"{count:.1f} {unit}"
        count /= step
    return f"{count:,.1f} {units[-1]}"


def _age(seconds: float) -> str:
    """In the largest unit there are two of, but for minutes."""
    for unit, length in (("d", 86_400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 60:.0f} min"


def _damage(entry: Entry) -> str:
    """What is wrong with a cache; empty if nothing is."""
    try:
        check(entry.folder, full=True)
    except (LockstepError, OSError) as error:
        return str(error) if entry.folder.exists() else ""  # taken away meanwhile: not damaged
    return ""
