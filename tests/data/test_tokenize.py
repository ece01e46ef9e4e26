"""Tokenizers: any text survives, the same texts give the same tokenizer, every failure is one message."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.contracts import Tokenizer
from lockstep.data.tokenize import (
    SEPARATOR,
    AlphabetTokenizer,
    ByteTokenizer,
    TokenizerFile,
    load_tokenizer,
    train_bpe,
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


def test_bpe_is_the_same_in_another_process_with_threads() -> None:
    code = (
        "from lockstep.data.tokenize import train_bpe; import sys, json;"
        "print(train_bpe(json.loads(sys.argv[1]), 400).fingerprint())"
    )
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "4", "PYTHONHASHSEED": "77"}
    texts = json.dumps(TEXTS)
    other = subprocess.run([sys.executable, "-c", code, texts], env=environ, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == train_bpe(TEXTS, 400).fingerprint()
    assert train_bpe(TEXTS[:1], 400).fingerprint() != other.stdout.strip()


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
