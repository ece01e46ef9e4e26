"""Text to ids and back. Every tokenizer here is a tokenizer.json of the `tokenizers` library, ours included."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from array import array
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lockstep.errors import DataError, NotFoundError
from lockstep.runtime.signals import UNSTOPPABLE

if TYPE_CHECKING:
    from lockstep.contracts import Array

SEPARATOR = "<|endoftext|>"
KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]", "<|eot_id|>")
MIN_BPE_VOCAB = 257  # every byte and the separator
SPECIALS = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
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

    def __init__(self, tokenizer: Tokenizer, *, separator: str, where: str = "tokenizer") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        found = tokenizer.token_to_id(separator)
        assert found is not None, separator
        self.separator: int = found
        self.separator_text = separator
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may leave holes
        self._tokenizer = tokenizer
        self._where = where

    def fingerprint(self) -> str:
        """SHA-256 of the whole definition and the separator."""
        return hashlib.sha256(f"{self.separator}\n{self._tokenizer.to_str()}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[Array]:
        """One uint32 array of ids per text."""
        with _refusals(self._where):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.frombuffer(array(UINT32, encoding.ids), np.uint32) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """The text of ids; separators and other special tokens are left out."""
        with _refusals(self._where):
            return self._tokenizer.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and tokenizer_config.json that names the separator, as Hugging Face does."""
        has_all = all(self._tokenizer.token_to_id(token) is not None for token in SPECIALS.values())
        named = SPECIALS if has_all else {}
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


def train_bpe(texts: Iterable[str], vocab_size: int) -> TokenizerFile:
    """Byte-level BPE of at most vocab_size tokens. The same texts give the same tokenizer."""
    assert vocab_size >= MIN_BPE_VOCAB
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train(tokenizer, trainer, texts)
    return TokenizerFile(tokenizer, separator=SEPARATOR)


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
    """With the five special tokens, and the template that BERT's readers expect."""
    begin, end = SPECIALS["cls_token"], SPECIALS["sep_token"]
    tokenizer.add_special_tokens([*SPECIALS.values()])  # pyright: ignore[reportUnknownMemberType] # stub: `list`
    ids = {token: tokenizer.token_to_id(token) for token in (begin, end)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1", special_tokens=[*ids.items()]
    )
    return TokenizerFile(tokenizer, separator=end)


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
    """One id per letter of an alphabet, for sources of symbols. The first letter is also the separator."""

    def __init__(self, alphabet: str) -> None:
        vocab = {letter: place for place, letter in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.decoder = decoders.Fuse()
        end = alphabet[0]  # so that the file itself says what ends a document
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 0)])
        super().__init__(tokenizer, separator=end)


def load_tokenizer(path: Path) -> TokenizerFile:
    """The tokenizer of a folder with tokenizer.json, or of that file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError("there is no tokenizer.json", where=str(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the tokenizer: {error}", where=str(file)) from error
    with _refusals(str(file)):
        tokenizer = Tokenizer.from_str(content)
    return TokenizerFile(tokenizer, separator=_separator(tokenizer, file), where=str(file))


def _separator(tokenizer: Tokenizer, file: Path) -> str:
    """The token that ends a document: the file's own end of a text, else a well-known one, else eos_token beside it."""
    processor: dict[str, Any] = json.loads(tokenizer.to_str()).get("post_processor") or {}
    template: list[Any] = processor.get("single", []) if processor.get("type") == "TemplateProcessing" else []
    own: str | None = template[-1].get("SpecialToken", {}).get("id") if template else None
    known = (token for token in (own, *KNOWN_SEPARATORS) if token and tokenizer.token_to_id(token) is not None)
    found = next(known, None) or _named_beside(file)
    if isinstance(found, str) and tokenizer.token_to_id(found) is not None:
        return found
    raise DataError(
        "no token that could end a document",
        where=str(file),
        hint='{"eos_token": "..."} in a tokenizer_config.json beside it',
    )


def _named_beside(file: Path) -> object:
    """eos_token of tokenizer_config.json."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        return cast("dict[str, Any]", named)["content"] if isinstance(named, dict) else named
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"no eos_token to be read: {error}", where=str(config)) from error
