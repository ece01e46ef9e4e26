"""JSON item by item: the same items, and the same refusals, as from parsing the whole text at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.formats import json as module
from lockstep.formats import txt
from tests.formats.samples import documents

SPACE = st.sampled_from(["", " ", "\n", "\n\n  ", "\t"])
TEXT = st.text(st.sampled_from('ab\\"[]{},:é😀\ud83d \n'), max_size=12)
ITEM = TEXT | st.builds(lambda text, number: {"text": text, "n": number}, TEXT, st.integers() | st.floats(width=32))


def in_blocks(content: bytes, size: int) -> list[Any] | str:
    """The documents of a file that comes in blocks of so many bytes, or what was said of it."""
    saved, txt.READ_BYTES = txt.READ_BYTES, size
    try:
        return documents(content, "json")
    except DataError as error:
        return error.what
    finally:
        txt.READ_BYTES = saved


def written(item: Any) -> str:
    """Characters as they are where all of them are characters."""
    text = json.dumps(item, ensure_ascii=False)
    return json.dumps(item) if "\ud83d" in text else text


@settings(max_examples=150, deadline=None)
@given(st.lists(ITEM, max_size=8), SPACE, st.integers(1, 40))
def test_a_list_in_blocks_of_any_size(items: list[Any], space: str, size: int) -> None:
    inner = f"{space},{space}".join(written(item) for item in items)
    content = f"{space}[{space}{inner}{space}]{space}".encode()
    texts = [item if isinstance(item, str) else item["text"] for item in items]
    whole = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts if text.strip()]
    assert in_blocks(content, size) == whole


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from('[]{},:" a1-etrun\\\n'), max_size=16), st.integers(1, 9))
def test_what_is_no_json_is_refused_as_json_refuses_it(text: str, size: int) -> None:
    """A text that the library refuses as a whole is refused here, unless it is several values."""
    said = in_blocks(f"[{text}".encode(), size)
    assert said == in_blocks(f"[{text}".encode(), 1000)
    try:
        json.loads(f"[{text}")
    except json.JSONDecodeError:
        assert isinstance(said, str)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('["a" "b"]', "column 6: Expecting ',' delimiter"),
        ('["a",]', "column 6: Expecting value"),
        ('["a"] x', "column 7: Extra data"),
        ('["a"', "column 5: Expecting ',' delimiter"),
        ("[", "column 2: Expecting value"),
        ('["a",\n"b\n"]', "line 2, column 3: Invalid control character at"),
        ('["a",\n\n"b', "line 3, column 1: Unterminated string starting at"),
        ('[\n{"text": "a"},\n{"text": a}]', "line 3, column 10: Expecting value"),
        ("", "column 1: Expecting value"),
        (" \n ", "line 2, column 2: Expecting value"),
        ('{"text": "a"}\n{"text": }', "line 2, column 10: Expecting value"),
        ("nul", "column 1: Expecting value"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_the_place_of_an_error_does_not_depend_on_blocks(text: str, said: str, size: int) -> None:
    assert in_blocks(text.encode(), size) == f"not JSON: {said}"


def test_json_lines_under_the_name_of_json() -> None:
    lines = b'{"text": ["one", "word"], "label": 1}\n\n{"text": "two", "label": 0}\n"three"\n'
    for size in (1, 7, 1000):
        assert in_blocks(lines, size) == ["one word", "two", "three"]
    assert in_blocks(b'{"text": "only"}\n', 1000) == ["only"]


def test_a_bad_line_under_the_name_of_json_is_named() -> None:
    with pytest.raises(DataError, match="got list") as caught:
        documents(b'"one"\n\n[2]\n', "json")
    assert caught.value.where == "a.json:3"


def test_no_line_end_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting those of all the text in memory again for each item took nine tenths of the time of the real c4."""
    counted, count = [0], module._Text.line

    def tallying(text: Any) -> int:
        counted[0] += text._next - text._counted
        return count(text)

    monkeypatch.setattr(module._Text, "line", tallying)
    lines = b"".join(b'{"text": "line %d"}\n' % number for number in range(1, 500))
    for size in (7, 1000, 1 << 20):
        counted[0] = 0
        assert len(in_blocks(lines, size)) == 499
        assert 0 < counted[0] <= len(lines)
        monkeypatch.setattr(txt, "READ_BYTES", size)
        with pytest.raises(DataError) as caught:
            documents(lines + b"[3]\n", "json")
        assert caught.value.where == "a.json:500"


def test_lists_of_words() -> None:
    """As in the files of the IMDB reviews that seed C reads."""
    items: list[Any] = [{"text": ["A", "good", "film"], "label": 1}, {"text": [], "label": 0}]
    items.append({"text": None, "label": 0})
    items.append({"text": ["Bad"], "tags": ["x", "y"], "label": 0})
    assert documents(json.dumps(items).encode(), "json") == ["A good film", "Bad"]
    assert documents("\n".join(map(json.dumps, items)).encode(), "jsonl") == ["A good film", "Bad"]
    named = [{"words": ["a", "b"], "title": "t"}]
    assert documents(json.dumps(named).encode(), "json", column="words") == ["a b"]
    assert documents(json.dumps(named).encode(), "json") == ["t"]  # a list that is not called text is none


def test_a_list_of_other_things_is_refused() -> None:
    with pytest.raises(DataError, match="it holds int") as caught:
        documents(b'{"text": ["a", 1]}\n', "jsonl")
    assert caught.value.where == "a.jsonl:1"


def test_an_object_too_large_to_be_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.formats.json.WHOLE_CHARACTERS", 1 << 20)
    content = json.dumps({"data": ["x" * 1000] * 4000}).encode()
    with pytest.raises(DataError, match="more than 1 Mi characters") as caught:
        documents(content, "json")
    assert ".jsonl" in caught.value.hint
    assert len(documents(content[len('{"data": ') : -1], "json")) == 4000
