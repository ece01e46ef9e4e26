"""What somebody wrote, value by value: from a file, a flag, or Python, all in one flat form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config import reader, renames, saved
from lockstep.config.catalog import Catalog, Setting, catalog, show_value
from lockstep.errors import ConfigError

SHORT_FLAGS = {"name": ("run", "name"), "checkpoint": ("checkpoint", "resume")}  # those that a plain look-up would miss

CANONICAL = ("canonical",)  # the switch that is a value of system.deterministic


@dataclass(frozen=True)
class Origin:
    """Which layer set a value, and where: default | preset | script | file | flag | auto."""

    layer: str
    where: str


@dataclass(frozen=True)
class Given:
    """One value as somebody wrote it."""

    path: tuple[str, ...]
    value: Any
    origin: Origin
    where: str  # of the value: file:line:column, or the flag
    key_where: str
    written: str  # the key as it was written
    is_text: bool = False  # still to be read according to the setting's type
    rank: int = 0  # place of its layer; filled in when layers are merged


def from_document(document: reader.Document, known: Catalog, *, preset: str = "") -> list[Given]:
    """The values of a file, flat."""
    given: list[Given] = []
    seen: dict[tuple[str, ...], str] = {}
    for path, value in _flat(document, known):
        plain = tuple(_plain(part) for part in path)
        where = document.values.get(path, document.name)
        key_where = document.keys.get(path, document.name)
        if plain in seen:
            raise ConfigError(f"{'.'.join(path)} and {seen[plain]} are the same setting", where=key_where)
        seen[plain] = ".".join(path)
        origin = Origin("preset", preset) if preset else Origin("file", where)
        folder = renames.run_folder(plain, value, known.family)
        for target, part in folder.items() if folder else [(plain, value)]:
            given.append(Given(target, part, origin, where, key_where, ".".join(path)))
    return given


def _flat(document: reader.Document, known: Catalog) -> Iterable[tuple[tuple[str, ...], Any]]:
    for key, value in document.tree.items():
        if _plain(key) not in known.sections:
            yield (key,), value
        elif isinstance(value, Mapping):
            for name, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
                yield (key, str(name)), inner  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, str) and renames.retired((_plain(key),), known.family):
            yield (key,), value  # `model: AD`
        elif value is not None:
            where = document.values.get((key,), document.name)
            raise ConfigError(
                f"{key}: got {show_value(value)}, expected a section with settings",
                where=where,
                hint=known.explanation(key),
            )


def from_flag(key: str, text: str | None, known: Catalog) -> Given:
    """A flag of the command line; without a section it means the one setting of that name."""
    path = tuple(_plain(part) for part in key.split("."))
    flag = f"--{key}"
    path = SHORT_FLAGS.get(path[-1], path) if len(path) == 1 else path
    if path == CANONICAL and text in (None, "true", "false"):
        path, text = ("system", "deterministic"), "false" if text == "false" else CANONICAL[0]
    if text is None and path[-1].removeprefix("no_") in _switches(known):  # --no-streaming
        path, text = (*path[:-1], path[-1].removeprefix("no_")), "false" if path[-1].startswith("no_") else None
    if len(path) == 1 and renames.moved(path) is None and renames.retired(path, known.family) is None:
        named = known.by_name(path[0]) + [joint_setting(joint) for joint in renames.JOINT if joint[-1] == path[0]]
        if len(named) == 1:
            path = named[0].path
        elif named:
            raise ConfigError("which one?", where=flag, hint=" or ".join(f"--{setting.key}" for setting in named))
    return Given(path, text, Origin("flag", flag), flag, flag, key, is_text=True)


def flag_words(family: str) -> set[str]:
    """Every word without a section that is a setting as a flag, or was one once."""
    known = {path[-1] for path in (*catalog(family).settings, *renames.JOINT, *renames.RETIRED)}
    known |= {key.rpartition(".")[2] for key in saved.REMOVED}  # to be refused by name
    return (
        known
        | renames.plain_words(family)
        | {*SHORT_FLAGS, *CANONICAL}
        | {f"no_{name}" for name in _switches(catalog(family))}
    )


def _switches(known: Catalog) -> set[str]:
    return {path[-1] for path, setting in known.settings.items() if "boolean" in setting.types}


def from_overrides(overrides: Mapping[str, Any], known: Catalog) -> list[Given]:
    """Values from Python: {"training.max_steps": 5} or {"training": {"max_steps": 5}}."""
    nested: dict[str, Any] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        inner = {name: value} if name else value
        if isinstance(inner, Mapping) and isinstance(nested.get(section), dict):
            nested[section].update(inner)
        else:
            nested[section] = dict(inner) if isinstance(inner, Mapping) else inner  # pyright: ignore[reportUnknownArgumentType]
    given = from_document(reader.Document("argument", nested), known)
    return [replace(item, origin=Origin("flag", item.written), where=f"argument {item.written}") for item in given]


def joint_setting(path: tuple[str, ...]) -> Setting:
    types = {"use_amp": "boolean", "max_seq_length": "integer"}.get(path[-1], "string")
    expected = {"boolean": "true or false", "integer": "a whole number"}.get(types, ", ".join(renames.DTYPES))
    return Setting(path, "", "", "", None, None, expected, frozenset({types}), (), secret=False)


def _plain(word: str) -> str:
    """Hyphen and underscore are the same."""
    return word.replace("-", "_")
