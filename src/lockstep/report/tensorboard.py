"""TensorBoard files: one record per step, written directly, without torch.utils.tensorboard and its thread."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.contracts import StepRecord
from lockstep.errors import OutputError

log = logging.getLogger(__name__)

FILES = "events.out.tfevents."  # how the names of TensorBoard's files begin


class _Package(NamedTuple):
    """What is used of the tensorboard package; importing exactly this costs 0.15 s and starts no TensorFlow."""

    Event: Any
    SessionLog: Any
    RecordWriter: Any


def _load() -> _Package | None:
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
    except Exception as error:  # tensorboard and protobuf of different ages fail in many ways
        log.info("no TensorBoard files: %s (pip install tensorboard)", error)
        return None
    proto: Any = event_pb2  # generated at run time, unknown to type checkers
    return _Package(proto.Event, proto.SessionLog, RecordWriter)


def _stamp(folder: Path) -> int:
    """Files are read in the order of this number, which is the time: later than all others, whatever the clock says."""
    known = (path.name.removeprefix(FILES).partition(".")[0] for path in folder.glob(f"{FILES}*"))
    return max([int(time.time()), *(int(text) + 1 for text in known if text.isdecimal())])


class TensorboardSink:
    """Scalars of a run for `tensorboard --logdir`. Without the package it says so once and does nothing.

    `validation` is how the tags of a family's validation begin.
    """

    def __init__(self, folder: Path, *, validation: str = "eval/val_") -> None:
        self._writer: Any = None
        self._validation = validation
        self._folder = folder
        self._resumed = -1  # after so many steps
        self._package = _load()
        if self._package is None:
            return
        name = f"{FILES}{_stamp(folder):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / name).open("xb", buffering=0)  # a viewer, or a crash, finds every record there
        except OSError as error:
            raise OutputError(f"cannot create it: {error.strerror or error}", where=str(folder / name)) from error
        self._writer = self._package.RecordWriter(self._file)
        self._append(self._package.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, record: StepRecord) -> None:
        scalars = {"train/loss": record.loss, "train/grad_norm": record.grad_norm, "train/lr": record.lr}
        if record.seconds > 0:
            scalars["train/tokens_per_second"] = record.tokens / record.seconds
        if record.mfu is not None:
            scalars["train/mfu"] = record.mfu
        if record.memory_bytes:
            scalars["train/memory_gib"] = record.memory_bytes / 2**30
        if record.loss_scale != 1.0:
            scalars["train/loss_scale"] = record.loss_scale
        self._scalars(record.step, {**scalars, **{f"train/{name}": value for name, value in record.measures.items()}})

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._writer is None or self._package is None:
            return
        step = int(fields.get("step") or 0)
        if kind == "eval":
            numbers = {name: value for name, value in fields.items() if name != "step" and _is_number(value)}
            last = max(0, step - 1)  # steps count from 0: the curve of the last finished one, and a resume keeps it
            self._once(step, last, {self._tag(name): float(value) for name, value in numbers.items()})
        elif kind == "walk":
            numbers = {name: float(value) for name, value in fields.items() if name.endswith("return")}
            self._once(step, max(0, step - 1), {f"walk/{name}": value for name, value in numbers.items()})
        elif kind == "resume":  # TensorBoard then drops what an earlier file says about this step and later ones
            self._resumed = step
            start = self._package.SessionLog(status=self._package.SessionLog.START)
            self._append(self._package.Event(wall_time=time.time(), step=step, session_log=start))

    def _tag(self, name: str) -> str:
        plain = name.removeprefix("val_")
        return self._validation + plain if plain != name else f"eval/{name}"

    def close(self) -> None:
        if self._writer is not None:
            self._writer = None
            self._file.close()

    def _once(self, done: int, step: int, scalars: Mapping[str, float]) -> None:
        """What a run that was over, and was started again, measures once more is there already: it is the same."""
        told = self._earlier(step) if done == self._resumed else set[str]()
        if left := {tag: value for tag, value in scalars.items() if tag not in told}:
            self._scalars(step, left)

    def _earlier(self, step: int) -> set[str]:
        """The tags that earlier files of this folder have at a step."""
        tags = set[str]()
        try:
            from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

            assert self._package is not None
            for path in sorted(self._folder.glob("events.out.tfevents.*")):
                for raw in RawEventFileLoader(str(path)).Load() if path.name != Path(self._file.name).name else ():
                    event = self._package.Event.FromString(raw)
                    if event.step == step:
                        tags |= {value.tag for value in event.summary.value}
        except Exception as error:  # as many as in _load; then a point stands there twice
            log.info("earlier TensorBoard files cannot be read: %s", error)
        return tags

    def _scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None or self._package is None:
            return
        event = self._package.Event(wall_time=time.time(), step=step)
        add = event.summary.value.add
        for tag, value in scalars.items():
            add(tag=tag, simple_value=value)
        self._append(event)

    def _append(self, event: Any) -> None:
        try:
            self._writer.write(event.SerializeToString())
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        """A record cut in two would spoil every later one, so the file is given up."""
        self._writer = None
        log.warning("cannot write %s: %s. Training goes on without it.", self._file.name, error.strerror or error)
        self._file.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
