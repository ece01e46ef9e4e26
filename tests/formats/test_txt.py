"""Plain text: pieces join to the text, however it came."""

from __future__ import annotations

import codecs
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.formats import txt
from lockstep.formats.txt import blocks, cut, cut_limit
from tests.formats.samples import how


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("ab \n"), max_size=400), st.integers(1, 50), st.integers(1, 60))
def test_pieces_join_to_the_text(text: str, limit: int, block: int) -> None:
    came = [text[place : place + block] for place in range(0, len(text), block)]
    pieces = list(cut(came, limit))
    assert "".join(pieces) == text
    assert all(len(piece) <= limit for piece in pieces)
    assert pieces == list(cut([text], limit))


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("aä€😀\r\n\ufeff"), max_size=60), st.integers(1, 9))
def test_blocks_read_as_python_reads_text(text: str, size: int) -> None:
    content = text.encode()
    saved, txt.READ_BYTES = txt.READ_BYTES, size
    try:
        read = "".join(blocks(io.BytesIO(content), how("txt")))
    finally:
        txt.READ_BYTES = saved
    assert read == io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()


@pytest.mark.parametrize(("size", "limit"), [(0, 1 << 10), (1 << 20, (1 << 20) // 40), (1 << 40, 1 << 18)])
def test_a_document_is_a_small_share_of_the_text(size: int, limit: int) -> None:
    assert cut_limit(size) == limit


def test_bytes_cut_short_at_the_end_are_noticed() -> None:
    with pytest.raises(DataError, match="not UTF-8: byte 0xe2") as caught:
        list(blocks(io.BytesIO("fünf\n€".encode()[:-1]), how("txt")))
    assert caught.value.where == "a.txt:2"


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("aä€😀\r\n\ufeff"), max_size=60), st.integers(1, 9))
def test_the_line_of_a_byte_that_is_not_utf8_is_named(text: str, size: int) -> None:
    """However the file comes in, and by whatever its lines end."""
    content = text.encode() + b"caf\xe9 au lait\n"
    saved, txt.READ_BYTES = txt.READ_BYTES, size
    try:
        with pytest.raises(DataError, match="not UTF-8: byte 0xe9") as caught:
            list(blocks(io.BytesIO(content), how("txt")))
    finally:
        txt.READ_BYTES = saved
    line = text.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1
    assert caught.value.where == f"a.txt:{line}"
    assert caught.value.hint.startswith("iconv -f LATIN1 -t UTF-8 a.txt > utf8-a.txt")


@pytest.mark.parametrize("order", ["le", "be"])
def test_text_of_windows_is_known_by_how_it_begins(order: str) -> None:
    """What is converted by that line is the text; as Latin-1 it would be every letter with a zero behind it."""
    mark = codecs.BOM_UTF16_LE if order == "le" else codecs.BOM_UTF16_BE
    with pytest.raises(DataError, match=r"not UTF-8: byte 0xf[ef]") as caught:
        list(blocks(io.BytesIO(mark + "hello".encode(f"utf-16-{order}")), how("txt")))
    assert caught.value.hint == "iconv -f UTF-16 -t UTF-8 a.txt > utf8-a.txt"
