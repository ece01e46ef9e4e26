"""Conversations in records: what was asked, and the answer that is to be learnt.

    {"prompt": "...", "answer": "..."}                        also response or completion; both may be lists of messages
    {"messages": [{"role": "user", "content": "..."}, ...]}   also conversations, with from and value
    {"instruction": "...", "input": "...", "output": "..."}   input may be left out

Of messages the last of the assistant is the answer; what comes before it is the prompt, what comes after is dropped. A
record without an answer is a blank one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from lockstep.errors import DataError

CHATS = ("messages", "conversations")
ANSWERS = ("answer", "response", "completion")
FIELDS = (*CHATS, "prompt", *ANSWERS, "instruction", "input", "output")
SPEAKERS = {"human": "user", "gpt": "assistant"}  # as some sets call them
FORMS = '{"prompt": "...", "answer": "..."}, {"messages": [{"role": "user", "content": "..."}, ...]}'
BETWEEN = "\n"  # turns, where no template says how a conversation is written
SHOWN = 60


class Message(NamedTuple):
    """One turn."""

    role: str
    content: str


class Exchange(str):
    """A prompt and its answer. As a text it is both, so that whoever counts, hashes or trains on texts may."""

    messages: tuple[Message, ...]
    prompt: str
    answer: str

    @staticmethod
    def of(messages: Iterable[Message], answer: str, *, between: str = BETWEEN) -> Exchange:
        """`between` stands after each turn of the prompt where no template is at hand."""
        turns = tuple(messages)
        prompt = "".join(turn.content + between for turn in turns)
        made = Exchange(prompt + answer)
        made.messages, made.prompt, made.answer = turns, prompt, answer
        return made


def exchange_of(item: object, where: str, *, column: str | None = None) -> str:
    """The conversation of one record; "": it has no answer. `column`: the field that holds the messages."""
    if not isinstance(item, dict):
        raise DataError(f"a conversation was expected, got {type(item).__name__}", where=where, hint=FORMS)
    record = cast("dict[str, Any]", item)
    chat = next((name for name in ((column,) if column else CHATS) if name in record), None)
    if chat is not None:
        return _of_turns(_turns(record[chat], chat, where))
    if column:
        raise DataError(f"no field {column!r}: {_listing(record)}", where=where, hint="data.text_column=NAME")
    answer = next((name for name in ANSWERS if name in record), None)
    if "prompt" in record and answer:
        return _of_pair(record["prompt"], record[answer], answer, where)
    if "instruction" in record and "output" in record:
        asked = [_text(record.get(name), name, where) for name in ("instruction", "input")]
        prompt = "\n\n".join(text for text in asked if text.strip())
        return _made([Message("user", prompt)], _text(record["output"], "output", where))
    raise DataError(f"no prompt with its answer: {_listing(record)}", where=where, hint=FORMS)


def is_record(item: Mapping[str, Any], column: str | None) -> bool:
    """Whether an object is a conversation itself, not one that holds a list of them."""
    return column in item if column else any(name in item for name in FIELDS)


def _of_pair(prompt: Any, answer: Any, name: str, where: str) -> str:
    if not isinstance(prompt, list) and not isinstance(answer, list):
        asked = Message("user", _text(prompt, "prompt", where))
        return _made([asked], _text(answer, name, where), between="")
    return _of_turns([*_side("user", "prompt", prompt, where), *_side("assistant", name, answer, where)])


def _side(role: str, field: str, value: Any, where: str) -> list[Message]:
    """What one side said: messages, or one text."""
    if isinstance(value, list):
        return _turns(cast("list[Any]", value), field, where)
    return [Message(role, _text(value, field, where))]


def _of_turns(turns: list[Message]) -> str:
    places = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
    return _made(turns[: places[-1]], turns[places[-1]].content) if places else ""


def _made(messages: list[Message], answer: str, *, between: str = BETWEEN) -> str:
    return Exchange.of(messages, answer, between=between) if answer.strip() else ""


def _turns(value: object, name: str, where: str) -> list[Message]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(f"{name} is a list of messages, got {type(value).__name__}", where=where, hint=FORMS)
    turns: list[Message] = []
    for number, turn in enumerate(cast("list[Any]", value)):
        if not isinstance(turn, dict):
            raise DataError(f"{name}[{number}] is no message but {type(turn).__name__}", where=where, hint=FORMS)
        said = cast("dict[str, Any]", turn)
        role = said.get("role", said.get("from"))
        if not isinstance(role, str):
            raise DataError(f"{name}[{number}] has no role", where=where, hint=FORMS)
        if "content" not in said and "value" not in said:
            raise DataError(f"{name}[{number}] has no content", where=where, hint=FORMS)
        content = said["content"] if "content" in said else said["value"]
        turns.append(Message(encodable(SPEAKERS.get(role, role)), _text(content, f"{name}[{number}].content", where)))
    return turns


def _text(value: object, name: str, where: str) -> str:
    """A field that is text; null is none."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{name} is no text but {type(value).__name__}", where=where, hint=FORMS)
    return encodable(value)


def encodable(text: str) -> str:
    """JSON can hold half a surrogate pair, which is no character: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _listing(record: Mapping[str, Any]) -> str:
    names = ", ".join(str(name)[:SHOWN] for name in sorted(record, key=str)[:20])
    return f"its fields are {names}" if names else "it has no fields"
