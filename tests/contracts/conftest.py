"""What the objects under contract need around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub import corpora
from tests.hub.fixtures import loopback

__all__ = ["loopback"]


@pytest.fixture(autouse=True)
def _a_hub_where_one_is_needed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source `hf` finds its datasets on the loopback, and keeps its record in a folder of the test."""
    callspec = getattr(request.node, "callspec", None)
    if callspec and callspec.params.get("name") == "hf":
        corpora.add_mixture(request.getfixturevalue("loopback"))
        monkeypatch.chdir(tmp_path)
