"""Whatever a hub does, there is one message, exit code 66, and nothing half in the cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.engine import settle
from tests.conftest import Outcome
from tests.hub import corpora
from tests.hub.server import Fault, LoopbackHub, sha256

CANARY = "hf_CanaryThatNobodyMayWriteDown"
DATA = "wikitext-103-raw-v1/train-00000-of-00002.parquet"
MOST_REQUESTS = 20  # to list, and for one file, which the library asks for six times
FAULTS = {  # name -> (what the hub does, to which file, what the message says)
    "unreachable": (None, "", "cannot be reached"),
    "401": (Fault("status", 401), "", "HF_TOKEN"),
    "403": (Fault("status", 403), "", "HF_TOKEN"),
    "404": (Fault("status", 404), "", "the hub has no dataset 'Salesforce/wikitext' for you"),
    "429": (Fault("status", 429), "", "429: too many requests"),
    "500": (Fault("status", 500), "", "answered 500"),
    "half list": (Fault("half"), "", "RemoteProtocolError"),
    "half file": (Fault("half"), DATA, "RemoteProtocolError"),
    "401 file": (Fault("status", 401), DATA, "HF_TOKEN"),
    "404 file": (Fault("status", 404), DATA, "Salesforce/wikitext"),
    "429 file": (Fault("status", 429), DATA, "429: too many requests"),
}


def prepare(lockstep: Callable[..., Outcome], folder: Path, *more: str) -> Outcome:
    wanted = ("data.dataset_name=wikitext", f"data.cache_dir={folder / 'cache'}", "data.tokenizer_name=bytes")
    return lockstep("prepare", "llama", "tiny", *wanted, *more)


def ask_for_trouble(lockstep: Callable[..., Outcome], loopback: LoopbackHub, folder: Path, name: str) -> float:
    """Prepare wikitext from a hub with that fault; returns the seconds it took to say no."""
    fault, file, expected = FAULTS[name]
    if fault is None:
        loopback.stop()
    else:
        loopback.fail("Salesforce/wikitext", Fault(fault.kind, fault.status), file=file)
    loopback.forget()
    start = time.monotonic()
    outcome = prepare(lockstep, folder, f"data.hf_token={CANARY}")
    seconds = time.monotonic() - start
    assert outcome.code == 66, outcome.text
    assert expected in outcome.err
    assert "wikitext" in outcome.err
    assert "HF_" in outcome.err  # a variable to look at
    assert "Traceback" not in outcome.text
    assert len(outcome.err.strip().splitlines()) <= 5, outcome.err
    assert len(loopback.asked) <= MOST_REQUESTS
    assert CANARY not in outcome.text
    nothing_half(loopback, folder)
    return seconds


def nothing_half(loopback: LoopbackHub, folder: Path) -> None:
    whole = {
        sha256(data) for repo in loopback.repos.values() for files in repo.commits.values() for data in files.values()
    }
    for path in (folder / "hf_home").rglob("*"):
        if path.is_file() and "blobs" in path.parts:
            assert sha256(path.read_bytes()) in whole, path
    for path in folder.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    assert not list((folder / "cache").rglob("meta.json"))


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_message(
    lockstep: Callable[..., Outcome], loopback: LoopbackHub, in_dir: Path, name: str
) -> None:
    corpora.add_wikitext(loopback)
    assert ask_for_trouble(lockstep, loopback, in_dir, name) < 30


def test_once_the_fault_is_gone_the_same_command_works_and_then_asks_nothing(
    lockstep: Callable[..., Outcome], loopback: LoopbackHub, in_dir: Path
) -> None:
    corpora.add_wikitext(loopback)
    ask_for_trouble(lockstep, loopback, in_dir, "half file")
    loopback.heal()
    assert prepare(lockstep, in_dir).code == 0
    loopback.forget()
    outcome = prepare(lockstep, in_dir)
    assert outcome.code == 0
    assert loopback.asked == []


@pytest.mark.parametrize("way", ["variable", "flag"])
def test_the_token_of_a_command_reaches_the_hub_and_no_file(
    lockstep: Callable[..., Outcome], loopback: LoopbackHub, in_dir: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    corpora.add_wikitext(loopback)
    loopback.private, loopback.allowed_token = {"Salesforce/wikitext"}, CANARY
    refused = prepare(lockstep, in_dir)
    assert refused.code == 66
    assert "HF_TOKEN is not set" in refused.err
    if way == "variable":
        monkeypatch.setenv("HF_TOKEN", CANARY)
    outcome = prepare(lockstep, in_dir, *(("--hf-token", CANARY) if way == "flag" else ()), "--log-level", "DEBUG")
    assert outcome.code == 0, outcome.text
    assert CANARY in {asked.token for asked in loopback.asked}
    assert CANARY not in outcome.text
    for path in in_dir.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    "words", [("data.dataset_name=imdb",), ("data.tokenizer_name=acme/tiny", "data.dataset_name=builtin")]
)
def test_a_name_server_that_never_answers(
    lockstep: Callable[..., Outcome], loopback: LoopbackHub, in_dir: Path, monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:  # fmt: skip
    """Item 43, X14: getaddrinfo knows no time-out; nothing but a thread left behind gets one away from it."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: time.sleep(60))
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    start = time.monotonic()
    outcome = prepare(lockstep, in_dir, *words)
    assert outcome.code == 66
    assert "cannot be reached in 5 s" in outcome.err
    assert len(outcome.err.strip().splitlines()) <= 3, outcome.err
    assert time.monotonic() - start < 30


def test_where_no_hub_can_be_reached_auto_takes_what_is_built_in(
    loopback: LoopbackHub, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 43: a dataset and a tokenizer are asked for, and both lines say why they were not had."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: time.sleep(60))
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    start = time.monotonic()
    decided = settle.decide(load("llama", preset="production").config)
    assert time.monotonic() - start < 20
    assert [decided[name][0] for name in ("dataset_name", "tokenizer_name")] == ["builtin", "builtin"]
    assert [line.count("cannot be reached in 5 s") for line in settle.lines(decided)] == [1, 1]
