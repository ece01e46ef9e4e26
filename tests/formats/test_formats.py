"""What every kind of file and every packing keeps: a new module in formats/ is tested here the moment it exists."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import formats
from lockstep.errors import DataError, ExitCode, LockstepError
from tests.formats.samples import HOLDS, SAMPLES, Meagre, documents, how, pack, walked

KINDS = formats.kinds()
PACKINGS = formats.packings()
PAIRS = [(kind, packing) for kind in KINDS for packing in ("", *PACKINGS) if not (kind == "parquet" and packing)]


def test_every_kind_has_a_sample() -> None:
    assert set(KINDS) == set(SAMPLES) == {"txt", "jsonl", "json", "csv", "parquet"}
    assert set(PACKINGS) == {"gz", "zst"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", formats.Kind("txt")),
        ("A.JSONL.GZ", formats.Kind("jsonl", "gz")),
        ("data/train-00000-of-00001.parquet", formats.Kind("parquet")),
        ("en/c4-train.00000-of-01024.json.gz", formats.Kind("json", "gz")),
        ("v1.2.csv.zst", formats.Kind("csv", "zst")),
        (".txt", formats.Kind("txt")),
        *[
            (name, None)
            for name in (
                "a",
                "a.gz",
                "a.md",
                "txt",
                "a.gz.txt.md",
                "a.txt.gz.zst",
                "a.npy",
                "a.txt.xz",
                "b.txt/a",
                "",
                "a.",
            )
        ],
        *[(name, None) for name in ("a.options", "a.__init__", "a.txt ", "a.txt\n", "gz.gz", "a..gz")],
    ],
)
def test_a_name_says_the_kind(name: str, kind: formats.Kind | None) -> None:
    assert formats.kind_of(name) == kind


@pytest.mark.parametrize(("kind", "packing"), PAIRS)
def test_the_documents_are_those_written(kind: str, packing: str) -> None:
    content = pack(SAMPLES[kind](), packing)
    found = documents(content, kind, packing)
    if kind == "txt":
        assert "".join(found) == "\n\n".join(HOLDS)
        assert len(found) > 20
    else:
        assert found == HOLDS


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_than_a_file_object_is_needed(kind: str) -> None:
    content = SAMPLES[kind]()
    file = Meagre(content) if kind == "parquet" else Meagre(content, most=7)  # arrow asks for what it gets
    assert [*formats.walk(cast("BinaryIO", file), how(kind))] == walked(content, how(kind))


# ------------------------------------------------------------------------------------------------------- damage


def outcome(content: bytes, kind: str, packing: str) -> list[Any] | DataError:
    """What a file holds, or the refusal; anything else is a fault of ours."""
    try:
        return documents(content, kind, packing)
    except DataError as refusal:
        error = refusal
    assert error.exit_code == ExitCode.DATA
    assert error.where.startswith(f"a.{kind}")
    assert len(str(error)) < 3000
    return error


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_archive_that_is_cut_short_is_refused_wherever_it_is_cut(packing: str) -> None:
    content = pack(SAMPLES["jsonl"](), packing)
    for size in range(1, len(content)):
        error = outcome(content[:size], "jsonl", packing)
        assert isinstance(error, DataError), size
        assert f".{packing}" in error.what
        assert "damaged or incomplete" in error.what


def test_an_altered_archive_is_never_another_text() -> None:
    content = pack(SAMPLES["jsonl"](), "gz")
    refused = 0
    for place in range(len(content)):
        found = outcome(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :], "jsonl", "gz")
        refused += isinstance(found, DataError)
        assert isinstance(found, DataError) or found == HOLDS
    assert refused > 0.9 * len(content)


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_is_no_archive_is_refused(packing: str) -> None:
    error = outcome(b'{"text": "plain"}\n', "jsonl", packing)
    assert isinstance(error, DataError)
    assert "damaged" in error.what


@pytest.mark.parametrize("packing", PACKINGS)
def test_archives_one_after_another_are_one(packing: str) -> None:
    content = pack(b'"one"\n', packing) + pack(b'"two"\n', packing)
    assert documents(content, "jsonl", packing) == ["one", "two"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_failing_disk_is_no_damaged_archive(packing: str) -> None:
    class Failing(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        list(formats.walk(cast("BinaryIO", Failing()), how("jsonl", packing)))


@pytest.mark.parametrize("packing", PACKINGS)
def test_bad_text_in_a_good_archive_is_named_as_bad_text(packing: str) -> None:
    for kind in ("txt", "jsonl", "csv", "json"):
        error = outcome(pack(b"caf\xe9 au lait", packing), kind, packing)
        assert isinstance(error, DataError)
        assert "not UTF-8: byte 0xe9" in error.what
        assert "iconv" not in error.hint  # it would not read the archive


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_parquet_is_to_be_unpacked(packing: str) -> None:
    error = outcome(pack(SAMPLES["parquet"](), packing), "parquet", packing)
    assert isinstance(error, DataError)
    assert "unpack" in error.hint


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "json", "txt"])
def test_a_bomb_is_not_unpacked_into_memory(kind: str, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record without end: refused once it is too long, or (plain text) cut; never gathered."""
    for limit in ("jsonl.RECORD_BYTES", "json.WHOLE_BYTES", "csv.RECORD_BYTES"):
        monkeypatch.setattr(f"lockstep.formats.{limit}", 1 << 21)
    opening = {"jsonl": b'"', "csv": b'text\n"', "json": b'["', "txt": b""}[kind]
    content = pack(opening + b"x" * (1 << 24), packing)
    walk = formats.walk(io.BytesIO(content), how(kind, packing, cut_characters=1 << 20))
    if kind == "txt":
        assert max(len(document) for _, document in walk) == 1 << 20
    else:
        with pytest.raises(DataError, match=re.compile("more than 2 M|field larger")):
            list(walk)


def missing(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(module, refuse)


@pytest.mark.parametrize(("kind", "packing"), [("parquet", ""), ("jsonl", "zst")])
def test_a_missing_package_is_named_with_its_command(kind: str, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pack(SAMPLES[kind](), packing)
    missing(monkeypatch, f"lockstep.formats.{packing or kind}.import_module")
    with pytest.raises(LockstepError, match="not installed") as caught:
        documents(content, kind, packing)
    assert caught.value.hint == "pip install pyarrow"


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=300), pair=st.sampled_from(PAIRS))
def test_garbage_is_refused_or_read(content: bytes, pair: tuple[str, str]) -> None:
    kind, packing = pair
    outcome(content, kind, packing)
    outcome(pack(content, packing), kind, packing)


MAGICS = {
    "parquet": b"PAR1",
    "json": b'[{"text": ',
    "jsonl": b'{"text": ',
    "csv": b"text\n",
}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_hurt_files_are_refused_or_read(data: st.DataObject, kind: str) -> None:
    content = bytearray(SAMPLES[kind]())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not content:
            return
    outcome(bytes(content), kind, "")


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200), kind=st.sampled_from(sorted(MAGICS)))
def test_what_only_begins_well_is_refused_or_read(content: bytes, kind: str) -> None:
    outcome(MAGICS[kind] + content, kind, "")
    outcome(MAGICS[kind] + content + MAGICS[kind], kind, "")


def test_the_reader_is_closed_with_the_walk() -> None:
    """A walk that is left early leaves nothing open."""
    walk: Iterator[Any] = formats.walk(io.BytesIO(pack(SAMPLES["jsonl"](), "gz")), how("jsonl", "gz"))
    next(walk)
    cast("Any", walk).close()
    assert list(walk) == []
