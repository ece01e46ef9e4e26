"""`lockstep prepare --list` and `--verify`: a table that fits the screen, and what is wrong with whom."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from lockstep.data.cache import entries, key_of, open_or_build
from lockstep.data.listing import _age, _short, describe
from tests.data.small_cache import KEY, fill


def described(meta: dict[str, object]):
    """A builder of a cache with such a description."""

    def build(folder: Path) -> None:
        fill(folder)
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    return build


META = {"source": "text", "rows": {"train": 12_000, "validation": 345}, "tokens": {"train": 1_200_000, "validation": 0}}


def add_parts(root: Path, key: str) -> None:
    """What a build that was killed has fetched."""
    (root / f"{key}.parts" / "00000").mkdir(parents=True)
    (root / f"{key}.parts" / "00000" / "000000").write_bytes(bytes(5000))


def test_a_table_says_what_how_much_and_how_old(tmp_path: Path) -> None:
    open_or_build(KEY, [tmp_path / "a"], described(META))
    other = key_of({"b": 1})
    open_or_build(other, [tmp_path / "b"], described({"source": "an-owner/with-a-very-long-name:and-a-config"}))
    os.utime(tmp_path / "b" / other, (time.time() - 3 * 86_400,) * 2)
    lines, damaged = describe([tmp_path / "a", tmp_path / "b", tmp_path / "nowhere"])
    assert damaged == 0
    assert lines[0].split() == ["dataset", "rows", "tokens", "size", "age", "state"]
    assert lines[1].split() == ["text", "12,345", "1.2", "M", "52.8", "KiB", "0", "min", "whole"]
    assert lines[2] == f"  {tmp_path / 'a' / KEY}"
    assert lines[3].startswith("an-owner/with-a-very…")
    assert "3 d" in lines[3]
    assert all(len(line) <= 80 for line in (lines[0], lines[1], lines[3]))
    nothing, _ = describe([tmp_path / "nowhere"])
    assert nothing == [f"No prepared dataset in {tmp_path / 'nowhere'}"]


def test_the_files_it_was_made_from_are_named(tmp_path: Path) -> None:
    open_or_build(KEY, [tmp_path], described({**META, "made_of": "a.txt, b\n.txt, c.jsonl and 1,234 more"}))
    lines, _ = describe([tmp_path], verify=True)
    assert lines[2:] == ["  from a.txt, b?.txt, c.jsonl and 1,234 more", f"  {tmp_path / KEY}  intact"]
    other = tmp_path / "other"
    open_or_build(KEY, [other], described({**META, "made_of": "long name " * 9}))
    line = describe([other])[0][2]
    assert (len(line), line[:12], line[-1]) == (80, "  from long ", "…")


def test_every_byte_is_checked_when_asked(tmp_path: Path) -> None:
    folder, _ = open_or_build(KEY, [tmp_path], fill)
    lines, damaged = describe([tmp_path], verify=True)
    assert (lines[2], damaged) == (f"  {folder}  intact", 0)
    content = bytearray((folder / "train" / "tokens.npy").read_bytes())
    content[5000] ^= 1
    (folder / "train" / "tokens.npy").write_bytes(content)
    lines, damaged = describe([tmp_path], verify=True)
    assert (lines[2], damaged) == (f"  {folder}  DAMAGED", 1)
    assert "tokens.npy" in lines[3]
    assert describe([tmp_path])[1] == 0  # a look is no check


def test_what_was_not_finished_is_shown_too(tmp_path: Path) -> None:
    """A build that goes on with what it has fetched is no damage; a folder that nothing describes is."""
    add_parts(tmp_path, KEY)
    (tmp_path / ("3" * 40)).mkdir()
    (tmp_path / "notes").mkdir()
    assert {entry.key: (entry.state, entry.bytes) for entry in entries(tmp_path)} == {
        KEY: ("unfinished", 5000), "3" * 40: ("remains", 0),
    }  # fmt: skip
    lines, damaged = describe([tmp_path], verify=True)
    assert damaged == 1
    assert f"  {tmp_path / KEY}.parts" in lines


@pytest.mark.parametrize("meta", [{"rows": 3, "tokens": [1]}, {"source": None}, {"made_of": 3}])
def test_a_strange_description_is_no_obstacle(tmp_path: Path, meta: dict[str, object]) -> None:
    open_or_build(KEY, [tmp_path], described(meta))
    assert len(describe([tmp_path])[0]) == 3


@pytest.mark.parametrize(("count", "shown"), [(0, "0 "), (999, "999 "), (1500, "1.5 k"), (12e15, "12,000.0 T")])
def test_numbers_are_short(count: float, shown: str) -> None:
    assert _short(count, ("", "k", "M", "G", "T"), 1000) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 min"), (3600, "60 min"), (7200, "2 h"), (100_000, "28 h"), (200_000, "2 d")]
)
def test_ages_are_short(seconds: float, shown: str) -> None:
    assert _age(seconds) == shown


def test_what_is_being_written_may_vanish(tmp_path: Path) -> None:
    """Somebody builds and fetches here while we look: nothing fails."""
    open_or_build(KEY, [tmp_path], described(META))
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            shutil.rmtree(tmp_path / KEY)
            add_parts(tmp_path, KEY)
            open_or_build(KEY, [tmp_path], described(META))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(60):
            describe([tmp_path], verify=True)
    finally:
        over.set()
        worker.join()
