"""The kept runs resume after the schema gained a setting and lost one: a run's identity can grow and shrink."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import saved
from lockstep.config.saved import Removed
from lockstep.config.section import setting
from tests.config.test_saved import added as added
from tests.conftest import Outcome
from tests.golden.make_runs import HISTORIES, KEPT, TESTS, TEXTS, TRAIN
from tests.golden.test_runs import LAST, MIDDLE, rewrite

pytestmark = pytest.mark.usefixtures("shared_cache")
Cli = Callable[..., Outcome]


@pytest.fixture
def run(in_dir: Path, request: pytest.FixtureRequest) -> Path:
    """A kept run that has ten steps to go, beside its data; saved with a setting that is gone since."""
    for name in TEXTS:
        shutil.copy(TESTS / name, in_dir)
    shutil.copytree(KEPT / HISTORIES.parts[0], in_dir / HISTORIES.parts[0])
    run = shutil.copytree(KEPT / request.param, in_dir / "runs" / "kept")
    shutil.rmtree(run / LAST)

    def older(content: bytes) -> bytes:
        tree: dict[str, Any] = json.loads(content)
        tree["about"]["identity"]["training.old_kernels"] = True
        tree["about"]["config"]["training"]["old_kernels"] = True
        return json.dumps(tree).encode()

    rewrite(run / MIDDLE / "run.json", older)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config["config"]["training"]["old_kernels"] = True
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return run


def gone(monkeypatch: pytest.MonkeyPatch, *harmless: Any) -> None:
    removed = Removed("there is one kind of kernels", "train a new run: --name NEW", harmless=harmless)
    monkeypatch.setitem(saved.REMOVED, "training.old_kernels", removed)


@pytest.mark.parametrize("run", list(TRAIN), indirect=True)
@pytest.mark.parametrize("how", ["by name", "auto"])
def test_it_resumes_after_a_setting_came_and_one_went(
    run: Path, how: str, added: Callable[..., None], lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = json.loads((run / "config.json").read_text(encoding="utf-8"))["family"]
    gone(monkeypatch, True)
    added(family, "training", "optimizer_kind", setting("adamw", "Which optimizer."))
    added(family, "system", "newer", setting(3, "Decides the numbers.", before=2))
    if how == "auto":
        words = ("train", *TRAIN[family], "--resume", "auto", "--system.newer", "2")
    else:
        words = ("resume", "runs/kept")
    ended = lockstep(*words)
    assert ended.code == 0, ended.text
    assert "Nothing to resume" not in ended.text
    assert (run / LAST / "run.json").is_file()
    identity = json.loads((run / LAST / "run.json").read_text(encoding="utf-8"))["about"]["identity"]
    assert (identity["training.optimizer_kind"], identity["system.newer"]) == ("adamw", 2)


@pytest.mark.parametrize("run", ["llama"], indirect=True)
def test_auto_names_the_settings_that_differ(
    run: Path, added: Callable[..., None], lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of the new setting is another than what held before: a new run, and the reason."""
    gone(monkeypatch, True)
    added("llama", "system", "newer", setting(3, "Decides the numbers.", before=2))
    ended = lockstep(
        "train", *TRAIN["llama"], "--resume", "auto", "--max-steps", "2", "--lr", "0.1", "--warmup-steps", "1"
    )
    assert ended.code == 0, ended.text
    for line in ("system.newer: 2 in kept, 3 now", "training.learning_rate: 0.003 in kept, 0.1 now"):
        assert line in ended.text
    assert not (run / LAST).exists()


@pytest.mark.parametrize("run", ["llama"], indirect=True)
def test_a_run_that_needs_what_is_gone_is_not_continued_but_can_be_used(
    run: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    gone(monkeypatch, False)
    for words in (("resume", "runs/kept"), ("train", *TRAIN["llama"], "--resume", "runs/kept")):
        refused = lockstep(*words)
        assert refused.code == 2, refused.text
        assert "training.old_kernels: true was removed: there is one kind of kernels" in refused.err
        assert "--name NEW" in refused.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for words in (("sample", "runs/kept", "The"), ("eval", "runs/kept"), ("export", "runs/kept", "--to", "hf")):
        used = lockstep(*words)
        assert used.code == 0, used.text
