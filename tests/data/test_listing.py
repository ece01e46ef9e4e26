"""`lockstep prepare --list` and `--verify`: name, rows and size of what is there, and what is wrong with whom."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

from lockstep.data.cache import key_of, open_or_build
from lockstep.data.listing import describe
from tests.data.small_cache import KEY, fill


def described(meta: dict[str, object]):
    """A builder of a cache with such a description."""

    def build(folder: Path) -> None:
        fill(folder)
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    return build


META = {"source": "text", "rows": {"train": 12_000, "validation": 345}}


def add_parts(root: Path, key: str) -> None:
    """What a build that was killed has fetched."""
    (root / f"{key}.parts" / "00000").mkdir(parents=True)
    (root / f"{key}.parts" / "00000" / "000000").write_bytes(bytes(3 << 20))


def test_a_list_says_what_is_there_and_how_much(tmp_path: Path) -> None:
    open_or_build(KEY, [tmp_path / "a"], described(META))
    other = key_of({"b": 1})
    open_or_build(other, [tmp_path / "b"], described({"source": "an-owner/a-name:and-a-config"}))
    assert describe([tmp_path / "a", tmp_path / "b", tmp_path / "nowhere"]) == ([
        "text: 12,345 rows, 0.1 MiB", f"  {tmp_path / 'a' / KEY}",
        "an-owner/a-name:and-a-config: 0 rows, 0.1 MiB", f"  {tmp_path / 'b' / other}",
    ], 0)  # fmt: skip
    nothing, _ = describe([tmp_path / "nowhere"])
    assert nothing == [f"No prepared dataset in {tmp_path / 'nowhere'}"]


def test_every_byte_is_checked_when_asked(tmp_path: Path) -> None:
    folder, _ = open_or_build(KEY, [tmp_path], fill)
    lines, damaged = describe([tmp_path], verify=True)
    assert (lines[1], damaged) == (f"  {folder}  intact", 0)
    content = bytearray((folder / "train" / "tokens.npy").read_bytes())
    content[5000] ^= 1
    (folder / "train" / "tokens.npy").write_bytes(content)
    lines, damaged = describe([tmp_path], verify=True)
    assert lines[1].startswith(f"  {folder}  DAMAGED: {folder}/train/tokens.npy")
    assert damaged == 1
    assert describe([tmp_path])[1] == 0  # a look is no check


def test_what_was_not_finished_is_shown_too(tmp_path: Path) -> None:
    """A build that goes on with what it has fetched is no damage; a folder that is not ours is not looked at."""
    add_parts(tmp_path, KEY)
    (tmp_path / ("3" * 40)).mkdir()
    (tmp_path / "notes").mkdir()
    shown = ["fetched for an unfinished dataset: 3.0 MiB", f"  {tmp_path / KEY}.parts"]
    assert describe([tmp_path], verify=True) == (shown, 0)


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
