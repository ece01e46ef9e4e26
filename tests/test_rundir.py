"""The run folder: names that stay inside it, files and folders that are whole or not there, errors worth reading."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import rundir
from lockstep.errors import ConfigError, DataError, ExitCode, OutputError
from lockstep.rundir import RunDir, check_name, create_run, publishing, replacing, seal, sweep, verify
from tests.conftest import Outcome


@pytest.mark.parametrize("name", ["a", "7", "llama-tiny-20261115-101112", "a.b_c+d=e@f", "x" * 200])
def test_plain_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "-flag", "a/b", "../x", "/etc", "a\\b", "a b", "a\nb", "a\n", "a\0", "ä", "a:b",
     "x" * 201, "run.tmp-1"],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not allowed") as caught:
        check_name(name, what="tag")
    assert str(caught.value).startswith("tag ")
    assert "letters, digits" in caught.value.hint


def test_a_run_is_made_once(tmp_path: Path) -> None:
    assert create_run(tmp_path, "one").root == tmp_path / "one"
    for taken in ("one", "latest"):
        with pytest.raises(ConfigError):
            create_run(tmp_path, taken)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert RunDir(tmp_path).checkpoint(7).name == "step_00000007"
    assert RunDir(tmp_path).worker("").name == "n0-CPU"


def test_latest_leads_to_the_newest_and_a_users_own_is_left_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        rundir.point_latest(create_run(tmp_path, name))
        assert (tmp_path / "latest").readlink() == Path(name)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    rundir.point_latest(create_run(tmp_path, "three"))
    assert not (tmp_path / "latest").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "three", "two"]


def test_a_probe_writes_nothing_and_names_the_setting(tmp_path: Path) -> None:
    rundir.probe(tmp_path / "new", key="run.out")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write here") as caught:
        rundir.probe(tmp_path / "file" / "below", key="run.out")
    assert "run.out=DIR" in caught.value.hint


def test_a_place_that_cannot_be_written_is_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot create the run folder") as caught:
        create_run(tmp_path / "file", "one")
    assert caught.value.exit_code == ExitCode.CANNOT_CREATE


def write_half(path: Path) -> None:
    path.write_text("tw")
    raise RuntimeError("half way")


def test_replacing_is_old_or_new_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    with replacing(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
    with pytest.raises(RuntimeError, match="half way"), replacing(path) as temporary:
        write_half(temporary)
    assert path.read_text() == "one"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    rundir.write_json(path, {"ä": 1})
    assert path.read_text(encoding="utf-8") == '{\n  "ä": 1\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        rundir.write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ä": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def publish(final: Path, content: str) -> None:
    with publishing(final) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "data.bin").write_text(content)
        (folder / "empty").touch()


def test_publishing_is_whole_and_sealed(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints" / "step_1"
    publish(final, "one")
    verify(final)
    assert set(json.loads((final / rundir.MANIFEST).read_text())["files"]) == {"part/data.bin", "empty"}
    publish(final, "again")
    verify(final)
    assert (final / "part" / "data.bin").read_text() == "again"
    assert [entry.name for entry in final.parent.iterdir()] == ["step_1"]


def test_publishing_that_fails_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "step_1"
    publish(final, "one")
    with pytest.raises(RuntimeError, match="half way"), publishing(final) as folder:
        write_half(folder / "new")
    verify(final)
    assert (final / "part" / "data.bin").read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"]


def test_modes_follow_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "sealed"
    folder.mkdir(mode=0o750)
    folder.chmod(0o750)
    (folder / "secretive").touch(mode=0o600)
    seal(folder)
    assert (folder / "secretive").stat().st_mode & 0o777 == 0o640


def told(files: dict[str, Any]) -> str:
    return json.dumps({"format": rundir.MANIFEST_FORMAT, "files": files})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "empty").unlink(), "empty: missing file"),
        (lambda folder: (folder / "part" / "data.bin").write_text("oneone"), "6 bytes, the manifest says 3"),
        (lambda folder: (folder / "part" / "data.bin").write_text("0ne"), "does not match its SHA-256"),
        (lambda folder: (folder / rundir.MANIFEST).unlink(), "no manifest: the save did not finish"),
        (lambda folder: (folder / rundir.MANIFEST).write_text("{"), "unreadable manifest"),
        (lambda folder: (folder / rundir.MANIFEST).write_text("[]"), "unreadable manifest"),
        (
            lambda folder: (folder / rundir.MANIFEST).write_text('{"format": 2, "files": {}}'),
            "unreadable manifest .format 2",
        ),
        (lambda folder: (folder / rundir.MANIFEST).write_text(told({"x": {}})), "unreadable manifest"),
        (
            lambda folder: (folder / rundir.MANIFEST).write_text(told({"../x": {"bytes": 0, "sha256": ""}})),
            "outside the folder",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: object, message: str) -> None:
    assert callable(damage)
    publish(tmp_path / "step_1", "one")
    damage(tmp_path / "step_1")
    with pytest.raises(DataError, match=message):
        verify(tmp_path / "step_1")


def test_a_quick_look_reads_no_content(tmp_path: Path) -> None:
    publish(tmp_path / "step_1", "one")
    (tmp_path / "step_1" / "part" / "data.bin").write_text("0ne")
    verify(tmp_path / "step_1", content=False)
    with pytest.raises(DataError):
        verify(tmp_path / "step_1")


def test_sweeping_takes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    folder = tmp_path / "checkpoints"
    publish(folder / "step_1", "one")
    (folder / "step_2.tmp-abc").mkdir()
    (folder / "step_2.tmp-abc" / "x").touch()
    (folder / "file.tmp-def").touch()
    (folder / "link.tmp-ghi").symlink_to(outside)
    assert sweep(folder) == ["file.tmp-def", "link.tmp-ghi", "step_2.tmp-abc"]
    assert [entry.name for entry in folder.iterdir()] == ["step_1"]
    assert (outside / "kept").exists(), "a link is removed, not followed"
    assert sweep(tmp_path / "nowhere") == []


def test_an_io_error_says_what_where_and_how_much_room(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    explained = rundir.io_error(full, tmp_path / "new.bin", doing="saving")
    assert explained.exit_code == ExitCode.IO
    assert str(explained).startswith(f"{tmp_path / 'new.bin'}: saving failed: No space left on device (")
    assert "MiB free" in str(explained)
    denied = rundir.io_error(PermissionError(errno.EACCES, "Permission denied"), tmp_path / "x", doing="reading")
    assert "reading failed: Permission denied\n" in str(denied), "room is not the trouble here"
    assert f"make {tmp_path} writable" in denied.hint


def test_a_manifest_must_name_what_is_required(tmp_path: Path) -> None:
    publish(tmp_path / "step_1", "one")
    verify(tmp_path / "step_1", required=["empty"])
    with pytest.raises(DataError, match="does not name model"):
        verify(tmp_path / "step_1", required=["empty", "model"])


def test_a_link_that_was_named_leads_to_what_is_written(tmp_path: Path) -> None:
    """In one step there too: who holds the old file reads it to its end."""
    far, link = tmp_path / "far" / "told.json", tmp_path / "link"
    far.parent.mkdir()
    rundir.write_json(far, {"old": 1})
    link.symlink_to(far)
    with far.open() as old:
        rundir.write_json(link, {"new": 2})
        assert json.load(old) == {"old": 1}
    assert link.is_symlink()
    assert json.loads(far.read_text()) == {"new": 2}
    assert [path.name for path in far.parent.iterdir()] == ["told.json"]


@pytest.mark.parametrize(
    "words",
    [
        ("train", "llama", "tiny", "--model-path"),
        ("prepare", "llama", "tiny", "--to"), ("check", "--quick", "--out"), ("check", "--quick", "--golden"),
        ("train", "llama", "tiny", "--data.cache-dir"), ("replay",),
    ],
    ids=lambda words: words[-1],
)  # fmt: skip
def test_the_home_of_nobody_is_no_path(lockstep: Callable[..., Outcome], words: tuple[str, ...]) -> None:
    result = lockstep(*words, "~no-such-user/x")
    assert result.code == 2, result.text
    assert "~no-such-user/x" in result.err
    assert "home directory" in result.err
