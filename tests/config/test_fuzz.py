"""Presets, damaged at random: accepted or refused in a line, never a traceback (faults.md row 34)."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config import reader
from lockstep.config.load import preset_file, presets

HOSTILE = [
    "NaN", "Infinity", "1e400", "-1", "0", "9223372036854775808", "-9223372036854775809", "1e-400", "true", "null",
    '""', '"4"', "[]", "{}", '"\\u0000"', '"\\ud800"', "[" * 10_000, '{"a":' * 10_000, '"' + "x" * 5000 + '"', "4.0",
    "1" * 5000, '"../../x"', "&a 1", "*a", "!!int 3", "'x'", "0x10", "no", '{"a": 1}', "[1, [2, [3]]]",
]  # fmt: skip
Mutation = Callable[[str, random.Random], bytes]


def on_tree(change: Callable[[dict[str, Any], random.Random], None]) -> Mutation:
    def mutate(text: str, dice: random.Random) -> bytes:
        tree = json.loads(text.split("\n", 1)[1])
        change(tree, dice)
        return json.dumps(tree, indent=1).encode()

    return mutate


def pick(tree: dict[str, Any], dice: random.Random) -> tuple[dict[str, Any], str]:
    section = dice.choice(sorted(tree))
    return (tree[section], dice.choice(sorted(tree[section]))) if tree[section] else (tree, section)


def delete(tree: dict[str, Any], dice: random.Random) -> None:
    place, key = pick(tree, dice)
    del place[key]


def misspell(tree: dict[str, Any], dice: random.Random) -> None:
    place, key = pick(tree, dice)
    at = dice.randrange(len(key))
    place[key[:at] + dice.choice("xyz_-. 0") + key[at + 1 :]] = place.pop(key)


def swap_types(tree: dict[str, Any], dice: random.Random) -> None:
    place, key = pick(tree, dice)
    place[key] = dice.choice([str(place[key]), [place[key]], {"x": place[key]}, None, True, 1.5, -1, [], ""])


def swap_values(tree: dict[str, Any], dice: random.Random) -> None:
    one, first = pick(tree, dice)
    two, second = pick(tree, dice)
    one[first], two[second] = two[second], one[first]


def hostile_value(text: str, dice: random.Random) -> bytes:
    places = [at for at, letter in enumerate(text) if letter == ":" and at > text.index("{")]
    at = dice.choice(places) + 1
    end = min(at + 1 + len(text[at + 1 :].split(",")[0].split("}")[0].rstrip()), len(text))
    return (text[:at] + " " + dice.choice(HOSTILE) + text[end:]).encode()


def duplicate_line(text: str, dice: random.Random) -> bytes:
    lines = text.split("\n")
    at = dice.randrange(2, len(lines))
    return "\n".join([*lines[: at + 1], lines[at], *lines[at + 1 :]]).encode()


def insert(*parts: bytes) -> Mutation:
    def mutate(text: str, dice: random.Random) -> bytes:
        data = text.encode()
        at = dice.randrange(len(data) + 1)
        return data[:at] + dice.choice(parts) + data[at:]

    return mutate


def random_bytes(text: str, dice: random.Random) -> bytes:
    data = bytearray(text.encode())
    for _ in range(dice.randint(1, 8)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)


def recode(text: str, dice: random.Random) -> bytes:
    return text.encode(dice.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"]))


def cut(text: str, dice: random.Random) -> bytes:
    return text.encode()[: dice.randrange(len(text))]


MUTATIONS: dict[str, Mutation] = {
    "delete": on_tree(delete),
    "misspell": on_tree(misspell),
    "swap types": on_tree(swap_types),
    "swap values": on_tree(swap_values),
    "hostile value": hostile_value,
    "duplicate line": duplicate_line,
    "NUL": insert(b"\0"),
    "comment": insert(b"// a comment, as the seeds print\n", b"/* one */", b"/*", b"#"),
    "comma": insert(b",", b",,"),
    "bracket": insert(b"{", b"}", b"[", b"]", b'"', b":"),
    "bytes": random_bytes,
    "encoding": recode,
    "cut": cut,
}


def problem(path: Path, kind: str, capture: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of `lockstep config validate`, and what is wrong with how it ended ("" when nothing is)."""
    code = main(["config", "validate", str(path), "--preset", "tiny"])
    _, err = capture.readouterr()
    if code not in (0, 2) or "Traceback" in err:
        return code, f"{kind}: exit {code}: {err[:500]}"
    if code == 2 and not (err.startswith(f"lockstep: error: {path}") or "training." in err or "model." in err):
        return code, f"{kind}: no place: {err[:500]}"
    if code == 2 and len(err.splitlines()) > 2:
        return code, f"{kind}: too many lines: {err[:500]}"
    return code, ""


def fuzz(preset: str, count: int, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
    dice = random.Random(f"{preset}-{count}")
    text = preset_file("llama", preset).read_text()
    codes: Counter[int] = Counter()
    problems: list[str] = []
    names = list(MUTATIONS)
    for number in range(count):
        kind = names[number % len(names)]
        path = folder / f"c{'.yaml' if dice.random() < 0.1 else '.json'}"
        path.write_bytes(MUTATIONS[kind](text, dice))
        code, wrong = problem(path, kind, capture)
        codes[code] += 1
        problems += [wrong] if wrong else []
    assert not problems
    assert codes[0] > count // 20  # comments, deletions and some swaps are harmless
    assert codes[2] > count // 3


@pytest.mark.parametrize("preset", presets("llama"))
def test_damaged_presets(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(preset, 65, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets("llama"))
def test_a_thousand_damaged_presets(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(preset, 1000, tmp_path, capsys)


def test_the_judge_sees_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: str) -> Any:
        raise RuntimeError("an injected fault")

    monkeypatch.setattr(reader, "scalar", broken)
    path = tmp_path / "c.json"
    path.write_text('{"training": {"max_steps": 3}}')
    code, wrong = problem(path, "injected", capsys)
    assert code == 1
    assert "injected" in wrong
