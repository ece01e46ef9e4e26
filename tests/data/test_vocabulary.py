"""What the ids of a tokenizer are: special ones, pieces that go on with a word, the flat map, and blanks in prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.data.tokenize import (
    AlphabetTokenizer,
    ByteTokenizer,
    load_tokenizer,
    train_marked_bpe,
    train_wordpiece,
    train_words,
)
from lockstep.errors import DataError
from tests.data.test_tokenize import CASED, SPECIALS, saved, words

ROLES = {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": 4}
MARKED = {
    "words": lambda: train_words(CASED, 99),
    "pieces": lambda: train_wordpiece([*CASED, "unhappiness unhappily happier"] * 3, 400),
    "bpe": lambda: train_marked_bpe([*CASED, " the cat, the happier cat"] * 5, 300),
    "alphabet": lambda: AlphabetTokenizer("abcd", marked=True),
}


@pytest.mark.parametrize("name", MARKED)
def test_a_marked_tokenizer_has_the_five_and_keeps_them(name: str, tmp_path: Path) -> None:
    """Also without the file beside it, as in a checkpoint of somebody who left it out."""
    tokenizer = MARKED[name]()
    again = saved(tokenizer, tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer_config.json").unlink()
    for one in (tokenizer, again, load_tokenizer(tmp_path / "saved")):
        vocabulary = one.vocabulary()
        assert vocabulary.specials == ROLES
        assert vocabulary.size == one.vocab_size == len(vocabulary.continues)
        assert not vocabulary.continues[:5].any()
        assert (one.separator, one.fingerprint()) == (2, tokenizer.fingerprint())
        assert list(vocabulary.continues) == list(tokenizer.vocabulary().continues)
        flat = one.vocabulary_map()
        assert list(flat.values()) == list(range(one.vocab_size)), "specials 0..4, contiguous, largest id = size - 1"
        assert list(flat)[:5] == SPECIALS
        assert not {0, 1, 2, 4} & set(one.encode(["[MASK] [PAD] a [CLS]"])[0].tolist())


def test_the_flat_map_is_of_the_training_text_alone_and_lower_case() -> None:
    """Items 92 and 93."""
    flat = train_words(CASED, 4096).vocabulary_map()
    assert set(flat) == {*SPECIALS, "the", "cat", "saw", ".", "dog", "!", "naïve", "zebra"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("words", "The cat saw.", [1, 1, 1, 1]),
        ("pieces", "unhappiest, naïvely", None),
        ("bpe", "the happier cat, naïvely", None),
    ],
)
def test_pieces_that_go_on_with_a_word_are_known(name: str, text: str, words: list[int] | None) -> None:
    """Cut before every piece that does not go on, the text falls into its words and punctuation marks."""
    tokenizer = MARKED[name]()
    ids, goes_on = tokenizer.encode([text])[0].tolist(), tokenizer.vocabulary().continues
    groups: list[list[int]] = []
    for token in ids:
        groups[-1].append(token) if goes_on[token] and groups else groups.append([token])
    found = [tokenizer.decode(group).strip() for group in groups]
    assert found == text.lower().replace(",", " ,").replace(".", " .").split()
    if words:
        assert [len(group) for group in groups] == words
    else:
        assert max(map(len, groups)) > 1


def test_bytes_go_on_with_their_word_and_letters_of_an_alphabet_do_not() -> None:
    goes_on = ByteTokenizer().vocabulary().continues
    assert [bool(goes_on[byte]) for byte in "a9 ,\n(é".encode()] == [True, True, False, False, False, False, True, True]
    assert not goes_on[256]
    assert not AlphabetTokenizer("abcd").vocabulary().continues.any()
    assert ByteTokenizer().vocabulary().specials == AlphabetTokenizer("abcd").vocabulary().specials == {}


@pytest.mark.parametrize("name", MARKED)
def test_a_prompt_may_hold_the_mask(name: str) -> None:
    """The mask stands where its word would: the ids around it are those of the whole text."""
    tokenizer = MARKED[name]()
    text, blank, word = ("abcd", "ab[MASK]d", 2) if name == "alphabet" else ("the cat saw", "the [MASK] saw", 1)
    ids = tokenizer.encode([text])[0].tolist()
    if name == "bpe":
        assert len(ids) == 3, "one token a word, or the test shows nothing"
    assert tokenizer.encode_prompt(blank) == [*ids[:word], 4, *ids[word + 1 :]]
    assert tokenizer.encode_prompt(text) == ids
    assert tokenizer.encode_prompt("[MASK][MASK]") == [4, 4]
    assert ByteTokenizer().encode_prompt("a [MASK]") == list(b"a [MASK]")


def roberta(folder: Path, named: dict[str, object] | None) -> Path:
    """A tokenizer with other spellings, and what stands beside it."""
    folder.mkdir()
    words(folder / "tokenizer.json", {"<s>": 0, "<pad>": 1, "</s>": 2, "<none>": 3, "@@": 4, "a": 5})
    if named is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


def test_special_tokens_are_named_beside_the_file(tmp_path: Path) -> None:
    named = {"mask_token": {"content": "@@"}, "unk_token": "<none>", "bos_token": "<s>", "cls_token": None}
    tokenizer = load_tokenizer(roberta(tmp_path / "named", named))
    expected = {"mask": 4, "pad": 1, "cls": 0, "sep": 2, "unk": 3}
    assert tokenizer.vocabulary().specials == expected
    assert tokenizer.encode_prompt("a@@") == [5, 4]
    plain = load_tokenizer(roberta(tmp_path / "plain", None))
    assert "mask" not in plain.vocabulary().specials
    assert plain.fingerprint() != tokenizer.fingerprint(), "other rows come of it"
    (tmp_path / "again").mkdir()
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").vocabulary().specials == expected
    assert load_tokenizer(tmp_path / "again").fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize("content", ["[1]", '{"mask_token": 5}', '{"mask_token": {"text": "x"}}', "nonsense"])
def test_a_bad_config_beside_it_is_one_message(tmp_path: Path, content: str) -> None:
    folder = roberta(tmp_path / "bad", None)
    (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert "tokenizer_config.json" in str(caught.value)


@pytest.mark.parametrize("name", ["words", "pieces"])
def test_the_flat_map_can_be_read_again(name: str, tmp_path: Path) -> None:
    """Item 163: tokenizer.json of a result folder is the tokenizer it was made from, to the last step."""
    tokenizer = MARKED[name]()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.vocabulary_map()), encoding="utf-8")
    again = load_tokenizer(tmp_path)
    texts = ["The CAT saw, unhappily, a naïve zebra.", "猫 \x00 [MASK] " + "x" * 99]
    assert [ids.tolist() for ids in again.encode(texts)] == [ids.tolist() for ids in tokenizer.encode(texts)]
    assert again.vocabulary_map() == tokenizer.vocabulary_map()
    assert again.fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"the": 0, "cat": 1}, r"without \[PAD\], \[CLS\]"),
        ({"the": "0"}, "tokenizers library refuses"),
        ({}, "tokenizers library refuses"),
        ({token: place for place, token in enumerate([*SPECIALS, "a", "\u0120the"])}, "how they are merged"),
    ],
)
def test_maps_that_are_no_tokenizer(content: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=said):
        load_tokenizer(tmp_path)
