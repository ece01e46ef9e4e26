"""Fixtures every test may use. Tests run in one process; a new process is the exception."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import disk

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Started in the background or under nohup: our processes are to hear what a person's would.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach the real hub


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long proofs (marker slow)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="long proof: bash test.sh --full")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--full"):
        disk.spare()


def pytest_collection_finish() -> None:
    """What was imported by now stays to the end: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_ends_with_the_test() -> Iterator[None]:
    """No handler of one test's run is there for the next."""
    yield
    if logs := sys.modules.get("lockstep.report.logs"):
        logs.close_logging()


@pytest.fixture(autouse=True)
def _no_gpu_was_given() -> Iterator[None]:
    """What a start in this process has said about its device is not for the next test."""
    yield
    os.environ.pop("LOCKSTEP_DEVICE", None)


@pytest.fixture(autouse=True)
def _is_nobodys_worker() -> Iterator[None]:
    """A test that plays a worker in this process would give it a guardian, which ends what it thinks hangs."""
    yield
    if link := sys.modules.get("lockstep.launch.link"):
        own = link._attached.get(os.getpid())
        assert own is None or own.work is None, f"from now on {own.work} watches the tests"


@dataclass(frozen=True)
class Outcome:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@pytest.fixture
def in_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def lockstep(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `lockstep ARGS` inside this process."""

    def run(*args: str) -> Outcome:
        from lockstep.cli import main

        code = main(list(args))
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture(scope="session")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture
def shared_cache(_prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One dataset cache for all tests that train: the corpus is prepared once."""
    monkeypatch.setenv("DATASET_CACHE_DIR", str(_prepared))
    return _prepared


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout without what was made in it."""
    made = shutil.ignore_patterns(".venv", ".git", "runs", ".cache", "__pycache__", ".slices", ".carry")
    return shutil.copytree(Path(__file__).parents[1], tmp_path / "clone", ignore=made, symlinks=True)
