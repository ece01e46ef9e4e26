"""A streamed dataset: only the bytes it needs are fetched, and a build that is killed again and again ends the same."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub import corpora
from tests.hub.server import LoopbackHub
from tests.hub.test_doors import child_environment

NAME, RECORD_BYTES, MOST_FETCHED = "someone/stories", 2000, 1.3


@functools.cache
def story(number: int) -> str:
    return corpora.text(number, sentences=30)


def record(number: int) -> bytes:
    """A line of the file, each of one length."""
    start = f'{{"text": "{number:08d} '
    return f'{start}{story(number % 997)[: RECORD_BYTES - len(start) - 3]}"}}\n'.encode()


class Stories(bytes):
    """A large file of which only the parts exist that somebody asks for."""

    size: int

    def __new__(cls, size: int) -> Stories:
        made = super().__new__(cls, b"stories")
        made.size = size
        return made

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: Any) -> Any:
        first, after = part.start, min(part.stop, self.size)
        lines = range(first // RECORD_BYTES, -(-after // RECORD_BYTES))
        return b"".join(map(record, lines))[first - lines.start * RECORD_BYTES :][: after - first]


class Builds:
    """`lockstep prepare` in processes of their own, which can be killed."""

    def __init__(self, hub: LoopbackHub, folder: Path, *words: str) -> None:
        self.hub, self.folder, self.words = hub, folder, words
        self.running: subprocess.Popen[str] | None = None

    def start(self, cache: Path, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lockstep", "prepare", "llama", "tiny", "--dataset", NAME, *self.words, *words]
        environment = child_environment(self.hub, self.folder) | {"DATASET_CACHE_DIR": str(cache)}
        self.running = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self.running

    def whole(self, cache: Path, *words: str) -> dict[str, Any]:
        """A build to its end: the key, and what each file of the dataset holds."""
        process = self.start(cache, *words)
        said = process.communicate()[0]
        assert process.returncode == 0, said
        assert not [*cache.glob("*.parts"), *cache.glob("*.tmp-*")]
        (manifest,) = cache.glob("*/manifest.json")
        return {"key": manifest.parent.name} | json.loads(manifest.read_text(encoding="utf-8"))

    def killed(self, cache: Path, when: Callable[[], bool]) -> None:
        process = self.start(cache)
        while not when():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not [*cache.glob("*/manifest.json")], "nothing half is taken for a dataset"
        assert [*cache.glob("*.parts")]


@pytest.fixture
def builds(in_dir: Path, loopback: LoopbackHub) -> Iterator[Builds]:
    made = Builds(loopback, in_dir, "--streaming", "true", "training.context_length=256")
    yield made
    if made.running and made.running.poll() is None:
        made.running.kill()
        made.running.communicate()


def check(hub: LoopbackHub, builds: Builds, documents: int, moments: list[float | str]) -> dict[str, Any]:
    """Build in peace, and once more with a kill at each moment: a share of what must be fetched, or `writing`."""
    needed, builds.words = documents * RECORD_BYTES, (*builds.words, "--max-samples", str(documents))
    hub.forget()
    peaceful = builds.whole(builds.folder / "peaceful")
    fetched = hub.sent_bytes
    assert needed <= fetched <= MOST_FETCHED * needed, fetched / needed
    assert all(asked.range for asked in hub.asked if asked.path.endswith("train.jsonl"))
    hub.forget()
    cache = builds.folder / "killed"
    for moment in moments:
        if moment == "writing":
            builds.killed(cache, lambda: any(cache.glob("*.tmp-*/train/tokens.npy")))
        else:
            builds.killed(cache, lambda least=float(moment) * needed: hub.sent_bytes >= least)
    assert builds.whole(cache) == peaceful
    assert hub.sent_bytes <= MOST_FETCHED * needed, hub.sent_bytes / needed
    print(f"needed {needed:,} bytes, fetched in peace {fetched:,}, with {len(moments)} kills {hub.sent_bytes:,}")
    return peaceful


def test_a_killed_build_goes_on_and_ends_the_same(loopback: LoopbackHub, builds: Builds) -> None:
    """20 MB of which 8 are wanted; the download of all 20 has the same key and the same rows."""
    loopback.add(NAME, {"train.jsonl": Stories(20_000_000)[0:20_000_000]})
    builds.words += ("--tokenizer-name", "bytes")
    made = check(loopback, builds, 4_000, [0.5, "writing"])
    loopback.forget()
    assert builds.whole(builds.folder / "downloaded", "--streaming", "false") == made
    assert loopback.sent_bytes > 20_000_000


@pytest.mark.slow
def test_two_gigabytes_killed_at_five_moments(loopback: LoopbackHub, builds: Builds) -> None:
    """Item 87 at size: 50,000 documents of a file of 2 GB."""
    loopback.add(NAME, {"train.jsonl": Stories(2_000_000_000)})
    builds.words += ("--tokenizer-name", "builtin", "data.tokenizer_vocab_size=512")
    check(loopback, builds, 50_000, [0.02, 0.35, 0.7, 1.0, "writing"])
