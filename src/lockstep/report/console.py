"""What the user sees while a run goes on: banner, step lines, progress bar, events, summary."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal, Self

from lockstep.contracts import StepRecord
from lockstep.report.logs import COLUMNS, console_handler, is_terminal

log = logging.getLogger(__name__)
LABEL_COLUMNS = 13
BAR_REFRESH_SECONDS = 0.1


def format_eta(seconds: float) -> str:
    """Minutes and seconds, minutes unbounded: 7505 -> 125:05."""
    whole = int(seconds + 0.5) if math.isfinite(seconds) and seconds > 0 else 0
    return f"{whole // 60}:{whole % 60:02d}"


def format_number(value: float) -> str:
    """Four decimals, or `nan`, or `inf`: the words the documented step line knows."""
    return "inf" if math.isinf(value) else f"{value:.4f}"


def format_step(record: StepRecord, max_steps: int, *, clip: bool) -> str:
    """The documented step line, without its prefix."""
    grad_norm = f"Grad Norm: {format_number(record.grad_norm)} | " if clip else ""
    return (
        f"Step [{record.step}/{max_steps}] | Loss: {format_number(record.loss)} | LR: {record.lr:.2e} | "
        f"{grad_norm}ETA: {format_eta(record.eta_seconds)}"
    )


def format_bytes(count: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def format_duration(seconds: float) -> str:
    """7505 -> 2 h 05 min 05 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"


def format_perplexity(loss: float) -> str:
    """e to the loss, as far as that says anything."""
    return "over 10^8" if loss >= 20 else f"{math.exp(loss):,.2f}"


@dataclass(frozen=True)
class _Facts:
    """Plain values that are shown on the screen and kept in events.jsonl alike."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self | None:
        """The facts an event carries; None where one that has no default is missing."""
        known = {entry.name: fields[entry.name] for entry in dataclasses.fields(cls) if entry.name in fields}
        needed = {entry.name for entry in dataclasses.fields(cls) if entry.default is dataclasses.MISSING}
        return cls(**known) if needed <= known.keys() else None

    def fields(self) -> dict[str, Any]:
        """As an event carries them."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Banner(_Facts):
    """What is about to run."""

    experiment: str
    run: str  # folder of the run
    device: str  # "NVIDIA H200, 139.8 GiB" or "CPU, 2 threads"
    model: str  # "llama, 4 layers, width 4096"
    parameters: int
    memory_bytes: Mapping[str, int]  # estimate per GPU: part -> bytes
    tokens_per_step: int
    max_steps: int
    dataset: str
    precision: str
    attention: str
    determinism: str
    batch: str = ""  # "2 rows x 4 micro-batches x 8,192 tokens"
    settings: str = ""  # "preset demo, 3 settings changed"
    tag: str = ""  # "GPU 0"
    version: str = ""
    logs: tuple[str, ...] = ()  # log files

    def lines(self, width: int = COLUMNS) -> list[str]:
        total = format_bytes(sum(self.memory_bytes.values()))
        total += "" if self.device.upper().startswith("CPU") else " per GPU"
        parts = [f"{name} {format_bytes(size)}," for name, size in self.memory_bytes.items()]
        rows = [
            ("model", [self.model + ",", f"{self.parameters:,} parameters"]),
            ("memory", [f"about {total}:", *parts[:-1], *(part.rstrip(",") for part in parts[-1:])]),
            ("work", [f"{self.max_steps:,} steps", f"of {self.tokens_per_step:,} tokens", *_bracketed(self.batch)]),
            ("data", self.dataset.split()),
            ("device", self.device.split()),
            ("precision", self.precision.split()),
            ("attention", self.attention.split()),
            ("determinism", self.determinism.split()),
            ("settings", self.settings.split()),
            ("run folder", [self.run]),
            *(("log file", [path]) for path in self.logs),
        ]
        title = f"Starting experiment: {self.experiment}" + (f" [{self.tag}]" if self.tag else "")
        version = f"lockstep {self.version}" if self.version else ""
        if len(title) + len(version) < width - 1:
            title = f"{title}{version:>{width - len(title)}}".rstrip()
        return [title, "─" * width, *_table(rows, width), "─" * width]


@dataclass(frozen=True)
class Summary(_Facts):
    """What has come of it."""

    steps: int
    loss: float
    tokens_per_second: float
    seconds: float
    results: str  # folder of the run
    outcome: str = "Training completed successfully!"
    first_loss: float | None = None
    val_loss: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int = 0
    skipped: int = 0  # fp16 overflows
    sample: str = ""
    next_commands: tuple[str, ...] = ()

    def lines(self, width: int = COLUMNS) -> list[str]:
        loss = f"{format_number(self.first_loss)} → " if self.first_loss is not None else ""
        validation: list[str] = []
        if self.val_loss is not None:
            validation = [f"{format_number(self.val_loss)}", f"(perplexity {format_perplexity(self.val_loss)})"]
        speed = [f"{self.tokens_per_second:,.0f} tokens/s"] if self.tokens_per_second else []
        speed += [f"({100 * self.mfu:.1f} % MFU)"] if self.mfu is not None else []
        skipped = [f"({self.skipped:,} skipped by fp16 overflow)"] if self.skipped else []
        rows = [
            ("steps", [f"{self.steps:,}", *skipped]),
            ("train loss", [loss + format_number(self.loss)] if not math.isnan(self.loss) else []),
            ("validation", validation),
            ("speed", speed),
            ("peak memory", [format_bytes(self.peak_memory_bytes)] if self.peak_memory_bytes else []),
            ("wall time", [format_duration(self.seconds)]),
            ("results", [self.results]),
        ]
        lines = ["─" * width, self.outcome, *_table(rows, width)]
        if self.sample:
            lines += ["", *_frame("sample", self.sample, width)]
        if self.next_commands:
            lines += ["", "Next:", *(f"  {command}" for command in self.next_commands)]
        return [*lines, "─" * width]


def _bracketed(text: str) -> list[str]:
    return [f"({text})"] if text else []


def _table(rows: list[tuple[str, list[str]]], width: int) -> list[str]:
    """Label and pieces per row; pieces are never broken, so that a path can be copied. Rows without pieces go."""
    lines: list[str] = []
    for label, pieces in rows:
        line = f"  {label:<{LABEL_COLUMNS}}"
        for index, piece in enumerate(pieces):
            if index and len(line) + 1 + len(piece) > width:
                lines.append(line)
                line = " " * (LABEL_COLUMNS + 2)
                index = 0
            line += f" {piece}" if index else piece
        if pieces:
            lines.append(line)
    return lines


def _frame(title: str, text: str, width: int) -> list[str]:
    """The text behind a bar; open to the right, so that letters of any width do not break it."""
    lines = [f"  ┌─ {title} " + "─" * (width - len(title) - 6)]
    for paragraph in text.expandtabs(4).split("\n"):
        wrapped = textwrap.wrap(paragraph, width - 4, replace_whitespace=False)
        lines += [f"  │ {line}".rstrip() for line in wrapped or [""]]
    return [*lines, "  └" + "─" * (width - 3)]


@dataclass
class _Pace:
    """Sums for tokens per second and MFU over some steps."""

    tokens: int = 0
    seconds: float = 0.0
    flop_seconds: float = 0.0
    flop_known: bool = False

    def add(self, record: StepRecord) -> None:
        self.tokens += record.tokens
        self.seconds += record.seconds
        if record.mfu is not None:
            self.flop_known = True
            self.flop_seconds += record.mfu * record.seconds

    def parts(self) -> list[str]:
        if self.seconds <= 0:
            return []
        mfu = [f"MFU {100 * self.flop_seconds / self.seconds:.1f} %"] if self.flop_known else []
        return [f"{self.tokens / self.seconds:,.0f} tokens/s", *mfu]


class Bar:
    """A progress bar at the bottom of a terminal, drawn by rich. Log lines go above it."""

    def __init__(self, stream: IO[str], max_steps: int, *, counted: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        tail = TextColumn("{task.fields[tail]}", markup=False)
        count = [MofNCompleteColumn()] if counted else []
        self._progress = Progress(
            *count, BarColumn(bar_width=None), tail, console=self._console, auto_refresh=False,
            transient=True, expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=max_steps, tail="")
        self._text = Text
        self._next_refresh = 0.0
        self._handler = console_handler()
        if self._handler is not None:
            self._handler.printer = self.print
        self._progress.start()

    def print(self, text: str, style: str) -> None:
        self._console.print(self._text(text, style=style), soft_wrap=True)

    def update(self, done: int, tail: str) -> None:
        self._progress.update(self._task, completed=done, tail=tail)
        now = time.monotonic()
        if now >= self._next_refresh:
            self._next_refresh = now + BAR_REFRESH_SECONDS
            self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()
        if self._handler is not None:
            self._handler.printer = None


class ConsoleSink:
    """Step lines every `log_interval` steps, the first and the last always; events as lines; a bar on a terminal."""

    def __init__(
        self,
        max_steps: int,
        *,
        clip: bool,
        log_interval: int = 1,
        progress: Literal["auto", "on", "off"] = "auto",
        stream: IO[str] | None = None,
        brief: bool = False,
    ) -> None:
        self._max_steps = max_steps
        self._brief = brief  # one of several workers: what holds for all of them the first one tells
        self._clip = clip
        self._log_interval = log_interval
        handler = console_handler()
        self._stream = stream or (handler.stream if handler is not None else sys.stdout)
        self._width = handler.width if handler is not None else COLUMNS
        self._wants_bar = progress == "on" or (progress == "auto" and is_terminal(self._stream))
        self._bar: Bar | None = None
        self._last: StepRecord | None = None
        self._shown = -1  # last step that has a line
        self._pace = _Pace()  # since the last validation

    def write(self, record: StepRecord) -> None:
        first, self._last = self._last is None, record
        self._pace.add(record)
        if first or record.step % self._log_interval == 0 or record.step == self._max_steps - 1:
            self._show_step(record)
        if self._wants_bar:
            self._draw(record)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "start":
            self._show(Banner.of(fields))
        elif kind == "eval":
            self._show_validation(fields)
        elif kind == "replicas":
            log.info("All %s replicas agree: %s", fields.get("count"), fields.get("digest"))
        elif kind == "save" and "path" in fields and not self._brief:
            log.info("Checkpoint saved: %s", fields["path"])
        elif kind == "resume":
            if "path" in fields:
                log.info("Checkpoint loaded from %s", fields["path"])
            log.info("Resuming from step %s", fields.get("step", 0))
        elif kind == "end":
            self.close()
            self._show(Summary.of(fields))

    def close(self) -> None:
        """Take the bar down; the last step gets its line if it has none yet."""
        if self._last is not None and self._last.step > self._shown:
            self._show_step(self._last)
        if self._bar is not None:
            self._bar.close()
        self._bar, self._wants_bar = None, False

    def _show(self, facts: Banner | Summary | None) -> None:
        if self._brief:
            log.info("%s", facts.outcome if isinstance(facts, Summary) else "Training started")
            return
        for line in facts.lines(self._width) if facts is not None else []:
            log.info("%s", line)

    def _show_step(self, record: StepRecord) -> None:
        self._shown = record.step
        log.info("%s", format_step(record, self._max_steps, clip=self._clip))

    def _show_validation(self, fields: Mapping[str, Any]) -> None:
        parts = ["Validation", f"Step {fields.get('step', 0)}"]
        loss = fields.get("val_loss")
        if isinstance(loss, float):
            parts += [f"Loss: {format_number(loss)}", f"Perplexity: {format_perplexity(loss)}"]
        log.info("%s", " | ".join(parts + self._pace.parts()))
        self._pace = _Pace()

    def _draw(self, record: StepRecord) -> None:
        pace = _Pace()
        pace.add(record)
        tail = [f"Loss: {format_number(record.loss)}", *pace.parts(), f"ETA: {format_eta(record.eta_seconds)}"]
        try:
            if self._bar is None:
                self._bar = Bar(self._stream, self._max_steps)
            self._bar.update(record.step + 1, "  ".join(tail))
        except ImportError:
            self._wants_bar = False
            log.info("no progress bar: the package rich is missing (pip install rich)")
        except OSError as error:  # the terminal is gone
            self._wants_bar = False
            log.warning("no progress bar any more: %s", error.strerror or error)
