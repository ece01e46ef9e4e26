"""The files that a config and a split of a hub dataset mean, by the rules of the `datasets` library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from lockstep.errors import DataError, LockstepError, NotFoundError


@dataclass(frozen=True)
class Card:
    """What the card of a dataset says about its parts: name -> data_files, data_dir."""

    configs: Mapping[str, Mapping[str, Any]]
    default: str = ""


@dataclass(frozen=True)
class Place:
    """One commit of a dataset on one hub."""

    dataset: str
    commit: str
    endpoint: str
    token: str | None

    @property
    def root(self) -> str:
        return f"hf://datasets/{self.dataset}@{self.commit}"


def library() -> Any:
    """The part of the `datasets` library that knows how data files are called."""
    try:
        return import_module("datasets.data_files")
    except ImportError:
        raise LockstepError("datasets of the hub need a package that is missing", hint="pip install datasets") from None


def read_card(path: Path | None) -> Card:
    """The `configs` of a README.md."""
    if path is None:
        return Card({})
    try:
        data = import_module("huggingface_hub").DatasetCard.load(path, ignore_metadata_errors=True).data.to_dict()
        listed = cast("list[dict[str, Any]]", data.get("configs") or [])
        configs = {str(entry["config_name"]): entry for entry in listed}
    except Exception as error:  # whatever a foreign YAML makes of its reader
        raise DataError(f"the card of the dataset cannot be read: {type(error).__name__}", where=str(path)) from None
    default = next((name for name, entry in configs.items() if entry.get("default") or name == "default"), "")
    return Card(configs, default)


def patterns(place: Place, config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Split -> patterns of file names: those of the card, else guessed from how the files are called."""
    named = config.get("data_files")
    if named is not None:
        found: dict[str, list[str]] = library().sanitize_patterns(named)
    else:
        folder = str(config.get("data_dir") or "").strip("/")
        _refuse_outside(place, [folder])
        try:
            root = f"{place.root}/{folder}".rstrip("/")
            guessed = library().get_data_patterns(root, download_config=_download_config(place))
        except FileNotFoundError:
            raise NotFoundError(f"dataset {place.dataset!r} has no data files", where="data.dataset_name") from None
        prefix = f"{folder}/" if folder else ""
        found = {str(split): [prefix + pattern for pattern in listed] for split, listed in guessed.items()}
    for listed in found.values():
        _refuse_outside(place, listed)
    return found


def files(place: Place, wanted: list[str]) -> list[tuple[str, int, str]]:
    """(name, size, hash) of all files that some patterns mean, in their order."""
    system = import_module("huggingface_hub").HfFileSystem(endpoint=place.endpoint, token=place.token)
    names: dict[str, None] = {}
    for pattern in wanted:
        try:
            matched = library().resolve_pattern(pattern, place.root, download_config=_download_config(place))
        except FileNotFoundError:
            continue
        names |= dict.fromkeys(matched)
    found: list[tuple[str, int, str]] = []
    for name in names:
        assert name.startswith(f"{place.root}/"), name
        info: dict[str, Any] = system.info(name)
        etag = getattr(info.get("lfs"), "sha256", None) or info["blob_id"]
        found.append((name.removeprefix(f"{place.root}/"), int(info["size"]), str(etag)))
    if not found:
        raise NotFoundError(f"dataset {place.dataset!r} has no file {' or '.join(wanted)}", where="data.dataset_name")
    return found


def _download_config(place: Place) -> Any:
    options = {"hf": {"endpoint": place.endpoint, "token": place.token}}
    return import_module("datasets").DownloadConfig(token=place.token, storage_options=options)


def _refuse_outside(place: Place, wanted: list[str]) -> None:
    """A card may name files of its own repository, not of this disk or of another address."""
    for pattern in wanted:
        if "://" in pattern or "::" in pattern or pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
            raise DataError(f"its card names files outside of it: {pattern[:80]!r}", where=f"dataset {place.dataset!r}")
