"""The documented report of a step that was not finite, line by line, and its companions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from lockstep.health.finding import Finding, Table

WIDE, NARROW = "=" * 80, "=" * 40
SHOWN_TENSORS = 2  # as documented; the bundle has them all
SHOWN_ROWS = 4
NAMES = {"grad": "GRADIENT", "loss": "LOSS", "weight": "PARAMETER", "input": "INPUT"}
SUSPECT = "hardware-suspect: the same step came out finite when it was run again"


def label(finding: Finding) -> str:
    """` [GPU 6]`, or nothing where there is no GPU."""
    spaced = re.sub(r"(?<=\D)(?=\d)", " ", finding.gpu)
    return f" [{spaced}]" if spaced else ""


def report(finding: Finding) -> list[str]:
    """The whole report. The documented part comes first, to the letter; what more is known follows."""
    kind = finding.kind.rpartition("_")[2] if finding.kind != "overflow" else "grad"
    return [
        WIDE,
        f"{finding.word} {NAMES[kind]} DETECTED{label(finding)}",
        WIDE,
        f"Step: {finding.step}",
        f"Loss: {_number(finding.loss)}",
        f"Gradient Norm: {_number(finding.grad_norm)}",
        "",
        NARROW,
        "PROBLEMATIC TENSORS:",
        NARROW,
        *_tensors(finding),
        NARROW,
        "",
        *_files(finding),
        *_more(finding),
        WIDE,
        f"EXITING DUE TO {finding.word}{label(finding)}",
        WIDE,
    ]


def _number(value: float) -> str:
    """As the step line has it."""
    return "inf" if math.isinf(value) else f"{value:.4f}"


def _tensors(finding: Finding) -> list[str]:
    lines: list[str] = []
    lines += _section("Parameters", "Param", finding.weights)
    lines += _section("Inputs", "Input", finding.inputs)
    lines += _section("Gradients", "Grad", finding.gradients)
    if not lines:
        own = finding.place is not None and finding.place.phase == "loss"
        what = "none but the loss itself" if own else "not known"
        return [f"  {what if finding.reproduced else 'no tensor was bad when the step was run again'}", ""]
    for name, tables in (("gradients", finding.gradients), ("parameters", finding.weights), ("inputs", finding.inputs)):
        for word, bad in _by_word(tables):
            shown = ", ".join(repr(table.name) for table in bad[:SHOWN_TENSORS])
            more = ", ..." if len(bad) > SHOWN_TENSORS else ""
            lines += [f"Total layers with {word} {name}: {len(bad)}", f"Affected layers: [{shown}{more}]"]
    return lines


def _by_word(tables: Sequence[Table]) -> Iterator[tuple[str, list[Table]]]:
    """Those with NaN, and those that have infinities only."""
    for word, bad in (
        ("NaN", [table for table in tables if table.nans]),
        ("Inf", [table for table in tables if not table.nans]),
    ):
        if bad:
            yield word, bad


def _section(title: str, values: str, tables: Sequence[Table]) -> list[str]:
    lines: list[str] = []
    for word, bad in _by_word(tables):
        lines.append(f"⚠️  {title} with {word} ({len(bad)} layers):")
        for table in bad[:SHOWN_TENSORS]:
            more = ", ..." if table.elements > len(table.values) else ""
            shown = ", ".join(repr(value) if value.lstrip("-") in ("NaN", "Inf") else value for value in table.values)
            count = table.nans if word == "NaN" else table.infs
            lines += [
                f"  • {table.name} (shape: torch.Size({list(table.shape)}))",
                f"    {values} values: [{shown}{more}]",
                f"    {word} count: {count}/{table.elements}",
            ]
        lines.append("")
    return lines


def _files(finding: Finding) -> list[str]:
    named = (("checkpoint", "Checkpoint saved"), ("debug", "Debug tensors saved"))
    lines = [f"{says}: {finding.files[key]}" for key, says in named if key in finding.files]
    return [*lines, ""] if lines else []


def _more(finding: Finding) -> list[str]:
    """Where it began, in which rows, and after which steps."""
    lines: list[str] = []
    if finding.place:
        lines.append(f"First bad value: {finding.place.text()}")
        lines += [f"  {_line(table)}" for table in finding.place.tensors]
    elif not finding.reproduced:
        lines.append(f"Verdict: {SUSPECT}")
    if len(finding.ranks) > 1 or any(finding.ranks):
        lines.append(f"Ranks: {', '.join(map(str, finding.ranks))}")
    lines += [f"Note: {note}" for note in finding.notes]
    ids = ", ".join(map(str, finding.row_ids[:16])) + (", ..." if len(finding.row_ids) > 16 else "")
    lines.append(f"Rows: {ids or 'not known'}")
    lines += [f"  {number}: {text[:80]!r}" for number, text in enumerate(finding.texts[:SHOWN_ROWS])]
    if finding.history:
        lines.append("Last steps:")
    lines += [
        f"  step {int(each['step'])} | loss {_number(each['loss'])} | grad norm {_number(each['grad_norm'])} | "
        f"lr {each['lr']:.2e} | scale {each['loss_scale']:g}"
        for each in finding.history
    ]
    if bundle := finding.files.get("bundle"):
        lines.append(f"Replay: lockstep replay {bundle}")
    return lines


def _line(table: Table) -> str:
    shape = " x ".join(map(str, table.shape)) or "scalar"
    span = "nothing finite" if table.minimum is None else f"min {table.minimum:.4g} max {table.maximum:.4g}"
    return f"{table.name}: {shape} {table.dtype}, {span}, NaN {table.nans}, Inf {table.infs} of {table.elements}"
