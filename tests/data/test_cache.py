"""The cache: whole or not at all, built once, checked on opening, rebuilt when damaged."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import cache
from lockstep.data.cache import Table, check, clean, entries, key_of, open_or_build, write_table
from lockstep.errors import DataError, ExitCode, LockstepError, OutputError
from lockstep.rundir import MANIFEST, seal
from tests.data.stand_in import Plain

KEY = key_of({"a": 1})
ROWS = 400


def fill(folder: Path) -> None:
    """A builder of a small cache."""
    for name in ("train", "validation"):
        tokens = np.arange(ROWS * 33, dtype=np.int32).reshape(ROWS, 33)
        write_table(folder / name, [{"tokens": tokens}], columns=Plain.columns, stored={"tokens": "uint16"})
    (folder / "meta.json").write_text(json.dumps({"source": "numbers"}), encoding="utf-8")


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------------------------- tables


def test_a_table_streams_in_and_reads_back(tmp_path: Path) -> None:
    blocks = [np.random.default_rng(i).integers(0, 60_000, (i + 1, 7), dtype=np.int32) for i in range(20)]
    rows = write_table(
        tmp_path / "t", ({"tokens": block} for block in blocks), columns=Plain.columns, stored={"tokens": "uint16"}
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
        write_table(tmp_path / "t", [block], columns=Plain.columns, stored={"tokens": "uint16"})


def test_an_empty_table(tmp_path: Path) -> None:
    assert write_table(tmp_path / "t", [], columns=Plain.columns, stored={}) == 0
    assert Table(tmp_path / "t").rows == 0


def test_a_pickle_in_a_column_is_not_opened(tmp_path: Path) -> None:
    write_table(tmp_path / "t", [], columns=Plain.columns, stored={})
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


def never(folder: Path) -> None:
    raise AssertionError("must not be built")


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


def rebuilt_after_damage(root: Path, times: int, caplog: pytest.LogCaptureFixture) -> None:
    """Items 37 and 38, faults row 28: every damage is seen, named and repaired."""
    folder, _ = open_or_build(KEY, [root], fill)
    whole = content(folder)
    names = [name for name in sorted(whole) if name != MANIFEST]
    random.seed(3)
    for index in range(times):
        name = names[index % len(names)]
        damage(folder / name, random.randrange(len(whole[name])), truncate=index % 2 == 0)
        assert content(folder) != whole
        caplog.clear()
        _, built = open_or_build(KEY, [root], fill)
        assert built, f"damage {index} of {name} went unnoticed"
        assert content(folder) == whole
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert name in warnings[0]
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


def test_a_large_cache_is_hashed_whole_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ALWAYS_HASHED_BYTES", 0)
    monkeypatch.setattr(cache, "SAMPLE_BYTES", 16)
    folder, _ = open_or_build(KEY, [tmp_path], fill)
    file = folder / "train" / "tokens.npy"
    before = file.stat()
    damage(file, 4001, truncate=False)
    with pytest.raises(DataError, match="SHA-256"):
        check(folder)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    check(folder)  # rot that leaves the time alone: between two samples it stays unseen ...
    with pytest.raises(DataError, match="SHA-256"):
        check(folder, full=True)  # ... until `--verify`
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"tokens\.npy"):
        check(folder)  # larger rot is met by the samples whatever the time says


def test_a_damaged_manifest_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = open_or_build(KEY, [tmp_path], fill)
    for text in ("", "{}", '{"files": {"../../x": {"bytes": 1, "sha256": ""}}}'):
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        assert open_or_build(KEY, [tmp_path], fill) == (folder, True)
    assert "manifest" in caplog.text


def test_an_older_place_is_read_and_never_written(tmp_path: Path) -> None:
    old, new = tmp_path / "cache", tmp_path / ".cache"
    folder, _ = open_or_build(KEY, [old], fill)
    assert open_or_build(KEY, [new, old], never) == (folder, False)
    assert not new.exists()
    (folder / MANIFEST).unlink()
    assert open_or_build(KEY, [new, old], fill) == (new / KEY, True)


# ---------------------------------------------------------------------------------------- places that are odd


AS_NOBODY = """
import os, sys
from pathlib import Path
from lockstep.data.cache import open_or_build
from lockstep.errors import LockstepError
if os.geteuid() == 0:  # root ignores modes
    os.setgid(65534); os.setuid(65534)
def fill(folder): (folder / "x").write_text("x")
try:
    print(open_or_build(sys.argv[2], [Path(sys.argv[1])], fill)[1])
except LockstepError as error:
    print(int(error.exit_code), error)
"""


def test_read_only_places() -> None:
    """Faults row 30: a complete cache may be read-only; an incomplete one is refused at once, naming the place."""
    with tempfile.TemporaryDirectory() as top:  # pytest's own folders are closed to other users
        root = Path(top) / "root"
        open_or_build(KEY, [root], fill)
        Path(top).chmod(0o755)
        root.chmod(0o555)
        command = [sys.executable, "-c", AS_NOBODY, str(root)]
        opened = subprocess.run([*command, KEY], capture_output=True, text=True, check=True)
        refused = subprocess.run([*command, key_of({"a": 2})], capture_output=True, text=True, check=True)
        root.chmod(0o755)
        Path(top).chmod(0o700)
        hidden = subprocess.run([*command, KEY], capture_output=True, text=True, check=True)
    assert opened.stdout == "False\n"
    assert refused.stdout.startswith(f"73 {root}: ")
    assert "DATASET_CACHE_DIR" in refused.stdout
    if os.geteuid() == 0:
        assert hidden.stdout.startswith(f"73 {root}: ")


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    with pytest.raises(LockstepError) as caught:
        open_or_build(KEY, [tmp_path / "file" / "root"], fill)
    assert caught.value.exit_code in (ExitCode.IO, ExitCode.CANNOT_CREATE)


def test_a_full_disk_is_said_with_its_place(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(LockstepError, match="No space left") as caught:
        open_or_build(KEY, [tmp_path], full)
    assert caught.value.exit_code == ExitCode.IO
    assert "MiB free" in str(caught.value)
    assert not (tmp_path / KEY).exists()


def test_refusal_names_the_folder(tmp_path: Path) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(OutputError, match="Permission denied") as caught:
        open_or_build(KEY, [tmp_path], refused)
    assert str(tmp_path) in str(caught.value)


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


# ---------------------------------------------------------------------------------------- several processes

BUILDER = """
import logging, sys, time
from pathlib import Path
from lockstep.data.cache import open_or_build
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
def fill(folder):
    (folder / "data").write_text("x" * 1000)
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
print("built" if open_or_build(sys.argv[2], [Path(sys.argv[1])], fill)[1] else "opened", flush=True)
"""


def start(root: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(root), KEY, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_one_builds_and_the_other_waits_for_it(tmp_path: Path) -> None:
    """Item 36 and faults row 29, with two processes."""
    builder = start(tmp_path, 1.0)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    waiter = start(tmp_path, 0.0)
    waited, _ = waiter.communicate(timeout=30)
    built, _ = builder.communicate(timeout=30)
    assert built == "built\n"
    assert f"waiting for process {builder.pid} on " in waited
    assert waited.endswith("opened\n")
    assert (builder.returncode, waiter.returncode) == (0, 0)


def test_a_killed_builder_is_replaced(tmp_path: Path) -> None:
    """Items 37 and 39: no half cache, the lock is free at once, the leftovers are swept."""
    builder = start(tmp_path, 60.0)
    assert builder.stdout is not None
    builder.stdout.readline()
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    assert list(tmp_path.glob(f"{KEY}.tmp-*"))
    assert not (tmp_path / KEY).exists()
    begun = time.perf_counter()
    folder, built = open_or_build(KEY, [tmp_path], fill)
    assert built
    assert time.perf_counter() - begun < 2
    assert not list(tmp_path.glob("*.tmp-*"))
    check(folder)


@pytest.mark.slow
def test_eight_at_once_with_kills(tmp_path: Path) -> None:
    """Faults row 29: eight start together, whoever builds is killed at a random moment, another builds, none hangs."""
    random.seed(1)
    killed = 0
    for attempt in range(12):
        root = tmp_path / str(attempt)
        processes = {process.pid: process for process in (start(root, 0.4) for _ in range(8))}
        while not (root / f"{KEY}.builder").exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.4))
        with contextlib.suppress(FileNotFoundError):
            victim = processes.pop(json.loads((root / f"{KEY}.builder").read_text(encoding="utf-8"))["pid"])
            victim.send_signal(signal.SIGKILL)
            killed += victim.wait() == -signal.SIGKILL
            victim.communicate()
        outputs = [process.communicate(timeout=60)[0] for process in processes.values()]
        assert all(out.endswith(("built\n", "opened\n")) for out in outputs)
        assert sum(out.endswith("built\n") for out in outputs) == 1 or not killed
        assert (root / KEY / "data").read_text(encoding="utf-8") == "x" * 1000
        assert not list(root.glob("*.tmp-*"))
    assert killed >= 6


# ---------------------------------------------------------------------------------------------- housekeeping


def test_keys_hash_all_parts_in_any_order() -> None:
    assert key_of({"a": 1, "b": [1, 2]}) == key_of({"b": [1, 2], "a": 1})
    assert len({key_of(parts) for parts in ({}, {"a": 1}, {"a": "1"}, {"a": 2}, {"b": 1})}) == 5
    assert cache.KEY.fullmatch(KEY)


def test_list_shows_newest_first(tmp_path: Path) -> None:
    older, newer = key_of({"n": 1}), key_of({"n": 2})
    for key in (older, newer):
        open_or_build(key, [tmp_path], fill)
    os.utime(tmp_path / older, (time.time() - 3600,) * 2)
    (tmp_path / "somebody's file").write_text("x", encoding="utf-8")
    found = entries(tmp_path)
    assert [entry.key for entry in found] == [newer, older]
    assert 3500 < found[1].age_seconds < 3700
    assert found[0].bytes == sum(len(data) for data in content(tmp_path / newer).values())
    assert found[0].meta == {"source": "numbers"}
    assert entries(tmp_path / "nowhere") == []


def test_clean_removes_only_what_we_made(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    open_or_build(KEY, [root], fill)
    theirs = {"notes.txt", "d41d8cd98f00b204e9800998ecf8427e.pt", "d41d8cd98f00b204e9800998ecf8427e.lock", "0" * 40}
    for name in theirs - {"0" * 40}:
        (root / name).write_text("theirs", encoding="utf-8")
    (root / ("0" * 40)).mkdir()  # a folder of such a name without our manifest
    (root / ("1" * 40)).symlink_to(outside)
    (root / f"{KEY}.tmp-dead").mkdir()
    (root / cache.MEMO).write_text("{}", encoding="utf-8")
    removed = clean(root)
    assert {KEY, f"{KEY}.tmp-dead", cache.MEMO} <= set(removed)
    assert {path.name for path in root.iterdir()} == theirs | {"1" * 40}
    assert outside.is_dir()
    assert clean(tmp_path / "nowhere") == []


def test_clean_leaves_what_is_being_built(tmp_path: Path) -> None:
    builder = start(tmp_path, 0.7)
    assert builder.stdout is not None
    builder.stdout.readline()
    assert clean(tmp_path) == []
    assert builder.communicate(timeout=30)[0] == "built\n"


def test_a_sealed_folder_with_other_rows_is_still_checked(tmp_path: Path) -> None:
    """A manifest that fits files which are no table: opened as a table it is refused, not crashed on."""
    folder = tmp_path / KEY
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "rows.json").write_text("[]", encoding="utf-8")
    seal(folder)
    check(folder)
    with pytest.raises(DataError):
        Table(folder / "train")
