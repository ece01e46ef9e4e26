"""What the user sees while a run goes on: banner, step lines, progress bar, events, summary."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal

from lockstep.contracts import StepRecord
from lockstep.report.logs import COLUMNS, console_handler, is_terminal
from lockstep.report.words import (
    USUAL,
    WORDINGS,
    Banner,
    Summary,
    folded,
    format_buckets,
    format_cut,
    format_duration,
    format_estimate,
    format_eta,
    format_number,
    format_perplexity,
    format_step,
    format_utilisation,
    format_walk,
)

log = logging.getLogger(__name__)
BAR_REFRESH_SECONDS = 0.1
Facts = Callable[[], Mapping[str, Any]]  # how the GPU is doing: the names of a step record


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

    def parts(self, unit: str) -> list[str]:
        if self.seconds <= 0:
            return []
        mfu = [f"MFU {100 * self.flop_seconds / self.seconds:.1f} %"] if self.flop_known else []
        return [f"{self.tokens / self.seconds:,.0f} {unit}/s", *mfu]


class Bar:
    """A progress bar at the bottom of a terminal, drawn by rich. Log lines go above it."""

    def __init__(self, stream: IO[str], max_steps: int, *, counted: bool = True, label: str = "") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        tail = TextColumn("{task.fields[tail]}", markup=False)
        count = [MofNCompleteColumn()] if counted else []
        name = [TextColumn("{task.description}", markup=False)] if label else []
        self._progress = Progress(
            *name, *count, BarColumn(bar_width=None), tail, console=self._console, auto_refresh=False,
            transient=True, expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task(label, total=max_steps, tail="")
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
        self._draw_if_due()

    def begin(self, label: str, total: int) -> None:
        """From 0 again, for something else."""
        self._progress.reset(self._task, description=label, total=total, tail="")

    def _draw_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_refresh:
            self._next_refresh = now + BAR_REFRESH_SECONDS
            self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()
        if self._handler is not None:
            self._handler.printer = None


@dataclass(frozen=True)
class _Window:
    """The steps of one epoch."""

    number: int
    count: int  # of epochs
    first: int
    after: int

    @staticmethod
    def of(step: int, *, epochs: int, epoch_steps: float, max_steps: int) -> _Window:
        """An epoch ends with the step that takes its last row."""
        number = min(epochs, math.floor(step / epoch_steps + 1e-9) + 1)
        first, after = (math.ceil(each * epoch_steps - 1e-9) for each in (number - 1, number))
        after = max_steps if number == epochs else min(after, max_steps)
        return _Window(number, epochs, first, max(after, step + 1))

    @property
    def label(self) -> str:
        return f"Epoch {self.number}/{self.count}"


class ConsoleSink:
    """Step lines every `log_interval` steps, the first and the last always; events as lines; a bar on a terminal."""

    def __init__(  # noqa: PLR0913 - settings of the screen, by name
        self,
        max_steps: int,
        *,
        clip: bool,
        log_interval: int = 1,
        progress: Literal["auto", "on", "off"] = "auto",
        stream: IO[str] | None = None,
        brief: bool = False,
        facts: Facts | None = None,
        family: str = "",
    ) -> None:
        self._max_steps = max_steps
        self._words = WORDINGS.get(family, USUAL)
        self._epochs, self._epoch_steps = 0, 0.0  # told by the start of a run that counts in them
        self._window: _Window | None = None
        self._facts = facts
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
            self._count(fields)
            self._show(Banner.of(fields))
        elif kind == "eval":
            self._show_validation(fields)
        elif kind == "epoch":
            self._show_epoch(fields)
        elif kind == "resume":
            if "path" in fields:
                log.info("Checkpoint loaded from %s", fields["path"])
            log.info("Resuming from step %s", fields.get("step", 0))
        elif kind == "replicas":
            log.info("All %s replicas agree: %s", fields.get("count"), fields.get("digest"))
        elif kind == "end":
            self.close()
            self._show(Summary.of(fields))
        elif not self._brief:
            self._show_for_all(kind, fields)

    def _show_for_all(self, kind: str, fields: Mapping[str, Any]) -> None:
        """What one worker tells for all."""
        if kind == "save" and "path" in fields:
            log.info("Checkpoint saved: %s", fields["path"])
        elif kind == "estimate":
            log.info("%s", format_estimate(fields))
        elif kind == "results":
            family, path = str(fields.get("family", "")).upper(), fields.get("path")
            log.info("%s", self._words.results.format(family=family, path=path))
        elif kind == "walk":
            log.info("%s", format_walk(fields))
        elif kind == "first_loss" and self._words.first:
            log.info("%s", self._words.first.format(loss=fields["loss"], expected=fields["expected"]))

    def close(self) -> None:
        """Take the bar down; the last step gets its line if it has none yet."""
        if self._last is not None and self._last.step > self._shown:
            self._show_step(self._last)
        if self._bar is not None:
            self._bar.close()
        self._bar, self._wants_bar = None, False

    def _count(self, fields: Mapping[str, Any]) -> None:
        """How many steps there are: known once the rows are."""
        self._max_steps = int(fields.get("max_steps") or self._max_steps)
        self._epochs = int(fields.get("epochs") or 0)
        self._epoch_steps = float(fields.get("epoch_steps") or 0.0)

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
        loss, accuracy = fields.get("val_loss"), fields.get(f"val_{self._words.accuracy or 'accuracy'}")
        buckets = format_buckets(fields)
        at_most = "at most " if buckets else ""  # a bound
        if isinstance(loss, float):
            parts.append(f"Loss: {at_most}{format_number(loss)}")
            parts += [] if self._words.accuracy else [f"Perplexity: {at_most}{format_perplexity(loss)}"]
        if isinstance(accuracy, float):
            parts.append(f"Accuracy: {format_number(accuracy)}")
        parts += [buckets] if buckets else []
        parts += self._pace.parts(self._words.unit) + self._gpu()
        for line in folded(parts, self._width, between=" | ", indent=2):
            log.info("%s", line)
        self._pace = _Pace()

    def _show_epoch(self, fields: Mapping[str, Any]) -> None:
        self._count(fields)
        losses = (fields[name] if fields[name] is not None else math.nan for name in ("train_loss", "val_loss"))
        train, val = map(format_number, losses)
        facts = {name: fields[name] for name in ("epoch", "epochs", "seconds")}
        facts["end"] = format_cut(fields) or self._words.whole
        duration, gpu = format_duration(fields["seconds"]), "".join(f" | {part}" for part in self._gpu())
        lr = self._last.lr if self._last else 0.0
        for line in self._words.epoch:
            log.info("%s", line.format(**facts, duration=duration, gpu=gpu, train=train, val=val, lr=lr))

    def _gpu(self) -> list[str]:
        """How busy the GPU is, where that can be said; a run in epochs says also that it cannot."""
        used = self._facts().get("gpu_utilisation") if self._facts else None
        return [f"GPU {format_utilisation(used)}"] if used is not None or self._epochs else []

    def _draw(self, record: StepRecord) -> None:
        pace = _Pace()
        pace.add(record)
        eta = f"ETA: {format_eta(record.eta_seconds)}"
        tail = [
            self._words.bar.format(loss=format_number(record.loss)),
            *pace.parts(self._words.unit),
            *self._gpu(),
            eta,
        ]
        try:
            self._bar_for(record.step).update(self._place(record.step), "  ".join(tail))
        except ImportError:
            self._wants_bar = False
            log.info("no progress bar: the package rich is missing (pip install rich)")
        except OSError as error:  # the terminal is gone
            self._wants_bar = False
            log.warning("no progress bar any more: %s", error.strerror or error)

    def _bar_for(self, step: int) -> Bar:
        """The bar of the whole run, or of the epoch at hand."""
        if not self._epochs:
            self._bar = self._bar or Bar(self._stream, self._max_steps)
            return self._bar
        window = _Window.of(
            step, epochs=self._epochs, epoch_steps=self._epoch_steps, max_steps=max(self._max_steps, step + 1)
        )
        if self._bar is None:
            self._bar = Bar(self._stream, window.after - window.first, label=window.label)
        elif self._window != window:
            self._bar.begin(window.label, window.after - window.first)
        self._window = window
        return self._bar

    def _place(self, step: int) -> int:
        """How many steps the bar has behind it."""
        return step + 1 - (self._window.first if self._window else 0)
