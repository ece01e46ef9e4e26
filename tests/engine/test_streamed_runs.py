"""A run of an earlier version whose dataset grew while it trained: refused where its rows would be needed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome
from tests.gates.training import FEW_DOCUMENTS

Cli = Callable[..., Outcome]
WORDS = ("--device", "cpu", "--max-steps", "2", "training.context_length=16", "report.tensorboard=false")


@pytest.fixture
def streamed(in_dir: Path, lockstep: Cli) -> Path:
    """What such a run has left: the folder `stream` is the trace of who fetched for it."""
    words = ("data.streaming=true", "--data-path", FEW_DOCUMENTS, "--tokenizer-name", "bytes", "--name", "x")
    ended = lockstep("train", "llama", "tiny", *WORDS, *words)
    assert ended.code == 0, ended.text
    run = in_dir / "runs" / "x"
    (run / "stream").mkdir()
    (run / "stream" / "n0.log").write_text("Chunk 1: 7 rows, 40 so far\n", encoding="utf-8")
    return run


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_is_refused_with_the_command_that_trains_anew(streamed: Path, lockstep: Cli) -> None:
    before, last = content(streamed), "runs/x/checkpoints/step_00000002"
    for words in (
        ("resume", "x"),
        ("resume", last, "--name", "y"),
        ("resume", "x", "--prove"),
        ("train", "llama", "tiny", *WORDS, "--name", "x", "--checkpoint", "runs/x", "data.streaming=true"),
        ("eval", "x"),
    ):
        refused = lockstep(*words)
        assert refused.code == 2, (words, refused.text)
        assert "its dataset grew while it trained" in refused.err
        assert len(refused.err.splitlines()) == 2, "one error and what to do"
        assert content(streamed) == before
    command = shlex.split(refused.err.partition("try: ")[2])
    ended = lockstep(*command[1:])
    assert ended.code == 0, ended.text
    assert (streamed.parent / "x-anew" / "checkpoints" / "step_00000002").is_dir()
    assert content(streamed) == before


def test_its_weights_are_still_of_use(streamed: Path, lockstep: Cli) -> None:
    for words in (("sample", "x", "The"), ("export", "x", "--to", "hf"), ("diff", "x", "x")):
        ended = lockstep(*words)
        assert ended.code == 0, ended.text
