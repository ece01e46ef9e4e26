"""Tokenizers: any text survives, the same texts give the same tokenizer, every failure is one message."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.contracts import Tokenizer
from lockstep.data.tokenize import (
    MIN_WORDPIECE_VOCAB,
    SEPARATOR,
    AlphabetTokenizer,
    ByteTokenizer,
    TokenizerFile,
    load_tokenizer,
    train_bpe,
    train_wordpiece,
    train_words,
)
from lockstep.errors import DataError, NotFoundError

TEXTS = ["the cat sat on the mat " * 20, "a dog\n\n  and\ta cat: 1234 — naïve 猫 " * 10]
AWKWARD = f"\x00\x7f tab\t{SEPARATOR} é 猫 🐈\u200d⬛ ﷽ \r\n   trailing "


def saved(tokenizer: TokenizerFile, folder: Path) -> TokenizerFile:
    folder.mkdir()
    tokenizer.save(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("make", [ByteTokenizer, lambda: train_bpe(TEXTS, 400)], ids=["bytes", "bpe"])
def test_any_text_survives(make: type[ByteTokenizer], tmp_path: Path) -> None:
    tokenizer = make()
    again = saved(tokenizer, tmp_path / "saved")
    assert isinstance(tokenizer, Tokenizer)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert (again.vocab_size, again.separator) == (tokenizer.vocab_size, tokenizer.separator)

    @settings(max_examples=100, deadline=None)
    @given(st.text())
    def survives(text: str) -> None:
        ids, loaded = tokenizer.encode([text])[0].tolist(), again.encode([text])[0].tolist()
        assert ids == loaded
        assert tokenizer.decode(ids) == text
        assert tokenizer.separator not in ids  # text that spells the separator stays text
        assert all(0 <= token < tokenizer.vocab_size for token in ids)

    survives()
    ids = tokenizer.encode([AWKWARD])[0].tolist()
    assert tokenizer.decode(ids) == AWKWARD
    assert tokenizer.separator not in ids
    assert tokenizer.decode([*ids, tokenizer.separator]) == AWKWARD


def test_bytes_are_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.separator) == (257, 256)
    assert bytes(tokenizer.encode([AWKWARD])[0].tolist()) == AWKWARD.encode()


def test_bpe_compresses_and_stays_within_its_size() -> None:
    tokenizer = train_bpe(TEXTS, 300)
    assert 257 < tokenizer.vocab_size <= 300
    assert len(tokenizer.encode([TEXTS[0]])[0]) < len(TEXTS[0]) / 2


def many_words() -> list[str]:
    """Enough words that are equally frequent for an order of chance to show."""
    random.seed(4)
    letters = "abcdefghiéß猫"
    return [" ".join("".join(random.choices(letters, k=random.randint(1, 6))) for _ in range(400)) for _ in range(20)]


TRAINERS = {"bpe": train_bpe, "wordpiece": train_wordpiece, "words": train_words}
IN_ANOTHER_PROCESS = """
import json, sys
from lockstep.data.tokenize import train_bpe, train_wordpiece, train_words
texts = json.loads(sys.stdin.read())
print(json.dumps([train(texts, 600).fingerprint() for train in (train_bpe, train_wordpiece, train_words)]))
"""


def test_the_same_in_another_process_with_threads() -> None:
    """The library counts words in hash tables that every process orders anew."""
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "4", "PYTHONHASHSEED": "77"}
    texts = many_words()
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    other = subprocess.run(
        command, input=json.dumps(texts), env=environ, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    for _ in range(3):  # in one process too, each table has an order of its own
        assert json.loads(other) == [train(texts, 600).fingerprint() for train in TRAINERS.values()]
    assert not {train(texts[:1], 600).fingerprint() for train in TRAINERS.values()} & set(json.loads(other))


def test_the_library_alone_trains_wordpiece_by_chance() -> None:
    """Negative control: what the fixed numbering of the first pieces is there for."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    made: set[str] = set()
    for _ in range(4):
        library = Library(models.WordPiece(unk_token="[UNK]"))
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
        library.train_from_iterator(many_words(), trainer)
        made.add(json.dumps(library.get_vocab(), sort_keys=True))
    assert len(made) > 1


# ------------------------------------------------------------------------------------------------ words and pieces

SPECIALS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
CASED = ["The cat saw THE Cat. the dog! Naïve naïve"] * 3 + ["Zebra"]


def vocabulary(tokenizer: TokenizerFile) -> dict[str, int]:
    return json.loads(tokenizer._tokenizer.to_str())["model"]["vocab"]


def faults(tokenizer: TokenizerFile) -> list[str]:
    """What is wrong with a vocabulary of whole words (item 92)."""
    vocab = vocabulary(tokenizer)
    words = sorted(vocab, key=vocab.__getitem__)
    found = [] if words[:5] == SPECIALS else ["specials are not 0..4"]
    found += [] if sorted(vocab.values()) == list(range(len(vocab))) else ["ids are not contiguous"]
    found += [] if tokenizer.vocab_size == len(vocab) else ["the largest id is not the size - 1"]
    missed = [word for word in words[5:] if tokenizer.encode([word])[0].tolist() != [vocab[word]]]
    found += [f"never met: {word}" for word in missed]
    return found


def test_words_are_counted_once_lower_case_and_most_frequent_first() -> None:
    """Item 92."""
    tokenizer = train_words(CASED, 4096)
    assert faults(tokenizer) == []
    counted = Counter(" ".join(CASED).lower().replace(".", " .").replace("!", " !").split())
    expected = sorted(counted, key=lambda word: (-counted[word], word))
    vocab = vocabulary(tokenizer)
    assert sorted(vocab, key=vocab.__getitem__) == SPECIALS + expected
    ids = tokenizer.encode(["THE Cat sAw a unicorn"])[0].tolist()
    assert ids == [vocab["the"], vocab["cat"], vocab["saw"], 3, 3]
    assert tokenizer.separator == 2


def test_the_vocabulary_of_words_is_capped() -> None:
    texts = [f"word{place} " * (1 + place // 2) for place in range(40)]
    vocab = vocabulary(train_words(texts, 15))
    assert sorted(vocab, key=vocab.__getitem__)[5:] == [
        f"word{place}" for place in (38, 39, 36, 37, 34, 35, 32, 33, 30, 31)
    ]


def test_the_known_faults_of_vocabularies_are_seen(tmp_path: Path) -> None:
    """Negative controls: specials counted twice, so that ids start at 10; and cased words that nobody can meet."""
    from tokenizers import Tokenizer as Library

    tree = json.loads(train_words(CASED, 4096)._tokenizer.to_str())
    vocab = tree["model"]["vocab"]
    tree["model"]["vocab"] = {word: place if place < 5 else place + 5 for word, place in vocab.items()}
    twice = TokenizerFile(Library.from_str(json.dumps(tree)), separator="[SEP]")
    assert {"ids are not contiguous", "the largest id is not the size - 1"} <= set(faults(twice))
    tree["model"]["vocab"] = {word.capitalize() if word == "cat" else word: place for word, place in vocab.items()}
    cased = TokenizerFile(Library.from_str(json.dumps(tree)), separator="[SEP]")
    assert faults(cased) == ["never met: Cat"]


def test_wordpiece_knows_every_word(tmp_path: Path) -> None:
    """Any text: no [UNK], no special token, and the text of the ids gives the same ids again."""
    tokenizer = train_wordpiece(many_words() + CASED, 700)
    again = saved(tokenizer, tmp_path / "saved")
    assert (again.fingerprint(), again.separator) == (tokenizer.fingerprint(), 2)
    vocab = vocabulary(tokenizer)
    assert sorted(vocab, key=vocab.__getitem__)[:5] == SPECIALS
    assert sorted(vocab.values()) == list(range(tokenizer.vocab_size))
    assert MIN_WORDPIECE_VOCAB < tokenizer.vocab_size <= 700

    @settings(max_examples=300, deadline=None)
    @given(st.text())
    def survives(text: str) -> None:
        ids = tokenizer.encode([text])[0].tolist()
        assert not {0, 1, 2, 3, 4} & set(ids)
        assert again.encode([tokenizer.decode(ids)])[0].tolist() == ids
        assert again.decode(ids) == tokenizer.decode(ids)

    survives()
    for text in (AWKWARD, "x" * 10_000, "猫" * 999, "[MASK] [PAD] ##a", "İSTANBUL ﬀ ǅ K"):
        survives.hypothesis.inner_test(text)
    assert tokenizer.decode(tokenizer.encode(["The NAÏVE cat!"])[0].tolist()) == "the naïve cat!"
    assert train_wordpiece([], MIN_WORDPIECE_VOCAB).vocab_size == MIN_WORDPIECE_VOCAB


def test_the_saved_files_say_it_all_to_others(tmp_path: Path) -> None:
    """tokenizer.json alone brings the separator; the file beside it the names that Hugging Face reads."""
    for name, tokenizer in (("words", train_words(CASED, 99)), ("pieces", train_wordpiece(CASED, 300))):
        saved(tokenizer, tmp_path / name)
        named = json.loads((tmp_path / name / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert named["mask_token"] == "[MASK]"
        assert named["eos_token"] == "[SEP]"
        (tmp_path / name / "tokenizer_config.json").unlink()
        again = load_tokenizer(tmp_path / name)
        assert (again.separator, again.separator_text) == (2, "[SEP]")
        whole = again._tokenizer.encode("The cat").ids
        assert (whole[0], whole[-1]) == (1, 2)
        assert again.encode(["The cat"])[0].tolist() == whole[1:-1]


def test_the_alphabet_has_no_other_ids(tmp_path: Path) -> None:
    """A checkpoint keeps tokenizer.json alone: the separator must be in it."""
    tokenizer = AlphabetTokenizer("abcd")
    again = saved(tokenizer, tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer_config.json").unlink()
    for one in (tokenizer, again, load_tokenizer(tmp_path / "saved" / "tokenizer.json")):
        assert (one.vocab_size, one.separator) == (4, 0)
        assert one.encode(["dcba"])[0].tolist() == [3, 2, 1, 0]
        assert one.decode([3, 2, 1, 0]) == "dcba"


def foreign(folder: Path, end: str) -> Path:
    """Somebody else's tokenizer: truncating, padding, with an end token of another name."""
    from tokenizers import Tokenizer as Library

    folder.mkdir()
    train_bpe(TEXTS, 300).save(folder)
    file = folder / "tokenizer.json"
    library = Library.from_str(file.read_text(encoding="utf-8").replace(SEPARATOR, end))
    library.enable_truncation(4)
    library.enable_padding(length=4)
    file.write_text(library.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").unlink()
    return folder


def test_truncation_and_padding_of_a_file_are_not_applied(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(foreign(tmp_path / "foreign", "</s>"))
    assert tokenizer.decode(tokenizer.encode([TEXTS[0]])[0].tolist()) == TEXTS[0]
    assert len(tokenizer.encode(["a"])[0]) == 1


@pytest.mark.parametrize("named", ["<end>", {"content": "<end>"}])
def test_an_unknown_end_is_named_beside_the_file(tmp_path: Path, named: object) -> None:
    folder = foreign(tmp_path / "foreign", "<end>")
    with pytest.raises(DataError, match="end a document"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}), encoding="utf-8")
    assert load_tokenizer(folder).separator_text == "<end>"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_bad_file_is_one_message(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match="tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        load_tokenizer(tmp_path)


def words(path: Path, vocab: dict[str, int], **changed: object) -> Path:
    """A tokenizer.json of whole words, with parts of it replaced."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    tree = json.loads(Library(models.WordLevel(vocab=vocab, unk_token="<none>")).to_str())
    path.write_text(json.dumps(tree | changed), encoding="utf-8")
    return path


def test_the_vocabulary_ends_after_the_highest_id(tmp_path: Path) -> None:
    """Two entries and ids up to 7: a model of 2 words would be handed a 7."""
    tokenizer = load_tokenizer(words(tmp_path / "t.json", {"a": 3, "</s>": 7}))
    assert (tokenizer.vocab_size, tokenizer.separator) == (8, 7)
    assert tokenizer.encode(["a"])[0].tolist() == [3]


def test_a_word_without_an_id_is_one_message(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(words(tmp_path / "t.json", {"a": 0, "</s>": 1}))
    with pytest.raises(DataError, match="UNK") as caught:
        tokenizer.encode(["a", "b"])
    assert caught.value.where == str(tmp_path / "t.json")


@pytest.mark.parametrize(("charsmap", "when"), [(b"", "loading"), (b"\x04\0\0\0abcd", "encoding")])
def test_a_panic_of_the_library_is_one_message(tmp_path: Path, charsmap: bytes, when: str) -> None:
    """A panic is no Exception: nothing that catches errors would see it."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    file = words(tmp_path / "t.json", {"a": 0, "</s>": 1}, normalizer=normalizer)
    tokenizer = load_tokenizer(file) if when == "encoding" else None
    with pytest.raises(DataError) as caught:
        tokenizer.encode(["a"]) if tokenizer else load_tokenizer(file)
    assert type(caught.value.__cause__).__name__ == "PanicException"
    assert caught.value.where == str(file)


def test_an_interruption_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is neither an error nor a panic passes."""

    class Interrupted:
        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> None:
            raise KeyboardInterrupt

    tokenizer = train_bpe(TEXTS, 300)
    monkeypatch.setattr(tokenizer, "_tokenizer", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode(["a"])
