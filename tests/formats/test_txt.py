"""Plain text: pieces join to the text, however it came."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.formats import txt
from lockstep.formats.txt import blocks, cut, cut_limit


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
        read = "".join(blocks(io.BytesIO(content)))
    finally:
        txt.READ_BYTES = saved
    assert read == io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()


@pytest.mark.parametrize(("size", "limit"), [(0, 1 << 10), (1 << 20, (1 << 20) // 40), (1 << 40, 1 << 18)])
def test_a_document_is_a_small_share_of_the_text(size: int, limit: int) -> None:
    assert cut_limit(size) == limit


def test_bytes_cut_short_at_the_end_are_noticed() -> None:
    with pytest.raises(UnicodeDecodeError):
        list(blocks(io.BytesIO("fünf €".encode()[:-1])))
