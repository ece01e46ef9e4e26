"""Files of models: from the cache first, verified, at one revision, and nothing of them is run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lockstep.errors import DataError, ExitCode, NotFoundError
from lockstep.runtime import hub, pins
from tests.hub.server import Fault, LoopbackHub

CANARY = "hf_CanaryThatNobodyMayWriteDown"
CONFIG = json.dumps({"model_type": "llama"})
WEIGHTS = bytes(range(256)) * 400


def tiny(loopback: LoopbackHub, **more: str | bytes) -> str:
    return loopback.add("acme/tiny", {"config.json": CONFIG, "model.safetensors": WEIGHTS, **more}, kind="models")


def test_a_file_is_downloaded_once_and_then_no_request_is_made(loopback: LoopbackHub) -> None:
    tiny(loopback)
    path = hub.download("acme/tiny", "config.json")
    assert path.read_text() == CONFIG
    loopback.forget()
    assert hub.download("acme/tiny", "config.json") == path
    assert loopback.asked == []
    loopback.stop()
    assert hub.available("acme/tiny", "config.json") == ""


def test_all_files_of_a_model_come_from_the_revision_that_was_met_first(loopback: LoopbackHub) -> None:
    tiny(loopback)
    hub.download("acme/tiny", "config.json")
    loopback.add("acme/tiny", {"config.json": "{}", "model.safetensors": b"new"}, kind="models")
    assert (hub.weights_folder("acme/tiny") / "model.safetensors").read_bytes() == WEIGHTS


def test_weights_in_parts(loopback: LoopbackHub) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    parts = {f"model-{n}.safetensors": WEIGHTS[n:] for n in (1, 2, 3)}
    loopback.add(
        "acme/big", {"config.json": CONFIG, "model.safetensors.index.json": index, **parts}, kind="models"
    )  # fmt: skip
    folder = hub.weights_folder("acme/big")
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors",
    }  # fmt: skip
    loopback.forget()
    assert hub.weights_folder("acme/big") == folder
    assert loopback.asked == []


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "model.bin", "a/b.safetensors"])
def test_an_index_that_names_something_else_is_refused(loopback: LoopbackHub, name: str) -> None:
    index = json.dumps({"weight_map": {"a": name}})
    loopback.add("acme/odd", {"config.json": CONFIG, "model.safetensors.index.json": index}, kind="models")
    with pytest.raises(DataError, match="not the name of a safetensors file"):
        hub.weights_folder("acme/odd")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": [1]}', '{"weight_map": null}', "[]", "{"])
def test_an_index_that_is_none_is_refused(loopback: LoopbackHub, index: str) -> None:
    loopback.add("acme/odd", {"config.json": CONFIG, "model.safetensors.index.json": index}, kind="models")
    with pytest.raises(DataError, match=r"no weight_map|expected a JSON object|unreadable"):
        hub.weights_folder("acme/odd")


def test_pickled_weights_are_not_fetched(loopback: LoopbackHub) -> None:
    loopback.add("acme/old", {"config.json": CONFIG, "pytorch_model.bin": b"pickle"}, kind="models")
    with pytest.raises(NotFoundError, match="no other form of weights is read"):
        hub.weights_folder("acme/old")
    assert "pytorch_model.bin" not in " ".join(loopback.fetched("acme/old"))


def test_code_of_a_model_is_neither_fetched_nor_run(
    loopback: LoopbackHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    touched = tmp_path / "touched"
    evil = f"import pathlib; pathlib.Path({str(touched)!r}).touch()"
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "evil.C"}, "_attn_implementation_internal": "a/b"}
    files = {"config.json": json.dumps(config), "model.safetensors": WEIGHTS, "evil.py": evil}
    loopback.add("acme/evil", files, kind="models")
    folder = hub.weights_folder("acme/evil")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert not touched.exists()
    assert "asks for code of its own (auto_map, _attn_implementation_internal), which is never run" in caplog.text
    exec(evil)  # the control: it would have
    assert touched.exists()


def test_a_broken_transfer_goes_on_where_it_stopped(loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what it keeps is a multiple of it
    tiny(loopback)
    hub.download("acme/tiny", "config.json")
    loopback.fail("acme/tiny", Fault("half", times=2), file="model.safetensors")  # the first question is HEAD
    assert (hub.weights_folder("acme/tiny") / "model.safetensors").read_bytes() == WEIGHTS
    assert {asked.range for asked in loopback.asked if asked.range} == {f"bytes={len(WEIGHTS) // 2}-"}


def test_a_busy_hub_is_asked_again(loopback: LoopbackHub) -> None:
    tiny(loopback)
    loopback.fail("acme/tiny", Fault("status", 503, times=1))
    assert hub.download("acme/tiny", "config.json").read_text() == CONFIG
    loopback.fail("acme/tiny", Fault("status", 503))
    with pytest.raises(NotFoundError, match="answered 503"):
        hub.download("acme/tiny", "model.safetensors")


def test_a_large_download_is_announced(loopback: LoopbackHub, caplog: pytest.LogCaptureFixture) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    files = {"config.json": CONFIG, "model.safetensors.index.json": index, "model-1.safetensors": WEIGHTS}
    loopback.add("acme/big", files, kind="models")
    with caplog.at_level("INFO", logger="lockstep"):
        hub.weights_folder("acme/big")
    assert "Downloading model-1.safetensors (1 of 1)" in caplog.text


def test_the_token_goes_into_the_header_to_the_hub_and_nowhere_else(
    loopback: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    tiny(loopback)
    loopback.private, loopback.allowed_token = {"acme/tiny"}, CANARY
    with pytest.raises(NotFoundError, match=r"known users only.*401.*HF_TOKEN is not set"):
        hub.download("acme/tiny", "config.json")
    with pytest.raises(NotFoundError, match=r"refuses model 'acme/tiny' to the owner of HF_TOKEN") as caught:
        hub.download("acme/tiny", "config.json", token=CANARY + "x")
    assert CANARY not in repr(caught.value) + str(caught.value) + repr(caught.value.__dict__)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    folder = hub.weights_folder("acme/tiny")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    large = [asked for asked in loopback.asked if asked.path.startswith("/large/")]
    assert large
    assert not any(asked.token for asked in large)  # another host: none of its business
    assert {asked.token for asked in loopback.asked if asked not in large} == {"", CANARY, CANARY + "x"}
    assert CANARY not in caplog.text
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes()


def test_forbidden_to_ask(loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(loopback)
    hub.download("acme/tiny", "config.json")
    loopback.forget()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.download("acme/tiny", "config.json").read_text() == CONFIG
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE forbids to ask") as caught:
        hub.weights_folder("acme/tiny")
    assert caught.value.exit_code == ExitCode.NOT_FOUND
    assert loopback.asked == []


def test_available_fetches_nothing(loopback: LoopbackHub) -> None:
    tiny(loopback)
    assert hub.available("acme/tiny", "config.json") == ""
    assert [(asked.method, asked.path) for asked in loopback.asked] == [
        ("HEAD", "/"), ("HEAD", "/acme/tiny/resolve/main/config.json"),
    ]  # fmt: skip
    assert "has no file tokenizer.json" in hub.available("acme/tiny", "tokenizer.json")
    assert "no name of the hub" in hub.available("tiny", "tokenizer.json")
    assert [asked.path for asked in loopback.asked].count("/") == 1, "one that has answered is not probed again"


def test_a_hub_that_cannot_be_reached_is_not_asked(loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(loopback)
    loopback.stop()
    assert "cannot be reached (ConnectError)" in hub.available("acme/other", "config.json")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", None)  # would fail if it were called
    assert "cannot be reached (ConnectError)" in hub.available("acme/tiny", "other.json")


def test_no_request_waits_for_ever(loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library sets no time-out for lists."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    loopback.add("acme/words", {"train.txt": "word"})
    loopback.fail("acme/words", Fault("silent"))
    begun = time.monotonic()
    with pytest.raises(NotFoundError, match=r"does not give dataset 'acme/words': .*timed out"):
        pins.pin(pins.Reference.parse("acme/words"), [])
    assert time.monotonic() - begun < 10
