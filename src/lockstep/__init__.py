"""lockstep trains transformers on every GPU you have, resumes bit for bit, and knows whether the GPUs agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "LockstepError", "get_default_config", "load", "train"]

if TYPE_CHECKING:
    from lockstep.api import Config, get_default_config, load, train
    from lockstep.errors import LockstepError


def __getattr__(name: str) -> Any:
    """The Python API, imported on first use so that `lockstep --help` stays quick."""
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    if name == "LockstepError":
        from lockstep.errors import LockstepError

        return LockstepError
    from lockstep import api

    return getattr(api, name)
