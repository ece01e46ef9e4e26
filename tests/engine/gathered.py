"""The histories of the smallest preset, for tests that open, copy or damage them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.api import resolve
from lockstep.config.schema import RunConfig
from lockstep.data.options import HistoryOptions
from lockstep.engine.prepare import Prepared
from lockstep.engine.prepare import prepare as prepare_any
from lockstep.objectives.distill import Distill
from tests.gates.training import flags

TASKS, STREAMS, STEPS = 25, 8, 100  # of the preset


def configuration(folder: Path, **data: Any) -> RunConfig:
    settings = {
        "data.data_path": folder,
        "system.device": "cpu",
        **{f"data.{key}": value for key, value in data.items()},
    }
    return resolve("ad", preset="tiny", flags=flags(settings)).config


def options_of(config: RunConfig) -> HistoryOptions:
    assert isinstance(config.data, HistoryOptions)
    return config.data


def prepare(config: RunConfig, actions: int = 5) -> Prepared:
    return prepare_any(config, Distill(), vocab_limit=actions)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The histories of the preset: collected once, copied by whoever changes them."""
    folder = tmp_path_factory.mktemp("histories")
    prepare(configuration(folder))
    return folder


@pytest.fixture
def own(collected: Path, tmp_path: Path) -> Path:
    """A copy."""
    return Path(shutil.copytree(collected, tmp_path / "own"))


def file_in(folder: Path, suffix: str = "hdf5") -> Path:
    return folder / f"history_darkroom_PSRL_alg-seed42.{suffix}"
