"""Which files a dataset of the hub consists of: asked once, recorded beside the caches, never asked again."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.registry import nearest
from lockstep.rundir import expanded, write_json
from lockstep.runtime import dataset_files, env, hub

logger = logging.getLogger(__name__)

CACHE = ".cache/datasets"  # of prepared data, where none is named
OTHER_CACHE = "cache/datasets"  # where an earlier version of the documentation put it: read, never written
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


def cache_roots(cache_dir: str) -> list[Path]:
    """Where to look for what was prepared and pinned; the first is written to.

    DATASET_CACHE_DIR moves the default, not a named folder.
    """
    named = cache_dir if cache_dir != CACHE else env.get("DATASET_CACHE_DIR")
    return [expanded(named, where="data.cache_dir")] if named else [Path(CACHE), Path(OTHER_CACHE)]


def pin(reference: Reference, roots: Sequence[Path], *, token: str | None = None) -> Pin:
    """What a reference stands for: as recorded in one of `roots`, else asked of the hub and recorded in the first."""
    if (known := recorded(reference, roots)) is not None:
        return known
    try:
        found = _resolve(reference, token)
    except NotFoundError as error:
        elsewhere = recorded(reference, roots, of_any_hub=True)
        if elsewhere is None or not (isinstance(error, hub.UnreachableError) or hub.offline()):
            raise
        logger.info("%s: as another hub gave it, since this one cannot be asked", reference)
        return elsewhere
    _keep(reference, found, roots)
    return found


def recorded(reference: Reference, roots: Sequence[Path], *, of_any_hub: bool = False) -> Pin | None:
    """What is known without asking. A commit is the same on every hub, whatever it was called when it was met."""
    known = {key: value for root in reversed(roots) for key, value in _recorded(root).items()}
    if (own := known.get(_key(reference))) is not None:
        return own
    for key, value in known.items():
        met = key.partition(" ")[2]
        if (of_any_hub and met == str(reference)) or (
            value.commit == reference.revision and met.rpartition("@")[0] == str(reference).rpartition("@")[0]
        ):
            return value
    return None


def reachable(reference: Reference, roots: Sequence[Path], *, token: str | None = None) -> str:
    """'' if a dataset is here, or if the hub would give its files; else why not."""
    found = recorded(reference, roots)
    if found is not None and _is_here(found, roots):
        return ""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        return f"{', '.join(missing)} is not installed"
    if variable := hub.offline():
        return f"{variable} is set"
    try:
        found = found or _resolve(reference, token)
    except (NotFoundError, DataError) as error:
        return error.what
    if reason := hub.probe_file(hub.dataset(found.dataset, found.commit), found.files[0].name, token=token):
        return reason
    _keep(reference, found, roots)
    return ""


def _is_here(found: Pin, roots: Sequence[Path]) -> bool:
    """Whether all files of it were fetched, or something was prepared from it."""
    repo = hub.dataset(found.dataset)
    if all(hub.cached(repo, file.name, found.commit) for file in found.files):
        return True
    for meta in (path for root in roots for path in root.glob("*/meta.json")):
        with contextlib.suppress(OSError, ValueError):
            if found.commit in meta.read_text(encoding="utf-8"):
                return True
    return False


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


def _keep(reference: Reference, found: Pin, roots: Sequence[Path]) -> None:
    logger.info("%s is %s: %d files", reference, found.commit[:12], len(found.files))
    root, key = roots[0], _key(reference)
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
    repo, library = hub.dataset(reference.dataset, reference.revision), hub.client()
    api = library.HfApi(endpoint=hub.endpoint(), token=hub.bearer(token))
    ask = partial(api.dataset_info, reference.dataset, revision=reference.revision)
    info = hub.asking(repo, ask, token=token)
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
