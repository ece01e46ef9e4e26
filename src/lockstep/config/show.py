"""Configurations as text: what is there, what a setting means, and where each value of a run comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.config import renames
from lockstep.config.catalog import Setting, catalog, config_class, show_value
from lockstep.config.load import Loaded, load, preset_file, presets, to_dict
from lockstep.config.schema import FAMILIES
from lockstep.errors import ConfigError

ROLES = {
    "identity": "decides the numbers: a run can only be resumed with the same value",
    "layout": "decides how the numbers are computed, not which",
    "cosmetic": "decides what is shown and kept, never the numbers",
}
DEFAULT = "default"


def list_presets(only: str | None = None) -> str:
    """Every preset of every family, or of one, with what it is for."""
    lines: list[str] = []
    for family in FAMILIES if only is None else (only,):
        lines.append(f"{family}:")
        names = presets(family)
        width = max(map(len, names), default=0)
        lines += [f"  {name:<{width}}  {_about(family, name)}" for name in names]
    lines += [
        "",
        "lockstep config show FAMILY PRESET    every value of one",
        "lockstep train FAMILY PRESET          run it",
    ]
    return "\n".join(lines)


def _about(family: str, name: str) -> str:
    """The first comment of a preset's file says what it is for."""
    first = preset_file(family, name).read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("//").strip() if first.startswith("//") else ""


def show(loaded: Loaded, *, only_set: bool = False) -> str:
    """Every value of a configuration with its provenance; or only those that differ from the defaults' layer."""
    tree = to_dict(loaded.config)
    rows: list[tuple[str, str, str]] = []
    for path, setting in catalog(loaded.family).settings.items():
        origin = loaded.origins.get(setting.key)
        if only_set and origin is None:
            continue
        value = tree[path[0]] if len(path) == 1 else tree[path[0]][path[1]]
        if loaded.finds_batch and setting.key == "training.batch_size":
            value = f"auto ({value})"
        rows.append((setting.key, show_value(value), f"{origin.layer} {origin.where}".strip() if origin else DEFAULT))
    keys, values = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    values = min(values, 40)
    title = f"# family {loaded.family}, preset {loaded.preset or 'none'}: key, value, where it comes from"
    notices = [f"# note: {notice}" for notice in loaded.notices]
    return "\n".join([title, *notices, *(f"{key:<{keys}}  {value:<{values}}  {where}" for key, value, where in rows)])


def show_json(loaded: Loaded) -> str:
    """The same as a file that can be loaded again; secrets masked."""
    return json.dumps(to_dict(loaded.config), indent=2, ensure_ascii=False)


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Sections and settings as a YAML file that can be loaded again: every value as JSON, which YAML 1.2 reads."""
    lines: list[str] = []
    for name, value in tree.items():
        lines.append(f"{name}:" if isinstance(value, Mapping) else f"{name}: {_json(value)}")
        if isinstance(value, Mapping):
            lines += [f"  {key}: {_json(inner)}" for key, inner in value.items()]  # pyright: ignore[reportUnknownVariableType]
    return "\n".join(lines) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def explain(key: str, family: str, *, known_models: tuple[str, ...] = ()) -> str:
    """What a setting means; a section or nothing explains all of it."""
    known, path = catalog(family), _path_of(key)
    if not path or (len(path) == 1 and path[0] in known.sections):
        wanted = [setting for setting in known.settings.values() if not path or setting.path[0] == path[0]]
        width = max(len(setting.key) for setting in wanted)
        return "\n".join(f"{setting.key:<{width}}  {setting.description}" for setting in wanted)
    if (gone := renames.retired(path, family)) is not None and gone.reason:
        inert = " or ".join(show_value(value) for value in gone.inert)
        return f"{key} has no effect: {gone.reason}. Accepted with a notice when {inert}, refused otherwise."
    if (found := _find(path, family)) is None:
        raise ConfigError(f"no setting {key[:200]!r}", where="KEY", hint=known.suggest(path))
    return _explain_one(found, family, known_models)


def family_of(key: str) -> str:
    """The first family that knows a setting; the first of all where none does."""
    path = _path_of(key)
    knowing = (family for family in FAMILIES if _find(path, family) or renames.retired(path, family))
    return next(knowing, next(iter(FAMILIES)))


def _path_of(key: str) -> tuple[str, ...]:
    return tuple(part.replace("-", "_") for part in key.split(".")) if key else ()


def _find(path: tuple[str, ...], family: str) -> Setting | None:
    """The setting of that path, former word or last name."""
    known = catalog(family)
    path = renames.JOINT.get(path, path)
    named = known.by_name(path[0]) if len(path) == 1 else []
    return (
        known.settings.get(path)
        or known.settings.get(renames.moved(path, family) or ())
        or (named[0] if len(named) == 1 else None)
    )


def _explain_one(setting: Setting, family: str, known_models: tuple[str, ...]) -> str:
    lines = [setting.key, f"  {setting.description}"]
    lines.append(f"  accepts   {setting.expected}{f' ({setting.unit})' if setting.unit else ''}")
    lines.append(f"  default   {show_value(setting.default)}")
    lines.append(f"  role      {setting.role}: {ROLES[setting.role]}")
    if words := renames.former_words(setting.key, family):
        lines.append(f"  also as   {', '.join(words)}")
    for name in presets(family):
        value = _value_of(load(family, preset=name), setting)
        if value != setting.default and not setting.secret:
            lines.append(f"  preset    {name}: {show_value(value)}")
    if setting.path == ("model", "model_path"):
        lines += ["  known shapes, no download needed:", *(f"    {name}" for name in known_models)]
    lines.append(f"  set it    --{setting.key} VALUE, or {setting.as_json()} in a file")
    return "\n".join(lines)


def _value_of(loaded: Loaded, setting: Setting) -> Any:
    value: Any = to_dict(loaded.config)
    for part in setting.path:
        value = value[part]
    return value


def schema(family: str) -> str:
    """The JSON Schema of a family's configuration files, for editors."""
    tree = config_class(family).model_json_schema()
    tree["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    tree["title"] = f"lockstep configuration, family {family}"
    tree["properties"]["include"] = {
        "description": "Files to read first; paths count from this file, or from the working directory.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return json.dumps(tree, indent=2)


def sizes(
    *, parameters: int, tokens_per_step: str, memory_bytes: int, state_bytes: int, computing: str, micro_batch: str = ""
) -> str:
    """The resolved sizes of a run, for a dry run; computing: on what and in which numbers."""
    return "\n".join(
        [
            f"parameters        {parameters:,}",
            f"tokens per step   {tokens_per_step}",
            *([f"micro-batch       {micro_batch}"] if micro_batch else []),
            f"memory per GPU    {_size(memory_bytes)} estimated, "
            f"{_size(state_bytes)} of it weights, gradients and AdamW moments ({computing})",
        ]
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"
