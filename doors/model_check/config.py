"""Configurations from Python: `from config import get_default_config`."""

try:
    from lockstep.api import Config, get_default_config
except ImportError as error:
    from install_hint import explain

    raise ImportError(explain(error)) from error

__all__ = ["Config", "get_default_config"]
