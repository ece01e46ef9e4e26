"""Labelled text: every kind of file gives the same pairs, and what cannot be a class is refused with one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from lockstep.engine.labelled import Labelled, read_labelled
from lockstep.errors import DataError, NotFoundError

PAIRS = [(f'text number {place}, with "quotes"', place % 2) for place in range(30)]


def jsonl(path: Path, pairs: list[tuple[Any, Any]]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in pairs), encoding="utf-8")
    return path


def as_json(path: Path, pairs: list[tuple[Any, Any]]) -> Path:
    path.write_text(json.dumps([{"text": text, "label": label} for text, label in pairs]), encoding="utf-8")
    return path


def as_words(path: Path, pairs: list[tuple[Any, Any]]) -> Path:
    """imdb_train.json as the guide has it: lists of words."""
    return as_json(path, [(text.split(" "), label) for text, label in pairs])


def as_columns(path: Path, pairs: list[tuple[Any, Any]]) -> Path:
    texts, labels = zip(*pairs, strict=True)
    path.write_text(json.dumps({"text": texts, "label": labels}), encoding="utf-8")
    return path


def csv(path: Path, pairs: list[tuple[Any, Any]]) -> Path:
    quoted = (",".join(f'"{str(field).replace(chr(34), chr(34) * 2)}"' for field in pair) for pair in pairs)
    path.write_text("\n".join(["text,label", *quoted]), encoding="utf-8")
    return path


def as_parquet(path: Path, pairs: list[tuple[Any, Any]]) -> Path:
    texts, labels = zip(*pairs, strict=True)
    parquet.write_table(arrow.table({"text": list(texts), "label": list(labels)}), path)
    return path


FILES: dict[str, Callable[[Path, list[tuple[Any, Any]]], Path]] = {
    "a.jsonl": jsonl,
    "lines.json": jsonl,
    "a.json": as_json,
    "imdb_train.json": as_words,
    "columns.json": as_columns,
    "a.csv": csv,
    "a.parquet": as_parquet,
}


def pairs_of(found: Labelled) -> set[tuple[str, str]]:
    return {(text, found.names[label]) for text, label in zip(found.texts, found.labels, strict=True)}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_pairs(tmp_path: Path, name: str) -> None:
    found = read_labelled(str(FILES[name](tmp_path / name, PAIRS)))
    assert pairs_of(found) == {(text, str(label)) for text, label in PAIRS}
    assert found.names == ("0", "1")


def test_columns_by_name_and_labels_that_are_words(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"review": text, "title": "-", "mood": ["bad", "good"][label]} for text, label in PAIRS]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_labelled(str(path), text_column="review", label_column="mood")
    assert pairs_of(found) == {(text, ["bad", "good"][label]) for text, label in PAIRS}
    with pytest.raises(DataError, match="which field holds the text") as caught:
        read_labelled(str(path), label_column="mood")
    assert caught.value.hint == "--text-column NAME"
    with pytest.raises(DataError, match="no text field 'label'") as caught:
        read_labelled(str(path), text_column="review")
    assert caught.value.hint == "--label-column NAME"


def test_semicolons_are_told_of_and_not_a_field_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;label\n" + "some text;1\n" * 20)
    with pytest.raises(DataError, match="no text field 'label': text fields are text;label") as caught:
        read_labelled(str(tmp_path / "a.csv"))
    assert caught.value.hint.startswith("the fields seem to be separated by semicolons")


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([*PAIRS, ("a text without", None)], "text 31 has no label"),
        ([(text, 1) for text, _ in PAIRS], "all 30 texts have one label, '1'"),
        (PAIRS[:4], "4 labelled texts, at least 10"),
        ([(text, place) for place, (text, _) in enumerate(PAIRS)], "30 different labels in 30 texts"),
    ],
)
def test_labels_that_are_none(tmp_path: Path, pairs: list[tuple[Any, Any]], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read_labelled(str(jsonl(tmp_path / "a.jsonl", pairs)))
    assert caught.value.hint


def test_files_without_fields_and_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    with pytest.raises(DataError, match="hold no labels"):
        read_labelled(str(tmp_path / "a.txt"))
    with pytest.raises(NotFoundError) as caught:
        read_labelled(str(tmp_path / "nothing.jsonl"))
    assert caught.value.hint.startswith("--labels")


def test_copies_of_a_text_are_never_on_both_sides(tmp_path: Path) -> None:
    pairs = [(f"text {place // 3}", place // 3 % 2) for place in range(90)]
    found = read_labelled(str(jsonl(tmp_path / "a.jsonl", pairs)))
    splits = [found.split(seed) for seed in range(5)]
    for train, test in splits:
        assert sorted([*train, *test]) == list(range(90))
        assert len(test) == 18
        assert not {found.texts[place] for place in train} & {found.texts[place] for place in test}
    assert len({tuple(test) for _, test in splits}) == 5  # another seed, another split
    assert splits == [found.split(seed) for seed in range(5)]


def test_fewer_texts_are_drawn_from_all_of_the_file(tmp_path: Path) -> None:
    pairs = [(f"text {place}", int(place >= 200)) for place in range(400)]  # sorted by label, as imdb is
    found = read_labelled(str(jsonl(tmp_path / "a.jsonl", pairs)), at_most=100)
    assert len(found.texts) == 100
    assert 30 <= sum(found.labels) <= 70


def test_a_label_that_only_the_test_would_see_is_refused() -> None:
    found = Labelled(tuple("abcdefghij"), (1, *[0] * 9), ("x", "y"), "here")
    alone = next(seed for seed in range(100) if 0 in _test_of(found, seed))
    with pytest.raises(DataError, match="too few different texts"):
        found.split(alone)


def _test_of(found: Labelled, seed: int) -> list[int]:
    balanced = Labelled(found.texts, (0, 1) * 5, found.names, found.where)
    return balanced.split(seed)[1]
