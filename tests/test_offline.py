"""Every family learns its built-in text within a minute, on a machine that cannot open a connection (159, 160)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.runtime.host_time import own_seconds
from tests.conftest import Outcome

Run = Callable[..., Outcome]
LEAST_FALL = {"llama": 1.0, "mlm": 0.4, "llada": 1.5, "ad": 0.8}  # nats, of the validation against the first loss
STEPS = 60


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No socket reaches anybody; who tries is remembered. No variable says that there is no network."""
    addresses: list[Any] = []

    def refused(_: socket.socket | None, address: Any) -> None:
        addresses.append(address)
        raise OSError("blocked")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket.socket, "connect_ex", refused)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: refused(None, names))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return addresses


def test_the_block_holds(tried: list[Any]) -> None:
    """The control."""
    with pytest.raises(OSError, match="blocked"):
        socket.create_connection(("127.0.0.1", 9))
    with socket.socket() as one, pytest.raises(OSError, match="blocked"):
        one.connect(("127.0.0.1", 9))
    assert len(tried) == 2


@pytest.mark.parametrize("family", list(LEAST_FALL))
def test_it_learns_offline_in_a_minute(family: str, lockstep: Run, in_dir: Path, tried: list[Any]) -> None:
    """With a cache of its own: the corpus is prepared within the minute."""
    began = own_seconds()  # of this process: others may load the machine
    words = ("--max-steps", str(STEPS), "--device", "cpu", "--name", "run", "data.num_workers=0",
             f"data.cache_dir={in_dir / 'cache'}", "system.threads=1")  # fmt: skip
    ended = lockstep("train", family, "tiny", *words)
    assert ended.code == 0, ended.text
    assert own_seconds() - began < 60
    assert tried == []
    events = [json.loads(line) for line in Path("runs/run/events.jsonl").read_text().splitlines()]
    first = next(event["loss"] for event in events if event["kind"] == "step")
    last = [event["val_loss"] for event in events if event["kind"] == "eval"][-1]
    assert first - last > LEAST_FALL[family], (first, last)
