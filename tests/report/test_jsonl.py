"""events.jsonl: whole lines, exact numbers, valid JSON, resumes honoured."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.report.jsonl import EventSink, read_events
from tests.counting import calls


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_step_has_the_stable_keys_and_exact_numbers(tmp_path: Path, record) -> None:
    sink = EventSink(tmp_path / "run" / "events.jsonl")
    sink.write(record(3, loss=0.1 + 0.2, memory_bytes=7, digest="ab", mfu=0.4))
    sink.close()
    (step,) = lines(tmp_path / "run" / "events.jsonl")
    assert step.pop("time") > 1e9
    assert step == {
        "kind": "step", "step": 3, "loss": 0.1 + 0.2, "loss_hex": (0.1 + 0.2).hex(), "grad_norm": 2.75648,
        "grad_norm_hex": 2.75648.hex(), "lr": 1e-5, "seconds": 0.05, "tokens": 8192, "memory_bytes": 7, "digest": "ab",
        "skipped": False, "loss_scale": 1.0, "mfu": 0.4,
    }  # fmt: skip
    assert float.fromhex(step["loss_hex"]) == 0.1 + 0.2


def test_nan_and_inf_stay_valid_json(tmp_path: Path, record) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventSink(path)
    sink.write(record(0, loss=math.nan))
    sink.write(record(1, grad_norm=-math.inf))
    sink.event("eval", {"step": 2, "val_loss": math.inf, "parts": {"a": [math.nan, 1.5]}, "path": Path("/x")})
    first, second, third = lines(path)
    assert (first["loss"], first["loss_text"], first["loss_hex"]) == (None, "nan", "nan")
    assert (first["grad_norm"], "grad_norm_text" in first) == (2.75648, False)
    assert (second["grad_norm"], second["grad_norm_text"], second["loss"]) == (None, "-inf", 12.234)
    assert third.pop("time") > 1e9
    assert third == {
        "kind": "eval", "step": 2, "val_loss": None, "val_loss_text": "inf", "parts": {"a": [None, 1.5]}, "path": "/x",
    }  # fmt: skip


def test_no_secret_and_no_control_byte_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-key")
    sink = EventSink(tmp_path / "e", secrets=("from-the-config",))
    sink.event("fault", {"cause": ["said canary-key", {"x": "from-the-config"}], "trace": "\x1b]0;t\x07red"})
    (event,) = lines(tmp_path / "e")
    assert event["cause"] == ["said ***", {"x": "***"}]
    assert event["trace"] == "red"


def test_a_resume_voids_what_came_after_its_step(tmp_path: Path, record) -> None:
    path = tmp_path / "events.jsonl"
    first = EventSink(path)
    first.event("start", {})
    for step in range(6):
        first.write(record(step, loss=float(step)))
        if step in (1, 3, 5):
            first.event("eval", {"step": step + 1, "val_loss": 1.0})
    first.event("save", {"step": 4})
    first.event("fault", {"step": 6, "cause": "x"})
    first.close()
    before = path.read_bytes()
    second = EventSink(path)
    second.event("resume", {"step": 4})
    for step in range(4, 6):
        second.write(record(step, loss=step + 0.5))
    second.event("end", {"step": 6, "exit_code": 0})
    second.close()
    events = read_events(path)
    steps = [(event["step"], event["loss"]) for event in events if event["kind"] == "step"]
    assert steps == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5)]
    assert [event["step"] for event in events if event["kind"] == "eval"] == [2, 4]
    assert [event["kind"] for event in events if event["kind"] not in ("step", "eval")] == [
        "start", "save", "resume", "end",
    ]  # fmt: skip
    assert path.read_bytes().startswith(before), "lines are only appended"
    assert len(lines(path)) == len(before.splitlines()) + 4


def test_a_run_that_was_over_is_measured_once(tmp_path: Path, record) -> None:
    """Who goes on from the end measures again; control: another step's measurement is not touched."""
    path = tmp_path / "events.jsonl"
    for attempt in range(3):
        sink = EventSink(path)
        if attempt:
            sink.event("resume", {"step": 2})
        else:
            for step in range(2):
                sink.write(record(step))
                sink.event("eval", {"step": step + 1, "val_loss": 1.0})
        sink.event("eval", {"step": 2, "val_loss": 2.0 + attempt}) if attempt else None
        sink.event("end", {"step": 2, "exit_code": 0})
        sink.close()
    told = [(event["step"], event["val_loss"]) for event in read_events(path) if event["kind"] == "eval"]
    assert told == [(1, 1.0), (2, 4.0)]
    assert len([event for event in read_events(path) if event["kind"] == "end"]) == 3


def test_a_torn_last_line_is_left_out_and_not_built_upon(tmp_path: Path, record) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventSink(path)
    sink.write(record(0))
    sink.write(record(1))
    sink.close()
    whole = path.read_bytes()
    start_of_last = whole.index(b"\n") + 1
    for cut in range(start_of_last + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [event["step"] for event in read_events(path)] == [0]
    path.write_bytes(whole[: start_of_last + 40])
    again = EventSink(path)  # without care its first line would continue the torn one and be lost with it
    again.event("resume", {"step": 1})
    again.write(record(1))
    assert [(event["kind"], event["step"]) for event in read_events(path)] == [("step", 0), ("resume", 1), ("step", 1)]


def test_what_an_objective_watches_is_beside_the_loss(tmp_path: Path, record) -> None:
    """And still JSON where it is no number."""
    sink = EventSink(tmp_path / "events.jsonl")
    sink.write(record(0, measures={"acc_action": 0.25}))
    sink.write(record(1, measures={"acc_action": math.nan}))
    sink.write(record(2))
    sink.close()
    first, second, third = read_events(tmp_path / "events.jsonl")
    assert first["acc_action"] == 0.25
    assert (second["acc_action"], second["acc_action_text"]) == (None, "nan")
    assert set(first) - set(third) == {"acc_action"}


WRITE_FOREVER = """
import sys
from pathlib import Path
from lockstep.contracts import StepRecord
from lockstep.report.jsonl import EventSink
sink = EventSink(Path(sys.argv[1]))
while True:
    sink.write(StepRecord(0, 1.5, 2.5, 1e-3, 0.1, 64))
"""


def test_a_kill_costs_at_most_the_line_that_is_being_written(tmp_path: Path) -> None:
    """The kernel may stop a write where a page of the file ends; whoever writes next begins a new line."""
    path, kills = tmp_path / "events.jsonl", 3
    path.touch()
    for _ in range(kills):
        before = path.stat().st_size
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(path)])
        while path.stat().st_size < before + 20_000:
            assert writer.poll() is None
        writer.kill()
        writer.wait()
    EventSink(path).close()
    lines, events = path.read_bytes().splitlines(), read_events(path)
    assert len(lines) - kills <= len(events) <= len(lines)
    assert len(events) > 100
    assert all(line[:12] == b'{"kind":"step'[: len(line)][:12] for line in lines), "no line continues another"


def test_a_full_disk_is_one_warning(screen: io.StringIO, record) -> None:
    sink = EventSink(Path("/dev/full"))
    for step in range(5):
        sink.write(record(step))
    sink.event("end", {})
    sink.close()
    (warning,) = screen.getvalue().splitlines()
    assert warning.startswith("cannot write /dev/full: No space left")


def test_writing_goes_on_when_there_is_room_again(tmp_path: Path, record, monkeypatch) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventSink(path)
    sink.write(record(0))
    real, room = os.write, iter([17, -1])

    def write(descriptor: int, data: bytes) -> int:
        left = next(room, None)
        if left is None:
            return real(descriptor, data)
        if left < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:left])  # a disk that fills up in the middle of a line

    monkeypatch.setattr(os, "write", write)
    for step in range(1, 5):
        sink.write(record(step))
    assert [event["step"] for event in read_events(path)] == [0, 3, 4]


def test_a_step_is_cheap(tmp_path: Path, record, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few calls and one system call, however many steps were before."""
    sink, step = EventSink(tmp_path / "events.jsonl"), record(0)
    sink.write(step)
    counted = [calls(lambda: sink.write(step)) for _ in range(300)]
    assert set(counted) == {counted[0]}
    assert counted[0] < 40
    written: list[int] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda *words: written.append(1) or real(*words))
    sink.write(step)
    assert len(written) == 1
