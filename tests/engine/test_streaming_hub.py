"""A stream from the hub: only what is asked for travels, training begins before the rest, a lost hub is named."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine import streaming
from lockstep.errors import LockstepError, Stopped
from lockstep.runtime.signals import StopRequest
from tests.engine.streams import chunks
from tests.engine.test_streaming_runs import base, stopped_child, waiting
from tests.gates.training import run
from tests.hub.corpora import text
from tests.hub.fixtures import loopback
from tests.hub.server import LoopbackHub

__all__ = ["loopback"]

NAME, FILE = "someone/stories", "train.jsonl"
DOCUMENTS = 20_000  # some 11 MB, in one file; it travels in blocks of 1 MiB

pytestmark = pytest.mark.network


@pytest.fixture
def settings(in_dir: Path, loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("DATASET_CACHE_DIR", str(in_dir / "cache"))
    for name, characters in (("HEAD", 16_000), ("FIRST", 4_000), ("LARGEST", 4_000)):
        monkeypatch.setattr(streaming, f"{name}_CHARACTERS", characters)
    lines = "\n".join(json.dumps({"text": text(number)}) for number in range(DOCUMENTS))
    loopback.add(NAME, {FILE: lines})
    return {
        "data.dataset_name": NAME,
        "data.streaming": True,
        "data.tokenizer_name": "bytes",
        "training.context_length": 64,
        "training.batch_size": 24,
        "training.max_steps": 20,
        "training.eval_interval": 0,
    }


def size(loopback: LoopbackHub) -> int:
    (repo,) = loopback.repos.values()
    return len(next(iter(repo.commits.values()))[FILE])


def test_only_the_part_that_is_asked_for_travels(in_dir: Path, settings: dict[str, Any], loopback: LoopbackHub) -> None:
    run(in_dir / "run", {**settings, "data.max_train_samples": 20, "training.max_steps": 4})
    assert loopback.sent_bytes < size(loopback) / 5
    (saved,) = (in_dir / "cache").glob("*/meta.json")
    (head,) = chunks(saved.parent)
    assert (head.documents, head.last) == (20, True)


def test_training_begins_before_the_rest_is_there_and_goes_on_where_it_stopped(
    in_dir: Path, settings: dict[str, Any], loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopRequest()
    stop.patient = True
    with monkeypatch.context() as patch:
        stopped_child(patch)
        waited = waiting(patch, lambda _: stop.receive(signal.SIGTERM, None))
        with pytest.raises(Stopped):
            run(in_dir / "first", settings, stop=stop)
    assert waited[0]._step > 2, "it trained on the head"
    assert loopback.sent_bytes < size(loopback) / 5
    (point,) = (in_dir / "first" / "checkpoints").iterdir()
    loopback.forget()
    _, recorder = run(in_dir / "second", settings, point=point)
    assert len(recorder.records) == 20 - waited[0]._step
    assert len(chunks(base(in_dir))) > 2
    assert loopback.sent_bytes < size(loopback) / 5
    loopback.stop()
    _, again = run(in_dir / "third", settings)  # what was fetched once needs no hub
    assert [record.loss for record in again.records[-3:]] == [record.loss for record in recorder.records[-3:]]


@pytest.mark.slow
def test_a_hub_that_is_gone_ends_the_run_with_66(
    in_dir: Path, settings: dict[str, Any], loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        loopback.stop()

    with monkeypatch.context() as patch:
        from lockstep.engine import feed

        start = feed.Child._start
        patch.setattr(feed.Child, "_start", lambda self: (gone(), start(self))[1])
        with pytest.raises(LockstepError) as caught:
            run(in_dir / "run", settings)
    assert caught.value.exit_code == 66
    assert caught.value.between_steps
