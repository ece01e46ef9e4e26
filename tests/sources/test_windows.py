"""Ready windows as a source: what is read of them, and every way in which such a folder can be wrong."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.contracts import PROMPT
from lockstep.data.options import DataOptions
from lockstep.engine.building import document_hash
from lockstep.errors import ConfigError, DataError, LockstepError, NotFoundError
from lockstep.sources.windows import build, check_folder, is_folder

LENGTH = 8


def write(folder: Path, **changes: Any) -> Path:
    """A folder of 20 training and 3 validation windows; `changes`: files by their names, None leaves one out."""
    random = np.random.default_rng(0)
    files: dict[str, Any] = {
        "train_data": random.integers(3, 60, (20, LENGTH)),
        "val_data": random.integers(3, 60, (3, LENGTH)),
        "metadata": {
            "sequence_length": LENGTH,
            "train_samples": 20,
            "val_samples": 3,
            "mask_token": 66,
            "eos_token": 2,
        },
        **changes,
    }
    folder.mkdir()
    for name, content in files.items():
        if isinstance(content, np.ndarray):
            np.save(folder / f"{name}.npy", content)
        elif isinstance(content, bytes):
            (folder / f"{name}.npy").write_bytes(content)
        elif content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def rows(folder: Path, **options: Any) -> list[list[int]]:
    return [row.tolist() for row in build(DataOptions(data_path=str(folder), **options)).documents()]


def test_training_comes_before_validation_and_the_split_is_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "w")
    train, held = (np.load(folder / f"{name}_data.npy") for name in ("train", "val"))
    assert is_folder(str(folder))
    assert rows(folder) == [*train.tolist(), *held.tolist()]
    assert rows(folder, max_train_samples=5) == [*train[:5].tolist(), *held.tolist()]
    source = build(DataOptions(data_path=str(folder)))
    assert source.held_out == {document_hash(row.astype(np.uint32)) for row in held}


def test_only_a_hash_names_the_tokenizer(tmp_path: Path) -> None:
    for number, (said, expected) in enumerate([("gpt2", None), (7, None), ("a" * 64, "a" * 64)]):
        folder = write(tmp_path / f"w{number}", metadata={"sequence_length": LENGTH, "tokenizer": said})
        assert check_folder(folder).tokenizer == expected


def test_a_training_window_that_is_held_out_too_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "w")
    train = np.load(folder / "train_data.npy")
    held = np.load(folder / "val_data.npy")
    train[[4, 9]] = held[1]
    np.save(folder / "train_data.npy", train)
    assert rows(folder) == [*np.delete(train, [4, 9], axis=0).tolist(), *held.tolist()]
    assert "2 training windows are also in val_data.npy" in caplog.text


def test_conversations_are_marked_and_what_fills_up_is_left_away(tmp_path: Path) -> None:
    train = np.array([[7, 8, 9, 5, 2, 2, 2, 2], [7, 2, 2, 2, 2, 2, 2, 2], [4, 4, 4, 4, 4, 4, 4, 4]])
    about = {"sequence_length": LENGTH, "eos_token": 2}
    lengths = {"train_prompt_lengths": np.array([2, 3, 0]), "val_prompt_lengths": np.array([1])}
    folder = write(tmp_path / "w", train_data=train, val_data=np.array([[5] * LENGTH]), metadata=about, **lengths)
    assert check_folder(folder).answers
    marked = [[7 | PROMPT, 8 | PROMPT, 9, 5], [7 | PROMPT, 2 | PROMPT, 2 | PROMPT], [4] * 8, [5 | PROMPT, *[5] * 7]]
    assert rows(folder, documents="answers") == marked
    with pytest.raises(ConfigError, match=r"data\.documents is separated") as caught:
        rows(folder)
    assert caught.value.hint == "data.documents=answers"
    with pytest.raises(ConfigError, match="has no train_prompt_lengths"):
        rows(write(tmp_path / "plain"), documents="answers")


def test_half_a_folder_is_recognised_and_its_command_is_said(tmp_path: Path) -> None:
    for number, missing in enumerate(("train_data", "val_data", "metadata")):
        folder = write(tmp_path / f"w{number}", **{missing: None})
        assert is_folder(str(folder))
        with pytest.raises(NotFoundError, match=rf"{missing}\.(npy|json) missing") as caught:
            rows(folder)
        assert caught.value.hint == f"lockstep prepare llada --data-path TEXT.txt --to {folder}"
    with pytest.raises(NotFoundError) as caught:
        check_folder("no where", model="a/b")
    assert caught.value.what == "Dataset directory 'no where' not found."
    assert caught.value.hint == "lockstep prepare llada --model-path a/b --data-path TEXT.txt --to 'no where'"
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other" / "train_data.npy", np.arange(9))  # of somebody else, as before
    for name in ("other", "nothing", "\0", "x" * 5000):
        assert not is_folder(str(tmp_path / name))
    assert not is_folder(None)


ABOUT = {"sequence_length": LENGTH}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"sequence_length": 9}}, r"shape \(windows, 9\) were expected, this is int64 of shape \(20, 8\)"),
    ({"metadata": {}}, "no sequence_length"),
    ({"metadata": []}, "a JSON object was expected"),
    ({"metadata": {"sequence_length": "8"}}, "sequence_length is no whole number"),
    ({"metadata": {"sequence_length": True}}, "sequence_length is no whole number"),
    ({"metadata": {**ABOUT, "mask_token": -1}}, "mask_token is no whole number"),
    ({"metadata": {**ABOUT, "train_samples": 19}}, "20 windows, metadata.json says 19"),
    ({"metadata": {**ABOUT, "mask_token": 5}, "val_data": np.full((1, LENGTH), 5)}, "window 0 holds the mask id 5"),
    ({"metadata": ABOUT, "train_data": np.arange(16.0).reshape(2, LENGTH)}, "float64"),
    ({"metadata": ABOUT, "train_data": np.arange(16)}, r"shape \(16,\)"),
    ({"metadata": ABOUT, "train_data": np.arange(-1, 15).reshape(2, LENGTH)}, "-1 is no token id"),
    ({"metadata": ABOUT, "train_data": np.full((2, LENGTH), 1 << 31)}, "2147483648 is no token id"),
    ({"metadata": ABOUT, "train_data": b"no array"}, "not a readable .npy file"),
    ({"train_prompt_lengths": np.zeros(20, np.int64)}, "val_prompt_lengths.npy missing"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_what_is_wrong_is_one_message_that_names_the_file(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(LockstepError, match=words) as caught:
        rows(write(tmp_path / "w", **changes))
    assert str(tmp_path / "w") in caught.value.where


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (np.zeros((20, 1), np.int64), r"each of the 20 windows was expected, its shape is \(20, 1\)"),
        (np.zeros(19, np.int64), "each of the 20 windows"),
        (np.zeros(20), "each of the 20 windows"),
        (np.full(20, 9), "window 0: a prompt of 9 tokens of 8"),
        (np.array([0] * 19 + [-1]), "window 19: a prompt of -1 tokens"),
    ],
)
def test_wrong_lengths_of_prompts(tmp_path: Path, lengths: Any, words: str) -> None:
    folder = write(tmp_path / "w", train_prompt_lengths=lengths, val_prompt_lengths=np.zeros(3, np.int64))
    with pytest.raises(DataError, match=words):
        rows(folder, documents="answers")


HEADERS = {
    "shape over 64 bits": b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999999999, 8), }\n",
    "shape of a truth": b"{'descr': '<i8', 'fortran_order': False, 'shape': (True, 8), }\n",
    "larger than the file": b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 8), }\n",
    "half a dictionary": b"{'descr': '<i8', 'fortran_order': \n",
    "too deep": b"-" * 9000 + b"1",
    "an archive": None,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.filterwarnings("ignore:Reading .*npy")
def test_a_header_made_to_hurt_is_one_message(tmp_path: Path, header: bytes | None) -> None:
    magic = b"\x93NUMPY\x01\x00" + len(header or b"").to_bytes(2, "little")
    raw = magic + header + bytes(64) if header else b"PK\x03\x04" + bytes(50)
    with pytest.raises(DataError, match=r"not a readable \.npy file: .") as caught:
        rows(write(tmp_path / "w", train_data=raw))
    assert caught.value.where.endswith("train_data.npy")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", train_data=None)
    np.save(folder / "train_data.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"not a readable \.npy file"):
        check_folder(folder)


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    """Contract 3.9.15: 32 MB of int64 are never in memory at once."""
    train = np.random.default_rng(0).integers(3, 60, (4000, 1024))
    about = {"sequence_length": 1024}
    folder = write(tmp_path / "w", train_data=train, val_data=train[:2] + 1, metadata=about)
    size = train.nbytes
    del train
    tracemalloc.start()
    try:
        source = build(DataOptions(data_path=str(folder)))
        assert sum(len(row) for row in source.documents()) == 1024 * 4002
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 0.6 * size, "blocks of 4 MiB, a few at a time"
        np.load(folder / "train_data.npy")  # the control
        assert tracemalloc.get_traced_memory()[1] > size
    finally:
        tracemalloc.stop()
