"""Which files a dataset of the hub consists of: asked once, recorded beside the caches, never asked again."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from lockstep.errors import ConfigError, NotFoundError
from lockstep.registry import nearest
from lockstep.rundir import write_json
from lockstep.runtime import dataset_files, hub

logger = logging.getLogger(__name__)

RECORD = "lockstep-hub.json"
FORMAT = 1
PACKAGES = ("huggingface_hub", "datasets", "pyarrow")  # to find out what a dataset consists of, and to read most
CARD = "README.md"
LOCK_SECONDS = 10.0
CONFIG_NAME = re.compile(r"[^\s<>:/\\|?*@]{1,120}")
SPLIT_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
MAX_LISTED = 12
SPELLING = "owner/name[:config[:split]][@revision]"


@dataclass(frozen=True)
class Reference:
    """A dataset as a user names it; '' is the dataset's own default."""

    dataset: str
    config: str = ""
    split: str = "train"
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.dataset}:{self.config}:{self.split}@{self.revision}"

    @staticmethod
    def parse(text: str) -> Reference:
        """owner/name[:config[:split]][@revision]"""
        name, _, revision = text.partition("@")
        dataset, config, split = (*name.split(":", 2), "", "")[:3]
        sound = (
            hub.looks_like_id(dataset)
            and (not config or CONFIG_NAME.fullmatch(config) is not None)
            and (not split or SPLIT_NAME.fullmatch(split) is not None)
            and (not revision or hub.REVISION.fullmatch(revision) is not None)
            and ".." not in config + revision
            and ("@" in text) == bool(revision)
        )
        if not sound:
            raise ConfigError(f"{text[:80]!r} names no dataset", where="data.dataset_name", hint=SPELLING)
        return Reference(dataset, config, split or "train", revision or "main")


@dataclass(frozen=True)
class HubFile:
    """One file of a dataset, and the hash the hub calls it by."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True)
class Pin:
    """What a reference stood for when it was first asked for."""

    dataset: str
    config: str
    split: str
    commit: str
    files: tuple[HubFile, ...]


def pin(reference: Reference, root: Path, *, token: str | None = None) -> Pin:
    """What a reference stands for: as recorded in `root`, else asked of the hub and recorded."""
    if (known := _recorded(root).get(_key(reference))) is not None:
        return known
    found = _resolve(reference, token)
    logger.info("%s is %s: %d files", reference, found.commit[:12], len(found.files))
    _record(root, _key(reference), found)
    return found


def is_recorded(reference: Reference, root: Path) -> bool:
    """Whether it is known without asking."""
    return _key(reference) in _recorded(root)


def reachable(reference: Reference, root: Path, *, token: str | None = None) -> str:
    """'' if a dataset is pinned already or the hub answers for it within 5 seconds, else the reason."""
    if is_recorded(reference, root):
        return ""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        return f"{', '.join(missing)} is not installed"
    if variable := hub.offline():
        return f"{variable} is set"
    repo, library = hub.dataset(reference.dataset), hub.client()
    api = library.HfApi(endpoint=hub.endpoint(), token=hub.bearer(token))
    return hub.probe(repo, lambda: api.dataset_info(reference.dataset, revision=reference.revision), token=token)


# --------------------------------------------------------------------------------------------- the record


def _key(reference: Reference) -> str:
    return f"{hub.endpoint()} {reference}"


def _recorded(root: Path) -> dict[str, Pin]:
    """All that was pinned here; what cannot be read as a pin is asked for again."""
    try:
        tree = json.loads((root / RECORD).read_text(encoding="utf-8"))
        entries = cast("dict[str, Any]", tree["pins"]).items() if tree["format"] == FORMAT else ()
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return {}
    pins: dict[str, Pin] = {}
    for key, value in entries:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            pins[key] = _read_pin(value)
    return pins


def _read_pin(value: Mapping[str, Any]) -> Pin:
    files = tuple(HubFile(str(name), int(size), str(etag)) for name, size, etag in value["files"])
    found = Pin(str(value["dataset"]), str(value["config"]), str(value["split"]), str(value["commit"]), files)
    if not files or not hub.COMMIT.fullmatch(found.commit) or not all(_is_inside(file.name) for file in files):
        raise ValueError("no pin")
    return found


def _record(root: Path, key: str, found: Pin) -> None:
    filelock = import_module("filelock")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{RECORD}.lock", timeout=LOCK_SECONDS):
            pins = {known: _written(value) for known, value in _recorded(root).items()}
            write_json(root / RECORD, {"format": FORMAT, "pins": {**pins, key: _written(found)}})
    except (OSError, filelock.Timeout) as error:  # a read-only cache: the next run asks again
        logger.debug("%s is not recorded: %s", key, error)


def _written(value: Pin) -> dict[str, Any]:
    return {**asdict(value), "files": [list(astuple(file)) for file in value.files]}


def _is_inside(name: str) -> bool:
    return bool(name) and not name.startswith("/") and "\\" not in name and not {"..", ""} & set(name.split("/"))


# --------------------------------------------------------------------------------------------- asking


def _resolve(reference: Reference, token: str | None) -> Pin:
    """Commit, then the card, then the files that the rules of the `datasets` library give a config and a split."""
    repo, library = hub.dataset(reference.dataset), hub.client()
    api = library.HfApi(endpoint=hub.endpoint(), token=hub.bearer(token))
    info = hub.asking(repo, lambda: api.dataset_info(reference.dataset, revision=reference.revision), token=token)
    commit, names = str(info.sha), [str(file.rfilename) for file in info.siblings or ()]
    card = dataset_files.read_card(hub.fetch(repo, CARD, revision=commit, token=token) if CARD in names else None)
    script = f"{reference.dataset.partition('/')[2]}.py"
    if not card.configs and script in names:
        raise NotFoundError(
            f"{repo} is a program ({script}), and code of a dataset is never run",
            where=repo.setting,
            hint=f"{reference.dataset}@refs/convert/parquet, where the hub has converted it",
        )
    config = _config(reference, card)
    place = dataset_files.Place(reference.dataset, commit, hub.endpoint(), hub.bearer(token))
    dataset_files.library()  # outside of what is waited for
    patterns = hub.asking(repo, lambda: dataset_files.patterns(place, card.configs.get(config, {})), token=token)
    if reference.split not in patterns:
        raise _unknown(f"{reference.dataset}:{config}", "split", reference.split, list(patterns))
    found = hub.asking(repo, lambda: dataset_files.files(place, patterns[reference.split]), token=token)
    return Pin(reference.dataset, config, reference.split, commit, tuple(HubFile(*file) for file in found))


def _config(reference: Reference, card: dataset_files.Card) -> str:
    """The config that was named, or the one the dataset means."""
    known = list(card.configs) or ["default"]
    if reference.config in known:
        return reference.config
    if not reference.config and (card.default or len(known) == 1):
        return card.default or known[0]
    if reference.config:
        raise _unknown(reference.dataset, "config", reference.config, known)
    raise NotFoundError(
        f"dataset {reference.dataset!r} has several configs: {_few(known)}",
        where="data.dataset_name",
        hint=f"{reference.dataset}:{known[0]}",
    )


def _unknown(dataset: str, what: str, word: str, known: list[str]) -> NotFoundError:
    return NotFoundError(
        f"dataset {dataset!r} has no {what} {word!r}, but {_few(known)}",
        where="data.dataset_name",
        hint=f"{dataset}:{nearest(word, known) or next(iter(known), '')}",
    )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
