"""NumPy, loaded when something of it is first used: the launcher imports much that counts with it, and never counts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
else:

    class _Later:
        """NumPy, before it is there."""

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(importlib.import_module("numpy"), attribute)
            setattr(self, attribute, value)  # the next time it is found like any other
            return value

    numpy = _Later()

__all__ = ["numpy"]
