"""From a configuration to rows: what they hold, and which key they have."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.data.cache import check, clean, entries
from lockstep.data.options import DataOptions
from lockstep.data.tokenize import train_bpe
from lockstep.engine import choices as module
from lockstep.engine import encoding
from lockstep.engine.building import Split
from lockstep.engine.choices import cache_roots
from lockstep.errors import ConfigError, DataError, NotFoundError
from tests.data.stories import configuration, prepared, story, write_stories


@pytest.fixture
def stories(in_dir: Path) -> Path:
    """A working directory with 60 stories in it."""
    return write_stories(in_dir)


def stream(table: Any) -> list[int]:
    """The tokens of rows that overlap by one."""
    rows = np.asarray(table.columns["tokens"])
    return [int(rows[0, 0]), *rows[:, 1:].ravel().tolist()]


# ----------------------------------------------------------------------------------------------------- the rows


def test_rows_hold_the_documents_and_nothing_else(stories: Path) -> None:
    """Every story is on exactly one side, whole, followed by the separator."""
    made = prepared(configuration(validation_fraction=0.2))
    texts = {story(index) for index in range(60)}
    seen: dict[str, list[str]] = {}
    for name, table in (("train", made.train), ("validation", made.validation)):
        ids = stream(table)
        ends = [place for place, token in enumerate(ids) if token == made.tokenizer.separator]
        starts = [0, *(end + 1 for end in ends)]
        seen[name] = [made.tokenizer.decode(ids[left:right]) for left, right in zip(starts, ends, strict=False)]
        assert set(seen[name]) <= texts
    meta = json.loads((made.folder / "meta.json").read_text(encoding="utf-8"))
    assert (meta["documents"], meta["made_of"]) == ({"train": 48, "validation": 12}, "stories.jsonl")
    for name in seen:  # only the tail that fills no row is missing
        assert 0 <= meta["tokens"][name] - len(stream(getattr(made, name))) <= 32
    assert not set(seen["train"]) & set(seen["validation"])
    assert len(seen["train"]) + len(seen["validation"]) >= 58


def test_the_tokenizer_never_sees_the_validation_split(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_texts: list[str] = []
    real, least = module.TRAINED["builtin"]

    def spy(texts: Any, size: int) -> Any:
        given_texts.extend(texts)
        return real(given_texts, size)

    monkeypatch.setattr(module, "TRAINED", {"builtin": (spy, least)})
    made = prepared(configuration(validation_fraction=0.2))
    assert len(given_texts) == 48
    assert made.tokenizer.fingerprint() == train_bpe(given_texts, 400).fingerprint()


def test_ids_take_two_bytes_where_they_fit(stories: Path) -> None:
    table = prepared(configuration()).train
    assert table.columns["tokens"].dtype == np.uint16
    assert table.take(np.array([0]))["tokens"].dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=5), max_size=60), st.floats(0.01, 0.99))
def test_copies_are_never_on_both_sides(documents: list[str], fraction: float) -> None:
    try:
        split = Split.of(documents, fraction)
    except DataError:
        assert len(set(documents)) < 2
        return
    sides = {name: list(split.texts(documents, name)) for name in ("train", "validation")}
    assert {name: len(texts) for name, texts in sides.items()} == split.counts
    assert sorted(sides["train"] + sides["validation"]) == sorted(documents)
    assert all(sides.values())
    assert not set(sides["train"]) & set(sides["validation"])


def test_long_documents_are_encoded_whole(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 100)
    lines = [json.dumps("x" * 150 + f"end{index:02}") for index in range(20)]
    (in_dir / "long.jsonl").write_text("\n".join(lines), encoding="utf-8")
    made = prepared(configuration(data_path="long.jsonl", tokenizer_name="bytes"))
    meta = json.loads((made.folder / "meta.json").read_text(encoding="utf-8"))
    assert sum(meta["tokens"].values()) == 20 * (155 + 1)


# ------------------------------------------------------------------------------------------------------- the key


def test_what_changes_the_key_and_what_does_not(stories: Path) -> None:
    """Item 35."""
    base = prepared(configuration()).key
    assert prepared(configuration(seed=2)).key == base
    assert prepared(configuration(lr=1e-5)).key == base
    assert prepared(configuration(model="another name of the same kind")).key == base
    others = [
        {"context": 16},
        {"max_train_samples": 50},
        {"validation_fraction": 0.1},
        {"tokenizer_name": "bytes"},
        {"tokenizer_vocab_size": 350},
        {"text_column": "text"},
        {"dataset_name": "synthetic", "data_path": None},
    ]
    keys = [prepared(configuration(**other)).key for other in others]
    assert len({base, *keys}) == 1 + len(others)
    (stories / "stories.jsonl").write_text("\n".join(json.dumps(story(index)) for index in range(1, 61)), "utf-8")
    assert prepared(configuration()).key not in {base, *keys}


def test_a_second_run_reads_no_text(
    stories: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Item 31, for local files."""
    caplog.set_level(logging.INFO)
    first = prepared(configuration())
    assert "Preparing dataset cache..." in caplog.messages
    assert "Dataset: text" in caplog.messages
    assert f"[Cache] Saved to {first.folder}" in caplog.messages
    caplog.clear()
    monkeypatch.setattr("lockstep.sources.text.TextSource.documents", lambda _: pytest.fail("the text was read"))
    second = prepared(configuration())
    tokens = json.loads((first.folder / "meta.json").read_text(encoding="utf-8"))["tokens"]["train"]
    assert f"[Cache] Loaded train data from cache ({tokens} tokens)" in caplog.messages
    assert f"Dataset ready: {first.train.rows} samples" in caplog.messages
    assert f"Cache location: {first.folder}" in caplog.messages
    assert np.array_equal(first.train.columns["tokens"], second.train.columns["tokens"])


def test_the_builtin_corpus_opens_at_once(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time: no text is read, no tokenizer trained, nothing written."""
    config = configuration(context=8192, dataset_name="builtin", data_path=None, tokenizer_vocab_size=4096)
    made = prepared(config, vocab_limit=128_256)
    assert made.train.rows >= 40
    assert made.validation.rows >= 2
    assert made.tokenizer.vocab_size == 4096
    before = {path: path.stat().st_mtime_ns for path in made.folder.rglob("*") if path.is_file()}
    monkeypatch.setattr("lockstep.sources.builtin.corpus", lambda _: pytest.fail("the text was read"))
    trained = {name: (lambda *_: pytest.fail("it was trained"), least) for name, (_, least) in module.TRAINED.items()}
    monkeypatch.setattr(module, "TRAINED", trained)
    again = prepared(config, vocab_limit=128_256)
    assert again.folder == made.folder
    assert {path: path.stat().st_mtime_ns for path in again.folder.rglob("*") if path.is_file()} == before


# ----------------------------------------------------------------------------------------------------- the place


def test_where_caches_lie(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items 33 and 34."""
    made = prepared(configuration())
    assert made.folder == Path(".cache/datasets") / made.key
    shutil.rmtree(".cache")
    again = prepared(configuration())
    assert again.folder.is_dir()
    Path("cache").mkdir()
    shutil.move(".cache/datasets", "cache/datasets")
    shutil.rmtree(".cache")
    assert prepared(configuration()).folder == Path("cache/datasets") / made.key
    assert not Path(".cache").exists()
    assert prepared(configuration(cache_dir="mine")).folder == Path("mine") / made.key
    monkeypatch.setenv("DATASET_CACHE_DIR", str(stories / "moved"))
    assert prepared(configuration()).folder == stories / "moved" / made.key
    assert cache_roots(DataOptions(cache_dir="mine")) == [Path("mine")]
    with pytest.raises(ConfigError, match=r"nobody-of-this-name/cache. is no path"):
        cache_roots(DataOptions(cache_dir="~nobody-of-this-name/cache"))


def test_housekeeping(stories: Path) -> None:
    made = prepared(configuration())
    (entry,) = entries(made.folder.parent)
    assert entry.folder == made.folder
    assert entry.meta["source"] == "text"
    check(entry.folder, full=True)
    assert made.key in clean(made.folder.parent)
    assert entries(made.folder.parent) == []


NAMES = [
    "../../x",
    "/tmp/x",
    "a/b",
    "x" * 300,
    "..",
    ".",
    "a\nb",
    "a\0b",
    "wikitext",
    "c4",
    "stories.jsonl",
    "~nobody/x",
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES) | st.text(max_size=20))
def test_names_never_become_paths(stories: Path, name: str) -> None:
    """Faults row 38: nothing is written outside, whatever a dataset or a tokenizer is called."""
    if name in ("auto", "builtin", "synthetic", "text", "bytes", ""):
        return
    with pytest.raises((NotFoundError, ConfigError)):
        prepared(configuration(dataset_name=name, data_path=None, cache_dir="deep/er/cache"))
    with pytest.raises((NotFoundError, DataError)) as caught:
        prepared(configuration(tokenizer_name=name, cache_dir="deep/er/cache"))
    assert "tokenizer" in str(caught.value)
    assert [path.name for path in stories.iterdir()] == ["stories.jsonl"]
