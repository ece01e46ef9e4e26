"""The cache: whole or not at all, built once, checked on opening, rebuilt when damaged."""

from __future__ import annotations

import json
import logging
import os
import random
import stat
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from lockstep.data import cache
from lockstep.data.cache import Table, check, clean, entries, key_of, open_or_build, write_table
from lockstep.errors import DataError, ExitCode, LockstepError, OutputError
from lockstep.rundir import MANIFEST, seal, verify
from tests.data.small_cache import COLUMNS, KEY, ROWS, content, fill, never

# ----------------------------------------------------------------------------------------------------- tables


def test_a_table_streams_in_and_reads_back(tmp_path: Path) -> None:
    blocks = [np.random.default_rng(i).integers(0, 60_000, (i + 1, 7), dtype=np.int32) for i in range(20)]
    rows = write_table(
        tmp_path / "t", ({"tokens": block} for block in blocks), columns=COLUMNS, stored={"tokens": "uint16"}
    )
    table = Table(tmp_path / "t")
    expected = np.concatenate(blocks)
    assert rows == table.rows == len(expected)
    assert table.columns["tokens"].dtype == np.uint16
    assert isinstance(table.columns["tokens"], np.memmap)
    ids = np.array([5, 0, 5, rows - 1])
    taken = table.take(ids)["tokens"]
    assert taken.dtype == np.int32
    assert np.array_equal(taken, expected[ids])


def test_columns_of_several_kinds(tmp_path: Path) -> None:
    columns = {"tokens": "int32", "reward": "float32", "length": "int64"}
    block = {
        "tokens": np.full((3, 4), 70_000, np.int32),
        "reward": np.full((3, 2), np.nan, np.float32),
        "length": np.ones((3, 1), np.int64),
    }
    write_table(tmp_path / "t", [block], columns=columns, stored={})
    taken = Table(tmp_path / "t").take(np.array([2]))
    assert {name: str(array.dtype) for name, array in taken.items()} == columns
    assert taken["tokens"].tolist() == [[70_000] * 4]


def test_an_id_that_does_not_fit_is_never_written(tmp_path: Path) -> None:
    block = {"tokens": np.full((1, 4), 70_000, np.int32)}
    with pytest.raises(AssertionError, match="too narrow"):
        write_table(tmp_path / "t", [block], columns=COLUMNS, stored={"tokens": "uint16"})


def test_an_empty_table(tmp_path: Path) -> None:
    assert write_table(tmp_path / "t", [], columns=COLUMNS, stored={}) == 0
    assert Table(tmp_path / "t").rows == 0


def test_a_pickle_in_a_column_is_not_opened(tmp_path: Path) -> None:
    write_table(tmp_path / "t", [], columns=COLUMNS, stored={})
    np.save(tmp_path / "t" / "tokens.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(DataError, match="readable"):
        Table(tmp_path / "t")


# --------------------------------------------------------------------------------------------- open or build


def test_built_once_then_opened(tmp_path: Path) -> None:
    folder, built = open_or_build(KEY, [tmp_path / "new" / "root"], fill)
    assert built
    assert folder == tmp_path / "new" / "root" / KEY
    assert open_or_build(KEY, [tmp_path / "new" / "root"], never) == (folder, False)
    assert Table(folder / "train").rows == ROWS


def test_the_same_key_gives_the_same_bytes(tmp_path: Path) -> None:
    one, _ = open_or_build(KEY, [tmp_path / "a"], fill)
    other, _ = open_or_build(KEY, [tmp_path / "b"], fill)
    assert content(one) == content(other)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        fill(folder)
        raise DataError("no text")

    with pytest.raises(DataError, match="no text"):
        open_or_build(KEY, [tmp_path], broken)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.lock"]


def test_leftovers_of_this_key_are_swept_and_no_others(tmp_path: Path) -> None:
    other = key_of({"a": 2})
    for name in (f"{KEY}.tmp-dead", f"{other}.tmp-alive"):
        (tmp_path / name / "train").mkdir(parents=True)
    open_or_build(KEY, [tmp_path], fill)
    assert sorted(path.name for path in tmp_path.glob("*.tmp-*")) == [f"{other}.tmp-alive"]


def damage(path: Path, at: int, *, truncate: bool) -> None:
    """Cut a file, or change one byte of it."""
    with path.open("r+b") as file:
        if truncate:
            file.truncate(at)
            return
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ (1 << at % 8)]))


def damage_at_random(path: Path) -> None:
    """Anywhere; but of a manifest sizes and hashes are read, not its last line end."""
    before = path.read_bytes()
    while path.read_bytes() == before or (path.name == MANIFEST and meaning(path.read_bytes()) == meaning(before)):
        path.write_bytes(before)
        damage(path, random.randrange(len(before)), truncate=random.random() < 0.5)


def meaning(manifest: bytes) -> object:
    try:
        return json.loads(manifest)["files"]
    except (ValueError, KeyError):
        return None


def rebuilt_after_damage(root: Path, times: int, caplog: pytest.LogCaptureFixture) -> None:
    """Items 37 and 38, faults row 28: every damage is seen, named and repaired."""
    folder, _ = open_or_build(KEY, [root], fill)
    whole = content(folder)
    names = sorted(whole)
    assert MANIFEST in names
    random.seed(3)
    for index in range(times):
        name = names[index % len(names)]
        damage_at_random(folder / name)
        caplog.clear()
        _, built = open_or_build(KEY, [root], fill)
        assert built, f"damage {index} of {name} went unnoticed"
        assert content(folder) == whole
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert name in warnings[0] or name == MANIFEST  # which may name the file that does not fit
    assert sorted(path.name for path in root.iterdir() if ".tmp-" in path.name) == []


def test_damage_is_seen_and_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rebuilt_after_damage(tmp_path, 20, caplog)


@pytest.mark.slow
def test_damage_is_seen_and_repaired_200_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rebuilt_after_damage(tmp_path, 200, caplog)


def test_damage_of_a_large_cache_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "ALWAYS_HASHED_BYTES", 0)
    rebuilt_after_damage(tmp_path, 20, caplog)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that counts as large."""
    monkeypatch.setattr(cache, "ALWAYS_HASHED_BYTES", 0)
    return open_or_build(KEY, [tmp_path], fill)[0]


def rot(file: Path, content: bytes, *, below: bool) -> None:
    """Other bytes and the time of before; below: as the disk itself loses them, so that no time at all tells of it."""
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    stamp = file.parents[1].with_name(f"{KEY}.checked")
    if below:
        seen = json.loads(stamp.read_text(encoding="utf-8"))
        assert seen["train/tokens.npy"][2] == before.st_ctime_ns
        seen["train/tokens.npy"][2] = file.stat().st_ctime_ns
        stamp.write_text(json.dumps(seen), encoding="utf-8")


def with_a_bit_changed(file: Path) -> bytes:
    content = bytearray(file.read_bytes())
    content[4001] ^= 2
    return bytes(content)


def test_a_large_cache_is_hashed_whole_only_when_it_changed(large: Path) -> None:
    file = large / "train" / "tokens.npy"
    rot(file, with_a_bit_changed(file), below=True)
    check(large)  # what the disk itself loses stays unseen ...
    with pytest.raises(DataError, match="SHA-256"):
        check(large, full=True)  # ... until `--verify`


def test_no_write_to_a_large_cache_stays_unseen(large: Path) -> None:
    """Item 38: also one that keeps size and time of change."""
    file = large / "train" / "tokens.npy"
    rot(file, with_a_bit_changed(file), below=False)
    with pytest.raises(DataError, match=r"tokens\.npy"):
        check(large)


def test_what_was_found_damaged_is_not_opened_again(large: Path) -> None:
    """`--verify` says so, and the next run must not train on it."""
    file = large / "train" / "tokens.npy"
    whole = content(large)
    rot(file, with_a_bit_changed(file), below=True)
    with pytest.raises(DataError, match="SHA-256"):
        check(large, full=True)
    assert open_or_build(KEY, [large.parent], fill) == (large, True)
    assert content(large) == whole


def test_a_damaged_manifest_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = open_or_build(KEY, [tmp_path], fill)
    for text in ("", "{}", '{"format": 1, "files": {"../../x": {"bytes": 1, "sha256": ""}}}'):
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        assert open_or_build(KEY, [tmp_path], fill) == (folder, True)
    assert "manifest" in caplog.text


def sealed_again(folder: Path) -> None:
    """A manifest that fits what is there now."""
    (folder / MANIFEST).unlink(missing_ok=True)
    seal(folder)
    verify(folder)


@pytest.mark.parametrize("gone", ["all", "meta.json", "tokenizer.json", "train/rows.json", "validation/tokens.npy"])
def test_a_manifest_that_names_too_little_is_rebuilt(
    tmp_path: Path, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a run would stop on is found at the opening, and repaired."""
    folder, _ = open_or_build(KEY, [tmp_path], fill)
    whole = content(folder)
    for name in whole if gone == "all" else [gone]:
        (folder / name).unlink()
    sealed_again(folder)
    with pytest.raises(DataError):
        check(folder)
    assert open_or_build(KEY, [tmp_path], fill) == (folder, True)
    assert content(folder) == whole
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    "described", ["[]", "[" * 100_000, '{"rows": 399, "columns": {"tokens": "int32"}}', '{"rows": 400, "columns": 7}']
)
def test_a_sealed_cache_that_is_no_table_is_rebuilt(tmp_path: Path, described: str) -> None:
    folder, _ = open_or_build(KEY, [tmp_path], fill)
    (folder / "train" / "rows.json").write_text(described, encoding="utf-8")
    sealed_again(folder)
    with pytest.raises(DataError, match="table"):
        check(folder)
    assert open_or_build(KEY, [tmp_path], fill) == (folder, True)


def test_an_older_place_is_read_and_never_written(tmp_path: Path) -> None:
    old, new = tmp_path / "cache", tmp_path / ".cache"
    folder, _ = open_or_build(KEY, [old], fill)
    assert open_or_build(KEY, [new, old], never) == (folder, False)
    assert not new.exists()
    (folder / MANIFEST).unlink()
    assert open_or_build(KEY, [new, old], fill) == (new / KEY, True)


# ---------------------------------------------------------------------------------------- places that are odd


@pytest.mark.parametrize("root", ["file", "file/root", "/proc/root"])
def test_a_place_that_cannot_be_made(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    with pytest.raises(OutputError) as caught:
        open_or_build(KEY, [tmp_path / root], fill)
    assert (caught.value.exit_code, caught.value.where) == (ExitCode.CANNOT_CREATE, str(tmp_path / root))
    assert "data.cache_dir=DIR" in caught.value.hint


@pytest.mark.parametrize(("error", "said"), [(OSError(28, "is full"), "MiB free"), (OSError(2, "is gone"), "writable")])
def test_a_build_that_fails_is_said_with_its_place(tmp_path: Path, error: OSError, said: str) -> None:
    def failing(folder: Path) -> None:
        raise error

    with pytest.raises(LockstepError, match=error.strerror) as caught:
        open_or_build(KEY, [tmp_path], failing)
    assert caught.value.exit_code == ExitCode.IO
    assert said in str(caught.value)
    assert not (tmp_path / KEY).exists()


def test_refusal_names_the_folder(tmp_path: Path) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(OutputError, match="Permission denied") as caught:
        open_or_build(KEY, [tmp_path], refused)
    assert str(tmp_path) in str(caught.value)


def test_damage_where_nothing_can_be_written_is_refused_by_name(tmp_path: Path) -> None:
    """Faults row 28: refused when read-only, never trained on."""
    folder, _ = open_or_build(KEY, [tmp_path], fill)
    damage(folder / "train" / "tokens.npy", 5000, truncate=False)

    def read_only(_: Path) -> None:
        raise OSError(30, "Read-only file system")

    with pytest.raises(OutputError, match=r"damaged \(.*tokens\.npy.*Read-only file system") as caught:
        open_or_build(KEY, [tmp_path], read_only)
    assert caught.value.exit_code == ExitCode.CANNOT_CREATE
    with pytest.raises(OutputError) as caught:  # negative control: what is not there is not damaged
        open_or_build(key_of({"a": 3}), [tmp_path], read_only)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755)])
def test_modes_follow_the_umask(tmp_path: Path, umask: int, file_mode: int, folder_mode: int) -> None:
    """Faults row 43."""
    before = os.umask(umask)
    try:
        open_or_build(KEY, [tmp_path / "root"], fill)
    finally:
        os.umask(before)
    made = [tmp_path / "root", *(tmp_path / "root").rglob("*")]
    assert len(made) >= 8
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (folder_mode if path.is_dir() else file_mode), path


# ---------------------------------------------------------------------------------------------- housekeeping


def test_keys_hash_all_parts_in_any_order() -> None:
    assert key_of({"a": 1, "b": [1, 2]}) == key_of({"b": [1, 2], "a": 1})
    assert len({key_of(parts) for parts in ({}, {"a": 1}, {"a": "1"}, {"a": 2}, {"b": 1})}) == 5
    assert cache.KEY.fullmatch(KEY)


def test_entries_are_the_caches_of_a_folder(tmp_path: Path) -> None:
    keys = sorted(key_of({"n": number}) for number in range(2))
    for key in keys:
        open_or_build(key, [tmp_path], fill)
    (tmp_path / "somebody's file").write_text("x", encoding="utf-8")
    found = entries(tmp_path)
    assert [entry.folder.name for entry in found] == keys
    assert found[0].bytes == sum(len(data) for data in content(tmp_path / keys[0]).values())
    assert found[0].meta == {"source": "numbers"}
    assert entries(tmp_path / "nowhere") == []


def test_clean_removes_only_what_we_made(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    open_or_build(KEY, [root], fill)
    files = {
        "notes.txt", "d41d8cd98f00b204e9800998ecf8427e.pt", "d41d8cd98f00b204e9800998ecf8427e.lock", "stdin-notes.txt",
        f"stdin-{16 * '0'}.txt", f"{KEY}-notes.txt", f"{KEY[1:]}.lock", "lockstep-hub.json.bak",
    }  # fmt: skip
    for name in files:
        (root / name).write_text("theirs", encoding="utf-8")
    (root / ("0" * 40)).mkdir()  # a folder of such a name without our manifest
    (root / ("1" * 40)).symlink_to(outside)
    ours = {cache.MEMO, "lockstep-hub.json", "lockstep-hub.json.lock", f"{KEY}.checked", f"{KEY}.builder.tmp-note"}
    for name in ours:
        (root / name).write_text("{}", encoding="utf-8")
    for name in (f"{KEY}.tmp-dead", f"{KEY}.parts", f"{'2' * 40}.parts"):
        (root / name / "000001").mkdir(parents=True)
    removed = clean(root)
    assert {KEY, f"{KEY}.tmp-dead", f"{KEY}.parts", f"{'2' * 40}.parts"} | ours <= set(removed)
    assert {path.name for path in root.iterdir()} == files | {"0" * 40, "1" * 40}
    assert outside.is_dir()
    assert clean(tmp_path / "nowhere") == []


def test_clean_leaves_what_is_being_fetched(tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.parts" / "000001").mkdir(parents=True)
    with FileLock(tmp_path / f"{KEY}.lock"):
        assert clean(tmp_path) == []
    assert f"{KEY}.parts" in clean(tmp_path)
    assert list(tmp_path.iterdir()) == []
