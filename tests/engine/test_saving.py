"""Saves that training does not wait for: they hold the state of their step, fail aloud, and nobody leaves before."""

from __future__ import annotations

import errno
import gc
import io
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.contracts import StepRecord
from lockstep.engine import checkpoint, endings, legacy, loop, milestones, saving, snapshot
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.engine.saving import Saver
from lockstep.engine.snapshot import Snapshot
from lockstep.errors import ExitCode, LockstepError, Stopped
from lockstep.health.fingerprint import digest_model
from lockstep.launch.link import Link
from lockstep.rundir import RunDir
from lockstep.runtime import env
from lockstep.runtime.marks import NoMarks
from lockstep.runtime.signals import StopRequest
from tests.gates.training import FEW_WORDS, Recorder, run

pytestmark = pytest.mark.usefixtures("shared_cache")

SMALL: dict[str, Any] = {
    "data.data_path": FEW_WORDS,
    "data.num_workers": 0,
    "training.context_length": 8,
    "training.batch_size": 1,
    "training.eval_interval": 0,
    "training.save_interval": 2,
    "training.max_steps": 4,
    "debug.digest_interval": 1,
    "system.threads": 1,
}
CPU = torch.device("cpu")
WAIT_SECONDS = 30.0


class Watching(Recorder):
    """Calls somebody after each step."""

    then: Callable[[StepRecord], object]

    def write(self, record: StepRecord) -> None:
        super().write(record)
        self.then(record)

    def of(self, kind: str) -> list[int]:
        return [fields["step"] for each, fields in self.events if each == kind]


def watching(then: Callable[[StepRecord], object]) -> Watching:
    recorder = Watching()
    recorder.then = then
    return recorder


def hold_first_save(monkeypatch: pytest.MonkeyPatch, gate: threading.Event, *, full: bool = False) -> None:
    """The first save writes nothing until the gate is open; then, if the disk is full, it fails."""
    calls, write = list[str](), checkpoint.save_file

    def held(tensors: Mapping[str, Tensor], path: Path) -> None:
        if "step_00000002" in str(path):
            calls.append(str(path))
            assert gate.wait(WAIT_SECONDS), "nobody trains on"
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
        write(dict(tensors), path)

    monkeypatch.setattr(checkpoint, "save_file", held)


def opening(gate: threading.Event, after: int) -> Callable[[StepRecord], object]:
    return lambda record: gate.set() if record.step >= after else None


@pytest.mark.parametrize("copies", [True, False], ids=["ours", "without a copy"])
def test_training_goes_on_and_the_file_holds_the_weights_of_its_step(
    copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    hold_first_save(monkeypatch, gate)
    if not copies:  # negative control
        monkeypatch.setattr(Snapshot, "take", lambda _self, state: state)
    _, recorder = run(tmp_path, SMALL, recorder=watching(opening(gate, after=2)))
    saved = digest_model(checkpoint.load(tmp_path / "checkpoints/step_00000002").model.items())
    assert (saved == recorder.records[1].digest) is copies


def test_every_byte_is_that_of_a_save_that_training_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, "training.precision": "fp16", "training.optimizer_states": "bf16"}
    run(tmp_path / "aside", {**settings, "training.checkpoint_dir": str(tmp_path / "aside")})
    monkeypatch.setattr(Saver, "has_room", lambda *_, **__: False)
    run(tmp_path / "waited", {**settings, "training.checkpoint_dir": str(tmp_path / "waited")})
    for name in ("model.safetensors", "optimizer.safetensors"):
        aside, waited = (tmp_path / way / "checkpoints/step_00000002" / name for way in ("aside", "waited"))
        assert aside.read_bytes() == waited.read_bytes()
    aside, waited = (torch.load(tmp_path / way / "step_2.pt", weights_only=True) for way in ("aside", "waited"))
    assert aside.keys() == waited.keys()
    assert aside["lockstep"]["loss_scale"] == waited["lockstep"]["loss_scale"] == aside["scaler_state_dict"]
    assert aside["optimizer_state_dict"]["param_groups"] == waited["optimizer_state_dict"]["param_groups"]
    for place, slot in waited["optimizer_state_dict"]["state"].items():
        assert list(slot) == list(aside["optimizer_state_dict"]["state"][place])
        assert all(
            torch.equal(kept, aside["optimizer_state_dict"]["state"][place][kind]) for kind, kept in slot.items()
        )


def test_a_full_disk_is_told_at_the_next_step_and_passes_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    hold_first_save(monkeypatch, gate, full=True)
    done: list[int] = []

    def then(record: StepRecord) -> None:
        done.append(record.step)
        if record.step == 2:
            gate.set()
            assert recorder.parts
            while recorder.parts.saver.ended == 0:
                time.sleep(0.01)

    recorder = watching(then)
    with pytest.raises(LockstepError, match="No space left") as caught:
        run(tmp_path, {**SMALL, "training.max_steps": 9, "debug.digest_interval": 0}, recorder=recorder)
    assert caught.value.exit_code == ExitCode.IO
    assert done == [0, 1, 2, 3], "known after step 2, while step 3 was on its way"
    assert recorder.of("save") == []
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_stop_waits_for_the_save_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, stop = threading.Event(), StopRequest()
    stop.patient = True
    hold_first_save(monkeypatch, gate)
    flying: list[bool] = []

    def then(record: StepRecord) -> None:
        if record.step == 2:
            assert recorder.parts
            flying.append(recorder.parts.saver.is_flying)
            stop.receive(signal.SIGTERM, None)
            threading.Timer(0.2, gate.set).start()

    recorder = watching(then)
    with pytest.raises(Stopped) as caught:
        run(tmp_path, {**SMALL, "training.max_steps": 9}, recorder=recorder, stop=stop)
    assert caught.value.exit_code == 143
    assert flying == [True], "else this tests nothing"
    found = Checkpointer(tmp_path / "checkpoints").found()
    assert recorder.of("save") == [2, int(found[-1].name[-1])], "in order"
    assert [checkpoint.is_good(path) for path in found] == [True, True]


@pytest.mark.parametrize("waits", [True, False], ids=["ours", "without waiting"])
def test_who_ends_badly_leaves_after_the_save_on_its_way(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    hold_first_save(monkeypatch, gate)
    recorder = watching(raising(2))
    with pytest.raises(Enough):
        run(tmp_path, SMALL, recorder=recorder)
    parts = recorder.parts
    assert parts
    assert parts.saver.is_flying
    threading.Timer(0.2, gate.set).start()
    if not waits:  # negative control
        monkeypatch.setattr(milestones, "land", lambda *_, **__: None)
    full = LockstepError("full", exit_code=ExitCode.IO)  # nothing more is saved after it
    endings.end_badly(RunDir(tmp_path), full, [], parts, place=env.detect(), link=Link())
    assert (tmp_path / "checkpoints/step_00000002").is_dir() is waits
    gate.set()
    parts.saver.land(NoMarks())


class Enough(Exception):
    """To leave a run."""


def raising(step: int) -> Callable[[StepRecord], object]:
    def then(record: StepRecord) -> None:
        if record.step == step:
            raise Enough

    return then


def test_one_save_at_a_time_in_order_and_its_copy_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[Tensor]] = []
    inside, most, write, take = [0], [0], checkpoint.save_file, Snapshot.take

    def slowly(tensors: Any, path: Path) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.03)
        write(tensors, path)
        inside[0] -= 1

    def noted(self: Snapshot, state: State) -> State:
        gc.collect()
        assert not any(ref() is not None for ref in copies), "the copy before is still there"
        taken = take(self, state)
        copies.append(weakref.ref(next(iter(taken.model.values()))))
        return taken

    monkeypatch.setattr(checkpoint, "save_file", slowly)
    monkeypatch.setattr(Snapshot, "take", noted)
    recorder = watching(lambda _: None)
    run(tmp_path, {**SMALL, "training.save_interval": 1}, recorder=recorder)
    assert recorder.of("save") == [1, 2, 3, 4]
    assert most == [1]
    assert len(copies) == 3, "the last save needs no copy"
    assert [path.name for path in Checkpointer(tmp_path / "checkpoints").found()] == ["step_00000003", "step_00000004"]


def test_without_memory_for_a_copy_training_waits_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flying: list[bool] = []
    monkeypatch.setattr(snapshot, "free_bytes", lambda: 0)
    recorder = watching(lambda _: flying.append(bool(recorder.parts and recorder.parts.saver.is_flying)))
    run(tmp_path, {**SMALL, "training.save_interval": 1}, recorder=recorder)
    assert flying == [False] * 4
    assert recorder.of("save") == [1, 2, 3, 4]
    assert caplog.text.count("Not enough memory for a copy") == 1


def test_a_save_that_failed_before_the_last_one_does_not_cost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    hold_first_save(monkeypatch, gate, full=True)
    monkeypatch.setattr(loop, "land", lambda _: None)  # nobody looks in between
    recorder = watching(opening(gate, after=3))
    run(tmp_path, SMALL, recorder=recorder)
    assert recorder.of("save") == [4]
    assert "The save before this one has failed" in caplog.text
    assert [path.name for path in Checkpointer(tmp_path / "checkpoints").found()] == ["step_00000004"]


@pytest.mark.parametrize("pinned_bytes", [1 << 30, 192])
def test_a_copy_has_every_kind_of_number_and_memory_of_its_own(
    pinned_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a tensor lies across pieces of memory that were pinned one by one."""
    monkeypatch.setattr("lockstep.engine.snapshot.PIN_BYTES", pinned_bytes)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
    model = {str(kind): torch.arange(7).to(kind) for kind in kinds}
    model |= {"none": torch.empty(0, 3), "number": torch.tensor(2.5), "turned": torch.arange(6.0).view(2, 3).T}
    state = State(model, {"m": torch.arange(1000.0)}, {"step": 1})
    taken = Snapshot(CPU).take(state)
    for name, tensor in model.items():
        assert torch.equal(taken.model[name], tensor)
        assert taken.model[name].dtype == tensor.dtype
    model["turned"].zero_()
    state.optimizer["m"].zero_()
    assert taken.model["turned"].sum() == 15
    assert torch.equal(taken.optimizer["m"], torch.arange(1000.0))
    file = io.BytesIO()
    torch.save(taken.model["number"], file)
    assert len(file.getvalue()) < 2000, "torch.save writes the whole storage of a tensor"


def test_who_waits_for_a_save_shows_signs_of_life_as_long_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "NAP_SECONDS", 0.01)
    beats, gate = list[str](), threading.Event()

    class Marks(NoMarks):
        def enter(self, section: str, step: int = -1) -> None:
            beats.append(section)

    saver = Saver(Checkpointer(tmp_path), Snapshot(CPU))

    def write(_state: State, link: Any) -> None:
        for _ in range(5):
            known, until = len(beats), time.monotonic() + WAIT_SECONDS
            link.enter("save")
            while len(beats) == known and time.monotonic() < until:  # who waits may be slow to look
                time.sleep(0.001)
        link.enter("communication")  # as Group does while it waits for another rank
        assert gate.wait(WAIT_SECONDS)

    saver.begin(1, State({"a": torch.ones(3)}, {}, {}), export=saving.Export(tmp_path / "x.pt", write))
    assert saver.land(Marks(), patience_seconds=1.0) is None
    assert (beats.count("save") >= 5, beats[-1]) == (True, "communication"), "else it is blamed for a lost node"
    assert saver.is_flying
    gate.set()
    saved = saver.land(Marks())
    assert saved
    assert saved.path == tmp_path / "step_00000001"


def test_a_failed_save_lets_go_of_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies, take = list[weakref.ref[Tensor]](), Snapshot.take

    def noted(self: Snapshot, state: State) -> State:
        taken = take(self, state)
        copies.append(weakref.ref(taken.model["a"]))
        return taken

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Snapshot, "take", noted)
    monkeypatch.setattr(checkpoint, "save_file", full)
    parts = stand_in(0, "retry")
    parts.saver = Saver(Checkpointer(tmp_path), Snapshot(CPU))
    gc.disable()
    try:
        parts.saver.begin(1, State({"a": torch.ones(3)}, {}, {}))
        milestones.land(parts)
        assert caplog.text.count("No space left") == 1
        assert [ref() for ref in copies] == [None]
    finally:
        gc.enable()


def stand_in(rank: int, policy: str) -> Any:
    """As much of a worker as landing needs."""
    made: Any = SimpleNamespace(link=NoMarks(), config=SimpleNamespace(), council=SimpleNamespace())
    made.config.checkpoint, made.council.group = SimpleNamespace(on_full=policy), SimpleNamespace(rank=rank)
    made.tell = lambda *_, **__: None
    return made


def test_a_checkpoint_is_told_though_its_documented_file_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = legacy.publish

    def publish(path: Path, content: Mapping[str, Any], **named: Any) -> None:
        if path.name == "step_2.pt":
            raise LockstepError("full", where=str(path), exit_code=ExitCode.IO)
        write(path, content, **named)

    monkeypatch.setattr(legacy, "publish", publish)
    settings = {**SMALL, "training.checkpoint_dir": str(tmp_path / "pt"), "checkpoint.on_full": "retry"}
    recorder = watching(lambda _: None)
    run(tmp_path, settings, recorder=recorder)
    assert recorder.of("save") == [2, 4]
    assert recorder.of("export") == [4]
    assert caplog.text.count("Training goes on without this checkpoint") == 1


@pytest.mark.parametrize("policy", ["retry", "stop"])
def test_the_first_rank_shows_what_another_one_failed_of(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """The lines of the others go to their logs only."""
    error = LockstepError("full (rank 1 on node)", exit_code=ExitCode.IO)
    error.secondary = True

    def fail(*_: object, **__: object) -> None:
        raise error

    for rank in (1, 0):
        assert caplog.text == ""
        parts = stand_in(rank, policy)
        parts.saver = SimpleNamespace(land=fail)
        milestones._make_way(parts, strict=False)
    assert caplog.text.count("full (rank 1 on node)") == 1
