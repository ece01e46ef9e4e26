"""What every source must keep: a new file in sources/ is tested here the moment it exists."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from lockstep import registry
from lockstep.contracts import Source
from lockstep.data.options import DataOptions


def build(name: str, folder: Path) -> Source:
    path = folder / "a.txt"
    if not path.exists():
        path.write_text("".join(f"Paragraph {index}.\n\n" for index in range(500)), encoding="utf-8")
    options = DataOptions(dataset_name=name, data_path=str(path) if name == "text" else None)
    return registry.load("sources", name, "build")(options)


NAMES = registry.names("sources")


def test_there_are_sources() -> None:
    assert {"builtin", "text", "synthetic"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_documents_are_text_and_the_same_every_time(name: str, tmp_path: Path) -> None:
    source = build(name, tmp_path)
    first = list(islice(source.documents(), 50))
    assert len(first) > 1
    assert all(isinstance(text, str) and text.strip() for text in first)
    assert first == list(islice(source.documents(), 50))
    assert first == list(islice(build(name, tmp_path).documents(), 50))
    "".join(first).encode()


@pytest.mark.parametrize("name", NAMES)
def test_the_fingerprint_is_plain_json_and_stable(name: str, tmp_path: Path) -> None:
    source = build(name, tmp_path)
    assert source.name == name
    first = source.fingerprint()
    assert json.loads(json.dumps(dict(first), allow_nan=False)) == first
    assert first
    assert first == build(name, tmp_path).fingerprint()
