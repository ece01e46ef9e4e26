"""A run stands on the commit it was started with, whatever the hub has by now; and what decides the key of its data."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import verb_arguments
from lockstep.api import setting_words
from lockstep.config.load import identity, load
from lockstep.data import cache
from lockstep.data.tokenize import ByteTokenizer
from lockstep.engine import choices, predecessor
from lockstep.objectives.causal import Causal
from tests.conftest import Outcome
from tests.data.stories import configuration
from tests.hub import corpora
from tests.hub.server import Fault, LoopbackHub
from tests.hub.test_doors import MODEL, SMALL, add_model

QUICK = ("--device", "cpu", "--max-steps", "1", "--max-samples", "80", "training.eval_batches=1",
         "report.tensorboard=false")  # fmt: skip


def data_of(run: str) -> dict[str, Any]:
    return json.loads(Path(f"runs/{run}/config.json").read_text())["config"]["data"]


def forget_everything(folder: Path) -> None:
    for left in (folder / ".cache", folder / "hf_home"):
        shutil.rmtree(left)


@pytest.mark.parametrize("name", ["imdb", "stanfordnlp/imdb:plain_text", "hf"])
def test_a_run_goes_on_with_its_own_commit(
    in_dir: Path, loopback: LoopbackHub, lockstep: Callable[..., Outcome], name: str
) -> None:
    """After `rm -rf .cache` and a new commit: by its name, and by `--resume auto` with the words it began with."""
    corpora.add_mixture(loopback)
    old = corpora.add_imdb(loopback, documents=60)
    words = ("train", "llama", "tiny", "--dataset", name, "training.context_length=64", *QUICK)
    first = lockstep(*words, "--name", "x")
    assert first.code == 0, first.text
    assert f"Dataset: {name}\n" in first.text
    taken = data_of("x")["dataset_name"]
    assert taken.startswith(f"{name}@")
    assert old in taken
    corpora.add_imdb(loopback, documents=70)
    forget_everything(in_dir)
    more = lockstep(*words, "--resume", "auto")
    assert more.code == 0, more.text
    assert "Nothing left to do" in more.text
    assert [path.name for path in (in_dir / "runs").iterdir() if not path.is_symlink()] == ["x"]
    forget_everything(in_dir)
    again = lockstep("resume", "x")
    assert again.code == 0, again.text
    assert "Nothing left to do" in again.text
    fresh = lockstep(*words, "--name", "y")  # the control: a new run has the new commit
    assert fresh.code == 0, fresh.text
    forget_everything(in_dir)
    assert lockstep(*words, "--name", "z").code == 0
    assert data_of("z")["dataset_name"] != taken


def test_another_dataset_is_another_run(in_dir: Path, loopback: LoopbackHub, lockstep: Callable[..., Outcome]) -> None:
    corpora.add_mixture(loopback)
    words = ("train", "llama", "tiny", "training.context_length=64", *QUICK)
    assert lockstep(*words, "--dataset", "wikitext", "--name", "x").code == 0
    other = lockstep(*words, "--dataset", "rajpurkar/squad", "--resume", "auto", "--name", "y", "min_words=0")
    assert "Nothing to resume" in other.text


@pytest.mark.parametrize("begun", ["with the hub", "without"])
def test_auto_goes_on_with_what_it_took(
    in_dir: Path, loopback: LoopbackHub, lockstep: Callable[..., Outcome], tmp_path: Path, begun: str
) -> None:
    """The answer of the hub is another one by then: the run is found, and nobody is asked."""
    if begun == "with the hub":
        corpora.add_wikitext(loopback)
        add_model(loopback, tmp_path / "model")
    words = ("train", "llama", "production", *SMALL, *QUICK)
    first = lockstep(*words, "--name", "x")
    assert first.code == 0, first.text
    taken = data_of("x")
    assert taken["tokenizer_name"] == (MODEL if begun == "with the hub" else "builtin")
    if begun == "with the hub":
        loopback.stop()
    else:
        corpora.add_wikitext(loopback)
        add_model(loopback, tmp_path / "model")
    loopback.forget()
    again = lockstep(*words, "--resume", "auto")
    assert again.code == 0, again.text
    assert "Nothing left to do" in again.text
    assert loopback.asked == []
    for other in (
        ("--dataset", "builtin|text") if begun == "with the hub" else ("--dataset", "wikitext"),
        ("--lr", "9e-5"),
    ):
        config = _asked(*words, *other, "--resume", "auto")
        found = predecessor.resolved_before(config, identity(config))
        assert found == {}, other


def _asked(*words: str) -> Any:
    parsed, settings = verb_arguments.parse("train", "", words[1:], setting_words)
    return load(parsed.family, preset=parsed.what, flags=settings).config


@pytest.mark.parametrize("trouble", ["half", "{}", "config only", "403 file", "fails later", "403 data"])
def test_auto_never_ends_a_run(
    in_dir: Path, loopback: LoopbackHub, lockstep: Callable[..., Outcome], tmp_path: Path, trouble: str
) -> None:
    """AB13: whatever comes of asking, `auto` takes what is built in and says why."""
    corpora.add_wikitext(loopback)
    add_model(loopback, tmp_path / "model")
    file = "wikitext-103-raw-v1/train-00000-of-00002.parquet"
    if trouble == "half":
        loopback.fail(MODEL, Fault("half"), file="tokenizer.json")
    elif trouble == "{}":
        loopback.add(MODEL, {"tokenizer.json": "{}"}, kind="models")
    elif trouble == "config only":  # the end of a text stands in another file: it is read
        text = (tmp_path / "model/tokenizer.json").read_text().replace("<|endoftext|>", "<end>")
        loopback.add(MODEL, {"tokenizer.json": text, "tokenizer_config.json": '{"eos_token": "<end>"}'}, kind="models")
    elif trouble == "403 file":
        loopback.fail(MODEL, Fault("status", 403), file="tokenizer.json")
    elif trouble == "fails later":
        loopback.fail(MODEL, Fault("wrong"), file="tokenizer.json")
    else:
        loopback.fail("Salesforce/wikitext", Fault("status", 403), file=file)
    for _ in range(2):  # the second time something is recorded
        ended = lockstep("train", "llama", "production", *SMALL, *QUICK)
        assert ended.code == 0, ended.text
        saved = data_of("latest")
        if "data" in trouble:
            assert saved["dataset_name"] == "builtin"
            assert "no wikitext (the hub" in ended.text
        elif trouble == "config only":
            assert saved["tokenizer_name"] == MODEL
        else:
            assert saved["tokenizer_name"] == "builtin"
            assert f"none of {MODEL} (" in ended.text


def test_the_key_is_made_of_what_is_in_it(
    in_dir: Path, loopback: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AB5: revision, config, split, tokenizer and format each make another entry; another name does not."""
    old = corpora.add_wikitext(loopback)
    corpora.add_wikitext(loopback, articles=50)

    def key(name: str, tokenizer: str = "bytes") -> str:
        config = configuration(dataset_name=name, data_path=None, tokenizer_name=tokenizer)
        source = choices.choose_source(config.data)
        choice = choices.choose_tokenizer(config.data, source, model_path="x", room=choices.Room(1000))
        return cache.key_of(choices.key_parts(config, Causal().columns, source=source, choice=choice))

    own = key("wikitext")
    assert key("Salesforce/wikitext:wikitext-103-raw-v1") == own
    assert key("wikitext@main") == own
    folder = tmp_path / "other"
    folder.mkdir()
    ByteTokenizer().save(folder)
    assert key("wikitext", str(folder)) == own
    path = folder / "tokenizer.json"
    path.write_text(re.sub(r"<\|endoftext\|>", "<end>", path.read_text()))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    found = {
        "revision": key(f"wikitext@{old}"),
        "config": key("wikitext:wikitext-2-raw-v1"),
        "split": key("wikitext:wikitext-103-raw-v1:test"),
        "tokenizer": key("wikitext", str(folder)),
    }
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    found["format"] = key("wikitext")
    assert len({own, *found.values()}) == len(found) + 1
