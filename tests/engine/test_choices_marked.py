"""Tokenizers for objectives that mark places: which is taken, which is refused, and what the cache key says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.api import resolve
from lockstep.config.load import load
from lockstep.data.cache import Table, key_of
from lockstep.data.options import DataOptions
from lockstep.data.tokenize import load_tokenizer, train_bpe
from lockstep.engine.build import make_objective
from lockstep.engine.choices import Room, TokenizerChoice, choose_source, choose_tokenizer, key_parts
from lockstep.engine.prepare import prepare
from lockstep.errors import ConfigError, DataError
from tests.gates.training import FEW_WORDS, flags


def choose(name: str | None, *, marked: bool, source: str = "builtin", size: int = 512) -> TokenizerChoice:
    options = DataOptions(dataset_name=source, tokenizer_name=name, tokenizer_vocab_size=size)
    return choose_tokenizer(options, choose_source(options), model_path="none", room=Room(1 << 20), marks_places=marked)


def test_auto_is_wordpiece_where_places_are_marked() -> None:
    assert choose(None, marked=True).name == "wordpiece"
    assert "WordPiece" in choose("auto", marked=True).notice
    assert choose(None, marked=False).name == "builtin"
    assert "BPE" in choose(None, marked=False).notice


def test_the_key_of_the_marked_bpe_is_its_own() -> None:
    """And that of no other tokenizer changes."""
    plain, marked = choose("builtin", marked=False), choose("builtin", marked=True)
    assert plain.spec == {"builtin": 512}
    assert marked.spec != plain.spec
    assert list(marked.make(["a b c"]).vocabulary_map())[:5] == ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    assert plain.make(["a b c"]).fingerprint() == train_bpe(["a b c"], 512).fingerprint()
    for name in ("word", "wordpiece"):
        assert choose(name, marked=True).spec == choose(name, marked=False).spec == {name: 512}
    for source in ("synthetic",):
        specs = [choose("auto", marked=marked, source=source).spec for marked in (False, True)]
        assert specs[0] != specs[1]


def test_a_tokenizer_without_marks_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    train_bpe(["some text"], 300).save(tmp_path)
    for name in ("bytes", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"no \[PAD\], \[CLS\], \[SEP\], \[MASK\]") as caught:
            choose(name, marked=True)
        assert "wordpiece" in str(caught.value)
        assert choose(name, marked=False).ready is not None


def config(folder: Path, **changed: Any) -> Any:
    given = {"data.dataset_name": "text", "data.data_path": FEW_WORDS, "data.cache_dir": folder, **changed}
    return load("mlm", preset="tiny", flags=flags(given)).config


def key(folder: Path, **changed: Any) -> str:
    made = config(folder, **changed)
    source = choose_source(made.data)
    choice = choose_tokenizer(made.data, source, model_path="none", room=Room(512), marks_places=True)
    return key_of(key_parts(made, make_objective(made).columns, source=source, choice=choice))


def test_the_key_knows_what_rows_depend_on_and_nothing_else(tmp_path: Path) -> None:
    first = key(tmp_path)
    masking = {"mask_probability": 0.4, "last_mask_probability": 0.1, "masked_share": 0.5, "random_share": 0.2,
               "whole_words": True}  # fmt: skip
    assert {key(tmp_path, **{f"objective.{name}": value}) for name, value in masking.items()} == {first}
    rows = {"data.documents": "padded", "training.context_length": 32, "data.tokenizer_name": "word",
            "data.tokenizer_vocab_size": 400}  # fmt: skip
    others = {key(tmp_path, **{name: value}) for name, value in rows.items()}
    assert len(others | {first}) == 5


@pytest.mark.parametrize("documents", ["masked", "padded", "separated", "joined"])
@pytest.mark.parametrize("tokenizer", ["wordpiece", "word", "builtin"])
def test_rows_are_prepared_with_every_layout_and_tokenizer(documents: str, tokenizer: str, tmp_path: Path) -> None:
    made = config(tmp_path, **{"data.documents": documents, "data.tokenizer_name": tokenizer})
    prepared = prepare(made, make_objective(made), vocab_limit=512)
    rows = prepared.train.take(np.arange(prepared.train.rows))["tokens"] if isinstance(prepared.train, Table) else None
    assert rows is not None
    assert rows.shape[1] == 64
    assert (rows[:, 0] == 1).all()
    special = load_tokenizer(prepared.folder).vocabulary().specials
    assert special == {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": 4}
    assert prepared.validation.rows > 0, "a split that fills no row still gives one"


def test_words_of_the_validation_split_are_in_no_vocabulary(tmp_path: Path) -> None:
    """Item 92: each document has a word of its own; those of the others are known, which is the control."""
    own = [f"own{number}q" for number in range(60)]
    documents = (f"every document has some words and {word}" for word in own)
    (tmp_path / "texts.txt").write_text("\n\n".join(documents), encoding="utf-8")
    text = {"data.data_path": tmp_path / "texts.txt", "data.tokenizer_name": "word", "data.validation_fraction": 0.2}
    made = config(tmp_path, **text)
    vocabulary = prepare(made, make_objective(made), vocab_limit=512).tokenizer.vocabulary_map()
    assert len(vocabulary.keys() & own) == 48
    assert {"every", "words"} < vocabulary.keys()


def test_what_does_not_fit_is_refused_before_torch_is_loaded() -> None:
    """And again where an objective is made, whoever asks for it."""
    wrong = {"llama": ("data.documents", "padded"), "mlm": ("objective.random_share", "0.3")}
    for family, flag in wrong.items():
        with pytest.raises(ConfigError, match=r"padded|more than all") as caught:
            resolve(family, preset="tiny", flags=[flag])
        assert flag[0] in str(caught.value)
        with pytest.raises(ConfigError, match=r"padded|more than all"):
            make_objective(load(family, preset="tiny", flags=[flag]).config)


def test_no_text_at_all_is_still_told(tmp_path: Path) -> None:
    """Rows are padded, so only text that gives no token is too little."""
    (tmp_path / "a.txt").write_text("\u200b\n\n\u200b\u200b\n\n \u200b", encoding="utf-8")
    made = config(tmp_path / "cache", **{"data.data_path": tmp_path / "a.txt"})
    with pytest.raises(DataError) as caught:
        prepare(made, make_objective(made), vocab_limit=512)
    assert "a row takes 65" not in str(caught.value)
