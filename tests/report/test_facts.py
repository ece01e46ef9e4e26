"""How the GPU is doing goes into the step records: what is known, only when it is known; nothing of it on the CPU."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lockstep.engine import train
from lockstep.report.jsonl import EventSink
from lockstep.runtime.gpu_facts import Facts

KNOWN = Facts(gpu_utilisation=97, gpu_memory_used_bytes=8 << 30, gpu_temperature_c=61, gpu_power_watts=402.5)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_step_has_the_facts_of_its_moment(tmp_path: Path, record) -> None:
    moments = iter([{}, asdict(KNOWN), asdict(Facts(3, None, None))])
    sink = EventSink(tmp_path / "events.jsonl", facts=lambda: next(moments))
    for step in range(3):
        sink.write(record(step))
    sink.event("end", {"step": 3})  # asks for no more facts
    sink.close()
    before, known, partly, end = lines(tmp_path / "events.jsonl")
    names = set(asdict(KNOWN))
    assert not names & set(before)
    assert not names & set(end)
    assert {name: known[name] for name in names} == asdict(KNOWN)
    assert (partly["gpu_utilisation"], partly["gpu_temperature_c"]) == (3, None)
    assert set(known) - names == set(before), "and nothing else has changed"


def test_facts_beside_a_loss_that_is_no_number(tmp_path: Path, record) -> None:
    sink = EventSink(tmp_path / "events.jsonl", facts=lambda: {"gpu_power_watts": math.nan, "gpu_utilisation": 5})
    sink.write(record(0, loss=math.inf))
    sink.close()
    (step,) = lines(tmp_path / "events.jsonl")
    assert (step["loss"], step["gpu_power_watts"], step["gpu_utilisation"]) == (None, None, 5)


def test_nobody_is_asked_on_the_cpu(tmp_path: Path) -> None:
    threads = threading.active_count()
    sampler = train.watch_gpu(torch.device("cpu"), tmp_path)
    assert sampler.latest() is None
    assert threading.active_count() == threads
    sampler.close()
    assert list(tmp_path.iterdir()) == []
