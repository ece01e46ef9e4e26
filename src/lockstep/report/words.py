"""What is said about a run: numbers in words, the banner before it and the summary after it."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lockstep.contracts import StepRecord
from lockstep.report.logs import COLUMNS

LABEL_COLUMNS = 13
WORKER_COLUMNS = 16  # with the number of its node
MUCH_WAITING = 0.2  # of the time: worth a line


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


def format_utilisation(percent: float | None) -> str:
    """97 %, or n/a where nobody can say."""
    return "n/a" if percent is None else f"{percent:.0f} %"


def format_walk(fields: Mapping[str, Any]) -> str:
    """How an agent does in tasks it has not seen: its first episode, its last ones, and what could be had."""
    spans = f"first → last {fields['last_episodes']} of {_plural(fields['episodes'], 'episode')}"
    return (
        f"Walk | Step {fields.get('step', 0)} | {_plural(fields['tasks'], 'unseen task')} | "
        f"Return: {fields['first_return']:.2f} → {fields['last_return']:.2f} of {fields['optimum']:.2f} ({spans})"
    )


def format_about(seconds: float) -> str:
    """An estimate, as exact as it deserves: 45 s, 12 min, 3 h 20 min."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_estimate(fields: Mapping[str, Any]) -> str:
    """What the first moments say about the whole."""
    steps, per_epoch = int(fields["steps"]), math.ceil(fields["epoch_steps"])
    what = f"{_plural(fields['epochs'], 'epoch')} of {_plural(per_epoch, 'step')}"
    if steps < math.floor(fields["epochs"] * fields["epoch_steps"]):  # max_steps ends it before
        what = _plural(steps, "step")
    if steps < int(fields["max_steps"]):
        what = f"{steps:,} of {_plural(int(fields['max_steps']), 'step')} left"
    return f"Estimated time: about {format_about(fields['seconds'])} ({what})"


def format_cut(fields: Mapping[str, Any]) -> str:
    """How far an epoch has come in which the run has ended; nothing of a whole one."""
    if fields.get("whole", True):
        return ""
    begin, end = (math.ceil(each * fields["epoch_steps"] - 1e-9) for each in (fields["epoch"] - 1, fields["epoch"]))
    done = fields["step"] - begin
    return f" ended after {done:,} of {end - begin:,} steps"


@dataclass(frozen=True)
class Wording:
    """The lines that the guide of a family documents, where they are not the usual ones."""

    outcome: str = "Training completed successfully!"
    epoch: tuple[str, ...] = ("Epoch {epoch}/{epochs}{end} | {duration}{gpu}", "Train Loss: {train} | Val Loss: {val}")
    whole: str = ""  # the end of a whole epoch; one that was cut tells how far it came
    results: str = "{family} model saved to {path}"
    first: str = ""  # of the first loss, beside what it must be
    best: bool = False  # whether the end tells the best validation loss of all
    at_most: str = ""  # before losses that are bounds
    unit: str = "tokens"  # what a row is long in, and the speed is counted in
    accuracy: str = ""  # the share of right answers among the measures, told in the place of the perplexity
    bar: str = "Loss: {loss}"  # beside the progress bar
    validation: str = "eval/val_"  # how the tags of validation begin, in TensorBoard


USUAL = Wording()
WORDINGS = {
    "mlm": Wording(outcome="MLM pre-training completed!"),
    "llada": Wording(
        outcome="Training completed!",
        epoch=(
            "Epoch {epoch}/{epochs}{end} in {seconds:.2f}s",
            "Train Loss: {train}",
            "Val Loss: {val}",
            "Learning Rate: {lr:.6f}",
        ),
        whole=" completed",
        results="Checkpoint saved to {path}",
        first="First loss {loss:.4f}, expected initial bound {expected:.4f} (where these tokens are hidden)",
        best=True,
        at_most="at most ",
    ),
    "ad": Wording(unit="actions", accuracy="acc_action", bar="loss={loss}", validation="test/"),
}


def format_buckets(measures: Mapping[str, Any], prefix: str = "val_loss_t_") -> str:
    """The cross-entropy where few, half and nearly all tokens are hidden: `by share hidden 0.0: 1.92, 0.5: ...`."""
    found = {int(name.removeprefix(prefix)): value for name, value in measures.items() if name.startswith(prefix)}
    if not found:
        return ""
    shown = sorted({min(found), sorted(found)[len(found) // 2], max(found)})
    return "By share hidden: " + ", ".join(f"{100 * (2 * each + 1) // 20} % {found[each]:.2f}" for each in shown)


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


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
    batch_size: int = 0  # rows of a micro-batch of one worker
    accumulated: int = 1  # micro-batches of a step
    settings: str = ""  # "preset demo, 3 settings changed"
    tag: str = ""  # "GPU 0"
    version: str = ""
    logs: tuple[str, ...] = ()  # log files
    epochs: int = 0  # 0: the run counts in steps only
    epoch_steps: float = 0.0  # of one epoch; it may end within a batch
    vocab_size: int = 0  # rows of the embedding
    unit: str = USUAL.unit

    def lines(self, width: int = COLUMNS) -> list[str]:
        total = format_bytes(sum(self.memory_bytes.values()))
        total += "" if self.device.upper().startswith("CPU") else " per GPU"
        parts = [f"{name} {format_bytes(size)}," for name, size in self.memory_bytes.items()]
        rows = [
            ("model", [self.model + ",", f"{self.parameters:,} parameters"]),
            ("memory", [f"about {total}:", *parts[:-1], *(part.rstrip(",") for part in parts[-1:])]),
            ("work", [*self._steps(), f"of {self.tokens_per_step:,} {self.unit}", *_bracketed(self.batch)]),
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

    def _steps(self) -> list[str]:
        return [*([f"{_plural(self.epochs, 'epoch')},"] if self.epochs else []), f"{self.max_steps:,} steps"]


@dataclass(frozen=True)
class Summary(_Facts):
    """What has come of it."""

    steps: int
    loss: float
    tokens_per_second: float
    seconds: float
    results: str  # folder of the run
    outcome: str = USUAL.outcome
    best_val_loss: float | None = None  # of all validations, where the family's guide has that line
    at_most: str = ""
    first_loss: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None  # told in the place of the perplexity
    unit: str = USUAL.unit  # of tokens_per_second
    mfu: float | None = None
    data_share: float = 0.0  # of the time, until the rows were there
    peak_memory_bytes: int = 0
    skipped: int = 0  # fp16 overflows
    workers: tuple[Mapping[str, Any], ...] = ()  # name, seconds, samples_per_second, peak_memory_bytes, utilisation
    sample: str = ""
    next_commands: tuple[str, ...] = ()

    def lines(self, width: int = COLUMNS) -> list[str]:
        loss = f"{format_number(self.first_loss)} → " if self.first_loss is not None else ""
        validation: list[str] = []
        if self.val_loss is not None:
            validation = [f"{self.at_most}{format_number(self.val_loss)}"]
            validation.append(f"({self._judged(self.val_loss)})")
        speed = [f"{self.tokens_per_second:,.0f} {self.unit}/s"] if self.tokens_per_second else []
        speed += [f"({100 * self.mfu:.1f} % MFU)"] if self.mfu is not None else []
        starved = [f"{100 * self.data_share:.0f} % of the time went into waiting for rows:", "data.num_workers"]
        skipped = [f"({self.skipped:,} skipped by fp16 overflow)"] if self.skipped else []
        rows = [
            ("steps", [f"{self.steps:,}", *skipped]),
            ("train loss", [loss + format_number(self.loss)] if not math.isnan(self.loss) else []),
            ("validation", validation),
            ("speed", speed),
            ("data", starved if self.data_share >= MUCH_WAITING else []),
            ("peak memory", [format_bytes(self.peak_memory_bytes)] if self.peak_memory_bytes else []),
            ("wall time", [format_duration(self.seconds)]),
            ("results", [self.results]),
        ]
        best = [f"Best validation loss: {format_number(self.best_val_loss)}"] if self.best_val_loss is not None else []
        lines = ["─" * width, self.outcome, *best, *_table(rows, width)]
        if self.workers:
            lines += ["", *_usage(self.workers)]
        if self.sample:
            lines += ["", *_frame("sample", self.sample, width)]
        if self.next_commands:
            lines += ["", "Next:", *(f"  {command}" for command in self.next_commands)]
        return [*lines, "─" * width]

    def _judged(self, loss: float) -> str:
        if self.val_accuracy is not None:
            return f"accuracy {format_number(self.val_accuracy)}"
        return f"perplexity {self.at_most}{format_perplexity(loss)}"


def _usage(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """How each GPU was used, a row for each."""
    lines = [f"  {'worker':<{WORKER_COLUMNS}}{'time':>16}{'samples/s':>13}{'peak memory':>14}{'GPU use':>10}"]
    for worker in workers:
        rate, used = worker.get("samples_per_second") or 0.0, worker.get("utilisation")
        lines.append(
            f"  {str(worker.get('name') or '')[: WORKER_COLUMNS - 1]:<{WORKER_COLUMNS}}"
            f"{format_duration(worker.get('seconds') or 0.0):>16}{rate:>13,.1f}"
            f"{format_bytes(worker.get('peak_memory_bytes') or 0):>14}{format_utilisation(used):>10}"
        )
    return lines


def _bracketed(text: str) -> list[str]:
    return [f"({text})"] if text else []


def folded(pieces: Sequence[str], width: int, *, between: str = " ", indent: int) -> list[str]:
    """Pieces in lines of a width, those after the first indented; none is broken, so that a path can be copied."""
    lines = [*pieces[:1]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(between) + len(piece) > width:
            lines.append(" " * indent)
        lines[-1] += between + piece
    return lines


def _table(rows: list[tuple[str, list[str]]], width: int) -> list[str]:
    """Label and pieces per row. Rows without pieces go."""
    lines: list[str] = []
    for label, pieces in rows:
        begun = [f"  {label:<{LABEL_COLUMNS}}{piece}" for piece in pieces[:1]]
        lines += folded([*begun, *pieces[1:]], width, indent=LABEL_COLUMNS + 1)
    return lines


def _frame(title: str, text: str, width: int) -> list[str]:
    """The text behind a bar; open to the right, so that letters of any width do not break it."""
    lines = [f"  ┌─ {title} " + "─" * (width - len(title) - 6)]
    for paragraph in text.expandtabs(4).split("\n"):
        wrapped = textwrap.wrap(paragraph, width - 4, replace_whitespace=False)
        lines += [f"  │ {line}".rstrip() for line in wrapped or [""]]
    return [*lines, "  └" + "─" * (width - 3)]
