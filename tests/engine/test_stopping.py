"""Stop signals and signs of life at the edges of training: the rehearsal, long saves, the sample, the closing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import rundir
from lockstep.engine import loop, saving, train
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.engine.parts import Parts
from lockstep.engine.saving import Pulse
from lockstep.errors import Stopped
from lockstep.launch.link import Link
from lockstep.report.jsonl import EventSink
from lockstep.runtime.signals import StopRequest
from tests.conftest import Outcome

Cli = Callable[..., Outcome]
TINY = ("train", "llama", "tiny", "--device", "cpu", "--max-steps", "2", "training.eval_batches=1", "system.threads=1")

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every section that was entered."""
    entered: list[str] = []
    enter = Link.enter

    def noted(self: Link, section: str, step: int = -1) -> None:
        entered.append(section)
        enter(self, section, step)

    monkeypatch.setattr(Link, "enter", noted)
    return entered


def test_a_stop_request_raises_once() -> None:
    stop = StopRequest()
    with pytest.raises(Stopped):
        stop.receive(signal.SIGTERM, None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        stop.receive(number, None)
    assert stop.error().exit_code == 143


def test_a_second_ctrl_c_hurries_a_patient_run() -> None:
    stop = StopRequest()
    stop.patient = True
    stop.receive(signal.SIGINT, None)
    stop.receive(signal.SIGTERM, None)
    with pytest.raises(Stopped):
        stop.receive(signal.SIGINT, None)


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_signal_while_closing_does_not_disturb(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch, by_signal: bool
) -> None:
    """The run ends by a signal, or by an error; then another signal comes while the end is written down."""
    said: list[str] = []
    event = EventSink.event

    def interrupted(self: EventSink, kind: str, fields: Any) -> None:
        if kind in ("end", "fault"):
            signal.raise_signal(signal.SIGTERM)
            said.append(kind)
        event(self, kind, fields)

    def end(_parts: Parts) -> None:
        for _ in range(2 if by_signal else 0):
            signal.raise_signal(signal.SIGINT)
        raise ValueError("something else")

    monkeypatch.setattr(EventSink, "event", interrupted)
    monkeypatch.setattr(loop, "run", end)
    ended = lockstep(*TINY, "--name", "a")
    assert (ended.code, said) == ((130, ["end"]) if by_signal else (1, ["fault"])), ended.text
    assert "failed too" not in ended.text


@pytest.mark.parametrize(("heard", "code"), [(True, 143), (False, 1)])
def test_losing_a_peer_after_a_stop_is_a_stop(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch, heard: bool, code: int
) -> None:
    """All are asked at once, but one hears it a moment before it has become patient, and leaves at once."""

    def lose(_parts: Parts) -> None:
        if heard:
            signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711")

    monkeypatch.setattr(loop, "run", lose)
    assert lockstep(*TINY, "--name", "a").code == code


@pytest.mark.parametrize(("heard", "code"), [(True, 143), (False, 1)])
def test_a_stop_that_a_compiler_takes_for_its_own_error_is_a_stop(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch, heard: bool, code: int
) -> None:
    """The first step compiles for a while, and the run is not patient yet."""

    def compile_it(*_: object) -> None:
        try:
            if heard:
                signal.raise_signal(signal.SIGTERM)
            raise OSError("no ptxas")
        except Exception:
            raise RuntimeError("backend='inductor' raised:") from None

    monkeypatch.setattr(train, "rehearse", compile_it)
    ended = lockstep(*TINY, "--name", "a")
    assert ended.code == code, ended.text
    assert (in_dir / "runs/a/failure.json").exists() is not heard


@pytest.mark.parametrize("code", [0, None])
def test_leaving_training_with_code_0_is_no_success(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    def leave(_parts: Parts) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(loop, "run", leave)
    ended = lockstep(*TINY, "--name", "a")
    assert ended.code == 1
    record = json.loads((in_dir / "runs/a/failure.json").read_text())
    assert (record["exit_code"], record["cause"]) == (1, "left training with exit code 0")


class Counted:
    """Marks that are only counted."""

    def __init__(self) -> None:
        self.count = 0

    def enter(self, section: str, step: int = -1) -> None:
        self.count += section == "save"

    def busy(self, step: int, seconds: float) -> None: ...


def test_a_long_save_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each chunk that is hashed."""
    monkeypatch.setattr(rundir, "HASH_CHUNK_BYTES", 1024)
    saver, link = Checkpointer(tmp_path), Counted()
    saver.link = link
    path = saver.save(1, State({"a": torch.zeros(10_000)}, {"b": torch.zeros(5_000)}, {"x": 1}))
    assert link.count > sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1024 > 50


def test_the_documented_file_and_the_sample_show_signs_of_life(
    in_dir: Path, lockstep: Cli, marks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[str, int] = {}
    pulses, draw = list[Pulse](), train.draw_sample

    def noted(*args: Any) -> str:
        before["evaluate"] = marks.count("evaluate")
        before["save"] = sum(pulse.count for pulse in pulses)
        return draw(*args)

    def made() -> Pulse:  # of the thread that writes; who waits for it passes them on (test_saving.py)
        pulses.append(Pulse())
        return pulses[-1]

    monkeypatch.setattr(saving, "Pulse", made)
    monkeypatch.setattr(train, "draw_sample", noted)
    sample = ("report.sample_prompt=Once", "report.sample_tokens=9", "training.checkpoint_dir=documented")
    assert lockstep(*TINY, *sample).code == 0
    assert marks.count("evaluate") - before["evaluate"] >= 9
    assert before["save"] > 30, "each tensor of the documented file is one"
