"""Configuration files for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(tree: Any, name: str = "c.json") -> Path:
        path = tmp_path / name
        path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
        return path

    return write_file
