"""What every sink promises. A new file in report/ that has a sink is found here and must be built below."""

from __future__ import annotations

import importlib
import inspect
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep import registry
from lockstep.contracts import Sink, StepRecord
from lockstep.report import logs


def sinks() -> dict[str, type]:
    found: dict[str, type] = {}
    for name in registry.names("report"):
        module = importlib.import_module(f"lockstep.report.{name}")
        classes = inspect.getmembers(module, inspect.isclass)
        found |= {
            label: kind for label, kind in classes if label.endswith("Sink") and kind.__module__ == module.__name__
        }
    return found


SINKS = sinks()
BUILD: dict[str, Callable[[Path], Sink]] = {
    "ConsoleSink": lambda _: SINKS["ConsoleSink"](10, clip=True),
    "EventSink": lambda folder: SINKS["EventSink"](folder / "events.jsonl"),
    "TensorboardSink": lambda folder: SINKS["TensorboardSink"](folder / "tb"),
}


@pytest.fixture
def screen() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.setup_logging(stream=stream)
    yield stream
    logs.close_logging()


def test_all_sinks_are_known() -> None:
    assert len(SINKS) >= 3
    assert set(SINKS) == set(BUILD)


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_takes_everything_a_run_can_say(name: str, tmp_path: Path, screen: io.StringIO) -> None:
    sink = BUILD[name](tmp_path)
    events = {
        "start": {"experiment": "x", "run": "y"},
        "resume": {"step": 2, "path": Path("checkpoints/step_00000002")},
        "eval": {"step": 3, "val_loss": 1.5},
        "save": {"step": 3, "path": "checkpoints/step_00000003"},
        "fault": {"step": 3, "kind_of_fault": "nan", "detail": {"tensors": ["a", "b"], "value": math.nan}},
        "end": {"exit_code": 71},
        "a kind of a later part": {},
    }
    for step, loss in enumerate([1.5, math.nan, math.inf, -math.inf, 0.0]):
        sink.write(StepRecord(step, loss, loss, 1e-3, 0.0, 0))
    sink.write(
        StepRecord(5, 1.0, 1.0, 1e-3, 0.1, 64, memory_bytes=1, skipped=True, loss_scale=2.0, digest="a", mfu=0.5)
    )
    for kind, fields in events.items():
        sink.event(kind, fields)
    sink.close()
    sink.close()
    assert "cannot" not in screen.getvalue()


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_may_be_closed_unused(name: str, tmp_path: Path, screen: io.StringIO) -> None:
    BUILD[name](tmp_path).close()
    assert screen.getvalue() == ""


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_changes_neither_record_nor_fields(name: str, tmp_path: Path, screen: io.StringIO) -> None:
    sink, fields = BUILD[name](tmp_path), {"step": 1, "val_loss": math.nan, "more": {"a": [1, 2]}}
    record = StepRecord(0, 1.0, 1.0, 1e-3, 0.1, 64)
    sink.write(record)
    sink.event("eval", fields)
    sink.close()
    assert record == StepRecord(0, 1.0, 1.0, 1e-3, 0.1, 64)
    assert list(fields) == ["step", "val_loss", "more"]
    assert fields["more"] == {"a": [1, 2]}
