"""Rows of .csv and .parquet: which column, what is refused, and how little is read."""

from __future__ import annotations

import io
import random
from itertools import islice
from typing import Any, BinaryIO, cast

import pytest

from lockstep import formats
from lockstep.errors import DataError
from tests.formats.samples import Meagre, documents, how

# ------------------------------------------------------------------------------------------------------------ csv


def test_csv_columns_are_chosen_as_elsewhere() -> None:
    assert documents(b"id,content\n1,one\n2,two", "csv") == ["one", "two"]
    assert documents(b"story\none\n\ntwo\n", "csv") == ["one", "two"]
    assert documents(b"id,story\n1,one\n", "csv", column="story") == ["one"]
    assert documents(b'\xef\xbb\xbftext\r\n"one\r\nmore"\r\n', "csv") == ["one\r\nmore"]
    assert documents(b"text\n", "csv") == documents(b"", "csv") == []


@pytest.mark.parametrize(
    ("content", "where", "said"),
    [
        (b"id,story\n1,one\n", "a.csv:1", "which field holds the text? text fields are id, story"),
        (b"text\none, two\n", "a.csv:2", "a row of 2 fields, the header has 1"),
        (b"id,text\n1,one\n2\n", "a.csv:3", "a row of 1 fields, the header has 2"),
        (b'text\n"one\ntwo\n', "a.csv:3", "not CSV: unexpected end of data"),
        (b'text\n"one" two\n', "a.csv:2", "not CSV"),
        (b"text\nfine\ncaf\xe9\n", "a.csv:3", "not UTF-8: byte 0xe9"),
        (b"text;label\none, two;1\n", "a.csv:2", "a row of 2 fields, the header has 1"),
        (b"text\nold\rlines\r", "a.csv:2", "not CSV"),
    ],
)
def test_bad_csv_is_named_exactly(content: bytes, where: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        documents(content, "csv")
    assert caught.value.where == where
    assert said in caught.value.what


@pytest.mark.parametrize(("header", "answers"), [(b"prompt,answer", True), (b"id,story", False)])
def test_who_has_answers_is_told_how_to_learn_them(header: bytes, answers: bool) -> None:
    with pytest.raises(DataError) as caught:
        documents(header + b"\n1,one\n", "csv")
    assert ("data.documents=answers" in caught.value.hint) == answers


def test_a_csv_field_may_be_long() -> None:
    text = "x" * 1_000_000  # the library alone refuses more than 131072
    assert documents(f"text\n{text}\n".encode(), "csv") == [text]


def test_a_million_columns_do_not_fill_the_screen() -> None:
    with pytest.raises(DataError, match="and 99980 more") as caught:
        documents(",".join("column" * 20 + str(number) for number in range(100_000)).encode(), "csv")
    assert len(caught.value.what) < 2000


# -------------------------------------------------------------------------------------------------------- parquet


def table(rows_of_group: int = 100, **columns: Any) -> bytes:
    import pyarrow
    from pyarrow import parquet as library

    out = io.BytesIO()
    library.write_table(
        pyarrow.table(columns), out, row_group_size=rows_of_group, compression="none", use_dictionary=False
    )
    return out.getvalue()


def test_only_the_text_is_read_and_only_as_far_as_asked() -> None:
    random.seed(0)
    texts = [random.randbytes(50).hex() for _ in range(20_000)]
    pictures = [random.randbytes(200) for _ in texts]
    content = table(1000, picture=pictures, text=texts)
    whole, part = Meagre(content), Meagre(content)
    assert [text for _, text in formats.walk(cast("BinaryIO", whole), how("parquet"))] == texts
    few = islice(formats.walk(cast("BinaryIO", part), how("parquet")), 1_500)
    assert [text for _, text in few] == texts[:1_500]
    assert whole.bytes < 1.3 * 20_000 * 104 < 0.5 * len(content)
    assert part.bytes < 2 * 2_000 * 104 + (1 << 17)  # two of twenty row groups, and the footer


def test_few_rows_of_a_large_group_are_few_reads() -> None:
    """What is asked for first comes before the rest of its row group is fetched."""
    texts = [random.Random(number).randbytes(500).hex() for number in range(30_000)]
    file = Meagre(table(30_000, text=texts))
    walk = formats.walk(cast("BinaryIO", file), how("parquet"))
    assert [text for _, text in zip(range(100), (text for _, text in walk), strict=False)] == texts[:100]
    assert file.bytes < 12 << 20 < 30_000 * 1000


def test_parquet_types_that_hold_text() -> None:
    import pyarrow

    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        assert documents(table(story=pyarrow.array(["a", None, "b"]).cast(kind)), "parquet") == ["a", "b"]
    words = pyarrow.array([["a", "b"], None, [], ["c"]])
    assert documents(table(text=words, label=[1, 2, 3, 4]), "parquet") == ["a b", "c"]
    assert documents(table(words=words, title=["t"] * 4), "parquet", column="words") == ["a b", "c"]
    assert documents(table(words=words, title=["t"] * 4), "parquet") == ["t"] * 4
    with pytest.raises(DataError, match="no text field"):
        documents(table(label=[1, 2]), "parquet")
