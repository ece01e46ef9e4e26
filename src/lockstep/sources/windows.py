"""Ready windows: a folder of token ids that are cut into rows and split already, as `lockstep prepare --to` writes it.

    train_data.npy  val_data.npy                    whole numbers, (windows, sequence_length)
    metadata.json                                   sequence_length, mask_token, eos_token, ...
    train_prompt_lengths.npy  val_prompt_lengths.npy   of conversations: (windows,), the tokens before each answer
    tokenizer.json  tokenizer_config.json           whose ids they are; else the model's own, or those named

The split is that of the files; a training window that is also in val_data.npy is left out. Files are read some rows at
a time, so that a set of any size takes little memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, cast

from lockstep.contracts import PROMPT
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.rundir import expanded
from lockstep.runtime.later import numpy as np
from lockstep.sources.text import content_of, memo_of, reading

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.data.options import DataOptions

logger = logging.getLogger(__name__)

METADATA = "metadata.json"
DATA = {"train": "train_data.npy", "validation": "val_data.npy"}
LENGTHS = {"train": "train_prompt_lengths.npy", "validation": "val_prompt_lengths.npy"}
COUNTS = {"train": "train_samples", "validation": "val_samples"}
NEEDED = (*DATA.values(), METADATA)
TOKENIZER = "tokenizer.json"
ALIKE = 2  # of the three files: who has so many means windows
JSON_BYTES = 1 << 26
SHA256 = re.compile("[0-9a-f]{64}")
READ_BYTES = 1 << 22
HEADER_ERRORS = (  # what NumPy raises over a .npy file of somebody else
    ValueError,
    TypeError,
    EOFError,
    SyntaxError,
    RecursionError,
    MemoryError,
    OverflowError,
    tokenize.TokenError,
)


@dataclass(frozen=True)
class Metadata:
    """What a folder of windows says about itself."""

    folder: Path
    sequence_length: int
    answers: bool  # prompts are told from answers
    vocab_size: int | None = None
    mask_token: int | None = None
    eos_token: int | None = None
    tokenizer: str | None = None  # definition of the one they were made with, as SHA-256


def command(folder: str | Path, model: str = "") -> str:
    """The command that makes such a folder."""
    named = f" --model-path {quote(model)}" if model else ""
    return f"lockstep prepare llada{named} --data-path TEXT.txt --to {quote(str(folder))}"


def is_folder(path: str | None) -> bool:
    """Whether a path means ready windows, whole or not."""
    try:
        return path is not None and sum((Path(path).expanduser() / name).is_file() for name in NEEDED) >= ALIKE
    except (OSError, RuntimeError, ValueError):  # no path at all: somebody else's to say so
        return False


def check_folder(path: str | Path, *, model: str = "") -> Metadata:
    """What the folder says; one message with the command that makes it, where it or a file of it is missing."""
    folder = expanded(str(path))
    if not folder.is_dir():
        raise NotFoundError(f"Dataset directory '{path}' not found.", hint=command(path, model))
    if missing := [name for name in NEEDED if not (folder / name).is_file()]:
        raise NotFoundError(f"{', '.join(missing)} missing", where=str(path), hint=command(path, model))
    tree = _json(folder / METADATA)
    length = _whole(tree, "sequence_length", folder)
    if not length:
        raise DataError("no sequence_length", where=str(folder / METADATA), hint=command(path, model))
    lengths = [(folder / name).is_file() for name in LENGTHS.values()]
    if any(lengths) and not all(lengths):
        name = LENGTHS["train" if lengths[1] else "validation"]
        raise NotFoundError(f"{name} missing", where=str(path), hint=command(path, model))
    for side, name in DATA.items():
        _check_shape(folder / name, length, _whole(tree, COUNTS[side], folder))
    made_with = tree.get("tokenizer")
    vocab_size, mask, end = (_whole(tree, name, folder) for name in ("vocab_size", "mask_token", "eos_token"))
    return Metadata(
        folder,
        length,
        answers=all(lengths),
        vocab_size=vocab_size,
        mask_token=mask,
        eos_token=end,
        tokenizer=made_with if isinstance(made_with, str) and SHA256.fullmatch(made_with) else None,
    )


class WindowSource:
    """The windows as documents of ids: those of training, then those of validation."""

    name = "windows"

    def __init__(self, metadata: Metadata, *, at_most: int, memo: Path | None = None) -> None:
        self.metadata = metadata
        self._at_most, self._memo = at_most, memo

    @property
    def tokenizer_file(self) -> Path | None:
        """Whose ids they are, if the folder says so."""
        file = self.metadata.folder / TOKENIZER
        return file if file.is_file() else None

    def fingerprint(self) -> Mapping[str, Any]:
        """Sizes and SHA-256 of the files that decide the rows."""
        names = (*NEEDED, *(LENGTHS.values() if self.metadata.answers else ()))
        return content_of([(name, self.metadata.folder / name) for name in names], self._memo)

    def documents(self) -> Iterator[Array]:
        kept = (row for row in self._rows("train") if key_of(row) not in self.held_out)
        return chain(islice(kept, self._at_most), self._rows("validation"))

    @cached_property
    def held_out(self) -> frozenset[int]:
        """Hashes of the windows kept for validation."""
        held = frozenset(key_of(row) for row in self._rows("validation"))
        if copies := sum(key_of(row) in held for row in self._rows("train")):
            names = (DATA["validation"], self.metadata.folder)
            logger.warning("%d training windows are also in %s of %s: they are left out", copies, *names)
        return held

    def _rows(self, side: str) -> Iterator[Array]:
        """The windows of one side; of conversations without what only fills them up, and prompts marked."""
        about, file = self.metadata, self.metadata.folder / DATA[side]
        prompts = _prompt_lengths(about.folder / LENGTHS[side], about) if about.answers else None
        for number, row in enumerate(_windows(file, about.sequence_length)):
            if about.mask_token is not None and (row == about.mask_token).any():
                raise DataError(
                    f"window {number} holds the mask id {about.mask_token} itself",
                    where=str(file),
                    hint=f"mask_token in {METADATA} is an id that no text has",
                )
            yield row if prompts is None else _marked(row, int(prompts[number]), about)


def _windows(file: Path, length: int) -> Iterator[Array]:
    """The rows as uint32, some read at a time."""
    stored = _open(file)
    at_once = max(1, READ_BYTES // (length * stored.itemsize))
    for start in range(0, len(stored), at_once):
        block = np.asarray(stored[start : start + at_once])
        wrong = np.argwhere((block < 0) | (block >= PROMPT))
        if len(wrong):
            row, column = wrong[0].tolist()
            raise DataError(
                f"{block[row, column]} is no token id",
                where=f"{file}: window {start + row}",
                hint="leave out what only fills up or masks: ids[ids >= 0]",
            )
        yield from block.astype(np.uint32)


def key_of(row: Array) -> int:
    """64 bits of the content, as of every document."""
    return int.from_bytes(hashlib.blake2b(row.astype("<u4").tobytes(), digest_size=8).digest(), "little")


def _marked(row: Array, prompt: int, about: Metadata) -> Array:
    """A prompt, marked, and its answer as far as it goes."""
    others = np.flatnonzero(row != about.eos_token)
    end = max(prompt, int(others[-1]) + 1 if len(others) else 0)
    kept = row[:end].copy()
    kept[:prompt] |= np.uint32(PROMPT)
    return kept


def _prompt_lengths(file: Path, about: Metadata) -> Array:
    if about.eos_token is None:
        raise DataError("no eos_token, which fills up after an answer", where=str(about.folder / METADATA))
    found = _open(file)
    windows = len(_open(about.folder / next(DATA[side] for side in DATA if LENGTHS[side] == file.name)))
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) != windows:
        raise DataError(
            f"one whole number for each of the {windows} windows was expected, its shape is {found.shape}",
            where=str(file),
            hint="numpy.save(FILE, lengths.astype(numpy.int64))",
        )
    if windows and not 0 <= int(found.min()) <= int(found.max()) <= about.sequence_length:
        wrong = int(np.flatnonzero((found < 0) | (found > about.sequence_length))[0])
        raise DataError(
            f"window {wrong}: a prompt of {found[wrong]} tokens of {about.sequence_length}", where=str(file)
        )
    return found


def _check_shape(file: Path, length: int, count: int | None) -> None:
    found = _open(file)
    if found.ndim != 2 or found.dtype.kind not in "iu" or found.shape[1] != length:
        raise DataError(
            f"whole numbers of shape (windows, {length}) were expected, this is {found.dtype} of shape {found.shape}",
            where=str(file),
            hint=f"sequence_length in {METADATA}, or {command(file.parent)}",
        )
    if count is not None and count != len(found):
        raise DataError(
            f"{len(found)} windows, {METADATA} says {count}", where=str(file), hint="copy or make the folder again"
        )


def _open(file: Path) -> Array:
    """Shape and type of an array, its content as it is touched; nothing is unpickled."""
    with reading(file):
        try:
            return np.lib.format.open_memmap(file, mode="r")
        except HEADER_ERRORS as error:
            hint = "numpy.save(FILE, ids.astype(numpy.int64))"
            reason = str(error) or type(error).__name__
            raise DataError(f"not a readable .npy file: {reason}"[:200], where=str(file), hint=hint) from error


def _json(file: Path) -> dict[str, Any]:
    with reading(file):
        try:
            tree = json.loads(file.read_text(encoding="utf-8")) if file.stat().st_size <= JSON_BYTES else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"unreadable: {error}", where=str(file)) from None
    if not isinstance(tree, dict):
        raise DataError("a JSON object was expected", where=str(file))
    return cast("dict[str, Any]", tree)


def _whole(tree: Mapping[str, Any], name: str, folder: Path) -> int | None:
    """A number of metadata.json; None: it is not there."""
    value = tree.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < PROMPT:
        raise DataError(f"{name} is no whole number: {value!r}"[:200], where=str(folder / METADATA))
    return value


def build(options: DataOptions) -> WindowSource:
    if options.data_path is None:
        raise ConfigError("which folder of windows?", where="data.data_path", hint="data.data_path=FOLDER")
    metadata = check_folder(options.data_path)
    if metadata.answers != (options.documents == "answers"):
        has, other = ("", "answers") if metadata.answers else ("no ", "separated")
        raise ConfigError(
            f"{options.data_path} has {has}{LENGTHS['train']}, data.documents is {options.documents}",
            where="data.documents",
            hint=f"data.documents={other}",
        )
    return WindowSource(metadata, at_most=options.max_train_samples, memo=memo_of(options))
