"""Ctrl-C and SIGTERM while a dataset is being prepared: at once, with the right code, and nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.tokenize import train_bpe
from lockstep.errors import DataError, Stopped
from lockstep.runtime.signals import UNSTOPPABLE, listening


def random_words(characters: int, seed: int = 0) -> str:
    """Hardly one twice, so that there is much to count and to merge."""
    letters = np.random.default_rng(seed).integers(97, 123, characters, dtype=np.uint8)
    letters[::9] = 32
    letters[::900] = 10
    return letters.tobytes().decode()


@pytest.mark.parametrize(
    ("number", "stage", "code"),
    [
        (signal.SIGINT, "Training", 130),
        pytest.param(signal.SIGTERM, "Training", 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "Tokenising", 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "Tokenising", 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_preparation_at_once(in_dir: Path, number: signal.Signals, stage: str, code: int) -> None:
    lines = [json.dumps(random_words(24 << 20, seed)) for seed in range(2)]
    (in_dir / "long.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = "builtin" if stage == "Training" else "tokenizer"
    settings = ["data.data_path=long.jsonl", "data.cache_dir=cache", f"data.tokenizer_name={tokenizer}"]
    command = ["prepare", "llama", "tiny", *settings, "model.vocab_size=4096"]
    if stage != "Training":
        (in_dir / "tokenizer").mkdir()
        train_bpe([random_words(20_000)], 400).save(in_dir / "tokenizer")
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    assert any(line.startswith(stage) for line in process.stdout), "it ended before"
    process.send_signal(number)
    sent = time.monotonic()
    try:
        said, _ = process.communicate(timeout=4)  # it is asked for one second; the rest of the work takes far longer
    finally:
        process.kill()
    print(f"{number.name} at {stage}: {time.monotonic() - sent:.2f} s")
    assert process.returncode == code, said
    assert f"stopped by {number.name}" in said
    assert {path.suffix for path in (in_dir / "cache").iterdir()} <= {".lock", ".json"}  # no folder, whole or half


def test_a_stop_is_heard_while_the_library_works() -> None:
    """In this process: the call is left to itself, and asks for no more texts."""
    asked, left = 0, threading.Event()
    text = random_words(1000)

    def texts() -> Iterator[str]:
        nonlocal asked
        for asked in range(1, 5000):
            if asked == 300:
                os.kill(os.getpid(), signal.SIGTERM)
                left.wait(30)  # the main thread has its turn, and does not wait for this one
            yield text

    with listening(), pytest.raises(Stopped):
        train_bpe(texts(), 300)
    left.set()
    end = time.monotonic() + 30
    while any(thread.name == UNSTOPPABLE for thread in threading.enumerate()):
        assert time.monotonic() < end, "the thread goes on"
        time.sleep(0.01)
    assert 300 <= asked < 600


def test_what_the_texts_raise_is_raised_here() -> None:
    def texts() -> Iterator[str]:
        yield "abc"
        raise DataError("unreadable")

    with pytest.raises(DataError, match="unreadable"):
        train_bpe(texts(), 300)
