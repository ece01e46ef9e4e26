"""Faults row 28 on streams: whatever of a chunk is damaged is seen, named, and made again to the same bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lockstep.data.listing import describe
from lockstep.data.stream import chunks_folder
from tests.data.test_cache import damage_at_random
from tests.engine.streams import content, small_chunks, streamed, supplied, write_text


def made_again_after_damage(root: Path, times: int, caplog: pytest.LogCaptureFixture) -> None:
    config, made = streamed(tokenizer_name="bytes", cache_dir=str(root))
    supplied(config, made.folder)
    whole = content(made.folder)
    names = sorted(whole)
    assert {Path(name).name for name in names} >= {"manifest.json", "chunk.json", "rows.json", "tokens.npy"}
    assert describe([root], verify=True)[1] == 0
    random.seed(5)
    for index in range(times):
        name = names[index % len(names)]
        damage_at_random(chunks_folder(made.folder) / name)
        assert describe([root], verify=True)[1] == 1, f"damage {index} of {name} went unnoticed"
        caplog.clear()
        supplied(config, made.folder)
        assert content(made.folder) == whole, name
        assert Path(name).parts[0] in caplog.text
    assert describe([root], verify=True)[1] == 0


@pytest.mark.parametrize("times", [pytest.param(12, id="12"), pytest.param(200, id="200", marks=pytest.mark.slow)])
def test_a_damaged_chunk_is_made_again(
    in_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    small_chunks(monkeypatch)
    write_text(in_dir)
    made_again_after_damage(in_dir / "cache", times, caplog)
