"""Text files as a whole: folders, names and links of any kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError, NotFoundError
from lockstep.sources import text as module
from lockstep.sources.text import TextSource, find_files
from tests.formats.samples import HOLDS, SAMPLES, pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every kind of file, some packed, one empty, one with blanks only."""
    made = tmp_path / "corpus"
    (made / "deep" / "er").mkdir(parents=True)
    for kind, make in SAMPLES.items():
        (made / f"{kind}.{kind}").write_bytes(make())
    for kind, packing in (("txt", "gz"), ("jsonl", "zst"), ("csv", "gz"), ("json", "zst")):
        (made / "deep" / f"{kind}.{kind}.{packing}").write_bytes(pack(SAMPLES[kind](), packing))
    (made / "deep" / "er" / "empty.jsonl").write_bytes(b"")
    (made / "deep" / "er" / "blank.txt").write_bytes(b" \n\n ")
    (made / "zzz.jsonl").write_bytes(b'"last"\n\n\n')
    return made


def test_a_folder_is_read_file_by_file(folder: Path) -> None:
    source = TextSource(str(folder))
    assert len(source.files) == 12
    assert source.made_of == "csv.csv, deep/csv.csv.gz, deep/er/blank.txt and 9 more"
    assert TextSource(f"{folder}/zzz.jsonl").made_of == "zzz.jsonl"
    documents = [*source.documents()]
    assert documents[-1] == "last"
    assert len(documents) > 7 * len(HOLDS)


# ----------------------------------------------------------------------------------------------- names and links


def test_names_of_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMO_BYTES", 1)
    names = [
        b"\xff\xfe.txt",
        b"a\nb.txt",
        b"-rf.txt",
        b"$(id).txt",
        b"'\".txt",
        "ä😀.txt".encode(),
        b"*.txt",
        b"[a].txt",
    ]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in names:
        place = os.fsencode(corpus) + b"/" + name
        with open(place, "wb") as file:  # noqa: PTH123 - no Path holds these bytes as they are
            file.write(name.hex().encode())
        os.utime(place, (1, 1))
    source = TextSource(str(corpus), memo=tmp_path / "memo.json")
    assert sorted(map(str, source.documents())) == sorted(name.hex() for name in names)
    first = source.fingerprint()
    assert json.loads(json.dumps(dict(first))) == first == source.fingerprint()
    assert len(json.loads((tmp_path / "memo.json").read_text(encoding="utf-8"))) == len(names)
    for name in names:
        source = TextSource(f"{corpus}/{os.fsdecode(name)}")
        (only,) = source.documents()
        assert only == name.hex()
        assert source.made_of.encode(), "it can be written"


def test_a_bad_file_of_a_bad_name_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\n.jsonl")
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        list(TextSource(str(tmp_path)).documents())
    assert caught.value.where == f"{path}:1"
    assert f"'{path.name}'" in caught.value.hint  # safe to paste into a shell


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30) | st.text(st.sampled_from("ab/.*?[]~!-{}\\\0 "), max_size=30))
def test_any_pattern_finds_files_or_is_refused(pattern: str) -> None:
    try:
        found = find_files(f"/nonexistent-folder/{pattern}")
    except NotFoundError as error:
        assert error.where.endswith(pattern)  # noqa: PT017 - either outcome is right
    else:
        assert found


def test_links_lead_where_they_lead_and_nowhere_for_ever(tmp_path: Path) -> None:
    """A link to a file is that file; a link to a folder above is not followed; loops and loose ends are no files."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (tmp_path / "outside.txt").write_text("outside", encoding="utf-8")
    (corpus / "a.txt").write_text("inside", encoding="utf-8")
    (corpus / "link.txt").symlink_to("../outside.txt")
    (corpus / "up").symlink_to("..")
    (corpus / "loop.txt").symlink_to("loop.txt")
    (corpus / "loose.txt").symlink_to("nothing.txt")
    (corpus / "folder.txt").mkdir()
    os.mkfifo(corpus / "pipe.txt")
    before = sorted(path.name for path in tmp_path.iterdir())
    source = TextSource(str(corpus))
    assert [name for name, _ in source.files] == ["a.txt", "link.txt"]
    assert list(source.documents()) == ["inside", "outside"]
    assert source.fingerprint() == source.fingerprint()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    for name in ("loop.txt", "loose.txt", "pipe.txt"):
        with pytest.raises(NotFoundError) as caught:
            find_files(str(corpus / name))
        assert ("corpus.txt" in caught.value.hint) == (name == "pipe.txt")
