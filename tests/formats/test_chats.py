"""Conversations in records: every form, in every kind of file, and what is no conversation."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import formats
from lockstep.errors import DataError
from lockstep.formats.chats import FIELDS, Exchange, Message, exchange_of

USER = Message("user", "Why?")
SAID = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
FORMS: list[dict[str, Any]] = [
    {"prompt": "Why?", "answer": "So."},
    {"prompt": "Why?", "response": "So.", "id": 7},
    {"prompt": "Why?", "completion": "So."},
    {"prompt": SAID[:1], "completion": SAID[1:]},
    {"prompt": "Why?", "completion": SAID[1:]},
    {"messages": SAID},
    {"messages": [*SAID, {"role": "user", "content": "And nobody answers this."}]},
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
    {"instruction": "Why?", "input": "", "output": "So."},
    {"instruction": "Why?", "output": "So."},
]


def read(content: bytes, kind: str, **how: Any) -> list[Any]:
    reading = formats.Reading(formats.Kind(kind), f"a.{kind}", conversations=True, **how)
    return [document for _, document in formats.walk(io.BytesIO(content), reading)]


@pytest.mark.parametrize("record", FORMS)
def test_every_form_is_a_prompt_and_its_answer(record: dict[str, Any]) -> None:
    found = exchange_of(record, "here")
    assert isinstance(found, Exchange)
    assert found.messages == (USER,)
    assert found.answer == "So."
    assert found == found.prompt + found.answer


def test_the_rest_of_a_conversation_is_its_prompt() -> None:
    record = {"messages": [{"role": "system", "content": "Be short."}, *SAID, *SAID]}
    found = exchange_of(record, "here")
    assert isinstance(found, Exchange)
    assert [turn.role for turn in found.messages] == ["system", "user", "assistant", "user"]
    assert found == "Be short.\nWhy?\nSo.\nWhy?\nSo."
    told = exchange_of({"instruction": "Add.", "input": "1 2", "output": "3"}, "here")
    assert isinstance(told, Exchange)
    assert told.messages == (Message("user", "Add.\n\n1 2"),)


def test_every_kind_of_file_that_has_fields() -> None:
    import pyarrow
    from pyarrow import parquet

    pairs = [(f"Why {number}?", f'So, "{number}".\nYes.') for number in range(30)]
    records = [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["prompt", "id", "answer"], *((prompt, 1, answer) for prompt, answer in pairs)])
    table = io.BytesIO()
    columns = {"id": [1] * 30, "prompt": [prompt for prompt, _ in pairs], "answer": [answer for _, answer in pairs]}
    parquet.write_table(pyarrow.table(columns), table, row_group_size=7)
    turns = io.BytesIO()
    messages = [[{"role": "user", "content": p}, {"role": "assistant", "content": a}] for p, a in pairs]
    parquet.write_table(pyarrow.table({"messages": messages, "text": ["x"] * 30}), turns)
    files = {
        "jsonl": "\n".join(map(json.dumps, records)).encode(),
        "json": json.dumps(records).encode(),
        "csv": text.getvalue().encode(),
        "parquet": table.getvalue(),
    }
    for kind, content in files.items():
        found = read(content, kind)
        assert [(each.prompt, each.answer) for each in found] == pairs, kind
    assert [each.answer for each in read(turns.getvalue(), "parquet")] == [answer for _, answer in pairs]
    assert [each.answer for each in read(json.dumps({"messages": SAID}).encode(), "json")] == ["So."]
    assert [each.answer for each in read(json.dumps({"data": FORMS}).encode(), "json")] == ["So."] * len(FORMS)
    named = json.dumps({"talk": SAID, "messages": 1}).encode()
    assert [each.answer for each in read(named, "jsonl", column="talk")] == ["So."]


def test_files_without_fields_hold_none() -> None:
    with pytest.raises(DataError, match=r"a \.txt file holds no conversations") as caught:
        read(b"Why? So.", "txt")
    assert "prompt" in caught.value.hint


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("a text", "a conversation was expected, got str"),
        ({"text": "So."}, "no prompt with its answer: its fields are text"),
        ({}, "it has no fields"),
        ({"prompt": "Why?"}, "no prompt with its answer"),
        ({"prompt": "Why?", "answer": 7}, "answer is no text but int"),
        ({"prompt": ["Why?"], "answer": "So."}, r"prompt\[0\] is no message but str"),
        ({"messages": "Why?"}, "messages is a list of messages, got str"),
        ({"messages": [{"content": "Why?"}]}, r"messages\[0\] has no role"),
        ({"messages": [*SAID, {"role": "user"}]}, r"messages\[2\] has no content"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"messages\[0\].content is no text but list"),
        ({"instruction": 3, "output": "So."}, "instruction is no text but int"),
    ],
)
def test_a_wrong_record_is_one_message_that_names_its_line(record: Any, words: str) -> None:
    content = "\n".join(map(json.dumps, [*FORMS, record])).encode()
    with pytest.raises(DataError, match=words) as caught:
        read(content, "jsonl")
    assert caught.value.where == f"a.jsonl:{len(FORMS) + 1}"
    assert caught.value.hint


def test_what_nobody_answered_is_left_out() -> None:
    records = [{"prompt": "Why?", "answer": answer} for answer in ("", " ", None)]
    records += [{"messages": []}, {"messages": SAID[:1]}, {"messages": None}, {"prompt": "", "answer": "Alone."}]
    (found,) = read("\n".join(map(json.dumps, records)).encode(), "jsonl")
    assert (found.prompt, found.answer) == ("", "Alone.")


def test_half_a_character_is_mended() -> None:
    (found,) = read(b'{"prompt": "a\\ud800", "answer": "b\\udfff"}', "jsonl")
    assert found.encode().decode() == "a\ufffdb\ufffd"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), ANYTHING, max_size=4) | ANYTHING)
def test_any_record_is_an_exchange_or_a_message(record: Any) -> None:
    try:
        found = exchange_of(record, "here")
    except DataError as error:
        found = "" if (error.where, bool(error.hint)) == ("here", True) else "?"
    assert found == "" or (isinstance(found, Exchange) and found.answer.strip() and found.endswith(found.answer))
