"""A configuration from its layers: defaults < preset < file < flags, with the provenance of every value."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep import families, registry
from lockstep.config import reader, saved
from lockstep.config.catalog import catalog, config_class, show_value
from lockstep.config.given import Origin, from_document, from_flag, from_overrides
from lockstep.config.merge import MASK, Loaded, resolve
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError, DataError
from lockstep.rundir import read_json

__all__ = [
    "Loaded", "Origin", "as_asked", "fixed", "from_dict", "from_saved", "identity", "identity_diff", "identity_hash",
    "load", "load_file", "load_run", "preset_file", "presets", "read_config", "replaced", "to_dict",
]  # fmt: skip

PRESETS_FOLDERS = (Path(__file__).parents[1] / "presets", Path(__file__).parents[3] / "presets")  # installed, checkout


def load(
    family: str,
    *,
    preset: str | None = None,
    file: Path | None = None,
    flags: Sequence[tuple[str, str | None]] = (),
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Loaded:
    """The configuration of a run. Flags are (key, text), text None for a bare `--switch`; overrides are values."""
    known = catalog(family)
    preset = preset or families.FAMILIES[family].preset
    layers = [
        from_document(document, known, preset=preset) for document in reader.read_file(preset_file(family, preset))
    ]
    if file is not None:
        layers += [from_document(document, known) for document in read_config(file, family)]
    layers.append([from_flag(key, text, known) for key, text in flags])
    layers.append(from_overrides(overrides, known))
    loaded = resolve(family, layers, preset=preset)
    return replace(loaded, name=re.sub(r"[^\w+=@-]+", "-", file.stem, flags=re.ASCII)[:80]) if file else loaded


def from_dict(tree: Mapping[str, Any], *, where: str = "config") -> RunConfig:
    """The configuration a dictionary holds, over the defaults: what `to_dict` gave, or a documented file's content."""
    family = str(tree.get("family", "llama"))
    document = reader.Document(where, dict(tree))
    return fixed(resolve(family, [from_document(document, catalog(family))], preset=""))


def fixed(loaded: Loaded) -> RunConfig:
    """The configuration alone, which says nothing of a batch size that is to be found."""
    if loaded.finds_batch:
        what = '"auto" is found when a run begins, and this is a configuration without a run'
        hint = "a number; or train(FAMILY, config, **{'training.batch_size': 'auto'})"
        raise ConfigError(what, where="training.batch_size", hint=hint)
    return loaded.config


def from_saved(tree: Mapping[str, Any], *, where: str = "config", trains: bool = True) -> RunConfig:
    """The configuration that a run or a checkpoint of this or an earlier version saved."""
    return from_dict(saved.read_tree(tree, str(tree.get("family", "llama")), where=where, trains=trains), where=where)


def load_file(path: Path, family: str = "llama") -> Loaded:
    """A configuration file over the defaults, without a preset; of the family that it names, else of the given one."""
    documents = read_config(path, family)
    for document in documents:
        family = str(document.tree.get("family", family))
    known = catalog(family)
    return resolve(family, [from_document(document, known) for document in documents], preset="")


def replaced(config: RunConfig, overrides: Mapping[str, Any]) -> Loaded:
    """The configuration with some values changed; a secret stays."""
    known = catalog(config.family)
    tree = to_dict(config)
    for setting in known.settings.values():
        if setting.secret:
            secret = getattr(getattr(config, setting.path[0]), setting.path[1])
            tree[setting.path[0]][setting.path[1]] = secret.get_secret_value() if secret else None
    layers = [from_document(reader.Document("Config", tree), known), from_overrides(overrides, known)]
    return _without_defaults(resolve(config.family, layers, preset=""))


def load_run(
    run: Path, flags: Sequence[tuple[str, str | None]] = (), *, since: Mapping[str, Any] = MappingProxyType({})
) -> Loaded:
    """The configuration a run was started with, changed by what its checkpoint says since, by dotted key, and flags."""
    path = run / "config.json"
    try:
        record: dict[str, Any] = read_json(path)
        family, preset, tree = str(record["family"]), str(record["preset"]), dict(record["config"])
    except FileNotFoundError:
        raise ConfigError("no run here", where=str(path), hint="lockstep shows the last runs") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the configuration of the run cannot be read: {error!r}",
            where=str(path),
            hint="a copy of that file; sample and export need only the checkpoints; or train anew: --name NEW",
        ) from None
    known, tree = catalog(family), saved.read_tree(tree, family, where=str(path))
    for setting in known.settings.values():
        if setting.key in since and len(setting.path) > 1 and isinstance(section := tree.get(setting.path[0]), dict):
            section[setting.path[1]] = since[setting.key]
    written = from_document(reader.Document(str(path), tree), known)
    changed = [from_flag(key, text, known) for key, text in flags]
    return _without_defaults(resolve(family, [written, changed], preset=preset))


def _without_defaults(loaded: Loaded) -> Loaded:
    """Of a configuration that was written out in full: no origin for what is as it would be anyway."""
    tree = to_dict(loaded.config)
    usual = {
        setting.key
        for path, setting in catalog(loaded.family).settings.items()
        if (tree[path[0]] if len(path) == 1 else tree[path[0]][path[1]]) == setting.default
    }
    kept = {key: origin for key, origin in loaded.origins.items() if origin.layer == "flag" or key not in usual}
    return replace(loaded, origins=kept)


# ------------------------------------------------------------------------------------------------ presets and files


def presets(family: str) -> list[str]:
    """The names of a family's presets."""
    config_class(family)
    return sorted(path.stem for path in _presets_folder(family).glob("*.json"))


def preset_file(family: str, name: str) -> Path:
    """The file of a preset, or a refusal that lists them."""
    if name not in presets(family):
        raise ConfigError(f"no preset {name[:80]!r}", where="--preset", hint=registry.suggest(name, presets(family)))
    return _presets_folder(family) / f"{name}.json"


def _presets_folder(family: str) -> Path:
    return next((folder for folder in PRESETS_FOLDERS if folder.is_dir()), PRESETS_FOLDERS[0]) / family


def read_config(path: Path, family: str) -> list[reader.Document]:
    """A file the user named, with all it includes."""
    try:
        there = path.exists()
    except (OSError, ValueError):  # a name no file can have
        there = False
    if not there:
        raise ConfigError(
            "no such configuration file",
            where=f"--config {str(path)[:300]!r}" if not str(path).isprintable() else f"--config {str(path)[:300]}",
            hint=families.FAMILIES[family].example_files(),
        )
    return [_settings_of(document, family) for document in reader.read_file(path)]


def _settings_of(document: reader.Document, family: str) -> reader.Document:
    """Of the config.json of a run its settings; any other file as it is."""
    tree, name = document.tree, "config"
    if "identity_hash" not in tree or not isinstance(tree.get(name), dict):
        return document
    keys, values = (
        {path[1:]: place for path, place in places.items() if path[0] == name and len(path) > 1}
        for places in (document.keys, document.values)
    )
    settings = saved.read_tree(tree[name], str(tree.get("family", family)), where=document.name)
    return reader.Document(document.name, settings, keys, values)


# ------------------------------------------------------------------------------------------------ out again


def to_dict(config: RunConfig) -> dict[str, Any]:
    """A copy as plain JSON values, secrets masked."""
    tree = config.model_dump(mode="json")
    for setting in catalog(config.family).settings.values():
        if setting.secret and tree[setting.path[0]][setting.path[1]] is not None:
            tree[setting.path[0]][setting.path[1]] = MASK
    return tree


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that decide the numbers, by dotted key."""
    tree = to_dict(config)
    return {
        setting.key: tree[path[0]] if len(path) == 1 else tree[path[0]][path[1]]
        for path, setting in catalog(config.family).settings.items()
        if setting.role == "identity"
    }


def as_asked(loaded: Loaded) -> dict[str, Any]:
    """The same as they were given: of a batch size that is to be found the rows of a step alone."""
    training = loaded.config.training
    rows = training.batch_size * training.grad_accum_nums
    open_rows = {"training.batch_size": "auto", "training.grad_accum_nums": rows} if loaded.finds_batch else {}
    return identity(loaded.config) | open_rows


def identity_hash(config: RunConfig) -> str:
    """Equal for two configurations exactly when they decide the same numbers."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()


def identity_diff(old: Mapping[str, Any], new: Mapping[str, Any], *, place: str = "in the checkpoint") -> list[str]:
    """One readable line per setting in which two identities differ; `place` says where the old one stands."""
    return [
        f"{key}: {show_value(old[key]) if key in old else 'not set'} {place}, "
        f"{show_value(new[key]) if key in new else 'not set'} now"
        for key in sorted({*old, *new})
        if key not in old or key not in new or old[key] != new[key]
    ]
