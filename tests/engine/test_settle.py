"""What a configuration leaves open is decided once, said once, recorded, and the same for every worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.engine import settle
from lockstep.errors import ConfigError, ExitCode, NotFoundError
from tests.conftest import Outcome
from tests.data.stories import write_stories

QUICK = ("--device", "cpu", "--max-steps", "1", "training.eval_batches=1", "report.tensorboard=false")


def decided(*flags: tuple[str, str | None], preset: str = "production") -> settle.Decided:
    return settle.decide(load("llama", preset=preset, flags=flags).config)


def test_without_a_hub_auto_takes_what_is_there_and_says_why(in_dir: Path) -> None:
    """AB13, item 43: wikitext and the model's own tokenizer, else what is built in, in one loud line each."""
    made = decided()
    assert made["dataset_name"][0] == "builtin"
    assert made["tokenizer_name"][0] == "builtin"
    assert "wikitext" in made["dataset_name"][1]
    assert "meta-llama/Llama-3.1-8B-Instruct" in made["tokenizer_name"][1]
    assert len(settle.lines(made)) == 2


def test_what_is_named_is_not_touched(in_dir: Path) -> None:
    assert decided(preset="tiny") == {}
    for name in ("wikitext", "some/thing:x@y"):  # never replaced: an error of its own
        with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE"):
            decided(("dataset", name), ("tokenizer-name", "bytes"))


def test_files_of_ones_own_need_no_hub(in_dir: Path) -> None:
    made = decided(("data-path", "x.txt"), ("tokenizer-name", "bytes"))
    assert made == {"dataset_name": ("text", "")}


@pytest.mark.parametrize("names", ["nobody/nothing|builtin", "nobody/nothing | text | builtin"])
def test_a_list_takes_the_first_that_can_be_had(in_dir: Path, names: str) -> None:
    write_stories(in_dir)
    flags = [("tokenizer-name", "bytes")] + ([("data-path", "stories.jsonl")] if "text" in names else [])
    value, line = decided(*flags, ("dataset", names))["dataset_name"]
    assert value == ("text" if "text" in names else "builtin")
    assert "no nobody/nothing" in line
    assert line.endswith(f"training on {value}")


def test_the_last_of_a_list_is_an_error_of_its_own(in_dir: Path) -> None:
    with pytest.raises(NotFoundError, match="no/body"):
        decided(("dataset", "nobody/nothing|no/body"), preset="tiny")
    with pytest.raises(ConfigError, match="empty place"):
        decided(("dataset", "a/b||builtin"))


def test_workers_are_told_and_do_not_ask(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("llama", preset="production")
    known = settle.settled(loaded, {"dataset_name": ("wikitext", "because"), "tokenizer_name": ("a/b", "so")})
    monkeypatch.setenv(settle.SETTLED, settle.for_workers(known)[settle.SETTLED])
    monkeypatch.setattr("lockstep.runtime.hub.available", None)  # would fail if it were asked
    again = settle.settled(loaded, settle.decide(loaded.config))
    assert again.config == known.config
    assert settle.lines(settle.decide(loaded.config)) == []
    assert again.origins["data.dataset_name"].layer == "auto"
    named = load("llama", preset="tiny", flags=[("dataset", "wikitext")])
    pinned = settle.settled(named, {"dataset_name": ("wikitext@" + "0" * 40, "")})
    monkeypatch.setenv(settle.SETTLED, settle.for_workers(pinned)[settle.SETTLED])
    again = settle.settled(named, settle.decide(named.config))
    assert again.config == pinned.config
    assert again.origins == named.origins  # it was named: only its commit was looked up


def test_a_run_records_what_was_taken(in_dir: Path, lockstep: Callable[..., Outcome]) -> None:
    write_stories(in_dir)
    words = ("data.dataset_name=nobody/nothing|text", "--data-path", "stories.jsonl", "--name", "x", *QUICK)
    ended = lockstep("train", "llama", "tiny", *words)
    assert ended.code == 0, ended.text
    assert ended.text.count("no nobody/nothing") == 1
    saved = json.loads((in_dir / "runs/x/config.json").read_text())
    assert saved["config"]["data"]["dataset_name"] == "text"
    assert saved["origins"]["data.dataset_name"].startswith("auto no nobody/nothing")
    again = lockstep("resume", "x")  # the choice stands: nobody is asked again
    assert again.code == 0, again.text
    assert "nobody/nothing" not in again.text


def test_stdin_is_refused_with_the_line_that_saves_it(in_dir: Path, lockstep: Callable[..., Outcome]) -> None:
    ended = lockstep("train", "llama", "tiny", "--data-path", "-", *QUICK)
    assert ended.code == ExitCode.USAGE, ended.text
    assert "stdin is not read as a dataset" in ended.err
    assert "try: COMMAND > corpus.txt, then --data-path corpus.txt" in ended.err
    assert not (in_dir / "runs").exists()
