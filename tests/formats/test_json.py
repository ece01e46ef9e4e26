"""JSON lists read whole, JSON lines of that name line by line; what is neither is refused as the library refuses it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.formats import json as module
from tests.formats.samples import documents, pack

SPACE = st.sampled_from(["", " ", "\n", "\n\n  ", "\t"])
TEXT = st.text(st.sampled_from('ab\\"[]{},:é😀\ud83d \n'), max_size=12)
ITEM = TEXT | st.builds(lambda text, number: {"text": text, "n": number}, TEXT, st.integers() | st.floats(width=32))


def in_blocks(content: bytes, size: int) -> list[Any] | str:
    """The documents of a file that comes in blocks of so many bytes, or what was said of it."""
    saved, module.READ_BYTES = module.READ_BYTES, size
    try:
        return documents(content, "json")
    except DataError as error:
        return error.what
    finally:
        module.READ_BYTES = saved


def written(item: Any) -> str:
    """Characters as they are where all of them are characters."""
    text = json.dumps(item, ensure_ascii=False)
    return json.dumps(item) if "\ud83d" in text else text


def texts(items: list[Any]) -> list[str]:
    found = [item if isinstance(item, str) else item["text"] for item in items]
    return [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in found if text.strip()]


@settings(max_examples=150, deadline=None)
@given(st.lists(ITEM, max_size=8), SPACE, st.integers(1, 40))
def test_a_list_in_blocks_of_any_size(items: list[Any], space: str, size: int) -> None:
    inner = f"{space},{space}".join(written(item) for item in items)
    assert in_blocks(f"{space}[{space}{inner}{space}]{space}".encode(), size) == texts(items)


@settings(max_examples=150, deadline=None)
@given(st.lists(ITEM, min_size=2, max_size=8), st.sampled_from(["\n", "\n\n", "\r\n"]), st.integers(1, 40))
def test_lines_in_blocks_of_any_size(items: list[Any], end: str, size: int) -> None:
    assert in_blocks(end.join(written(item) for item in items).encode(), size) == texts(items)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from('[]{},:" a1-etrun\\\n'), max_size=16), st.integers(1, 9))
def test_what_is_no_json_is_refused_as_json_refuses_it(text: str, size: int) -> None:
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
        ('["a"] x', "column 7: Extra data"),
        ("[", "column 2: Expecting value"),
        ('["a",\n"b\n"]', "line 2, column 3: Invalid control character at"),
        ('["a",\n\n"b', "line 3, column 1: Unterminated string starting at"),
        ('[\n{"text": "a"},\n{"text": a}]', "line 3, column 10: Expecting value"),
        ("", "column 1: Expecting value"),
        (" \n ", "line 2, column 2: Expecting value"),
        ('{\n"text": "a"\n}\n{\n"text": "b"\n}', "line 4, column 1: Extra data"),
    ],
)
def test_the_place_of_an_error(text: str, said: str) -> None:
    assert in_blocks(text.encode(), 1000) == f"not JSON: {said}"


def test_json_lines_under_the_name_of_json() -> None:
    lines = b'{"text": ["one", "word"], "label": 1}\n\n{"text": "two", "label": 0}\n"three"\n'
    for size in (1, 7, 1000):
        assert in_blocks(lines, size) == ["one word", "two", "three"]
    assert in_blocks(b'{"text": "only"}\n', 1000) == ["only"]
    assert in_blocks(b'\xef\xbb\xbf\n{"text": "one"}\n{"text": "two"}', 1000) == ["one", "two"]


@pytest.mark.parametrize(("line", "words"), [(b"[2]", "got list"), (b'{"text": }', "column 10: Expecting value")])
def test_a_bad_line_under_the_name_of_json_is_named(line: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        documents(b'"one"\n\n' + line + b"\n", "json")
    assert caught.value.where == "a.json:3"


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


@pytest.mark.parametrize("packing", ["", "gz"])
def test_a_list_too_large_to_be_read_whole_is_told_with_what_makes_lines_of_it(
    packing: str, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "READ_BYTES", 1 << 16)
    items = [{"text": "x" * 1000}] * 4000
    content = pack(json.dumps(items).encode(), packing)
    with pytest.raises(DataError, match=r"more than 1 MiB, and \.json") as caught:
        documents(content, "json", packing)
    Path(f"a.json.{packing}" if packing else "a.json").write_bytes(content)
    Path("jq").write_text(  # which need not be installed here
        '#!/usr/bin/env python3\nimport json, sys\nassert sys.argv[1:] == ["-c", ".[]"]\n'
        "for item in json.load(sys.stdin): print(json.dumps(item))\n"
    )
    Path("jq").chmod(0o755)
    subprocess.run(["bash", "-c", f"PATH=.:$PATH; {caught.value.hint}"], check=True)
    assert len(documents(Path("a.jsonl").read_bytes(), "jsonl")) == 4000
    lines = "\n".join(map(json.dumps, items)).encode()
    assert len(documents(pack(lines, packing), "json", packing)) == 4000, "lines may be many"
