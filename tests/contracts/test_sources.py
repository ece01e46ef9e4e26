"""What every source must keep: a new file in sources/ is tested here the moment it exists."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from lockstep import registry
from lockstep.contracts import Source
from lockstep.data.options import DataOptions


def build(name: str, folder: Path) -> Source:
    path = folder / "a.txt"
    if not path.exists():
        path.write_text("".join(f"Paragraph {index}.\n\n" for index in range(500)), encoding="utf-8")
    if name == "windows":
        path = windows(folder)
    options = DataOptions(dataset_name=name, data_path=str(path) if name in ("text", "windows") else None)
    return registry.load("sources", name, "build")(options)


def windows(folder: Path) -> Path:
    """A folder of ready windows."""
    made = folder / "windows"
    if not made.exists():
        made.mkdir()
        np.save(made / "train_data.npy", np.arange(800).reshape(100, 8))
        np.save(made / "val_data.npy", np.arange(800, 880).reshape(10, 8))
        (made / "metadata.json").write_text('{"sequence_length": 8}', encoding="utf-8")
    return made


NAMES = registry.names("sources")


def test_there_are_sources() -> None:
    assert {"builtin", "text", "synthetic"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_documents_are_text_or_ids_and_the_same_every_time(name: str, tmp_path: Path) -> None:
    source = build(name, tmp_path)
    first = some(source)
    assert len(first) > 1
    kind = tuple if name == "windows" else str
    assert all(isinstance(document, kind) and document for document in first)
    assert first == some(source)
    assert first == some(build(name, tmp_path))
    "".join(text for text in first if isinstance(text, str)).encode()


def some(source: Source) -> list[str | tuple[int, ...]]:
    found = islice(source.documents(), 50)
    return [document.strip() if isinstance(document, str) else tuple(document.tolist()) for document in found]


@pytest.mark.parametrize("name", NAMES)
def test_the_fingerprint_is_plain_json_and_stable(name: str, tmp_path: Path) -> None:
    source = build(name, tmp_path)
    assert source.name == name
    first = source.fingerprint()
    assert json.loads(json.dumps(dict(first), allow_nan=False)) == first
    assert first
    assert first == build(name, tmp_path).fingerprint()
