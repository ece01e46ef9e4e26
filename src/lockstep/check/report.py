"""What a check leaves behind: one screen of lines, check.json, and report.html. Torch-free."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.check import page, schema
from lockstep.check.document import document
from lockstep.check.outcome import Checked
from lockstep.check.schema import CardEntry, Report
from lockstep.check.wording import (
    alike,
    counted,
    details,
    equal_steps,
    golden_state,
    headline,
    kind_of,
    listed,
    milliseconds,
    same_model,
    short_uuid,
)
from lockstep.report.words import format_duration
from lockstep.rundir import io_error, write_bytes

PAGE = "report.html"
NARROWEST, WIDEST = 80, 120
MOST_ROWS = 16  # more cards than this: those that pass share a line
MOST_EXPLAINED = 3  # cards; the rest is in the page
MOST_NOTES = 3
MOST_REASONS = 3  # of one card, which may differ in every workload
COLOURS = {"PASS": "\x1b[32m", "FAIL": "\x1b[31m", "UNDECIDED": "\x1b[33m"}
PLAIN = "\x1b[0m"


def write(folder: Path, checked: Checked) -> Report:
    """check.json and report.html in the folder of the check, each whole or not there."""
    told = document(checked, name=folder.name)
    files = {schema.FILE: told.model_dump_json(indent=1) + "\n", PAGE: page.html(told)}
    for name, text in files.items():
        try:
            write_bytes(folder / name, text.encode())
        except OSError as error:
            raise io_error(error, folder / name, doing="writing the report") from error
    return told


def lines(told: Report, *, width: int = 100, colour: bool = False, folder: Path | None = None) -> list[str]:
    """One screen: a row for each card, then why those that do not pass do not, then how far all this reaches."""
    width = min(WIDEST, max(NARROWEST, width))
    found = _head(told, width, colour)
    found += _table(told, width, colour)
    wrong = [card for card in told.gpus if card.status != "PASS"]
    for cards in alike(wrong)[:MOST_EXPLAINED]:
        found += ["", *_explained(cards, width)]
    if len(alike(wrong)) > MOST_EXPLAINED:
        found.append(f"... and {len(alike(wrong)) - MOST_EXPLAINED} more: see {PAGE}")
    notes = Counter(note for card in told.gpus for note in card.notes)
    found += [] if wrong else [""]  # what is explained is set apart by its indent
    found += [_cut(_note(note, count), width) for note, count in notes.most_common(MOST_NOTES)]
    found += [_cut(f"covered: {'; '.join(told.coverage.covered)}", width)] if told.coverage.covered else []
    left_out = told.coverage.not_covered
    found += _wrapped(f"not covered: {'; '.join(left_out)}", width) if left_out else []  # never cut: it is a limit
    found += _wrapped(f"limits: {' '.join(told.coverage.limits)}", width)
    files, golden = f"report: {folder / PAGE if folder else PAGE}, {schema.FILE}", golden_state(told)
    if golden and len(files) + len(golden) + len("; golden: ") > width:
        return [*found, files, f"golden: {golden}"]
    return [*found, f"{files}; golden: {golden}" if golden else files]


def _head(told: Report, width: int, colour: bool) -> list[str]:
    """The verdict and what was checked: in one line if there is room."""
    verdict, nodes = _cut(headline(told), width), len({card.node for card in told.gpus})
    facts = [
        f"{told.level} check", counted(len(told.gpus), kind_of(told)), same_model(told),
        f"{nodes} nodes" if nodes > 1 else "", format_duration(told.seconds),
    ]  # fmt: skip
    about = ", ".join(filter(None, facts))
    shown = _coloured(told.status, verdict, colour)
    return [f"{shown}  ({about})"] if len(verdict) + len(about) + 4 <= width else [shown, _cut(about, width)]


def _table(told: Report, width: int, colour: bool) -> list[str]:
    """A column that nobody has anything for is left out."""
    shown = list(told.gpus)
    if len(shown) > MOST_ROWS:
        shown = [card for card in shown if card.status != "PASS"][:MOST_ROWS]
    columns: list[tuple[str, Callable[[CardEntry], str]]] = [
        ("", lambda card: card.name),
        ("model", lambda card: "" if same_model(told) else card.model[:24]),
        ("uuid", lambda card: short_uuid(card.uuid)),
        ("verdict", lambda card: card.status),
        ("step", lambda card: _time(card, told.main_workload, "median_seconds")),
        ("p95", lambda card: _time(card, told.main_workload, "p95_seconds")),
        ("peak", lambda card: "" if card.peak_temperature_c is None else f"{card.peak_temperature_c:.0f} °C"),
        ("equal", lambda card: "/".join(map(str, equal_steps(card)))),
        ("why", lambda card: card.reasons[0] if card.reasons else ""),
    ]
    filled = [(title, [cell(card) for card in shown]) for title, cell in columns]
    filled = [(title, cells) for title, cells in filled if any(cells)]
    sizes = [max(len(title), *map(len, cells)) for title, cells in filled]
    rows = [] if not shown else [[title for title, _ in filled], *zip(*(cells for _, cells in filled), strict=True)]
    found: list[str] = []
    for row in rows:
        line = _cut("  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip(), width)
        status = next((cell for cell in row if cell in COLOURS), "")
        found.append(line.replace(status, _coloured(status, status, colour), 1) if status else line)
    hidden = len(told.gpus) - len(shown)
    return [*found, *([f"... and {counted(hidden, 'card')} more: see {PAGE}"] if hidden else [])]


def _time(card: CardEntry, main: str, name: str) -> str:
    pace = next((work.pace for work in card.works if work.workload == main), None)
    return milliseconds(getattr(pace, name) if pace else None)


def _explained(cards: Sequence[CardEntry], width: int) -> list[str]:
    card = cards[0]
    ids = [f"{label}{value}" for label, value in (("", card.uuid), ("serial ", card.serial)) if value]
    title = (
        card.name + (f" ({', '.join(ids)})" if ids else "")
        if len(cards) == 1
        else listed([each.name for each in cards])
    )
    texts = [*details(card, most=MOST_REASONS), f"try: {card.advice}" if card.advice else ""]
    return [title, *(line for text in texts if text for line in _wrapped(text, width, indent="  "))]


def _note(note: str, count: int) -> str:
    return f"note: {note}" if count == 1 else f"note ({count} cards): {note}"


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _coloured(status: str, text: str, colour: bool) -> str:
    return f"{COLOURS[status]}{text}{PLAIN}" if colour else text
