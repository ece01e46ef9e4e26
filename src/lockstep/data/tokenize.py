"""Text to ids and back. Every tokenizer here is a tokenizer.json of the `tokenizers` library, ours included."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lockstep.data.vocabulary import (
    BLANKS,
    SPECIALS,
    describe,
    flat_map,
    names_beside,
    special_texts,
    spoken,
    template_beside,
)
from lockstep.errors import DataError, NotFoundError
from lockstep.rundir import open_plain
from lockstep.runtime.later import numpy as np
from lockstep.runtime.signals import UNSTOPPABLE

if TYPE_CHECKING:
    from lockstep.contracts import Array, Vocabulary

SEPARATOR = "<|endoftext|>"
KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]", "<|eot_id|>")
MIN_BPE_VOCAB = 257  # every byte and the separator
MIN_MARKED_BPE_VOCAB = 256 + len(SPECIALS)
MIN_WORD_VOCAB = len(SPECIALS) + 1
UINT32 = "I"  # for `array`, which takes a list of numbers in half the time numpy does
CONTINUED = "##"  # stands before a piece that does not begin its word
LONGEST_WORD = 32  # characters; what is longer is cut, since looking up its pieces takes the square of its length


@contextlib.contextmanager
def _refusals(where: str) -> Generator[None]:
    """What the library does not like comes as bare Exception, or as a panic of its Rust, which is none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"the tokenizers library refuses it: {error}", where=where) from error


class TokenizerFile:
    """A tokenizer.json. No special tokens are added, and text that spells one stays text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        separator: str,
        where: str = "tokenizer",
        named: Mapping[str, str] | None = None,  # as in tokenizer_config.json
        chat_template: str | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        found = tokenizer.token_to_id(separator)
        assert found is not None, separator
        self.separator: int = found
        self.separator_text = separator
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may leave holes
        self.special_texts = special_texts(tokenizer, {"eos_token": separator, **(named or {})})
        self.named = {"eos_token": separator, **(named or {})}
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._where = where

    def fingerprint(self) -> str:
        """SHA-256 of the whole definition and the separator; and of special tokens that only a file beside it names."""
        plain = special_texts(self._tokenizer, {"eos_token": self.separator_text})
        said = "" if plain == self.special_texts else json.dumps(self.special_texts, sort_keys=True)
        return hashlib.sha256(f"{self.separator}\n{said}{self._tokenizer.to_str()}".encode()).hexdigest()

    def definition(self) -> str:
        """SHA-256 of what decides the ids of a text, whatever lies beside the file."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def vocabulary(self) -> Vocabulary:
        """What the ids are, for objectives that have to know."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        specials = {role: ids[text] for role, text in self.special_texts.items()}
        said = spoken(self._tokenizer, self.named).items()
        told = specials | {role: place for role, place in said if place not in specials.values()}
        return describe(self._tokenizer, told, self.vocab_size, separator=self.separator)

    def vocabulary_map(self) -> dict[str, int]:
        """Every token and its id, by id."""
        found = self._tokenizer.get_vocab(with_added_tokens=True)
        return {token: found[token] for token in sorted(found, key=found.__getitem__)}

    def special_ids(self) -> dict[str, int]:
        """The special tokens as they are spelt; in a text they would stay text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: place for place, token in added.items() if token.special}

    def encode(self, texts: list[str]) -> list[Array]:
        """One uint32 array of ids per text."""
        with _refusals(self._where):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.frombuffer(array(UINT32, encoding.ids), np.uint32) for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """The same, except that the mask token, spelt out, is one: a blank to be filled in.

        The blank before it belongs to it, as to every word.
        """
        mask = self.special_texts.get("mask")
        if mask is None:
            return self.encode([text])[0].tolist()
        place = self._tokenizer.get_vocab(with_added_tokens=True)[mask]
        *before, last = text.split(mask)
        encoded = self.encode([*(part.removesuffix(" ") for part in before), last])
        ids = [token for part in encoded for token in (place, *part.tolist())]
        return ids[1:]

    def decode(self, ids: list[int]) -> str:
        """The text of ids; separators and other special tokens are left out."""
        with _refusals(self._where):
            return self._tokenizer.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and tokenizer_config.json that names the separator, as Hugging Face does."""
        marks = self.special_texts if "mask" in self.special_texts else {}
        named = {f"{role}_token": marks[role] for role in ("pad", "cls", "sep", "unk", "mask") if role in marks}
        if self.chat_template:
            named |= {key: text for key, text in self.named.items() if key == "bos_token"}
            named["chat_template"] = self.chat_template
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.separator_text, **named}
        with (folder / "tokenizer.json").open("x", encoding="utf-8") as file:
            file.write(self._tokenizer.to_str(pretty=True))
        with (folder / "tokenizer_config.json").open("x", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _byte_level(model: models.Model) -> Tokenizer:
    """A tokenizer over bytes, so that any text survives the way to ids and back."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: trainers.Trainer, texts: Iterable[str]) -> None:
    """Train in a thread of its own: the call may take half a minute, and a signal is only heard outside of it."""
    failures: list[BaseException] = []
    done, given_up = threading.Event(), threading.Event()

    def wanted() -> Iterator[str]:
        for text in texts:
            if given_up.is_set():
                return
            yield text

    def work() -> None:
        try:
            tokenizer.train_from_iterator(wanted(), trainer)
        except BaseException as error:  # the caller's, whatever it is
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name=UNSTOPPABLE, daemon=True).start()
    try:
        done.wait()
    except BaseException:
        given_up.set()
        raise
    if failures:
        raise failures[0]


def train_marked_bpe(texts: Iterable[str], vocab_size: int) -> TokenizerFile:
    """The same with the five special tokens, for objectives that mark places in a text."""
    return train_bpe(texts, vocab_size, specials=tuple(SPECIALS.values()))


def train_bpe(texts: Iterable[str], vocab_size: int, *, specials: tuple[str, ...] = (SEPARATOR,)) -> TokenizerFile:
    """Byte-level BPE of at most vocab_size tokens. The same texts give the same tokenizer."""
    assert vocab_size >= 256 + len(specials)
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train(tokenizer, trainer, texts)
    if SEPARATOR in specials:
        return TokenizerFile(tokenizer, separator=SEPARATOR)
    mask = AddedToken(
        SPECIALS["mask_token"], special=True, normalized=False, lstrip=True
    )  # the blank before is its own
    tokenizer.add_special_tokens([mask])  # pyright: ignore[reportUnknownMemberType] # stub: `list`
    return _finished(tokenizer)


def _byte_pieces() -> tuple[list[str], list[str], list[str]]:
    """The single bytes lower-cased UTF-8 words are made of: at the start of a word, further on, never at the start."""
    characters = _byte_characters()
    punctuation = [byte for byte in range(0x21, 0x7F) if not chr(byte).isalnum()]  # always a word of its own
    letters = [byte for byte in range(0x21, 0x7F) if chr(byte).isalnum() and not chr(byte).isupper()]
    first, later = [*range(0xC2, 0xF5)], [*range(0x80, 0xC0)]
    begin = sorted([*punctuation, *letters, *first])
    go_on = sorted([*letters, *first, *later])
    named = ([characters[byte] for byte in group] for group in (begin, go_on, later))
    starts, ends, inner = named
    return starts, ends, inner


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> TokenizerFile:
    """Lower-case WordPiece over bytes, so that no word is unknown. The same texts give the same tokenizer.

    The library numbers the pieces it starts from in the order of a hash table that differs from process to process, and
    breaks ties by those numbers. Here they are all named beforehand, in a fixed order; that is the whole trick.
    """
    assert vocab_size >= MIN_WORDPIECE_VOCAB
    starts, ends, inner = _byte_pieces()
    alphabet = [*SPECIALS.values(), *starts, *(CONTINUED + piece for piece in ends)]
    tokenizer = _bert_like(models.WordPiece(unk_token=SPECIALS["unk_token"]), over_bytes=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size + len(inner),  # which it will not do without, and nobody needs
        min_frequency=2,
        special_tokens=[*alphabet, *inner],
        continuing_subword_prefix=CONTINUED,
        show_progress=False,
    )
    _train(tokenizer, trainer, texts)
    found = tokenizer.get_vocab()
    kept = [piece for piece in sorted(found, key=found.__getitem__) if piece not in inner]
    assert kept[: len(alphabet)] == alphabet
    model = models.WordPiece(
        vocab={piece: place for place, piece in enumerate(kept)},
        unk_token=SPECIALS["unk_token"],
        continuing_subword_prefix=CONTINUED,
        max_input_chars_per_word=4 * LONGEST_WORD,  # of UTF-8
    )
    return _finished(_bert_like(model, over_bytes=True))


def train_words(texts: Iterable[str], vocab_size: int) -> TokenizerFile:
    """Whole lower-case words, the most frequent first, those equally frequent by the alphabet; others are [UNK]."""
    assert vocab_size >= MIN_WORD_VOCAB
    tokenizer = _bert_like(models.WordLevel(unk_token=SPECIALS["unk_token"]), over_bytes=False)
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=[*SPECIALS.values()], show_progress=False)
    _train(tokenizer, trainer, texts)
    return _finished(tokenizer)


def _bert_like(model: models.Model, *, over_bytes: bool) -> Tokenizer:
    """Lower-case words and punctuation marks; the same steps at training and at encoding."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    words, joined = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix=CONTINUED)
    tokenizer.pre_tokenizer, tokenizer.decoder = words, joined
    if over_bytes:
        short, in_bytes = pre_tokenizers.FixedLength(LONGEST_WORD), pre_tokenizers.ByteLevel(False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, short, in_bytes])
        blank = decoders.Replace(" ", _byte_characters()[ord(" ")])
        tokenizer.decoder = decoders.Sequence([joined, blank, decoders.ByteLevel()])
    return tokenizer


def _finished(tokenizer: Tokenizer) -> TokenizerFile:
    _add_specials(tokenizer)
    return TokenizerFile(tokenizer, separator=SPECIALS["sep_token"])


def _add_specials(tokenizer: Tokenizer) -> None:
    """The five special tokens, and the template that BERT's readers expect."""
    begin, end = SPECIALS["cls_token"], SPECIALS["sep_token"]
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [text for text in SPECIALS.values() if text not in there]
    tokenizer.add_special_tokens(missing)  # pyright: ignore[reportUnknownMemberType] # stub: `list`
    ids = {token: tokenizer.token_to_id(token) for token in (begin, end)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1", special_tokens=[*ids.items()]
    )


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers: itself if printable, else one past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + other.index(byte)) for byte in range(256)]


MIN_WORDPIECE_VOCAB = len(SPECIALS) + sum(len(pieces) for pieces in _byte_pieces()[:2])


class ByteTokenizer(TokenizerFile):
    """One id per byte of the text, and 256 after each document."""

    def __init__(self) -> None:
        vocab = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = _byte_level(models.BPE(vocab=vocab, merges=[]))
        end = AddedToken(SEPARATOR, special=True, normalized=False)
        tokenizer.add_special_tokens([end])  # pyright: ignore[reportUnknownMemberType] # stub: `list`, of what is open
        super().__init__(tokenizer, separator=SEPARATOR)

    def encode(self, texts: list[str]) -> list[Array]:
        """The same ids as the file gives, without asking the library."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


class AlphabetTokenizer(TokenizerFile):
    """One id per letter of an alphabet, for sources of symbols. The first letter is also the separator.

    With the five special tokens, where places are to be marked, letters come after them and [SEP] is the separator.
    """

    def __init__(self, alphabet: str, *, marked: bool = False) -> None:
        first = [*SPECIALS.values()] if marked else []
        vocab = {letter: place for place, letter in enumerate([*first, *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.decoder = decoders.Fuse()
        end = SPECIALS["sep_token"] if marked else alphabet[0]  # so that the file itself says what ends a document
        if marked:
            _add_specials(tokenizer)
        else:
            tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 0)])
        super().__init__(tokenizer, separator=end)


def load_tokenizer(path: Path) -> TokenizerFile:
    """The tokenizer of a folder with tokenizer.json, or of that file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        with open_plain(file) as opened:
            content = opened.read().decode()
    except FileNotFoundError:
        raise NotFoundError("there is no tokenizer.json", where=str(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the tokenizer: {error}", where=str(file)) from error
    try:
        with _refusals(str(file)):
            tokenizer = Tokenizer.from_str(content)
    except DataError:
        if (flat := flat_map(content)) is None:
            raise
        return _of_words(flat, where=str(file))
    named = names_beside(file)
    end, template = _separator(tokenizer, file, named), template_beside(file)
    return TokenizerFile(tokenizer, separator=end, where=str(file), named=named, chat_template=template)


def _of_words(vocab: dict[str, int], *, where: str) -> TokenizerFile:
    """The tokenizer of a flat map: words, or pieces of words where some go on. How a BPE merges, no map tells."""
    if missing := [token for token in SPECIALS.values() if token not in vocab]:
        raise DataError(f"a map of tokens without {', '.join(missing)}", where=where)
    pieces = any(token.startswith(CONTINUED) and token != CONTINUED for token in vocab)
    if not pieces and any(token.startswith(BLANKS) for token in vocab):
        hint = "data.tokenizer_name=RUN/checkpoints/step_N, which keeps the whole tokenizer"
        raise DataError("a map of BPE tokens does not tell how they are merged", where=where, hint=hint)
    unknown = SPECIALS["unk_token"]
    if not pieces:
        return _finished(_bert_like(models.WordLevel(vocab=vocab, unk_token=unknown), over_bytes=False))
    over_bytes = vocab.keys() >= {*_byte_pieces()[0]}
    longest = (4 if over_bytes else 1) * LONGEST_WORD
    model = models.WordPiece(
        vocab=vocab, unk_token=unknown, continuing_subword_prefix=CONTINUED, max_input_chars_per_word=longest
    )
    return _finished(_bert_like(model, over_bytes=over_bytes))


def _separator(tokenizer: Tokenizer, file: Path, named: Mapping[str, str]) -> str:
    """The token that ends a document: the file's own end of a text, else a well-known one, else eos_token beside it."""
    said = tokenizer.post_processor  # alone: a large vocabulary would be written out and read for it
    processor: dict[str, Any] = json.loads(said.__getstate__()) if said else {}
    template: list[Any] = processor.get("single", []) if processor.get("type") == "TemplateProcessing" else []
    own: str | None = template[-1].get("SpecialToken", {}).get("id") if template else None
    known = (token for token in (own, *KNOWN_SEPARATORS) if token and tokenizer.token_to_id(token) is not None)
    found = next(known, None) or named.get("eos_token")
    if found is not None and tokenizer.token_to_id(found) is not None:
        return found
    raise DataError(
        "no token that could end a document",
        where=str(file),
        hint='{"eos_token": "..."} in a tokenizer_config.json beside it',
    )
