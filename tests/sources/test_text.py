"""Text files: what a document is, which field holds the text, and an exact word for everything wrong."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data.options import DataOptions
from lockstep.errors import ConfigError, DataError, ExitCode, LockstepError, NotFoundError
from lockstep.sources import text as module
from lockstep.sources import windows
from lockstep.sources.text import TextSource, build, find_files


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path | str, column: str | None = None) -> list[str]:
    return list(TextSource(str(path), column=column).documents())


def parquet(path: Path, **columns: list[object]) -> Path:
    import pyarrow
    from pyarrow import parquet as library

    library.write_table(pyarrow.table(columns), path)
    return path


# -------------------------------------------------------------------------------------------------------- kinds


def test_a_small_text_file_is_one_document(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "One.\r\n\r\nTwo.\n")) == ["One.\n\nTwo.\n"]


def test_a_long_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    text = "".join(f"Paragraph {index} " + "word " * 60 + "\n\n" for index in range(100))
    documents = read(write(tmp_path / "a.txt", text))
    assert 20 <= len(documents) <= 80
    assert "".join(documents) == text
    assert all(document.startswith("Paragraph") and document.endswith("\n\n") for document in documents)


def test_many_files_are_a_document_each(tmp_path: Path) -> None:
    texts = [f"File {index}. " * 100 for index in range(60)]
    for index, text in enumerate(texts):
        write(tmp_path / "corpus" / f"{index:03}.txt", text)
    assert read(tmp_path / "corpus") == texts


def test_lines_of_json(tmp_path: Path) -> None:
    lines = ['{"text": "one", "id": 1}', "", '"two"', '{"text": null}', '{"id": 2, "text": "three", "title": "t"}']
    assert read(write(tmp_path / "a.jsonl", "\n".join(lines))) == ["one", "two", "three"]


@pytest.mark.parametrize(
    "content",
    [
        ["one", "two"],
        [{"text": "one"}, {"text": "two"}],
        {"data": [{"content": "one"}, "two"]},
        {"text": ["one", "two"]},
    ],
)
def test_json_in_its_forms(tmp_path: Path, content: object) -> None:
    assert read(write(tmp_path / "a.json", json.dumps(content))) == ["one", "two"]


def test_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", id=[1, 2, 3], text=["one", None, "two"], title=["x", "y", "z"])
    assert read(path) == ["one", "two"]
    assert read(path, "title") == ["x", "y", "z"]


def test_a_folder_with_all_kinds_in_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a" / "z.jsonl", '{"text": "a/z"}')
    write(tmp_path / "c.JSON", '["c"]')
    parquet(tmp_path / "d.parquet", text=["d"])
    write(tmp_path / "notes.md", "not read")
    write(tmp_path / ".hidden" / "x.txt", "not read")
    assert read(tmp_path) == ["a/z", "b", "c", "d"]


def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/1.txt", "a/2.txt", "b/1.txt", "b/3.jsonl"):
        write(tmp_path / name, f'"{name}"')
    assert [name for name, _ in find_files(f"{tmp_path}/*/1.txt")] == ["a/1.txt", "b/1.txt"]
    assert [name for name, _ in find_files(f"{tmp_path}/**/*.txt")] == ["a/1.txt", "a/2.txt", "b/1.txt"]
    monkeypatch.chdir(tmp_path)
    assert [name for name, _ in find_files("a/*")] == ["1.txt", "2.txt"]


def test_the_field_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"story": "one", "title": "t"}\n')
    assert read(path, "story") == ["one"]
    assert read(write(tmp_path / "b.jsonl", '{"story": "only", "n": 1}\n')) == ["only"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one"), ("b.jsonl", '"one"'), ("c.json", '["one"]')):
        assert read(write(tmp_path / name, b"\xef\xbb\xbf" + content.encode())) == ["one"]


def test_half_a_surrogate_pair_becomes_encodable(tmp_path: Path) -> None:
    document = read(write(tmp_path / "a.jsonl", '{"text": "x\\ud83d y \\ud83d\\ude00"}'))[0]
    assert document == "x\ufffd y 😀"


# -------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("name", "content", "where", "what"),
    [
        ("a.jsonl", '"fine"\n{"text": \n', "a.jsonl:2", "not JSON"),
        ("a.jsonl", '"fine"\n\n[1]\n', "a.jsonl:3", "got list"),
        ("a.jsonl", '{"title": "x", "body": "y"}\n', "a.jsonl:1", "body, title"),
        ("a.jsonl", '{"n": 1}\n', "a.jsonl:1", "no text field"),
        ("a.jsonl", '"fine"\n' + "[" * 100_000 + "\n", "a.jsonl:2", "JSON"),
        ("a.jsonl", f'"fine"\n{{"text": "x", "n": {"9" * 5000}}}\n', "a.jsonl:2", "4300 digits"),
        ("a.json", f'["x", {"9" * 5000}]', "a.json", "4300 digits"),
        ("a.json", "3", "a.json", "list was expected"),
        ("a.json", '{"a": [], "b": []}', "a.json", "2 lists"),
        ("a.json", '["x", 3]', "item 1", "got int"),
        ("a.json", '[\n"x",\n]', "a.json", "line 3"),
        ("a.txt", b"fine\ncaf\xe9 au lait", "a.txt:2", "not UTF-8: byte 0xe9"),
        ("a.json", b'["fine",\n"caf\xe9"]', "a.json:2", "not UTF-8: byte 0xe9"),
        ("a.parquet", "not parquet at all", "a.parquet", "parquet"),
        ("a.csv", 'id,text\n1,"open\n', "a.csv:", "not CSV"),
        ("a.txt.gz", gzip.compress(b"\ncaf\xe9"), "a.txt.gz:2", "not UTF-8"),
        ("a.jsonl", '{"text": ["a", 1]}', "a.jsonl:1", "it holds int"),
    ],
)
def test_bad_content_is_named_exactly(tmp_path: Path, name: str, content: str | bytes, where: str, what: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.exit_code == ExitCode.DATA
    assert where in caught.value.where
    assert what in caught.value.what
    assert caught.value.hint


def test_a_named_field_that_is_missing(tmp_path: Path) -> None:
    for path in (write(tmp_path / "a.jsonl", '{"title": "x"}'), parquet(tmp_path / "b.parquet", title=["x"])):
        with pytest.raises(DataError, match=r"no text field 'story'.*title"):
            read(path, "story")


@pytest.mark.parametrize(
    "path", ["nowhere", "nowhere.txt", "no/*.txt", "a\0b", "empty", "~nobody-of-this-name/x.txt", "x" * 300, "a/**x/**"]
)
def test_missing_files(in_dir: Path, path: str) -> None:
    (in_dir / "empty").mkdir()
    with pytest.raises(NotFoundError) as caught:
        find_files(path)
    assert caught.value.exit_code == ExitCode.NOT_FOUND
    assert path in caught.value.where


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, error: OSError) -> None:
    """Opening a file of this name fails; modes would not stop root."""

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: str | Path, *arguments: Any, **named: Any) -> Any:
            if Path(path).name == name:
                raise error
            return real(path, *arguments, **named)

        return opened

    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(os, "open", refusing(os.open))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (PermissionError(13, "Permission denied"), DataError, "Permission denied"),
        (OSError(5, "Input/output error"), DataError, "Input/output error"),
        (FileNotFoundError(2, "No such file or directory"), NotFoundError, "gone"),
    ],
)
@pytest.mark.parametrize("name", ["b.txt", "b.jsonl", "b.json"])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError, kind: type[LockstepError], said: str
) -> None:
    write(tmp_path / "a.txt", "fine")
    path = write(tmp_path / name, '["x"]')
    source = TextSource(str(tmp_path))
    refuse(monkeypatch, name, error)
    for reading in (source.fingerprint, lambda: list(source.documents())):
        with pytest.raises(kind, match=said) as caught:
            reading()
        assert caught.value.where == str(path)


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text")
    source = TextSource(str(path))
    path.unlink()
    for reading in (source.fingerprint, lambda: list(source.documents())):
        with pytest.raises(NotFoundError, match="gone") as caught:
            reading()
        assert caught.value.where == str(path)


def test_an_unknown_kind_of_file(tmp_path: Path) -> None:
    for name in ("a.md", "a", "a.gz", "a.md.gz", "txt", "a.txt.gz.gz"):
        with pytest.raises(DataError, match="no kind of text") as caught:
            read(write(tmp_path / name, "x"))
        assert ".csv" in caught.value.hint


@pytest.mark.parametrize("packing", ["bz2", "xz"])
@pytest.mark.parametrize("place", ["a.jsonl.{}", "corpus", "corpus/*"])
def test_a_packing_that_is_not_read_is_told_with_what_unpacks_it(in_dir: Path, packing: str, place: str) -> None:
    """Also among files that are read: a run would silently train on less."""
    pack = {"bz2": bz2.compress, "xz": lzma.compress}[packing]
    held = pack(b'"one"\n')
    path = write(Path(place.format(packing) if place.startswith("a") else f"corpus/a.jsonl.{packing}"), held)
    write(path.with_name("b.txt"), "two")
    with pytest.raises(DataError, match=f".{packing} is no kind of text") as caught:
        read(place.format(packing))
    subprocess.run(["bash", "-c", caught.value.hint], check=True)
    assert read(place.removesuffix(".{}"))[0] == "one"


def test_a_file_of_ids_is_told_with_what_makes_windows_of_it(in_dir: Path) -> None:
    ids = np.arange(51_300).astype(np.uint16)
    np.save("all ids.npy", ids)
    with pytest.raises(DataError, match=r".npy is no kind of text") as caught:
        read("all ids.npy")
    subprocess.run(["bash", "-c", caught.value.hint.partition(", then --data-path windows")[0]], check=True)
    rows = np.stack([*windows.build(DataOptions(data_path="windows")).documents()])
    assert np.array_equal(rows[rows[:, 0].argsort()].reshape(-1), ids[: 100 * 512])
    assert np.load("windows/val_data.npy").shape == (5, 512)


def test_no_path_is_a_mistake_of_configuration() -> None:
    with pytest.raises(ConfigError, match="no text"):
        build(DataOptions(dataset_name="text"))


# --------------------------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_follows_content_and_names_not_the_place(tmp_path: Path) -> None:
    one = write(tmp_path / "one" / "a.txt", "text").parent
    other = write(tmp_path / "other" / "a.txt", "text").parent
    first = TextSource(str(one)).fingerprint()
    assert first == TextSource(str(other)).fingerprint()
    assert first != TextSource(str(one), column="x").fingerprint()
    write(other / "a.txt", "Text")
    assert first != TextSource(str(other)).fingerprint()
    (one / "a.txt").rename(one / "b.txt")
    assert first != TextSource(str(one)).fingerprint()


def test_a_large_file_is_read_again_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMO_BYTES", 1)
    hashed: list[str] = []
    real = module.sha256
    monkeypatch.setattr(module, "sha256", lambda path: hashed.append(path.name) or real(path))
    path = write(tmp_path / "a.txt", "text")
    long_ago = time.time() - 100
    os.utime(path, (long_ago, long_ago))
    source = TextSource(str(path), memo=tmp_path / "memo.json")
    first = source.fingerprint()
    assert source.fingerprint() == first
    assert hashed == ["a.txt"]
    write(path, "next")
    assert source.fingerprint() != first
    assert source.fingerprint() != first  # just written: not trusted to the memo yet
    assert hashed == ["a.txt"] * 3
    write(tmp_path / "memo.json", "garbage")
    source.fingerprint()
    assert hashed == ["a.txt"] * 4


def test_an_edit_that_keeps_size_and_time_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `touch -r` and some copying programs leave a file."""
    monkeypatch.setattr(module, "MEMO_BYTES", 1)
    path = write(tmp_path / "a.txt", "text")
    os.utime(path, (1, 1))
    source = TextSource(str(path), memo=tmp_path / "memo.json")
    first, before = source.fingerprint(), path.stat()
    assert (tmp_path / "memo.json").is_file()
    while (after := path.stat()).st_ctime_ns == before.st_ctime_ns:  # that clock ticks every few milliseconds
        write(path, "next")
        os.utime(path, (1, 1))
    assert (after.st_size, after.st_mtime, after.st_ino) == (4, 1, before.st_ino)
    assert source.fingerprint() != first


@pytest.mark.parametrize("shape", ["[]", "{}", "3", "null", '"x"', "[[1, 2, 3]]", "[null, null]", '[[], "", 1]'])
def test_a_damaged_memo_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    monkeypatch.setattr(module, "MEMO_BYTES", 1)
    path = write(tmp_path / "a.txt", "text")
    os.utime(path, (1, 1))
    expected = TextSource(str(path)).fingerprint()
    for damaged in (f'{{"{path}": {shape}}}', shape, "[" * 100_000, f"[{'9' * 5000}]"):
        memo = write(tmp_path / "memo.json", damaged)
        assert TextSource(str(path), memo=memo).fingerprint() == expected
        assert list(json.loads(memo.read_text(encoding="utf-8"))) == [str(path)]  # and repaired
