"""HF_ENDPOINT, HF_TOKEN and names as people write them: what is wrong is one message that names the word to change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from lockstep import start, verb_arguments
from lockstep.api import setting_words
from lockstep.config.load import load
from lockstep.data.options import DataOptions
from lockstep.errors import ConfigError, NotFoundError
from lockstep.runtime import env, hub, pins
from lockstep.sources import hf
from tests.conftest import Outcome
from tests.hub import corpora
from tests.hub.server import Fault, LoopbackHub

SECRET = "hf_CanaryThatNobodyMayWriteDown"
BAD_ENDPOINTS = ("http://127.0.0.1:99999", "http://[bad", "garbage", "ftp://x", "http://", "http://a b", "http://h:0")


def options(name: str, **more: Any) -> DataOptions:
    return DataOptions.model_validate({"dataset_name": name, **more})


@pytest.mark.parametrize("address", BAD_ENDPOINTS)
def test_an_endpoint_that_is_no_address_is_refused(
    in_dir: Path, lockstep: Callable[..., Outcome], loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    ended = lockstep("prepare", "llama", "tiny", "--dataset", "wikitext")
    assert ended.code == 2, ended.text
    assert "HF_ENDPOINT: " in ended.err
    assert "Traceback" not in ended.text
    with pytest.raises(ConfigError, match="is no address"):
        hub.client()


def test_an_endpoint_with_a_path_or_blanks_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, meant in (
        (" https://hub.example/ \n", "https://hub.example"),
        ("http://[::1]:80/x/", "http://[::1]:80/x"),
    ):
        monkeypatch.setenv("HF_ENDPOINT", given)
        assert hub.endpoint() == meant


def test_a_token_is_sent_without_the_blanks_around_it(
    in_dir: Path, loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora.add_imdb(loopback)
    loopback.private, loopback.allowed_token = {"stanfordnlp/imdb"}, SECRET
    monkeypatch.setenv("HF_TOKEN", f" {SECRET}\n")
    assert len(list(hf.build(options("imdb")).documents())) == 12
    assert SECRET in {asked.token for asked in loopback.asked}
    assert env.redact(f"<{SECRET}>") == "<***>"
    assert hub.token_of(SecretStr(f"{SECRET}\n")) == SECRET
    monkeypatch.setenv("HF_TOKEN", " \n")
    assert hub.bearer(" ") is None
    assert hub.token_of(SecretStr(" ")) is None


@pytest.mark.parametrize("token", [f"{SECRET}ü", f"{SECRET}\x1b[0m", f"{SECRET}\n{SECRET}", f"Bearer {SECRET}"])
@pytest.mark.parametrize("way", ["variable", "flag"])
def test_a_token_that_is_none_is_refused_and_not_repeated(
    in_dir: Path,
    lockstep: Callable[..., Outcome],
    loopback: LoopbackHub,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    way: str,
) -> None:
    if way == "variable":
        monkeypatch.setenv("HF_TOKEN", token)
    ended = lockstep("prepare", "llama", "tiny", "--dataset", "imdb", *(("--hf-token", token) if way == "flag" else ()))
    assert ended.code == 2, ended.text
    assert "HF_TOKEN: " in ended.err
    assert SECRET not in ended.text
    assert loopback.asked == []


@pytest.mark.parametrize(
    "form", [["--hf-token", SECRET], [f"--hf-token={SECRET}"], ["--data.hf_token", SECRET], [f"data.hf_token={SECRET}"],
             [f"data.hf-token={SECRET}"], [f"hf_token={SECRET}"]],
)  # fmt: skip
def test_a_token_is_not_on_the_command_line_of_a_worker(form: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["llama", "tiny", *form, "--max-steps", "3"]
    asked, settings = verb_arguments.parse("train", "", words, setting_words)
    loaded = load("llama", preset="tiny", flags=settings)
    assert loaded.config.data.hf_token is not None  # the control: it is a way to give one
    begun = start.Start.of(("lockstep", "train"), words, asked)
    assert begun.module == ("lockstep", "train", "llama", "tiny", "--max-steps", "3")
    assert start._environment(loaded)["HF_TOKEN"] == SECRET


def test_a_slip_in_a_name_is_answered_with_the_name(in_dir: Path) -> None:
    for name, near in (("wikitxt", "wikitext"), ("wikitext2", "wikitext"), ("imbd", "imdb"), ("buildin", "builtin")):
        with pytest.raises(ConfigError, match="names no dataset") as caught:
            hf.build(options(name))
        assert f"did you mean {near}?" in caught.value.hint


def test_messages_name_what_to_change(in_dir: Path, loopback: LoopbackHub) -> None:
    corpora.add_imdb(loopback)
    with pytest.raises(NotFoundError, match=f"no dataset 'no/body' for you \\({loopback.url}\\)") as caught:
        hf.build(options("no/body"))
    assert "HF_ENDPOINT" in caught.value.hint
    with pytest.raises(NotFoundError, match="has no revision 'v9'"):
        hf.build(options("imdb@v9"))
    loopback.fail("stanfordnlp/imdb", Fault("status", 429))
    with pytest.raises(NotFoundError, match="429: too many requests") as caught:
        hf.build(options("imdb"))
    assert caught.value.hint.startswith("wait, or set HF_TOKEN")


def test_a_hub_that_sends_whole_files_is_stopped_before_it_does(in_dir: Path, loopback: LoopbackHub) -> None:
    size = 32 << 20  # far more than the buffers between the two
    loopback.add("acme/big", {"train.jsonl": json.dumps({"text": "x" * size})})
    source = hf.build(options("acme/big", streaming=True))
    source.fetch_to(Path("parts"))
    loopback.fail("acme/big", Fault("deaf"))
    loopback.forget()
    with pytest.raises(NotFoundError, match="does not serve parts of files") as caught:
        list(source.documents())
    assert caught.value.hint.startswith("data.streaming=false")
    assert [asked.range for asked in loopback.asked] == [f"bytes=0-{(1 << 20) - 1}"]
    assert loopback.sent_bytes < size


def test_the_cache_may_lie_in_either_place(
    in_dir: Path, loopback: LoopbackHub, lockstep: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 34: moved, and without a network; what was pinned there is read, and nothing is written there."""
    assert DataOptions.model_fields["cache_dir"].default == pins.CACHE
    corpora.add_imdb(loopback, documents=60)
    words = ("prepare", "llama", "tiny", "--dataset", "imdb", "training.context_length=64")
    assert lockstep(*words).code == 0
    shutil.move(".cache", "cache")
    shutil.rmtree(in_dir / "hf_home")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = lockstep(*words)
    assert again.code == 0, again.text
    assert "Loaded train data from cache" in again.text
    shutil.rmtree("cache")  # the control
    assert lockstep(*words).code == 66


def test_a_pin_of_another_hub_helps_where_none_can_be_asked(
    in_dir: Path, loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora.add_imdb(loopback)
    known = hf.build(options("imdb")).fingerprint()
    other = LoopbackHub()
    monkeypatch.setenv("HF_ENDPOINT", other.url)
    with pytest.raises(NotFoundError, match="no dataset"):  # it could be asked, and it says no
        hf.build(options("imdb"))
    other.stop()
    assert hf.build(options("imdb")).fingerprint() == known
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hf.build(options("imdb")).fingerprint() == known
