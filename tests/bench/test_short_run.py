"""A short real run as a measurement: what is made of its events, the text that is made for it, and how it fails."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench import short_run
from lockstep.bench.short_run import WARM_UP, Measured, lasting, made_documents, measured, with_made_rows
from lockstep.config.load import load
from lockstep.errors import LockstepError, Stopped
from lockstep.runtime import env, signals


def events(
    seconds: Sequence[float], *, workers: int = 1, tokens: int = 64, mfu: float | None = None
) -> list[dict[str, Any]]:
    """Of a run with two rows x 2 a worker: slow steps that warm up, then these."""
    start = {
        "kind": "start", "time": 100.0, "batch_size": 2, "accumulated": 2, "device": "CPU (2 threads)", "model": "m",
        "parameters": 10, "memory_bytes": {"weights": 1 << 30, "gradients": 1 << 30}, "precision": "fp32",
        "attention": "native_math", "batch": "2 rows x 2 x 16", "epoch_steps": 0.0,
    }  # fmt: skip
    steps = [
        {"kind": "step", "step": step, "time": 109.0 + step, "seconds": each, "tokens": tokens, "mfu": mfu,
         "memory_bytes": step}
        for step, each in enumerate([9.0] * WARM_UP + list(seconds))
    ]  # fmt: skip
    return [start, *steps, {"kind": "end", "time": 200.0, "workers": [{}] * workers if workers > 1 else []}]


def made(seconds: Sequence[float] = (0.5,), **more: Any) -> Measured:
    return measured(events(seconds, **more), steps=len(seconds))


def test_figures_by_hand() -> None:
    """Steps that warm up count for nothing, nor do those that the profiler watches."""
    told = events([0.4, 0.5, 0.6, 7.0, 3.0, 5.0, 7.0], mfu=0.5)
    told.insert(-1, {"kind": "profile", "step": WARM_UP + 6, "steps": 2, "parts_seconds": {"attention": 0.3},
                     "unnamed_seconds": {}})  # fmt: skip
    found = measured(told, steps=3)
    assert found.step_seconds == [0.4, 0.5, 0.6]
    assert (found.seconds, found.rows_per_second, found.tokens_per_second) == (0.5, 8.0, 128.0)
    assert (found.mfu, found.memory_bytes, found.start_seconds) == (0.5, WARM_UP + 2, 9.0)
    assert found.traced_seconds == 4.0, "of the two steps before the profile was told"
    assert found.parts_seconds == {"attention": 0.3}


def test_twice_the_workers_at_the_same_step_time_are_fully_efficient() -> None:
    one, two, late = made([0.5]), made([0.5], workers=2, tokens=128), made([1.0], workers=2)
    assert two.tokens_per_second == 256
    assert (one.efficiency(one), two.efficiency(one), late.efficiency(one)) == (1.0, 1.0, 0.5)
    with pytest.raises(LockstepError, match="told of 5 steps"):
        measured(events([]), steps=3)


def test_made_words_and_documents_are_as_in_a_language() -> None:
    documents = list(islice(made_documents(4000, row=512), 4000))
    lengths = [len(words) for words in documents]
    assert statistics.fmean(lengths) == pytest.approx(0.25 * 512, rel=0.1)
    assert max(lengths) <= 510
    assert statistics.median(lengths) < 0.8 * statistics.fmean(lengths), "few are long"
    often = Counter(word for words in documents for word in words)
    assert often["w1"] / often["w4"] == pytest.approx(4, rel=0.5)
    assert documents == list(made_documents(4000, row=512)), "the same each time"


def test_a_run_that_measures_saves_and_fetches_nothing(tmp_path: Path) -> None:
    """Whatever the user has set beside the steps."""
    set_before = {
        "training.checkpoint_dir": str(tmp_path / "pt"), "report.results_dir": str(tmp_path / "results"),
        "system.log_dir": str(tmp_path / "logs"), "data.data_path": "nowhere.txt", "training.max_steps": 10_000,
        "training.warmup_steps": 1000, "system.device": "cpu",
    }  # fmt: skip
    config = with_made_rows(load("llama", preset="tiny", overrides=set_before).config, tmp_path, workers=1)
    found = short_run.run(config, workers="1", steps=3, folder=tmp_path)
    assert len(found.step_seconds) == 3
    assert not (tmp_path / "run-1" / "checkpoints").exists() or not any((tmp_path / "run-1/checkpoints").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"run-1", "run-1.json", "made.jsonl", "cache", "latest"}
    assert env.saves(tmp_path / "run-1"), "only that run was told to keep nothing"


def test_a_run_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("llama", preset="tiny", overrides={"data.data_path": "nowhere.txt", "system.device": "cpu"}).config
    with pytest.raises(LockstepError, match=r"--gpus 2 ended with code 66:(.|\n)*nowhere.txt") as caught:
        short_run.run(config, workers="2", steps=1, folder=tmp_path)
    assert caught.value.exit_code == 66
    full = f"{tmp_path}/cache: building the cache failed: No space left on device"
    said = f"first\n{full}\n[GPU0]   log: {tmp_path}/run-2/output.txt\n\nlast"
    assert lasting(said, tmp_path) == ["first", full.replace(str(tmp_path), f"{tmp_path.parent}/..."), "", "last"]
    monkeypatch.setattr(short_run, "_ended", lambda *_, **__: (0, ""))  # and one that tells nothing is no figure
    with pytest.raises((LockstepError, OSError)):
        short_run.run(config, workers="1", steps=1, folder=tmp_path)


def test_a_signal_is_heard_while_a_run_talks(tmp_path: Path) -> None:
    """It talks without a pause, so that hardly any signal comes while its reader waits."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    until = time.monotonic() + 20
    talking = f"import time\nwhile time.monotonic() < {until}: print('x' * 4000)"
    with signals.listening():
        timer.start()
        with pytest.raises(Stopped):
            short_run._ended([sys.executable, "-c", talking], unsaved=tmp_path)
    assert time.monotonic() < until - 5
