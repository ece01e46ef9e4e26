"""What is to be prepared: which source, which tokenizer, where the cache lies, and the key of it all. Torch-free."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
from lockstep.data.vocabulary import template_beside
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.formats.chats import FORMS
from lockstep.runtime import hub, pins
from lockstep.sources.windows import WindowSource, command

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Objective, Source
    from lockstep.models.shapes import AnyShape

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
SILENT = ("builtin", "synthetic")  # nobody answers anybody in them
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
    talks = config.data.documents == "answers" and choice.ready is not None and choice.ready.chat_template
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
        "streaming": False,  # keeps the keys of caches that are there; how text was fetched decides no row
        **({"chat_template": choice.ready.chat_template} if talks and choice.ready else {}),
    }


def choose_source(options: DataOptions) -> Source:
    """The source that a configuration names; what it leaves open was decided before (settle.py)."""
    name = options.dataset_name
    assert name != "auto", "not settled"
    assert "|" not in name, "not settled"
    if name == "text" and is_windows(options):
        name = "windows"
    if options.data_path is not None and name not in ("text", "windows") and not is_own(name):
        raise ConfigError(
            f"data.data_path is set, but dataset {name!r} reads no files",
            where="data.dataset_name",
            hint="data.dataset_name=text, or leave data_path out",
        )
    if options.documents == "answers" and name in SILENT:
        raise ConfigError(
            f"dataset {name!r} holds no conversations",
            where="data.documents",
            hint=f"data.data_path=FILE.jsonl with {FORMS}, or data.documents=separated",
        )
    here = name in registry.names("sources") or is_own(name)
    return registry.load("sources", name if here else "hf", "build")(options)


def is_windows(options: DataOptions) -> bool:
    """Whether the text is ready windows of ids."""
    named = options.dataset_name in ("auto", "text", "windows")
    return named and registry.load("sources", "windows", "is_folder")(options.data_path)


def is_of_hub(name: str) -> bool:
    """Whether a name means one or several datasets of the hub."""
    return name == "hf" or not (name in registry.names("sources") or is_own(name))


def is_own(name: str) -> bool:
    """Whether a name means code outside the package, pkg.module:build; c4:en does not."""
    return OWN_SOURCE.fullmatch(name) is not None and name.partition(":")[0] not in HUB_DATASETS


def choose_tokenizer(
    options: DataOptions, source: Source, *, model_path: str, room: Room, marks_places: bool = False
) -> TokenizerChoice:
    """The tokenizer a configuration asks for; one with the five special tokens if the objective marks places."""
    choice = _choice(options, source, model_path=model_path, room=room, marked=marks_places)
    has = choice.ready.special_texts if marks_places and choice.ready else MARKS
    if missing := [role for role in MARKS if role not in has]:
        raise ConfigError(
            f"tokenizer {choice.name!r} has no {', '.join(f'[{role.upper()}]' for role in missing)}, and this "
            "objective marks places in the text",
            where="data.tokenizer_name",
            hint="data.tokenizer_name=wordpiece, or one that has them",
        )
    return choice


@dataclass(frozen=True)
class Room:
    """For the ids of a tokenizer."""

    rows: int  # of the model
    spare: int = 0  # of them for a mask, if the tokenizer has none
    mask: int | None = None  # where it was said which id that is

    @classmethod
    def of(cls, config: RunConfig, rows: int) -> Room:
        """Beside what the objective needs."""
        return cls(rows, config.objective.spare_ids, getattr(config.objective, "mask_token_id", None))

    def taken(self, tokenizer: TokenizerFile) -> int:
        """What a mask takes beside this tokenizer: nothing if it is one of its ids, such as one it reserves."""
        within = self.mask is not None and self.mask < tokenizer.vocab_size
        return 0 if within or "mask" in tokenizer.special_texts else self.spare

    def holds(self, tokenizer: TokenizerFile) -> bool:
        return tokenizer.vocab_size + self.taken(tokenizer) <= self.rows

    def refusal(self, name: str, size: int, spare: int) -> ConfigError:
        mask = f", and {spare} more is for the mask" if spare else ""
        other = "an objective.mask_token_id that it only reserves, " if spare else ""
        return ConfigError(
            f"tokenizer {name!r} has {size} ids{mask}, the model has room for {self.rows}",
            where="data.tokenizer_name",
            hint=f"model.vocab_size={size + spare}, {other}or another data.tokenizer_name",
        )


def _choice(options: DataOptions, source: Source, *, model_path: str, room: Room, marked: bool) -> TokenizerChoice:
    name, notice = options.tokenizer_name or "auto", ""
    if name == "auto":
        alphabet = getattr(source, "alphabet", None)  # of a source of symbols
        if alphabet is not None:
            return _ready("alphabet", AlphabetTokenizer(alphabet, marked=marked), room)
        if isinstance(source, WindowSource):
            return _of_windows(source, model_path=model_path, room=room)
        if own := existing(f"{model_path}/tokenizer.json"):
            return _ready(model_path, load_tokenizer(own), room)
        name, what = AUTOMATIC[marked]
        notice = f"{what} (data.tokenizer_name=FOLDER for your own)"
    if name in TRAINED:
        if existing(f"{model_path}/tokenizer.json"):  # ids of another tokenizer mean other words to its weights
            notice = f"{model_path} has a tokenizer of its own: data.tokenizer_name=auto, if its weights are used"
        train, least = (MARKED if marked else TRAINED)[name]
        spare = 0 if marked else room.spare
        size = min(options.tokenizer_vocab_size, room.rows - spare)
        if size < least:
            raise room.refusal(name, least, spare)
        other = {"specials": True} if train is not TRAINED[name][0] else {}
        return TokenizerChoice(name, {name: size, **other}, lambda texts: train(texts, size), notice)
    if name == "bytes":
        return _ready(name, ByteTokenizer(), room)
    if path := existing(name):
        return _ready(name, load_tokenizer(path), room)
    return _ready(name, hub_tokenizer(options, name), room)


def _of_windows(source: WindowSource, *, model_path: str, room: Room) -> TokenizerChoice:
    """Whose ids ready windows are: the folder's own tokenizer, else the model's."""
    folder = source.metadata.folder
    if own := source.tokenizer_file:
        return _ready(str(folder), load_tokenizer(own), room)
    if own := existing(f"{model_path}/tokenizer.json"):
        notice = f"{folder} has no tokenizer.json: its ids are taken for those of {model_path}"
        return replace(_ready(model_path, load_tokenizer(own), room), notice=notice)
    again = command(f"{folder}_2", model_path)
    raise NotFoundError(
        f"{folder} has no tokenizer.json, and none of {model_path} is here: nobody knows what its ids mean",
        where="data.tokenizer_name",
        hint=f"data.tokenizer_name=FOLDER with the tokenizer they were made with, or {again}",
    )


def hub_tokenizer(options: DataOptions, name: str) -> TokenizerFile:
    """tokenizer.json of a model on the hub, or one message. The token goes into the header and nowhere else."""
    token = hub.token_of(options.hf_token)
    try:
        if not hub.looks_like_id(name):
            raise NotFoundError("not a folder, not a hub id")
        file = hub.download(name, "tokenizer.json", token=token)
        if options.documents == "answers":
            _fetch_template(name, file, token)
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


def _fetch_template(name: str, file: Path, token: str | None) -> None:
    """The chat template of a hub tokenizer: in its configuration, else in a file of its own. Asked for once."""
    for beside in ("tokenizer_config.json", "chat_template.jinja"):
        if template_beside(file) is None and not hub.absent(hub.model(name), beside):
            with contextlib.suppress(hub.MissingFileError):
                hub.download(name, beside, token=token)


def with_mask(config: RunConfig, shape: AnyShape) -> RunConfig:
    """The id that hides a token, where the settings leave it open and the weights have learnt it."""
    mask, objective = getattr(shape, "mask", None), config.objective
    if mask is None or config.model.init == "random" or getattr(objective, "mask_token_id", mask) is not None:
        return config
    return config.model_copy(update={"objective": objective.model_copy(update={"mask_token_id": mask})})


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


def _ready(name: str, tokenizer: TokenizerFile, room: Room) -> TokenizerChoice:
    """A tokenizer that needs no training."""
    if not room.holds(tokenizer):
        raise room.refusal(name, tokenizer.vocab_size, room.taken(tokenizer))
    return TokenizerChoice(name, {"file": tokenizer.fingerprint()}, lambda _: tokenizer, ready=tokenizer)
