"""The folder is the registry: a name in a config is a module in a folder."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import Any

from lockstep.errors import ConfigError


def names(folder: str) -> list[str]:
    """The names a folder of the package offers, e.g. names("objectives") -> ["causal"]."""
    package = importlib.import_module(f"lockstep.{folder}")
    found = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return sorted(name for name in found if name not in ("options", *getattr(package, "PARTS", ())))


def load(folder: str, name: str, attribute: str) -> Any:
    """The object called `attribute` in module `name` of `folder`; `pkg.module:attribute` names code outside."""
    if ":" in name:
        module_name, _, attribute = name.partition(":")
    elif name in (known := names(folder)):
        module_name = f"lockstep.{folder}.{name}"
    else:
        raise ConfigError(f"{name!r} is not in {folder}/", hint=suggest(name, known))
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot load {name!r} for {folder}: {error}") from error


def nearest(word: str, known: list[str], *, cutoff: float = 0.5) -> str:
    """The known word most like this one, or ''."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return found[0] if found else ""


def suggest(word: str, known: list[str], *, most: int = 100) -> str:
    """A hint for an unknown word: the nearest one and the first `most` of all."""
    close = nearest(word, known)
    more = [f"{len(known) - most} more"] if len(known) > most else []
    listing = "one of " + ", ".join([*known[:most], *more]) if known else "nothing is registered"
    return f"did you mean {close!r}? ({listing})" if close else listing
