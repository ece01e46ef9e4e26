"""The folder in which the commands of these tests run, and runs of today's version in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.golden.make_runs import HISTORIES, KEPT, LLAMA, NAN, TESTS, TEXTS, TRAIN
from tests.golden.player import Player


@pytest.fixture(scope="session")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """Commands, in a folder that holds the data of the kept runs."""
    player = Player(tmp_path_factory.mktemp("kept"))
    for name in TEXTS:
        shutil.copy(TESTS / name, player.folder)
    (player.folder / HISTORIES).parent.mkdir(parents=True)
    shutil.copy(KEPT / HISTORIES, player.folder / HISTORIES)
    yield player
    player.close()


@pytest.fixture(scope="session")
def anew(player: Player) -> Callable[[str], Path]:
    """A kept run as today's version makes it; once for all tests, which only read it."""

    def make(run: str) -> Path:
        folder = player.folder / "anew" / run
        if not folder.exists():
            code, fault = (71, NAN) if run == "nan" else (0, "")
            words = TRAIN.get(run, LLAMA)
            ended = player("train", *words, "--out", "anew", "--name", run, LOCKSTEP_FAULT=fault)
            assert ended.code == code, ended.text
        return folder

    return make


@pytest.fixture
def copy(player: Player) -> Iterator[Callable[..., Path]]:
    """Copies of kept runs in the player's folder, gone after the test."""
    runs = player.folder / "runs"

    def make(run: str, name: str = "copy") -> Path:
        return shutil.copytree(KEPT / run, runs / name)

    yield make
    shutil.rmtree(runs, ignore_errors=True)
