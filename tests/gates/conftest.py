"""The gates also run on several ranks."""

from tests.ranks.conftest import ranks

__all__ = ["ranks"]
