"""Settings of earlier versions: how a saved run is read today, and how a removed setting is refused.

Every reader of a saved run goes through here: the list of differences, `--resume auto`, loading a configuration.

To add a setting, declare it. Runs saved before it existed are read as if they had its `before`, which is its default
unless declared; declare `before` if the default of the new setting changes what a run computes.
To remove a setting, delete it from the schema and enter it in REMOVED. Its `harmless` values are dropped from saved
runs. A run saved with another value needs what is gone and is refused, and so is a file or flag with any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from lockstep.config.catalog import catalog, show_value
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Removed:
    """A setting, or one value of a setting, that this version no longer has."""

    reason: str  # a sentence that begins after "KEY: VALUE was removed: "
    hint: str  # the replacement, as a command or a setting
    harmless: tuple[Any, ...] | None = ()  # saved values a run can do without; None: all of them


REMOVED: dict[str, Removed] = {  # by dotted key
    "report.profile_from": Removed("the steps are named by their first and last", "--profile-steps 100-104", None),
}
_STATES = "--optimizer-states bf16; for less memory --model.lora-rank 32 or --mode fsdp on more GPUs"
_LEARNER = Removed(
    "PPO and PSRL are the source learners; histories of others stay where they are, and are not read",
    "lockstep train ad data.alg=PSRL",
)
REMOVED_VALUES: dict[str, dict[Any, Removed]] = {  # of settings that stay: dotted key -> value
    "data.alg": {"Q": _LEARNER, "Noise": _LEARNER},
    "training.optimizer_states": {"int8": Removed("bf16 states take about half the time of a step", _STATES)},
    "training.precision": {"fp8-rowwise": Removed("float8 has one scale for each matrix", "--precision fp8")},
}


def refusal(key: str, value: Any, *, where: str) -> ConfigError | None:
    """The error for a removed setting, with or without its section, or a removed value; None if it was not removed."""
    removed = REMOVED.get(key) or next((each for name, each in REMOVED.items() if name.partition(".")[2] == key), None)
    if removed is None and isinstance(value, str | int | float):
        removed = REMOVED_VALUES.get(key, {}).get(value)
    if removed is None:
        return None
    return ConfigError(f"{key}: {show_value(value)} was removed: {removed.reason}", where=where, hint=removed.hint)


def read_identity(saved: Mapping[str, Any], family: str, *, where: str = "", trains: bool = True) -> dict[str, Any]:
    """The settings that decide the numbers, by dotted key, as this version would have saved them."""
    kept = {key: value for key, value in saved.items() if not _is_dropped(key, value, where=where, trains=trains)}
    settings = catalog(family).settings.values()
    missing = {each.key: each.before for each in settings if each.role == "identity" and each.key not in kept}
    return {**missing, **kept}


def read_tree(saved: Mapping[str, Any], family: str, *, where: str = "", trains: bool = True) -> dict[str, Any]:
    """A whole saved configuration, section by section, as this version would have saved it.

    To use the weights without training on (`trains` false), nothing that was removed is needed.
    """
    tree: dict[str, Any] = {}
    for name, section in saved.items():
        if isinstance(section, dict):
            items = cast("dict[str, Any]", section).items()
            tree[name] = {
                key: value
                for key, value in items
                if not _is_dropped(f"{name}.{key}", value, where=where, trains=trains)
            }
        elif not _is_dropped(name, section, where=where, trains=trains):
            tree[name] = section
    for setting in catalog(family).settings.values():
        if setting.before != setting.default and len(setting.path) == 2:
            section, name = setting.path
            tree[section] = {name: setting.before, **tree.get(section, {})}
    return tree


def _is_dropped(key: str, value: Any, *, where: str, trains: bool) -> bool:
    """Whether a saved setting is one that the run does not need; raises for one that this version cannot honour."""
    error, removed = refusal(key, value, where=where), REMOVED.get(key)
    if error is None:
        return False
    if not trains or (removed and (removed.harmless is None or value in removed.harmless)):
        return True
    raise error
