"""A stream from a text: what its head and its chunks hold, what is asked of the source, and who goes on after whom."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data import cache
from lockstep.data.stream import Chunk, StreamTable, chunk_folder, chunks_folder
from lockstep.data.tokenize import train_bpe
from lockstep.engine import streaming, supply
from lockstep.engine.building import document_hash
from lockstep.engine.prepare import is_prepared
from lockstep.engine.supply import Beats, Silence, as_failure, read_beats, serve
from lockstep.errors import DataError
from lockstep.sources import text
from lockstep.sources.text import TextSource
from tests.data.stories import story
from tests.engine.streams import STORIES, chunks, content, job, small_chunks, streamed, supplied, write_text


@pytest.fixture
def stories(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_chunks(monkeypatch)
    monkeypatch.setattr(supply, "POLL_SECONDS", 0.01)
    return write_text(in_dir)


def text_of(table: Any, tokenizer: Any, first: int, rows: int) -> list[str]:
    """The documents in some rows; the last may be cut."""
    tokens = table.take(np.arange(first, first + rows))["tokens"]
    ids = [int(tokens[0, 0]), *tokens[:, 1:].ravel().tolist()]
    ends = [place for place, token in enumerate(ids) if token == tokenizer.separator]
    starts = [0, *(end + 1 for end in ends)]
    return [tokenizer.decode(ids[left:right]) for left, right in zip(starts, ends, strict=False)]


def test_head_and_chunks_hold_the_documents_in_their_order(stories: Path) -> None:
    config, made = streamed(validation_fraction=0.2)
    assert isinstance(made.train, StreamTable)
    assert made.train.chunks == 1
    found = supplied(config, made.folder)
    assert [chunk.number for chunk in found] == [0, 1, 2, 3, 4]
    assert [chunk.last for chunk in found] == [False, False, False, False, True]
    assert all(left.end == right.start for left, right in pairwise(found))
    assert found[-1].documents == STORIES
    held_out = set(json.loads((made.folder / streaming.HELD_OUT).read_text(encoding="utf-8")))
    assert held_out
    documents = list(TextSource("stories.jsonl").documents())
    assert any(document_hash(text) in held_out for text in documents[found[0].documents :]), "copies come later"
    used = 0
    for chunk in found:
        first = made.train.span(chunk.number)[0] if made.train.chunks else 0
        expected = [text for text in documents[used : chunk.documents] if document_hash(text) not in held_out]
        seen = text_of(made.train, made.tokenizer, first, chunk.rows)
        assert seen == expected[: len(seen)]
        assert len(expected) - len(seen) <= 1, "only what does not fill the last row of a chunk is dropped"
        used = chunk.documents


def test_the_tokenizer_knows_the_training_part_of_the_head_only(stories: Path) -> None:
    _, made = streamed(validation_fraction=0.2)
    (head,) = chunks(made.folder)
    meta = json.loads((made.folder / "meta.json").read_text(encoding="utf-8"))
    assert meta["stream"]["head"]["documents"] == head.documents < STORIES
    assert meta["made_of"] == "stories.jsonl"
    held_out = set(json.loads((made.folder / streaming.HELD_OUT).read_text(encoding="utf-8")))
    texts = [text for text in TextSource("stories.jsonl").documents() if isinstance(text, str)]
    training = [text for text in texts[: head.documents] if document_hash(text) not in held_out]
    assert meta["documents"] == {"train": len(training), "validation": head.documents - len(training)}
    assert made.tokenizer.fingerprint() == train_bpe(training, 400).fingerprint()
    assert made.tokenizer.fingerprint() != train_bpe(texts[: head.documents], 400).fingerprint()


def test_a_small_text_is_all_head(stories: Path) -> None:
    write_text(stories, 20)
    config, made = streamed()
    (head,) = supplied(config, made.folder)
    assert (head.last, head.documents) == (True, 20)
    assert not chunks_folder(made.folder).exists()
    assert made.train.epoch_rows == made.train.rows == head.rows


def test_samples_end_a_stream(stories: Path) -> None:
    config, made = streamed(max_train_samples=60)
    found = supplied(config, made.folder)
    assert found[-1].documents == 60
    assert found[-1].last
    assert sum(chunk.rows for chunk in found) == made.train.epoch_rows


def test_short_documents_are_left_out_and_do_not_count(stories: Path) -> None:
    lines = [json.dumps({"text": story(index) if index % 2 else "too short"}) for index in range(200)]
    (stories / "stories.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config, made = streamed(min_words=20, max_train_samples=70)
    found = supplied(config, made.folder)
    assert found[-1].documents == 70
    seen = "".join(text_of(made.train, made.tokenizer, 0, made.train.rows))
    assert "too short" not in seen


class Counting:
    """How far the source was read, in documents."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.furthest, self.starts = 0, list[Any]()
        walk = TextSource.walk

        def counted(source: TextSource, start: Any = (0, 0)) -> Iterator[Any]:
            self.starts.append(start)
            for place, document in walk(source, start):
                self.furthest = max(self.furthest, place[1])
                yield place, document

        monkeypatch.setattr(TextSource, "walk", counted)


def test_nothing_is_read_beyond_the_rows_a_run_needs(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counting(monkeypatch)
    config, made = streamed()
    (head,) = supplied(config, made.folder, rows=5)
    assert asked.furthest == head.documents
    found = supplied(config, made.folder, rows=head.rows + 1)
    assert len(found) == 2
    assert asked.furthest == found[-1].documents < STORIES
    before = len(asked.starts)
    supplied(config, made.folder, rows=head.rows + 1)
    assert len(asked.starts) == before, "what is there is not read again"
    supplied(config, made.folder)
    assert asked.starts[before:] == [found[-1].end], "and going on begins behind it, once"


def test_chunks_are_the_same_bytes_however_they_came_about(stories: Path) -> None:
    config, made = streamed()
    supplied(config, made.folder)
    expected = content(made.folder)
    assert len(expected) == 4 * 4
    shutil.rmtree(chunks_folder(made.folder))
    rows = 0
    while len(found := supplied(config, made.folder, rows=rows)) < 5:  # a process for each chunk
        rows = sum(chunk.rows for chunk in found) + 1
    assert content(made.folder) == expected
    shutil.rmtree(chunk_folder(made.folder, 2))
    path = chunk_folder(made.folder, 3) / "rows" / "tokens.npy"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    supplied(config, made.folder)
    assert content(made.folder) == expected


class Plain:
    """A source that cannot begin in the middle."""

    name = "plain"

    def documents(self) -> Iterator[str]:
        return iter([f"document {index}" for index in range(10)])


def test_a_source_without_places_is_read_past() -> None:
    source: Any = Plain()
    everything = list(streaming.walk(source, (0, 0)))
    assert [text for _, text in everything] == list(source.documents())
    for place, _ in everything:
        assert list(streaming.walk(source, place)) == everything[place[1] :]


def test_a_damaged_chunk_is_made_again_with_a_warning(stories: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, made = streamed()
    supplied(config, made.folder)
    expected = content(made.folder)
    path = chunk_folder(made.folder, 2) / "rows" / "tokens.npy"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (chunk_folder(made.folder, 3) / "chunk.json").write_text("{}", encoding="utf-8")
    supplied(config, made.folder)
    assert content(made.folder) == expected
    assert sum("damaged, will be made again" in line for line in caplog.messages) == 2
    path.write_bytes(good[:-1])
    asked = job(config, made.folder, stories)
    assert serve(asked) == 0
    (line,) = read_beats(Path(asked.status))["warnings"]  # which the run shows
    assert line.startswith("[Cache] damaged, will be made again: ")


def test_leftovers_of_a_killed_one_are_swept(stories: Path) -> None:
    config, made = streamed()
    left = chunks_folder(made.folder) / "000001.tmp-abc"
    left.mkdir(parents=True)
    supplied(config, made.folder)
    assert not list(made.folder.parent.rglob("*.tmp-*"))
    assert not made.folder.with_name(f"{made.key}.stream.json").exists()


def test_another_text_is_never_continued(stories: Path) -> None:
    config, made = streamed()
    write_text(stories, STORIES + 1)
    with pytest.raises(DataError, match="changed while it was being streamed"):
        supplied(config, made.folder)
    assert content(made.folder) == {}


def test_files_are_hashed_once_and_watched_while_they_are_read(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes is noticed by the chunk that reads it; what nobody reads costs nothing."""
    folder = stories / "texts"
    folder.mkdir()
    for number in range(STORIES):
        (folder / f"{number:04d}.txt").write_text(story(number), encoding="utf-8")
    config, made = streamed(data_path=str(folder))
    hashed: list[Path] = []
    sha256 = text.sha256
    monkeypatch.setattr(text, "sha256", lambda file: (hashed.append(file), sha256(file))[1])
    found = supplied(config, made.folder)
    assert len(found) == 5
    assert len(hashed) == STORIES
    shutil.rmtree(chunks_folder(made.folder))
    maker = streaming.Maker(made.folder, config)
    first = maker.make(found[0])
    behind = folder / f"{found[2].end[0] - 1:04d}.txt"
    status = behind.stat()
    behind.write_text(behind.read_text(encoding="utf-8").swapcase(), encoding="utf-8")
    os.utime(behind, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match="changed while it was being streamed"):
        maker.make(first)
    assert [chunk.number for chunk in chunks(made.folder)] == [0, 1]


def test_the_head_reads_on_until_there_is_a_row_of_each_split(stories: Path) -> None:
    """One long document, or many alike, or too few tokens for validation: the text has more."""
    lines = [story(0) * 100, *[story(1)] * 10, *(story(number) for number in range(2, 200))]
    (stories / "stories.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines), encoding="utf-8")
    config, made = streamed(tokenizer_name="bytes", validation_fraction=0.02)
    (head, *_) = found = supplied(config, made.folder)
    assert 2 <= head.documents < found[-1].documents == len(lines)
    assert made.validation.rows > 0
    assert not list(made.folder.rglob("*.tmp*"))
    cache.check(made.folder, full=True)
    (stories / "stories.jsonl").write_text("\n".join([json.dumps({"text": lines[0]})] * 3), encoding="utf-8")
    with pytest.raises(DataError, match="too few"):
        streamed(tokenizer_name="bytes")


def test_the_key_of_a_stream_is_its_own_and_a_head_is_prepared(stories: Path) -> None:
    config, made = streamed(dataset_name="text", tokenizer_name="builtin")
    whole = config.model_copy(update={"data": config.data.model_copy(update={"streaming": False})})
    tiny = {"model": config.model.model_copy(update={"model_path": "lockstep/tiny"})}
    assert not is_prepared(whole.model_copy(update=tiny))
    cache.check(made.folder, full=True)
    assert {entry.key for entry in cache.entries(made.folder.parent)} == {made.key}


# ------------------------------------------------------------------------------------------- the child, in this process


def test_a_failure_is_told_with_its_code(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, made = streamed()
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setattr(
        supply, "Maker", lambda *_: (_ for _ in ()).throw(DataError("no hf_secretsecret", where="hub", hint="wait"))
    )
    asked = job(config, made.folder, stories)
    assert serve(asked) == 65
    says = read_beats(Path(asked.status))
    assert says["error"] == {"what": "no ***", "where": "hub", "hint": "wait", "code": 65}
    assert says["pid"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied"), 73, "DATASET_CACHE_DIR"),
        (OSError(28, "No space left on device"), 74, "free some space"),
        (ZeroDivisionError("x"), 1, "ZeroDivisionError: x"),
    ],
)
def test_what_goes_wrong_is_explained(tmp_path: Path, error: Exception, code: int, said: str) -> None:
    failure = as_failure(error, tmp_path / "base")
    assert failure.exit_code == code
    assert said in str(failure)


def test_a_holder_that_is_silent_is_named(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped; and one that moves is waited for."""
    from filelock import FileLock

    config, made = streamed()
    monkeypatch.setattr(supply, "SILENCE_SECONDS", 0.3)
    progress = made.folder.with_name(f"{made.key}.stream.json")
    with FileLock(made.folder.with_name(f"{made.key}.stream.lock")):
        Beats(progress).beat(pid=4711)
        with pytest.raises(DataError, match=r"process 4711 on .* no sign of life"):
            supplied(config, made.folder)
    supplied(config, made.folder)


def test_silence_is_counted_from_the_last_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(supply.time, "monotonic", lambda: now[0])
    beats = Beats(tmp_path / "beats")
    silence = Silence(tmp_path / "beats")
    now[0] = 5.0
    assert silence.look() == 5
    beats.beat()
    assert silence.look() == 0
    now[0] = 5.5
    assert silence.look() == 0.5
    beats.beat()
    assert silence.look() == 0


def test_one_long_call_is_no_silence(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hash of a large file, or a thousand documents that are too short: nothing is said, but the process lives."""
    config, made = streamed()
    asked = job(config, made.folder, stories)
    monkeypatch.setattr(supply, "BEAT_SECONDS", 0.01)
    files = (Path(asked.status), made.folder.with_name(f"{made.key}.stream.json"))

    class Slow(streaming.Maker):
        def make(self, before: Chunk) -> Chunk:
            silences, deadline = [Silence(file) for file in files], time.monotonic() + 10
            known = [silence.says["beats"] for silence in silences]
            while any(read_beats(file)["beats"] < count + 3 for file, count in zip(files, known, strict=True)):
                assert time.monotonic() < deadline, "no sign of life"
                time.sleep(0.01)
            return super().make(before)

    monkeypatch.setattr(supply, "Maker", Slow)
    assert serve(asked) == 0
    assert len(chunks(made.folder)) == 5
    before = read_beats(files[0])
    time.sleep(0.05)
    assert read_beats(files[0]) == before, "it ends with the work"


def test_the_log_says_what_was_added(stories: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config, made = streamed()
    supplied(config, made.folder)
    assert sum(line.startswith("Chunk ") for line in caplog.messages) == 4
