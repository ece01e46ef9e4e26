"""Streams of little stories, and what tests of them share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import to_dict
from lockstep.config.schema import RunConfig
from lockstep.data.stream import Chunk, chunks_folder, read_chunk, read_head
from lockstep.engine import settle, streaming
from lockstep.engine.prepare import Prepared
from lockstep.engine.supply import Beats, Job, supply
from tests.data.stories import configuration, prepared, story

STORIES = 150
ALL_ROWS = 1 << 40


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of some forty stories, then ten, twenty and forty: what was the size of the head is kept in its cache."""
    for name, characters in (("HEAD", 16_000), ("FIRST", 4_000), ("LARGEST", 16_000)):
        monkeypatch.setattr(streaming, f"{name}_CHARACTERS", characters)


def write_text(folder: Path, stories: int = STORIES) -> Path:
    """stories.jsonl; every seventh is one that came before."""
    numbers = [index // 2 if index % 7 == 6 else index for index in range(stories)]
    lines = [json.dumps({"text": story(number)}) for number in numbers]
    (folder / "stories.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def streamed(**data: Any) -> tuple[RunConfig, Prepared]:
    """A configuration, settled, and the head that is prepared for it."""
    config = configuration(streaming=True, **data)
    return settle.applied(config, settle.decide(config)), prepared(config)


def job(config: RunConfig, base: Path, folder: Path, rows: int = ALL_ROWS) -> Job:
    said = [str(folder / name) for name in ("status.json", "log.txt")]
    tree = to_dict(config)
    return Job(str(base.absolute()), tree, rows, *said, parent=os.getpid(), path=sys.path)


def supplied(config: RunConfig, base: Path, rows: int = ALL_ROWS) -> list[Chunk]:
    """Add all that is asked for, in this process."""
    asked = job(config, base, base.parent, rows)
    supply(asked, Beats(Path(asked.status)))
    return chunks(base)


def chunks(base: Path) -> list[Chunk]:
    found = [read_head(base)]
    while chunk := read_chunk(base, len(found)):
        found.append(chunk)
    return found


def content(base: Path) -> dict[str, bytes]:
    """Every byte of the chunks."""
    folder = chunks_folder(base)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
