"""What is to be prepared: which source, which tokenizer, where the cache lies, and the key of it all. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import registry
from lockstep.data.options import DataOptions
from lockstep.data.tokenize import (
    MIN_BPE_VOCAB,
    MIN_MARKED_BPE_VOCAB,
    MIN_WORD_VOCAB,
    MIN_WORDPIECE_VOCAB,
    AlphabetTokenizer,
    ByteTokenizer,
    TokenizerFile,
    load_tokenizer,
    train_bpe,
    train_marked_bpe,
    train_wordpiece,
    train_words,
)
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.runtime import hub, pins

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Objective, Source

TRAINED: Mapping[str, tuple[Callable[[Iterable[str], int], TokenizerFile], int]] = {  # how, and the fewest ids
    "builtin": (train_bpe, MIN_BPE_VOCAB),
    "wordpiece": (train_wordpiece, MIN_WORDPIECE_VOCAB),
    "word": (train_words, MIN_WORD_VOCAB),
}
MARKED = {**TRAINED, "builtin": (train_marked_bpe, MIN_MARKED_BPE_VOCAB)}  # with [CLS], [SEP], [PAD] and [MASK]
AUTOMATIC = {
    False: ("builtin", "No tokenizer named: using a byte-level BPE trained on this text"),
    True: ("wordpiece", "No tokenizer named: using a WordPiece trained on this text, in lower case"),
}
MARKS = ("pad", "cls", "sep", "mask")
HUB_DATASETS = ("wikitext", "c4", "imdb", "hf")  # by their own names; all others are owner/name
OWN_SOURCE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:\w+")  # pkg.module:build


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer that may have to be trained first: what decides it, and how to get it from training texts."""

    name: str
    spec: Mapping[str, Any]
    make: Callable[[Iterable[str]], TokenizerFile]
    notice: str = ""
    ready: TokenizerFile | None = None  # needs no training


def cache_roots(options: DataOptions) -> list[Path]:
    """Where to look for caches; the first is written to."""
    return pins.cache_roots(options.cache_dir)


def key_parts(
    config: RunConfig, columns: Mapping[str, str], *, source: Source, choice: TokenizerChoice
) -> dict[str, Any]:
    """All that decides the rows, and nothing else: not the seed, not the learning rate."""
    return {
        "objective": config.objective.name,
        "columns": dict(columns),
        "source": "hub" if is_of_hub(config.data.dataset_name) else source.name,  # there the content says it all
        "content": dict(source.fingerprint()),
        "tokenizer": dict(choice.spec),
        "context_length": config.training.context_length,
        "max_train_samples": config.data.max_train_samples,
        "validation_fraction": config.data.validation_fraction,
        "min_words": config.data.min_words,
        "documents": config.data.documents,
        "streaming": config.data.streaming,
    }


def choose_source(options: DataOptions) -> Source:
    """The source that a configuration names; what it leaves open was decided before (settle.py)."""
    name = options.dataset_name
    assert name != "auto", "not settled"
    assert "|" not in name, "not settled"
    if options.data_path is not None and name != "text" and not is_own(name):
        raise ConfigError(
            f"data.data_path is set, but dataset {name!r} reads no files",
            where="data.dataset_name",
            hint="data.dataset_name=text, or leave data_path out",
        )
    here = name in registry.names("sources") or is_own(name)
    return registry.load("sources", name if here else "hf", "build")(options)


def is_of_hub(name: str) -> bool:
    """Whether a name means one or several datasets of the hub."""
    return name == "hf" or not (name in registry.names("sources") or is_own(name))


def is_own(name: str) -> bool:
    """Whether a name means code outside the package, pkg.module:build; c4:en does not."""
    return OWN_SOURCE.fullmatch(name) is not None and name.partition(":")[0] not in HUB_DATASETS


def choose_tokenizer(
    options: DataOptions, source: Source, *, model_path: str, vocab_limit: int, marks_places: bool = False
) -> TokenizerChoice:
    """The tokenizer a configuration asks for; one with the five special tokens if the objective marks places."""
    choice = _choice(options, source, model_path=model_path, vocab_limit=vocab_limit, marked=marks_places)
    has = choice.ready.special_texts if marks_places and choice.ready else MARKS
    if missing := [role for role in MARKS if role not in has]:
        raise ConfigError(
            f"tokenizer {choice.name!r} has no {', '.join(f'[{role.upper()}]' for role in missing)}, and this "
            "objective marks places in the text",
            where="data.tokenizer_name",
            hint="data.tokenizer_name=wordpiece, or one that has them",
        )
    return choice


def _choice(
    options: DataOptions, source: Source, *, model_path: str, vocab_limit: int, marked: bool
) -> TokenizerChoice:
    name, notice = options.tokenizer_name or "auto", ""
    if name == "auto":
        alphabet = getattr(source, "alphabet", None)  # of a source of symbols
        if alphabet is not None:
            return _ready("alphabet", AlphabetTokenizer(alphabet, marked=marked), vocab_limit)
        if own := existing(f"{model_path}/tokenizer.json"):
            return _ready(model_path, load_tokenizer(own), vocab_limit)
        name, what = AUTOMATIC[marked]
        notice = f"{what} (data.tokenizer_name=FOLDER for your own)"
    if name in TRAINED:
        if existing(f"{model_path}/tokenizer.json"):  # ids of another tokenizer mean other words to its weights
            notice = f"{model_path} has a tokenizer of its own: data.tokenizer_name=auto, if its weights are used"
        train, least = (MARKED if marked else TRAINED)[name]
        size = min(options.tokenizer_vocab_size, vocab_limit)
        if size < least:
            raise _does_not_fit(name, least, vocab_limit)
        other = {"specials": True} if train is not TRAINED[name][0] else {}
        return TokenizerChoice(name, {name: size, **other}, lambda texts: train(texts, size), notice)
    if name == "bytes":
        return _ready(name, ByteTokenizer(), vocab_limit)
    if path := existing(name):
        return _ready(name, load_tokenizer(path), vocab_limit)
    return _ready(name, hub_tokenizer(options, name), vocab_limit)


def hub_tokenizer(options: DataOptions, name: str) -> TokenizerFile:
    """tokenizer.json of a model on the hub, or one message. The token goes into the header and nowhere else."""
    token = hub.token_of(options.hf_token)
    try:
        if not hub.looks_like_id(name):
            raise NotFoundError("not a folder, not a hub id")
        file = hub.download(name, "tokenizer.json", token=token)
        try:
            return load_tokenizer(file)
        except DataError:  # the file alone may not say what ends a text
            hub.download(name, "tokenizer_config.json", token=token)
            return load_tokenizer(file)
    except NotFoundError as error:
        raise NotFoundError(
            f"no tokenizer {name!r}: {error.what}",
            where="data.tokenizer_name",
            hint="check the name and the network; gated models need HF_TOKEN; or use data.tokenizer_name=builtin",
        ) from error


def speaking(objective: Objective, tokenizer: TokenizerFile) -> Objective:
    """The objective, told about the ids of the tokenizer if it needs to know."""
    told = getattr(objective, "with_vocabulary", None)
    return told(tokenizer.vocabulary()) if told else objective


def existing(name: str) -> Path | None:
    """The file or folder of this name; a name that could not be one's is nobody's."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long; the home of an unknown user
        return None


def _ready(name: str, tokenizer: TokenizerFile, vocab_limit: int) -> TokenizerChoice:
    """A tokenizer that needs no training."""
    if tokenizer.vocab_size > vocab_limit:
        raise _does_not_fit(name, tokenizer.vocab_size, vocab_limit)
    return TokenizerChoice(name, {"file": tokenizer.fingerprint()}, lambda _: tokenizer, ready=tokenizer)


def _does_not_fit(name: str, vocab_size: int, vocab_limit: int) -> ConfigError:
    return ConfigError(
        f"tokenizer {name!r} has {vocab_size} ids, the model has room for {vocab_limit}",
        where="data.tokenizer_name",
        hint=f"model.vocab_size={vocab_size}, or another data.tokenizer_name",
    )
