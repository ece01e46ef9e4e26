"""Names that become folders: nothing is ever written outside the root (faults.md row 38)."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.config.load import load
from lockstep.errors import ConfigError, LockstepError
from lockstep.rundir import create_run

NASTY = [
    "../../x",
    "/abs",
    "a/b",
    "..",
    ".",
    "",
    "a\0b",
    "x" * 300,
    "-rf",
    "~",
    "a\\b",
    "a\nb",
    "é",
    "a b",
    "x.tmp-1",
    "..",
]


def scan(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.one_of(
        st.text(max_size=20), st.lists(st.sampled_from(["..", ".", "a", "/", "\\", "~", "\0", "%2e"])).map("".join)
    ),
)
@example("../../x")
@example("a/../../b")
def test_whatever_the_name_all_writes_stay_inside(name: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        out = Path(parent) / "runs"
        out.mkdir()
        with contextlib.suppress(LockstepError):
            config = load("llama", preset="tiny", overrides={"run": {"name": name, "experiment_name": name}}).config
            create_run(out, config.run.name or "x")
        outside = {path for path in scan(Path(parent)) if path.parts[0] != "runs"}
        assert not outside
        inside = scan(out)
        assert inside <= {Path(name), Path("latest")}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("key", ["run.name", "run.experiment_name"])
def test_nasty_names_are_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load("llama", overrides={key: name})


@pytest.mark.parametrize("name", ["a", "Run-1.2_x+y=z@w", "0"])
def test_plain_names_pass(name: str) -> None:
    assert load("llama", overrides={"run.name": name}).config.run.name == name


def test_a_symlink_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    outside, out = tmp_path / "outside", tmp_path / "runs"
    outside.mkdir()
    out.mkdir()
    (out / "there").symlink_to(outside)
    (out / "dangling").symlink_to(outside / "new")
    for name in ("there", "dangling"):
        with pytest.raises(LockstepError):
            create_run(out, name)
    assert not list(outside.iterdir())


def test_a_configuration_is_named_after_its_file_or_its_preset(tmp_path: Path) -> None:
    from lockstep.rundir import check_name

    assert load("llama", preset="tiny").name == "tiny"
    assert load("llama").name == "production"
    for name, expected in (("test_config.json", "test_config"), ("my run (2).v1.yaml", "my-run-2-v1"), ("é.json", "-")):
        (tmp_path / name).write_text("{}")
        loaded = load("llama", preset="tiny", file=tmp_path / name)
        assert (loaded.name, loaded.preset) == (expected, "tiny")
        check_name(f"llama-{loaded.name}-x")
