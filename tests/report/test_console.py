"""Step lines to the letter, banner and summary in 80 columns, and the bar on a real terminal."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.report import logs
from lockstep.report.console import ConsoleSink
from lockstep.report.jsonl import EventSink, read_events
from lockstep.report.words import (
    Banner,
    Summary,
    format_bytes,
    format_duration,
    format_eta,
    format_step,
)
from tests.counting import calls

TAIL = re.compile(
    r"Step \[(\d+)/(\d+)\] \| Loss: (-?\d+\.\d{4}|nan|inf) \| LR: (\d\.\d{2}e[+-]\d{2}) \| "
    r"Grad Norm: (\d+\.\d{4}|nan|inf) \| ETA: (\d+):(\d{2})"
)
SAMPLE = "Step [0/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30"
PREFIXES = [{}, {"tag": "GPU0"}, {"tag": "GPU0", "prefix": "colon"}]

BANNER = Banner(
    experiment="llama_training",
    run="runs/llama-demo-20260720-120000",
    device="NVIDIA H200, 139.8 GiB",
    model="llama, 4 layers, width 4096",
    parameters=1_922_371_584,
    memory_bytes={"weights": 7 << 30, "gradients": 7 << 30, "optimizer": 14 << 30, "activations": 20 << 30},
    tokens_per_step=65_536,
    max_steps=100,
    dataset="built-in corpus, 1,234,567 tokens to train on and 12,345 to validate",
    precision="bf16",
    attention="native_flash",
    determinism="not bit-reproducible (use --deterministic)",
    batch="2 rows x 4 micro-batches x 8,192 tokens",
    settings="preset production",
    tag="GPU 0",
    version="0.1.0",
)
SUMMARY = Summary(
    steps=100,
    loss=2.1043,
    first_loss=8.3451,
    val_loss=2.2511,
    tokens_per_second=12_345.6,
    mfu=0.4123,
    peak_memory_bytes=3 << 29,
    seconds=98.4,
    results="runs/llama-demo-20260720-120000",
    sample="The first words of a text that is long enough to be wrapped at the end of its line.\n\n    indented\ttab",
    next_commands=('lockstep sample runs/latest "The "', "tensorboard --logdir runs/latest/tb"),
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7505, "125:05"), (330, "5:30"), (0, "0:00"), (59.6, "1:00"), (9.4, "0:09"), (36_000_000, "600000:00")],
)
def test_eta(seconds: float, text: str) -> None:
    assert format_eta(seconds) == text
    assert format_eta(-1) == format_eta(math.nan) == format_eta(math.inf) == "0:00"


def test_the_documented_step_line_to_the_letter(record) -> None:
    assert format_step(record(), 100, clip=True) == SAMPLE
    assert format_step(record(), 100, clip=False) == SAMPLE.replace("Grad Norm: 2.7565 | ", "")


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, 0.0, 1e30, -1.5, 1e-9])
def test_odd_numbers_keep_the_documented_form(record, value: float) -> None:
    line = format_step(record(7, loss=value, grad_norm=abs(value), lr=0.0, eta_seconds=value), 10**6, clip=True)
    found = TAIL.fullmatch(line)
    assert found is not None, line
    assert found[3] == ("nan" if math.isnan(value) else "inf" if math.isinf(value) else f"{value:.4f}")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SAMPLE),
        ({"prefix": "colon"}, f"INFO | {SAMPLE}"),
        ({"tag": "GPU0"}, f"[GPU0] {SAMPLE}"),
        ({"tag": "GPU0", "prefix": "colon"}, f"GPU0:INFO | [GPU 0] {SAMPLE}"),
    ],
)
def test_step_lines_with_each_prefix_on_screen_and_in_the_file(record, settings, expected, tmp_path: Path) -> None:
    stream = io.StringIO()
    logs.setup_logging(stream=stream, log_files=[tmp_path / "log.txt"], **settings)
    ConsoleSink(100, clip=True).write(record())
    assert stream.getvalue() == expected + "\n"
    assert (tmp_path / "log.txt").read_text().endswith(f" | INFO | {SAMPLE}\n")


def steps_shown(screen: io.StringIO) -> list[int]:
    return [int(found[1]) for found in TAIL.finditer(screen.getvalue())]


@pytest.mark.parametrize(
    ("interval", "ran", "expected"),
    [
        (1, range(5), [0, 1, 2, 3, 4]),
        (4, range(10), [0, 4, 8, 9]),
        (100, range(10), [0, 9]),
        (4, range(7, 10), [7, 8, 9]),  # resumed: the first of this process is always shown
        (4, range(7), [0, 4, 6]),  # stopped early: so is the last
    ],
)
def test_which_steps_have_a_line(screen: io.StringIO, record, interval, ran, expected) -> None:
    sink = ConsoleSink(10, clip=True, log_interval=interval)
    for step in ran:
        sink.write(record(step))
    sink.close()
    sink.close()
    assert steps_shown(screen) == expected


def test_event_lines(screen: io.StringIO, record) -> None:
    sink = ConsoleSink(100, clip=True, log_interval=1000)
    sink.event("resume", {"step": 48, "path": "runs/x/checkpoints/step_00000048"})
    sink.write(record(48, seconds=0.1, tokens=1000, mfu=0.3))
    sink.write(record(49, seconds=0.3, tokens=1000, mfu=0.5))
    sink.event("eval", {"step": 50, "val_loss": 2.1234})
    sink.event("eval", {"step": 50, "val_loss": math.nan})
    sink.event("save", {"step": 50, "path": "runs/x/checkpoints/step_00000050"})
    sink.event("something new", {"a": 1})
    assert [line for line in screen.getvalue().splitlines() if not TAIL.fullmatch(line)] == [
        "Checkpoint loaded from runs/x/checkpoints/step_00000048",
        "Resuming from step 48",
        "Validation | Step 50 | Loss: 2.1234 | Perplexity: 8.36 | 5,000 tokens/s",
        "   | MFU 45.0 %",
        "Validation | Step 50 | Loss: nan | Perplexity: nan",
        "Checkpoint saved: runs/x/checkpoints/step_00000050",
    ]


@pytest.mark.parametrize("settings", PREFIXES)
def test_banner_and_summary_fit_80_columns(settings: dict) -> None:
    stream = io.StringIO()
    logs.setup_logging(stream=stream, **settings)
    sink = ConsoleSink(100, clip=True)
    sink.event("start", BANNER.fields())
    sink.event("end", SUMMARY.fields() | {"exit_code": 0})
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 50
    text = re.sub(r"\s+", " ", re.sub(r"^(\S*GPU0:INFO \| \[GPU 0\]|\[GPU0\])", "", stream.getvalue(), flags=re.M))
    for fact in (
        "Starting experiment: llama_training [GPU 0]", "lockstep 0.1.0", "1,922,371,584 parameters",
        "about 48.00 GiB per GPU: weights 7.00 GiB, gradients 7.00 GiB, optimizer 14.00 GiB, activations 20.00 GiB ",
        "100 steps of 65,536 tokens (2 rows x 4 micro-batches x 8,192 tokens)", BANNER.dataset, BANNER.device, "bf16",
        "native_flash", BANNER.determinism, "run folder runs/llama-demo-20260720-120000",
        "Training completed successfully!", "train loss 8.3451 → 2.1043", "validation 2.2511 (perplexity 9.50)",
        "12,346 tokens/s (41.2 % MFU)", "peak memory 1.50 GiB", "wall time 1 min 38 s", *SUMMARY.next_commands,
    ):  # fmt: skip
        assert fact in text, fact
    assert any(line.endswith("│     indented    tab") for line in lines)


@pytest.mark.parametrize("settings", PREFIXES)
def test_validation_fits_80_columns_and_loses_no_figure(record, settings: dict) -> None:
    stream = io.StringIO()
    logs.setup_logging(stream=stream, **settings)
    sink = ConsoleSink(100, clip=True, log_interval=1000, family="llada", facts=lambda: {"gpu_utilisation": 97.0})
    sink.write(record(49, seconds=0.1, tokens=123_456, mfu=0.5))
    buckets = {f"val_loss_t_{share}": 1.5 + share for share in range(10)}
    sink.event("eval", {"step": 123_456, "val_loss": 2.1234, "val_accuracy": 0.4512, **buckets})
    lines = stream.getvalue().splitlines()[1:]  # the step line is documented, and may be longer
    assert max(map(len, lines)) <= 80
    figures = [figure.strip() for line in lines for figure in line.replace("[GPU0] ", "").split(" | ")]
    assert [figure for figure in figures if figure and not figure.startswith(("GPU0:", "[GPU 0]"))][-8:] == [
        "Step 123456", "Loss: at most 2.1234", "Perplexity: at most 8.36", "Accuracy: 0.4512",
        "By share hidden: 5 % 1.50, 55 % 6.50, 95 % 10.50", "1,234,560 tokens/s", "MFU 50.0 %", "GPU 97 %",
    ]  # fmt: skip


def test_the_bare_banner_leaves_out_what_is_not_known() -> None:
    short = replace(BANNER, settings="", batch="", tag="", version="", device="CPU, 2 threads", experiment="x" * 100)
    lines = short.lines(60)
    assert lines[0] == "Starting experiment: " + "x" * 100
    assert not any("settings" in line or "per GPU" in line for line in lines)
    lines = Summary(steps=0, loss=math.nan, tokens_per_second=0, seconds=1, results="r", outcome="Stopped").lines(60)
    assert [line.split()[0] for line in lines[1:-1]] == ["Stopped", "steps", "wall", "results"]


def test_a_path_is_never_broken() -> None:
    long = "runs/" + "deep/" * 30 + "name"
    assert f"  run folder   {long}" in replace(BANNER, run=long).lines(60)


def test_banner_and_summary_are_the_start_and_end_events(tmp_path: Path) -> None:
    sink = EventSink(tmp_path / "events.jsonl")
    sink.event("start", BANNER.fields())
    sink.event("end", replace(SUMMARY, loss=math.nan).fields())
    start, end = read_events(tmp_path / "events.jsonl")
    assert Banner.of(start) == replace(BANNER, logs=[])
    assert (start["parameters"], end["loss"], end["loss_text"]) == (1_922_371_584, None, "nan")
    assert Banner.of({"run": "x"}) is None


def test_units() -> None:
    assert [format_bytes(n) for n in (7, 1536, 5 << 20, 3 << 29, 2000 << 30)] == [
        "7 B", "1.5 KiB", "5.0 MiB", "1.50 GiB", "2,000.00 GiB",
    ]  # fmt: skip
    assert [format_duration(s) for s in (3.21, 61, 7505)] == ["3.2 s", "1 min 01 s", "2 h 05 min 05 s"]


def test_a_step_line_is_cheap(record) -> None:
    """A few calls, however many steps were before."""
    with Path(os.devnull).open("w") as stream:
        logs.setup_logging(tag="GPU0", stream=stream)
        sink, step = ConsoleSink(10**9, clip=True), record()
        sink.write(step)
        counted = [calls(lambda: sink.write(step)) for _ in range(300)]
    assert set(counted[1:]) == {counted[1]}
    assert counted[1] < 200  # half of them are by pytest, which listens too


class Terminal:
    """A real terminal of 80 columns, and all that was written to it."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._drain)
        self._thread.start()

    def _drain(self) -> None:
        while True:
            try:
                part = os.read(self._ours, 65536)
            except OSError:  # the other side is closed
                return
            self._parts.append(part)

    def text(self) -> str:
        self.stream.close()
        self._thread.join(10)
        os.close(self._ours)
        return b"".join(self._parts).decode("utf-8")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": ""}.items():
        monkeypatch.setenv(name, value)
    made = Terminal()
    yield made
    if not made.stream.closed:
        made.text()


def run_on(terminal: Terminal, record, **settings) -> str:
    logs.setup_logging(tag="GPU0", stream=terminal.stream)
    sink = ConsoleSink(100, clip=True, **settings)
    for step in range(3):
        sink.write(record(step, mfu=0.412))
        logs.ROOT.warning("a [bold]warning[/bold] at %d", step)
    sink.event("end", SUMMARY.fields())
    return terminal.text()


def screen_after(text: str) -> list[str]:
    """What is left on the screen, by the few control sequences that are used."""
    rows: list[str] = [""]
    row = 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if piece == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif piece == "\r":
            rows[row] = rows[row] if rows[row].startswith("[GPU0]") else ""
        elif piece == "\x1b[2K":
            rows[row] = ""
        elif found := re.fullmatch(r"\x1b\[(\d+)A", piece):
            row -= int(found[1])
        elif not piece.startswith("\x1b"):
            rows[row] += piece
    return rows


def test_a_bar_at_the_bottom_and_lines_above_it(terminal: Terminal, record) -> None:
    text = run_on(terminal, record)
    assert "3/100" in text or "2/100" in text or "1/100" in text
    assert "163,840 tokens/s" in text
    assert "MFU 41.2 %" in text
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert "\x1b[33m" in text
    left = screen_after(text)
    assert [line for line in left if "Step [" in line] == [
        f"[GPU0] {SAMPLE.replace('[0/', f'[{n}/')}" for n in range(3)
    ]
    assert [line for line in left if "warning" in line] == [f"[GPU0] a [bold]warning[/bold] at {n}" for n in range(3)]
    assert not any("tokens/s  MFU" in line for line in left)  # the bar itself is gone
    assert any("Training completed successfully!" in line for line in left)


def test_no_color_keeps_the_bar_and_drops_the_colour(terminal: Terminal, record, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = run_on(terminal, record)
    assert "/100" in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][;m]", text)


EPOCHS = {"max_steps": 7, "epochs": 2, "epoch_steps": 3.5}


def test_each_epoch_has_its_own_bar(terminal: Terminal, record) -> None:
    """3.5 steps each: the first one ends with the fourth step."""
    logs.setup_logging(tag="GPU0", stream=terminal.stream)
    sink = ConsoleSink(10_000_000, clip=True, log_interval=100, progress="on", facts=lambda: {"gpu_utilisation": 37})
    sink.event("start", replace(BANNER, **EPOCHS).fields())
    shown: list[tuple[str, float, float]] = []
    for step in range(7):
        sink.write(record(step))
        task = sink._bar._progress.tasks[0]
        shown.append((task.description, task.completed, task.total))
        if step in (3, 6):
            losses = {"train_loss": 5.25, "val_loss": None if step == 6 else 4.5}
            sink.event("epoch", {"epoch": 1 + (step > 3), "epochs": 2, "seconds": 61.0, **losses, **EPOCHS})
    sink.event("end", SUMMARY.fields())
    assert shown == [("Epoch 1/2", n, 4) for n in (1, 2, 3, 4)] + [("Epoch 2/2", n, 3) for n in (1, 2, 3)]
    text = terminal.text()
    assert "Epoch 1/2" in text
    assert "GPU 37 %" in text
    left = [line for line in screen_after(text) if re.match(r"\[GPU0\] (Epoch|Train Loss)", line)]
    assert left == [
        "[GPU0] Epoch 1/2 | 1 min 01 s | GPU 37 %", "[GPU0] Train Loss: 5.2500 | Val Loss: 4.5000",
        "[GPU0] Epoch 2/2 | 1 min 01 s | GPU 37 %", "[GPU0] Train Loss: 5.2500 | Val Loss: nan",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["dumb", "off", "no rich"])
def test_plain_lines_on_a_terminal(terminal: Terminal, record, monkeypatch, how: str) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    if how == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if how == "no rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    text = run_on(terminal, record, progress="off" if how == "off" else "auto")
    assert "\x1b" not in text
    assert len(TAIL.findall(text)) == 3
    assert text.count("pip install rich") == (how == "no rich")


def test_a_terminal_that_goes_away_does_not_stop_the_run(record, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w", encoding="utf-8")
    logs.setup_logging(stream=stream, log_files=[tmp_path / "log.txt"])
    sink = ConsoleSink(100, clip=True)
    sink.write(record(0))
    os.close(ours)
    for step in range(1, 4):
        sink.write(record(step))
    sink.close()
    assert len(TAIL.findall((tmp_path / "log.txt").read_text())) == 4
    logs.close_logging()
    stream.close()
