"""Text files as a whole: going on from any place, names and links of any kind, and what is piped in."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import cache
from lockstep.data.options import DataOptions
from lockstep.errors import ConfigError, DataError, ExitCode, LockstepError, NotFoundError, OutputError
from lockstep.sources import text as module
from lockstep.sources.text import TextSource, build, find_files, spool
from tests.formats.samples import HOLDS, SAMPLES, ids, pack, plain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every kind of file, some packed, one empty, one with blanks only."""
    made = tmp_path / "corpus"
    (made / "deep" / "er").mkdir(parents=True)
    for kind, make in SAMPLES.items():
        (made / f"{kind}.{kind}").write_bytes(make())
    for kind, packing in (("txt", "gz"), ("jsonl", "zst"), ("csv", "bz2"), ("json", "xz"), ("npy", "gz")):
        (made / "deep" / f"{kind}.{kind}.{packing}").write_bytes(pack(SAMPLES[kind](), packing))
    (made / "deep" / "er" / "empty.jsonl").write_bytes(b"")
    (made / "deep" / "er" / "blank.txt").write_bytes(b" \n\n ")
    (made / "zzz.jsonl").write_bytes(b'"last"\n\n\n')
    return made


Walk = list[tuple[Any, Any]]


def walked(source: TextSource, start: tuple[int, int] = (0, 0)) -> Walk:
    return [(place, plain(document)) for place, document in source.walk(start)]


def strays(whole: Walk, again: Iterator[Walk]) -> int:
    """How many of the walks, one from each place, are not the rest of the whole."""
    return sum(rest != whole[number:] for number, rest in enumerate(again, 1))


def test_a_folder_goes_on_from_every_place(folder: Path) -> None:
    source = TextSource(str(folder))
    assert len(source.files) == 14
    assert source.made_of == "csv.csv, deep/csv.csv.bz2, deep/er/blank.txt and 11 more"
    assert TextSource(f"{folder}/zzz.jsonl").made_of == "zzz.jsonl"
    whole = walked(source)
    assert [document for _, document in whole] == [plain(document) for document in source.documents()]
    assert whole[-1][1] == "last"
    assert len({place for place, _ in whole}) == len(whole) > 8 * len(HOLDS)
    assert [place for place, _ in whole] == sorted(place for place, _ in whole)
    assert strays(whole, (walked(source, place) for place, _ in whole)) == 0
    assert strays(whole, (walked(source, (file, after + 1)) for (file, after), _ in whole)) > 0.8 * len(whole)
    assert walked(source, whole[-1][0]) == walked(source, (14, 0)) == []


def test_a_walk_opens_only_the_files_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TextSource(str(folder))
    opened: list[str] = []
    real = Path.open

    def noting(self: Path, *arguments: Any, **named: Any) -> Any:
        opened.append(self.name)
        return real(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", noting)
    assert [document for _, document in walked(source, (13, 0))] == ["last"]
    assert opened == ["zzz.jsonl"]


def test_ids_come_as_ids(tmp_path: Path) -> None:
    (tmp_path / "train_data.npy").write_bytes(SAMPLES["npy"]())
    source = TextSource(str(tmp_path / "train_data.npy"))
    assert [plain(document) for document in source.documents()] == ids().tolist()


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
        assert ("piped in" in caught.value.hint) == (name == "pipe.txt")


# --------------------------------------------------------------------------------------------------------- stdin


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        (b"Some text.\n", "txt"),
        (b'{"text": "one"}\n{"text": "two"}\n', "jsonl"),
        (b'\n  \n{"text": "one"}\n', "jsonl"),
        (b'\xef\xbb\xbf{"text": "one"}', "jsonl"),
        (b"[not json]", "txt"),
    ],
)
def test_what_is_piped_in_becomes_a_file(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = spool(io.BytesIO(content), tmp_path / "new" / "cache")
    assert path == tmp_path / "new" / "cache" / f"stdin-{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"
    assert path.read_bytes() == content
    assert spool(io.BytesIO(content), path.parent) == path
    assert list(path.parent.iterdir()) == [path]
    assert len(list(TextSource(str(path)).documents())) == max(1, content.count(b'{"'))


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize(
    ("content", "suffix", "held"),
    [(b"BZhere\xc3\xa4 is text.\n", "txt", "BZhere\u00e4 is text.\n"), (b'\n{"text": "one"}\n', "jsonl", "one")],
)
def test_what_is_piped_in_packed_is_called_so(
    tmp_path: Path, content: bytes, suffix: str, held: str, packing: str
) -> None:
    path = spool(io.BytesIO(pack(content, packing)), tmp_path)
    assert path.name.endswith(f".{suffix}.{packing}")
    assert list(TextSource(str(path)).documents()) == [held]
    assert cache.LOOSE.fullmatch(path.name)  # so that clearing the cache takes it along
    assert spool(io.BytesIO(content), tmp_path).suffix == f".{suffix}"
    for blank in (b"", b" \n"):
        with pytest.raises(ConfigError, match="nothing was piped in"):
            spool(io.BytesIO(pack(blank, packing)), tmp_path)


def test_a_damaged_archive_piped_in_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"damaged or incomplete \.gz"):
        spool(io.BytesIO(pack(b"Some text. " * 99, "gz")[:12]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_is_gone_has_to_be_piped_in_again(tmp_path: Path) -> None:
    for content in (b"Some text.", pack(b'{"text": "one"}', "gz")):
        path = spool(io.BytesIO(content), tmp_path)
        path.unlink()
        with pytest.raises(NotFoundError, match="came through a pipe") as caught:
            TextSource(str(path))
        assert caught.value.where == str(path)
        assert "cat FILE | lockstep train ... --data-path -" in caught.value.hint
    with pytest.raises(NotFoundError, match="no such file"):
        find_files(str(tmp_path / "stdin-notes.txt"))


def test_blanks_before_the_first_character_may_be_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COPY_BYTES", 4)
    assert spool(io.BytesIO(b" " * 99 + b'{"text": "one"}'), tmp_path).suffix == ".jsonl"


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
def test_nothing_piped_in_is_a_mistake_of_the_command(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="nothing was piped in") as caught:
        spool(io.BytesIO(content), tmp_path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--data-path -" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


class Breaking(io.BytesIO):
    """A pipe that breaks in the middle."""

    def read(self, size: int | None = -1, /) -> bytes:
        if block := super().read(4):
            return block
        raise OSError(5, "Input/output error")


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="copying stdin failed: Input/output error") as caught:
        spool(Breaking(b"some text"), tmp_path)
    assert caught.value.exit_code == ExitCode.IO
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError) as refused:
        spool(io.BytesIO(b"text"), tmp_path / "file")
    assert "data.cache_dir" in refused.value.hint


def test_stdin_is_copied_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match="not been copied"):
        build(DataOptions(dataset_name="text", data_path="-"))
