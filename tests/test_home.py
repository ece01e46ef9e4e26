"""`lockstep` alone: what it proposes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import families
from lockstep.rundir import MANIFEST, write_json
from tests.conftest import Outcome

Run = Callable[..., Outcome]


def test_alone_it_proposes_a_prompt_that_suits_the_last_run(lockstep: Run, in_dir: Path) -> None:
    write_json(in_dir / "runs" / "one" / "config.json", {"family": "llama"})
    assert "lockstep sample" not in lockstep().out, "it has saved nothing"
    (saved := in_dir / "runs" / "one" / "checkpoints" / "step_00000001").mkdir(parents=True)
    write_json(saved / MANIFEST, {})
    assert 'lockstep sample one "The"' in lockstep().out
    write_json(in_dir / "runs" / "one" / "config.json", {"family": "mlm"})
    assert 'lockstep sample one "the [MASK] sat"' in lockstep().out
    assert 'try: lockstep sample runs/one "the [MASK] sat"' in lockstep("sample", "one").err


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize("words", ["resume", "sample", "eval", "train llama tiny --resume"])
def test_an_export_is_no_run(lockstep: Run, in_dir: Path, words: str, name: str) -> None:
    """hf and peft."""
    for file in (name, MANIFEST):
        write_json(in_dir / "runs" / "a" / "out" / file, {})
    refused = lockstep(*words.split(), "runs/a/out")
    assert refused.code == 2
    assert "error: runs/a/out: is an export for other programs, and no run\n  try: the run" in refused.err
    assert ("--model.init pretrained --model.model-path runs/a/out" in refused.err) == (name == "config.json")


@pytest.mark.parametrize("place", [".", "./", "..", "/", "here/.."])
def test_an_export_takes_no_folder_away_from_under_you(
    lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    write_json(in_dir / "runs" / "mine" / "config.json", {})
    (empty := in_dir / "empty").mkdir()
    monkeypatch.chdir(empty)
    refused = lockstep("export", "../runs/mine", place, "--to", "hf")
    assert refused.code == 73
    assert ": is where you are, and an export takes the place of its folder\n  try: a folder of its own" in refused.err
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("content", ['{"family": "llama", "conf', "{}", "[]"])
def test_a_damaged_configuration_is_told_as_such(lockstep: Run, in_dir: Path, content: str) -> None:
    (config := in_dir / "runs" / "a" / "config.json").parent.mkdir(parents=True)
    config.write_text(content, encoding="utf-8")
    refused = lockstep("resume", "a")
    assert refused.code == 65
    assert "runs/a/config.json: the configuration of the run cannot be read: " in refused.err
    assert "\n  try: a copy of that file; " in refused.err


def test_what_is_no_run_is_not_offered_as_one(lockstep: Run, in_dir: Path) -> None:
    (in_dir / "runs" / "q" / "config.json").mkdir(parents=True)
    refused = lockstep("resume", "q")
    assert refused.err.endswith("no run 'q' here or in runs/\n  try: lockstep train llama demo makes one\n")
    assert "none yet" in lockstep().out
    checkpoint = in_dir / "alone" / "step_00000001"
    write_json(checkpoint / MANIFEST, {})
    away = lockstep("resume", str(checkpoint))
    assert away.code == 2
    assert away.err.endswith("/config.json: no run here\n  try: lockstep shows the last runs\n")


def test_scripts_that_cannot_be_written_name_another_folder(
    lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(families.shutil, "copyfile", read_only)
    refused = lockstep("init", "llama")
    assert refused.code == 73
    assert "Read-only file system\n  try: lockstep init llama DIR, a folder you can write to" in refused.err
