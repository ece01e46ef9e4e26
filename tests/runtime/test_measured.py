"""What was measured is found again, by all that decides it; whatever is wrong with the file costs time and no more."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from lockstep.runtime import measured

CARD = {"what": "attention", "card": "NVIDIA Fake", "layer": {"rows": 4}}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lockstep" / "measured.json"


def test_a_round_trip(file: Path) -> None:
    assert measured.known(CARD) is None
    measured.keep(CARD, {"rows": 8})
    measured.keep({**CARD, "card": "another"}, {"rows": 2})
    found = measured.known({"layer": {"rows": 4}, "card": "NVIDIA Fake", "what": "attention"})
    assert found == {"rows": 8, "day": measured.today(), "of": CARD}
    assert measured.known({**CARD, "layer": {"rows": 5}}) is None, "the control"
    measured.keep(CARD, {"rows": 16})
    assert [entry["rows"] for entry in json.loads(file.read_text())["entries"].values()] == [2, 16]
    assert sorted(path.name for path in file.parent.iterdir() if "tmp" in path.name) == []


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "3", '{"format": 1}', '{"format": 2, "entries": {}}', '{"format": 1, "entries": []}',
        '{"format": 1, "entries": {"KEY": 3}}', '{"format": 1, "entries": {"KEY": {"rows": 3}}}', "[" * 5000,
        "\x00\xff", '{"format": 1, "entries": {"KEY": {"rows": NaN, "day": "2026-11-16"}}}',
        '{"format": 1, "entries": {"other": {"rows": -Infinity, "day": "2026-11-16"}}}',
        '{"format": 1, "entries": {"other": {"rows": 3, "day": "\\ud800"}}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_as_good_as_none(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content.replace("KEY", measured.key(CARD)), encoding="latin-1")
    assert measured.known(CARD) is None
    measured.keep(CARD, {"rows": 8})
    assert (measured.known(CARD) or {})["rows"] == 8


def test_where_nothing_can_be_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.mkdir()
    os.mkfifo(file)
    assert measured.known(CARD) is None, "nobody waits for a pipe"
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder")
    measured.keep(CARD, {"rows": 8})
    assert measured.known(CARD) is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("no home")))
    measured.keep(CARD, {"rows": 8})
    assert measured.place() is None


@pytest.mark.filterwarnings("ignore:flock not supported")  # it says so
def test_a_disk_without_locks_keeps_it_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock finds another way there, which still lets only one in."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)
    measured.keep(CARD, {"rows": 8})
    assert (measured.known(CARD) or {})["rows"] == 8
    other = file.with_name("other.lock")
    with measured.FileLock(other), pytest.raises(measured.Timeout):
        measured.FileLock(other, timeout=0).acquire()


def test_the_oldest_go_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST_ENTRIES", 2)
    for rows in (1, 2, 3):
        measured.keep({"rows": rows}, {"rows": rows})
    assert [measured.known({"rows": rows}) is None for rows in (1, 2, 3)] == [True, False, False]
