"""Filling a cache: all cores and always the same bytes, ready ids, documents left out, joined or kept apart."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.tokenize import ByteTokenizer, TokenizerFile, train_bpe, train_wordpiece, train_words
from lockstep.engine import building, encoding
from lockstep.engine.building import PARALLELISM, Split, has_words
from lockstep.engine.encoding import batches_of, encoded_in_order, pieces_of
from lockstep.engine.prepare import Prepared
from lockstep.errors import DataError
from tests.data.small_cache import content
from tests.data.stories import configuration, prepared, story, write_stories


@pytest.fixture
def stories(in_dir: Path) -> Path:
    """A working directory with 60 stories in it."""
    return write_stories(in_dir)


def meta_of(made: Prepared) -> dict[str, dict[str, int]]:
    return json.loads((made.folder / "meta.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------- all cores


@pytest.mark.parametrize("name", ["builtin", "wordpiece", "word"])
def test_the_bytes_do_not_depend_on_cores_or_batches(stories: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made: list[dict[str, bytes]] = []
    for cores, characters in ((1, 1 << 18), (2, 700), (7, 1)):
        monkeypatch.setattr(encoding, "cores", lambda cores=cores: cores)
        monkeypatch.setattr(encoding, "BATCH_CHARACTERS", characters)
        where = f"cache{cores}"
        made.append(content(prepared(configuration(tokenizer_name=name, cache_dir=where)).folder))
    assert made[0] == made[1] == made[2]
    lines = (stories / "stories.jsonl").read_text(encoding="utf-8").splitlines()  # negative control: another order
    (stories / "stories.jsonl").write_text("\n".join(reversed(lines)), encoding="utf-8")
    turned = content(prepared(configuration(tokenizer_name=name)).folder)
    assert turned["train/tokens.npy"] != made[0]["train/tokens.npy"]


class Uneven(ByteTokenizer):
    """Takes longest for the first texts; counts how many are at it together."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.busy = self.most = 0

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        with self.lock:
            self.busy += 1
            self.most = max(self.most, self.busy)
        time.sleep(0.02 if texts[0] < "03" else 0.001)
        with self.lock:
            self.busy -= 1
        return super().encode(texts)


def test_batches_come_in_order_whoever_is_first_and_not_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "cores", lambda: 3)
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 2)
    read: list[str] = []

    def texts() -> list[str]:
        for number in range(60):
            read.append(f"{number:02}")
            yield read[-1]

    tokenizer, seen = Uneven(), []
    for batch in encoded_in_order(texts(), tokenizer):
        seen += [(text, bytes(ids.tolist()).decode()) for text, ids in batch]
        assert len(read) - len(seen) <= 2 * 3 + 1  # no more is held than this
    assert seen == [(f"{number:02}",) * 2 for number in range(60)]
    assert tokenizer.most == 3
    monkeypatch.setattr(encoding, "ROOM_CHARACTERS", 3)  # one batch of two fits, a second does not; one of 9 still may
    narrow = Uneven()
    assert len(list(encoded_in_order(["99"] * 20 + ["9" * 9] * 3, narrow))) == 23
    assert narrow.most == 1
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 100)  # of which none but one would fit
    monkeypatch.setattr(encoding, "ROOM_CHARACTERS", 6)
    shared = Uneven()
    assert [text for batch in encoded_in_order(read, shared) for text, _ in batch] == read
    assert shared.most == 3


class Refusing(ByteTokenizer):
    def encode(self, texts: list[str]) -> list[np.ndarray]:
        if "bad" in texts:
            raise DataError("no such word")
        return super().encode(texts)


def tokenising() -> int:
    return sum(thread.name.startswith("tokenise") for thread in threading.enumerate())


def test_a_failure_of_a_thread_is_the_failure_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 1)
    with pytest.raises(DataError, match="no such word"):
        list(encoded_in_order(["a"] * 9 + ["bad"] + ["a"] * 90, Refusing()))
    assert tokenising() == 0
    given_up = encoded_in_order(["a"] * 99, ByteTokenizer())
    next(given_up)
    assert tokenising() > 0
    given_up.close()
    assert tokenising() == 0


def test_too_few_documents_are_counted_in_plain_words() -> None:
    for texts, words in (
        (["a"], "1 document: too few"),
        (["a", "a"], "2 documents, all alike: too few"),
        ([], "0 documents: "),
    ):
        with pytest.raises(DataError, match=words):
            Split.of(texts, 0.5)


def test_the_library_uses_all_cores_where_our_threads_do_not(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To train a tokenizer, not to use it; afterwards the variable is as before."""
    seen = set[tuple[str, str | None]]()
    limited, encode = building._limited, encoding.encode

    def trained_on(*given: Any) -> Iterator[str]:
        seen.add(("train", os.environ.get(PARALLELISM)))
        yield from limited(*given)

    def encoded(*given: Any) -> list[Any]:
        seen.add(("encode", os.environ.get(PARALLELISM)))
        return encode(*given)

    monkeypatch.setattr(building, "_limited", trained_on)
    monkeypatch.setattr(encoding, "encode", encoded)
    for number, value in enumerate(("false", None)):
        monkeypatch.delenv(PARALLELISM, raising=False)
        if value:
            monkeypatch.setenv(PARALLELISM, value)
        prepared(configuration(cache_dir=f"cache{number}"))
        assert os.environ.get(PARALLELISM) == value
    assert seen == {("train", "true"), ("encode", "false")}


def test_batches_are_whole_documents() -> None:
    documents = ["abc", np.arange(5), "", "d" * 50, "e"]
    assert list(batches_of(documents, 20)) == [documents[:2], documents[2:4], documents[4:]]
    assert list(batches_of([], 20)) == []


# ------------------------------------------------------------------------------------------------- long documents


@given(st.text(alphabet="ab \n\u00e9\U0001f600", max_size=200), st.integers(1, 50))
def test_pieces_are_the_text(text: str, characters: int) -> None:
    pieces = list(pieces_of(text, characters))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= characters
    assert all(pieces) or not text


def test_pieces_are_cut_at_a_lone_blank_else_at_white_space_else_anywhere() -> None:
    assert list(pieces_of("aaaaaaa bb  cccc", 12)) == ["aaaaaaa bb ", " cccc"]
    assert list(pieces_of("aaaaaaaaaaa c\n c", 14)) == ["aaaaaaaaaaa", " c\n c"]
    assert list(pieces_of("a" * 25, 10)) == ["a" * 10, "a" * 10, "a" * 5]


class Counting(TokenizerFile):
    """Keeps the lengths of what it is asked for."""

    @staticmethod
    def of(tokenizer: TokenizerFile) -> Counting:
        made = Counting(tokenizer._tokenizer, separator=tokenizer.separator_text)
        made.asked = []
        return made

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        self.asked += [len(text) for text in texts]
        return super().encode(texts)


@pytest.mark.parametrize("train", [train_bpe, train_wordpiece, train_words])
def test_a_very_long_document_is_encoded_in_pieces_to_the_same_ids(
    monkeypatch: pytest.MonkeyPatch, train: Callable[..., TokenizerFile]
) -> None:
    texts = [story(1), "\n".join(map(story, range(40))), story(2) + " don't stop", " ".join(map(story, range(40)))]
    tokenizer = Counting.of(train(texts, 400))
    whole = [ids.tolist() for ids in tokenizer.encode(texts)]
    assert max(tokenizer.asked) > 5000
    tokenizer.asked.clear()
    monkeypatch.setattr(encoding, "WHOLE_CHARACTERS", 2000)
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 500)
    found = [pair for batch in encoded_in_order(texts, tokenizer) for pair in batch]
    assert [document for document, _ in found] == texts
    assert [ids.tolist() for _, ids in found] == whole
    assert max(tokenizer.asked) <= 500
    assert len(tokenizer.asked) > 20


@pytest.mark.parametrize("train", [train_bpe, train_wordpiece, train_words])
def test_a_tokenizer_is_trained_on_pieces_to_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, train: Callable[..., TokenizerFile]
) -> None:
    texts = ["\n".join(map(story, range(40))), story(50)]
    monkeypatch.setattr(building, "BPE_PIECE_CHARACTERS", 300)
    pieces = list(building._limited(texts, 1 << 30))
    assert (max(map(len, pieces)) <= 300) == (len(pieces) > 20) == ("".join(pieces) == "".join(texts)) is True
    assert train(pieces, 400).fingerprint() == train(texts, 400).fingerprint()
    assert sum(map(len, building._limited(texts, 1000))) < 1300  # of a long one too no more than is wanted


def test_long_documents_are_not_held_by_the_dozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "cores", lambda: 8)
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 1)
    read: list[str] = []

    def texts() -> Iterator[str]:
        for _ in range(30):
            read.append("x" * 100)
            yield read[-1]

    def most_ahead() -> int:
        read.clear()
        return max(len(read) - taken for taken, _ in enumerate(encoded_in_order(texts(), ByteTokenizer())))

    assert most_ahead() > 10
    monkeypatch.setattr(encoding, "AHEAD_CHARACTERS", 350)
    assert most_ahead() <= 4
    monkeypatch.setattr(encoding, "AHEAD_CHARACTERS", 1)
    assert most_ahead() == 1


class Slow(ByteTokenizer):
    """Counts its calls."""

    calls = 0

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        self.calls += 1
        time.sleep(0.01)
        return super().encode(texts)


def test_who_gives_up_does_not_wait_for_the_rest_of_a_long_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "WHOLE_CHARACTERS", 10)
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 1)
    monkeypatch.setattr(encoding, "ROOM_CHARACTERS", 1)
    tokenizer = Slow()

    def refused() -> Iterator[str]:
        yield "x" * 2000
        raise DataError("stopped")

    monkeypatch.setattr(encoding, "AHEAD_CHARACTERS", 1 << 20)
    with pytest.raises(DataError, match="stopped"):
        list(encoded_in_order(refused(), tokenizer))
    assert tokenizer.calls <= 10


# ------------------------------------------------------------------------------------------------ ids that are ready


def write_windows(ids: Any) -> None:
    Path("windows").mkdir()
    np.save("windows/train_data.npy", ids[3:])
    np.save("windows/val_data.npy", ids[:3])
    Path("windows/metadata.json").write_text(json.dumps({"sequence_length": ids.shape[1]}), encoding="utf-8")


def test_ids_of_another_tokenizer_are_refused_naming_the_largest(in_dir: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, (50, 40), dtype=np.uint16)
    ids[7, 7], ids[9, 9] = 290, 300
    write_windows(ids)
    with pytest.raises(DataError, match="ids up to 300, the ids of the tokenizer end at 256") as caught:
        prepared(configuration(data_path="windows", tokenizer_name="bytes"))
    assert "data.tokenizer_name" in caught.value.hint
    with pytest.raises(DataError, match="ids up to 400"):  # and where nobody has looked before
        list(encoded_in_order([np.array([400])], ByteTokenizer()))


@pytest.mark.parametrize("name", ["builtin", "wordpiece", "word"])
def test_no_tokenizer_is_trained_on_ids(in_dir: Path, name: str) -> None:
    write_windows(np.random.default_rng(0).integers(0, 256, (50, 40)))
    with pytest.raises(DataError, match="no tokenizer can be trained") as caught:
        prepared(configuration(data_path="windows", tokenizer_name=name))
    assert "data.tokenizer_name=FOLDER" in caught.value.hint


def test_the_split_of_ids_keeps_copies_together() -> None:
    documents = [np.array([1, 2, 3], np.uint16), np.array([1, 2, 3], np.int64), np.array([4]), np.array([5])]
    split = Split.of(documents, 0.3)
    assert split.largest_id == 5
    assert split.holds_out(documents[0]) == split.holds_out(documents[1])
    assert sum(split.counts.values()) == 4
    assert Split.of(["a", "b"], 0.5).largest_id is None


# ----------------------------------------------------------------------------------------------- which documents


def test_short_documents_are_left_out_before_they_are_counted(in_dir: Path) -> None:
    texts = [story(index) if index % 2 else "too short" for index in range(60)]
    (in_dir / "some.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    made = prepared(configuration(data_path="some.jsonl", min_words=5, max_train_samples=20, validation_fraction=0.2))
    assert meta_of(made)["documents"] == {"train": 16, "validation": 4}
    counted = prepared(
        configuration(data_path="some.jsonl", min_words=0, max_train_samples=20, validation_fraction=0.2)
    )
    assert sum(meta_of(counted)["documents"].values()) == 20  # negative control: here the short ones count
    with pytest.raises(DataError, match="0 documents") as caught:
        prepared(configuration(data_path="some.jsonl", min_words=500))
    assert "data.min_words" in caught.value.hint


@pytest.mark.parametrize(("text", "words"), [("", 0), ("  \n ", 0), ("one", 1), (" a  b\tc\n", 3)])
def test_words_are_counted_between_blanks(text: str, words: int) -> None:
    assert all(has_words(text, least) == (words >= least) for least in range(6))
    assert has_words(np.array([1]), 100)


@pytest.mark.parametrize(("documents", "separators"), [("joined", 0), ("separated", 57), ("masked", 57)])
def test_documents_share_rows_as_asked(stories: Path, documents: str, separators: int) -> None:
    made = prepared(configuration(documents=documents, tokenizer_name="bytes"))
    text_bytes = sum(len(story(index).encode()) for index in range(60))
    assert sum(meta_of(made)["tokens"].values()) == text_bytes + (60 if separators else 0)
    rows = np.asarray(made.train.columns["tokens"])
    assert abs(int((rows[:, 1:] == made.tokenizer.separator).sum()) - separators) <= 1  # the tail fills no row


def test_empty_documents_cost_nothing(in_dir: Path) -> None:
    texts = [story(index) for index in range(30)] + [""] * 10
    (in_dir / "some.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    made = prepared(configuration(data_path="some.jsonl", tokenizer_name="bytes"))
    assert sum(meta_of(made)["tokens"].values()) == sum(len(text) + 1 for text in texts if text)


def test_many_ids_take_four_bytes(stories: Path) -> None:
    ByteTokenizer().save(stories)
    tree = json.loads((stories / "tokenizer.json").read_text(encoding="utf-8"))
    tree["model"]["vocab"]["t"] = 70_000
    (stories / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    table = prepared(configuration(tokenizer_name="tokenizer.json"), vocab_limit=70_001).train
    assert table.columns["tokens"].dtype == np.uint32
    taken = table.take(np.arange(table.rows))["tokens"]
    assert (taken.dtype, int(taken.max())) == (np.int32, 70_000)


def test_what_is_written_is_a_tokenizer(stories: Path) -> None:
    made = prepared(configuration(tokenizer_name="wordpiece"))
    assert isinstance(made.tokenizer, TokenizerFile)
    assert made.tokenizer.separator == 2
    assert "the quick" in made.tokenizer.decode(made.tokenizer.encode(["The  QUICK fox"])[0].tolist())
