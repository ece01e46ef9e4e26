"""What the ids of a tokenizer are: which are special, and which go on with a word. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.contracts import Vocabulary
from lockstep.errors import DataError
from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lockstep.contracts import Array

SPECIALS = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
WELL_KNOWN: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # names in a config, then how they are spelt
    "pad": (("pad_token",), ("[PAD]", "<pad>")),
    "cls": (("cls_token", "bos_token"), ("[CLS]", "<s>", "<cls>")),
    "sep": (("sep_token", "eos_token"), ("[SEP]", "</s>", "<sep>")),
    "unk": (("unk_token",), ("[UNK]", "<unk>")),
    "mask": (("mask_token",), ("[MASK]", "<mask>", "<|mdm_mask|>", "<|mask|>")),
}
SPOKEN: Mapping[str, tuple[str, ...]] = {  # what conversations are made of; told to objectives, marks no places
    "bos": ("<|startoftext|>", "<|begin_of_text|>", "<s>"),
    "eot": ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
}
BLANKS = ("\u0120", "\u2581")  # stand for the blank before a word: in byte-level tokenizers, and in SentencePiece's


def names_beside(file: Path) -> dict[str, str]:
    """The special tokens that tokenizer_config.json beside a tokenizer.json names: `cls_token` -> `[CLS]`."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return {}
    try:
        tree: Any = json.loads(config.read_text(encoding="utf-8"))
        named = {key: tree[key] for keys, _ in WELL_KNOWN.values() for key in keys if tree.get(key) is not None}
        plain = {key: cast("dict[str, Any]", name)["content"] if isinstance(name, dict) else name
                 for key, name in named.items()}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"no special tokens to be read: {error!r}", where=str(config)) from error
    if wrong := [key for key, name in plain.items() if not isinstance(name, str)]:
        raise DataError(f"{wrong[0]} is no text", where=str(config))
    return plain


def template_beside(file: Path) -> str | None:
    """The chat template of a tokenizer.json: chat_template.jinja beside it, else in tokenizer_config.json."""
    own, config = file.with_name("chat_template.jinja"), file.with_name("tokenizer_config.json")
    try:
        if own.is_file():
            return own.read_text(encoding="utf-8")
        found: Any = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
        if isinstance(found, list):  # several by name
            named = cast("list[dict[str, Any]]", found)
            found = next((entry["template"] for entry in named if entry["name"] == "default"), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"no chat template to be read: {error!r}", where=str(file.parent)) from error
    return found if isinstance(found, str) and found.strip() else None


def flat_map(content: str) -> dict[str, int] | None:
    """Token -> id, the form of tokenizer.json in a result folder; None: it is something else."""
    try:
        tree: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or not tree:
        return None
    flat = cast("dict[str, Any]", tree)
    return flat if all(type(place) is int and 0 <= place < 1 << 31 for place in flat.values()) else None


def special_texts(tokenizer: Tokenizer, named: Mapping[str, str]) -> dict[str, str]:
    """pad, cls, sep, unk, mask -> the token, of those that there are: as named, else by a well-known spelling.

    bos and eos stand in for cls and sep where there is nothing better. What was never meant to mark places has no mask
    token, and its names mean other things.
    """
    found: dict[str, str] = {}
    for role in ("mask", "pad", "cls", "sep", "unk"):
        keys, spellings = WELL_KNOWN[role]
        own, others = ([named[key] for key in part if key in named] for part in (keys[:1], keys[1:]))
        candidates = [*own, *spellings, *others] if role == "mask" or "mask" in found else spellings
        text = next((text for text in candidates if tokenizer.token_to_id(text) is not None), None)
        if text is not None:
            found[role] = text
    return found


def spoken(tokenizer: Tokenizer, named: Mapping[str, str]) -> dict[str, int]:
    """bos and eot -> the id, of those that there are."""
    found: dict[str, int] = {}
    for role, spellings in SPOKEN.items():
        candidates = [named["bos_token"], *spellings] if role == "bos" and "bos_token" in named else spellings
        places = (tokenizer.token_to_id(text) for text in candidates)
        place = next((place for place in places if place is not None), None)
        if place is not None:
            found[role] = place
    return found


def describe(tokenizer: Tokenizer, specials: Mapping[str, int], size: int, *, separator: int = -1) -> Vocabulary:
    """All an objective may have to know."""
    return Vocabulary(size, dict(specials), _continues(tokenizer, specials, size), separator)


def _continues(tokenizer: Tokenizer, specials: Mapping[str, int], size: int) -> Array:
    """The ids that go on with a word another id began.

    A token alone does not always say it: in byte-level tokenizers a word after `(` or a line's end has no mark of its
    own, and counts as part of the word before.
    """
    tree = json.loads(tokenizer.to_str())
    prefix: str | None = tree["model"].get("continuing_subword_prefix")
    goes_on = np.zeros(size, bool)
    marked = any(kind in json.dumps([tree["pre_tokenizer"], tree["normalizer"]]) for kind in ("ByteLevel", *BLANKS))
    marked |= '"Metaspace"' in json.dumps(tree["pre_tokenizer"])
    if not prefix and (tree["model"].get("type") == "WordLevel" or not marked):
        return goes_on
    for token, place in tokenizer.get_vocab(with_added_tokens=True).items():
        goes_on[place] = token.startswith(prefix) if prefix else _is_inner(token)
    added = [token["id"] for token in tree["added_tokens"]]
    goes_on[[*added, *specials.values()]] = False
    return goes_on


def _is_inner(token: str) -> bool:
    """Whether a token without a blank goes on with letters or digits; punctuation marks are words of their own.

    Characters past ASCII are bytes of letters, or letters; those up to 32 and the blank stand 256 higher.
    """
    first = token[:1]
    if not first or first in BLANKS or 0x100 <= ord(first) <= 0x121:
        return False
    return first.isalnum() or not first.isascii()
