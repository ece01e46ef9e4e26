"""`lockstep prepare llada --to DIR`: what lies there, and training on it (contract items 108-110)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.data.tokenize import load_tokenizer
from lockstep.engine import settle
from lockstep.engine.choices import with_mask
from lockstep.engine.prepare import Prepared, is_prepared, prepare
from lockstep.errors import ConfigError, DataError, ExitCode, NotFoundError
from lockstep.models import shapes
from lockstep.objectives.diffusion import Diffusion
from lockstep.objectives.diffusion import build as diffusion
from lockstep.objectives.options import DiffusionOptions
from tests.conftest import Outcome
from tests.data.small_llada import EOS, MASK, START, write_tokenizer
from tests.data.stories import story

KEYS = {
    "sequence_length", "vocab_size", "train_samples", "val_samples", "total_tokens", "mask_token", "bos_token",
    "eos_token", "pad_token",
}  # fmt: skip
FILES = {
    "manifest.json", "metadata.json", "tokenizer.json", "tokenizer_config.json", "train_data.npy", "val_data.npy",
}  # fmt: skip
Cli = Callable[..., Outcome]


@pytest.fixture
def text(in_dir: Path) -> Path:
    """input.txt: one text of sixty stories, one of them five times."""
    stories = [story(index % 56 if index < 60 else 7) for index in range(60)]
    (in_dir / "input.txt").write_text("\n".join(stories), encoding="utf-8")
    return in_dir


@pytest.fixture
def make(lockstep: Cli, text: Path) -> Cli:
    """`lockstep prepare llada tiny --to NAME` on that text."""
    return lambda name, *words: lockstep("prepare", "llada", "tiny", "--to", name, "data.data_path=input.txt", *words)


def configured(**data: Any) -> RunConfig:
    flags = data.pop("flags", {})
    return load("llada", preset="tiny", overrides={"data": data, **flags}).config


def opened(config: RunConfig, rows: int = 512) -> Prepared:
    config = settle.applied(config, settle.decide(config))
    return prepare(config, objective_of(config), vocab_limit=rows)


def objective_of(config: RunConfig) -> Diffusion:
    assert isinstance(config.objective, DiffusionOptions)
    return diffusion(config.objective, documents=config.data.documents)


def arrays(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    about = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    return np.load(folder / "train_data.npy"), np.load(folder / "val_data.npy"), about


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# --------------------------------------------------------------------------------------------------------- the folder


def test_the_folder_of_a_text(make: Cli, text: Path) -> None:
    """Item 109."""
    made = make("shakespeare_processed")
    assert made.code == ExitCode.DONE, made.text
    folder = text / "shakespeare_processed"
    assert {path.name for path in folder.iterdir()} == FILES
    train, held, about = arrays(folder)
    assert about.keys() >= KEYS
    assert (train.dtype, held.dtype) == (np.int64, np.int64)
    assert train.shape == (about["train_samples"], 64)
    assert held.shape == (about["val_samples"], 64)
    assert about["total_tokens"] == train.size + held.size
    assert (about["vocab_size"], about["tokenizer_size"], about["mask_token"], about["eos_token"]) == (
        512,
        257,
        257,
        256,
    )
    tokenizer = load_tokenizer(folder)
    assert about["tokenizer"] == tokenizer.definition()
    assert f"{len(train)} training and {len(held)} validation windows of 64 tokens" in made.out
    assert "lockstep train llada --model-path lockstep/llada-tiny --data-path shakespeare_processed" in made.out
    words = set(" ".join(story(index) for index in range(60)).split())
    inner = [word for row in train.tolist() for word in tokenizer.decode(row).split()[1:-1]]
    assert len(inner) > 500
    assert set(inner) <= words, "ids of the tokenizer in the folder"


def test_no_window_is_shared_and_no_document_is_on_both_sides(lockstep: Cli, in_dir: Path) -> None:
    """Documents whose every stretch of 16 letters is their own, three copies of each."""
    documents = [" ".join(f"{number:03}-{place:03}" for place in range(30)) for number in range(40)]
    (in_dir / "copies.jsonl").write_text("\n".join(map(json.dumps, documents * 3)), encoding="utf-8")
    words = ("data.data_path=copies.jsonl", "data.validation_fraction=0.3")
    assert lockstep("prepare", "llada", "tiny", "--to", "w", *words).code == ExitCode.DONE
    train, held, _ = arrays(in_dir / "w")
    known = stretches(train)
    assert not stretches(held) & known
    assert len(stretches(held)) > 1000
    mixed = np.random.default_rng(0).permutation(np.concatenate([train, held]))  # the split of windows is the control
    assert stretches(mixed[:30]) & stretches(mixed[30:])


def stretches(windows: Any, length: int = 16) -> set[tuple[int, ...]]:
    """Every run of so many ids inside a document."""
    views = np.lib.stride_tricks.sliding_window_view(windows, length, axis=1).reshape(-1, length)
    return {tuple(view) for view in views.tolist() if 256 not in view}


def test_same_seed_same_bytes_and_another_order_by_another(make: Cli, text: Path) -> None:
    make("one")
    shutil.rmtree(text / ".cache")
    make("two")
    assert digests(text / "one") == digests(text / "two")
    make("three", "system.seed=7")
    first, third = arrays(text / "one"), arrays(text / "three")
    assert not np.array_equal(first[0], third[0])
    for one, other in zip(first[:2], third[:2], strict=True):
        assert sorted(one.tolist()) == sorted(other.tolist())


def test_again_is_nothing_and_other_content_is_never_touched(make: Cli, text: Path) -> None:
    make("w")
    before = digests(text / "w")
    assert "has them already" in make("w").out
    refused = make("w", "system.seed=7")
    assert (refused.code, "other windows are there already" in refused.text) == (ExitCode.CANNOT_CREATE, True)
    assert digests(text / "w") == before
    (text / "w" / "val_data.npy").write_bytes(b"cut")
    assert make("w").code == ExitCode.DONE
    assert digests(text / "w") == before, "what was damaged is made anew"
    (text / "mine").mkdir()
    (text / "mine" / "notes.txt").write_text("mine", encoding="utf-8")
    (text / "file").write_text("mine", encoding="utf-8")
    for name in ("mine", "file", "."):
        refused = make(name)
        assert (refused.code, "something else is there" in refused.text) == (ExitCode.CANNOT_CREATE, True)
    assert (text / "mine" / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert not list(text.glob("*.tmp-*"))


def test_what_is_not_for_windows(lockstep: Cli, make: Cli) -> None:
    assert "for the family llada, not llama" in lockstep("prepare", "llama", "tiny", "--to", "w").err


# ---------------------------------------------------------------------------------------------------- training on it


def test_windows_are_trained_as_they_are(make: Cli, lockstep: Cli, text: Path) -> None:
    make("w")
    train, held, _ = arrays(text / "w")
    config = configured(data_path="w", tokenizer_name="auto")
    assert not is_prepared(settle.applied(config, settle.decide(config)))
    made = opened(config)
    assert np.array_equal(made.train.take(np.arange(len(train)))["tokens"], train)
    assert np.array_equal(made.validation.take(np.arange(len(held)))["tokens"], held)
    assert made.train.take(np.arange(1), as_stored=True)["tokens"].dtype == np.uint16, "no int64 anywhere"
    assert is_prepared(settle.applied(config, settle.decide(config)))
    (text / "input.txt").unlink()
    words = ("data.data_path=w", "training.max_steps=2", "training.eval_batches=1", "report.tensorboard=false")
    ended = lockstep("train", "llada", "tiny", *words)
    assert ended.code == ExitCode.DONE, ended.text
    assert f"windows, {len(train):,} rows" in ended.out


def test_rows_of_another_length(make: Cli, text: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("w")
    train, _, _ = arrays(text / "w")
    made = opened(configured(data_path="w", flags={"training": {"context_length": 16}}))
    assert np.array_equal(made.train.take(np.arange(4))["tokens"], train[0].reshape(4, 16))
    assert "windows of 64 tokens are cut into 4 rows of 16" in caplog.text
    for length in (48, 128):
        with pytest.raises(ConfigError, match=f"windows of 64 tokens cannot be cut into rows of {length}") as caught:
            opened(configured(data_path="w", flags={"training": {"context_length": length}}))
        assert caught.value.hint == "training.context_length=64"


def test_ids_and_a_mask_outside_the_embedding_are_refused_with_the_numbers(make: Cli, text: Path) -> None:
    """Item 110."""
    make("w")
    train, _, about = arrays(text / "w")
    (text / "w" / "metadata.json").write_text(json.dumps(about | {"mask_token": 126336}), encoding="utf-8")
    free = configured(data_path="w", tokenizer_name="bytes")
    with pytest.raises(DataError, match=r"mask_token 126336, the embedding of the model has 512 rows \(0 to 511\)"):
        opened(free)
    opened(configured(data_path="w", tokenizer_name="bytes", flags={"objective": {"mask_token_id": 511}}))
    (text / "w" / "metadata.json").write_text(json.dumps(about), encoding="utf-8")
    train[3, 5] = 512
    np.save(text / "w" / "train_data.npy", train)
    with pytest.raises(DataError, match=r"ids up to 512, the embedding of the model has 512 rows \(0 to 511\)"):
        opened(free)


def test_windows_of_another_tokenizer_are_refused(make: Cli, text: Path) -> None:
    make("w")
    write_tokenizer(text / "llada")
    with pytest.raises(DataError, match="made with another tokenizer than that of llada") as caught:
        opened(configured(data_path="w", tokenizer_name="llada"))
    assert caught.value.hint == "data.tokenizer_name=auto"
    model = {"model": {"model_path": str(text / "llada"), "init": "pretrained"}}
    with pytest.raises(DataError, match="made with another tokenizer") as caught:
        opened(configured(data_path="w", tokenizer_name=None, flags=model))
    assert f"--model-path {text / 'llada'}" in caught.value.hint


def test_windows_without_a_tokenizer_are_those_of_the_model_or_refused(
    lockstep: Cli, make: Cli, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the folders of the guide's own download script, whose ids are letters of no tokenizer."""
    make("w")
    _, _, about = arrays(text / "w")
    (text / "w" / "tokenizer.json").unlink()
    del about["tokenizer"]
    (text / "w" / "metadata.json").write_text(json.dumps(about), encoding="utf-8")
    refused = lockstep("train", "llada", "tiny", "data.data_path=w", "data.tokenizer_name=auto")
    assert refused.code == ExitCode.NOT_FOUND, refused.text
    assert "w has no tokenizer.json, and none of lockstep/llada-tiny is here" in refused.err
    assert "or lockstep prepare llada --model-path lockstep/llada-tiny --data-path TEXT.txt --to w_2" in refused.err
    assert opened(configured(data_path="w", tokenizer_name="bytes")).tokenizer.vocab_size == 257, "as the hint says"
    write_tokenizer(text / "llada")
    config = configured(data_path="w", tokenizer_name="auto", flags={"model": {"model_path": "llada"}})
    named = prepare(config.model_copy(update={"data": config.data.model_copy(update={"dataset_name": "text"})}),
                    objective_of(config), vocab_limit=512)  # fmt: skip
    assert "w has no tokenizer.json: its ids are taken for those of llada" in caplog.text
    assert named.tokenizer.vocab_size == MASK + 1


# ------------------------------------------------------------------------------------------------------ conversations


def test_conversations_become_windows_and_come_back(lockstep: Cli, in_dir: Path) -> None:
    write_tokenizer(in_dir / "llada")
    lines = [{"prompt": f"What is {number}?", "answer": f"It is {number} <|eot_id|>."} for number in range(40)]
    (in_dir / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    words = ("data.documents=answers", "data.tokenizer_name=llada", "training.context_length=128")
    made = lockstep("prepare", "llada", "tiny", "--to", "w", "data.data_path=talk.jsonl", *words)
    assert made.code == ExitCode.DONE, made.text
    assert {path.name for path in (in_dir / "w").iterdir()} == FILES | {
        "train_prompt_lengths.npy", "val_prompt_lengths.npy",
    }  # fmt: skip
    train, _, about = arrays(in_dir / "w")
    prompts = np.load(in_dir / "w" / "train_prompt_lengths.npy")
    assert prompts.shape == (len(train),)
    assert (about["mask_token"], about["eos_token"]) == (MASK, EOS)
    tokenizer = load_tokenizer(in_dir / "w")
    for row, prompt in zip(train.tolist(), prompts.tolist(), strict=True):
        asked, answered = tokenizer.decode(row[:prompt]), tokenizer.decode(row[prompt:])
        number = asked.split("What is ")[1].split("?")[0]
        assert answered == f"It is {number} <|eot_id|>."
    from_text = opened(configured(data_path="talk.jsonl", documents="answers", tokenizer_name="llada",
                                  flags={"training": {"context_length": 128}}))  # fmt: skip
    again = opened(configured(data_path="w", documents="answers", tokenizer_name="auto",
                              flags={"training": {"context_length": 128}}))  # fmt: skip
    for name in ("tokens", "lengths"):
        expected, found = (table.take(np.arange(len(train)))[name] for table in (from_text.train, again.train))
        assert sorted(found.tolist()) == sorted(expected.tolist())


def test_a_template_is_part_of_the_key(in_dir: Path) -> None:
    (in_dir / "talk.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}", "answer": "x"}) for n in range(9)))
    write_tokenizer(in_dir / "a")
    write_tokenizer(
        in_dir / "b", template="{{ messages[0]['content'] }}:{% if not add_generation_prompt %}A{% endif %}"
    )
    made = {name: opened(configured(data_path="talk.jsonl", documents="answers", tokenizer_name=name)) for name in "ab"}
    assert made["a"].key != made["b"].key
    assert made["b"].train.take(np.arange(1))["lengths"].tolist() == [[2, 4]]


@pytest.mark.parametrize("family", ["llama", "mlm"])
def test_other_families_do_not_know_answers(lockstep: Cli, in_dir: Path, family: str) -> None:
    refused = lockstep("train", family, "tiny", "data.documents=answers")
    assert refused.code == ExitCode.USAGE
    assert "does not tell answers from prompts" in refused.err


def test_a_text_of_no_conversations(in_dir: Path) -> None:
    with pytest.raises(ConfigError, match="'builtin' holds no conversations"):
        opened(configured(dataset_name="builtin", documents="answers"))
    (in_dir / "a.txt").write_text("So. " * 1000, encoding="utf-8")
    with pytest.raises(DataError, match=r"a \.txt file holds no conversations"):
        opened(configured(data_path="a.txt", documents="answers"))


# ---------------------------------------------------------------------------------------------------------- the mask


def test_tokenizers_leave_a_row_for_the_mask(text: Path) -> None:
    trained = opened(configured(data_path="input.txt", tokenizer_name="builtin", tokenizer_vocab_size=4096), rows=300)
    assert trained.tokenizer.vocab_size == 299
    for name, rows in (("bytes", 257), ("builtin", 257)):
        with pytest.raises(ConfigError, match="has 257 ids, and 1 more is for the mask, the model has room for 257"):
            opened(configured(data_path="input.txt", tokenizer_name=name), rows=rows)
    write_tokenizer(text / "own")
    own = configured(data_path="input.txt", tokenizer_name="own")
    assert opened(own, rows=MASK + 1).tokenizer.vocab_size == MASK + 1, "it has a mask of its own"
    write_tokenizer(text / "none", mask=False)
    with pytest.raises(ConfigError, match="1 more is for the mask"):
        opened(configured(data_path="input.txt", tokenizer_name="none"), rows=MASK)


@pytest.mark.parametrize("named", ["by the user", "by the weights"])
def test_a_mask_among_the_ids_of_the_tokenizer_needs_no_row(text: Path, named: str) -> None:
    """As where a LLaMA, whose tokenizer has an id for every row, becomes a LLaDA: one it reserves hides tokens."""
    shape = shapes.known("lockstep/llada-tiny")
    assert shape is not None
    write_tokenizer(text / "llama", mask=False)
    mask = START if named == "by the weights" else None
    (text / "llama" / "config.json").write_text(json.dumps(replace(shape, vocab_size=MASK, mask=mask).to_hf()))
    given = {"objective": {"mask_token_id": START}} if named == "by the user" else {}
    model = {"model_path": "llama", "init": "pretrained"}
    config = configured(data_path="input.txt", tokenizer_name=None, flags={"model": model, **given})
    config = settle.applied(config, settle.decide(config))
    assert not is_prepared(config)
    planned = with_mask(config, shapes.resolve(config.model, context_length=64))
    assert isinstance(planned.objective, DiffusionOptions)
    assert planned.objective.mask_token_id == START
    assert opened(planned, rows=MASK).tokenizer.vocab_size == MASK
    assert is_prepared(config)
    free = configured(data_path="input.txt", tokenizer_name=None, flags={"model": {**model, "init": "random"}})
    with pytest.raises(ConfigError, match="1 more is for the mask") as caught:
        opened(free, rows=MASK)
    assert "objective.mask_token_id" in caught.value.hint


def test_pretrained_weights_want_their_own_tokenizer(text: Path) -> None:
    (text / "weights").mkdir()
    model = {"model": {"model_path": "weights", "init": "pretrained"}}
    config = configured(data_path="input.txt", tokenizer_name=None, flags=model)
    with pytest.raises(NotFoundError, match="no tokenizer of weights, and to its weights other ids mean other words"):
        settle.decide(config)
    write_tokenizer(text / "weights")
    assert "tokenizer_name" not in settle.decide(config)


def test_a_folder_without_windows_says_what_a_row_takes(text: Path) -> None:
    """As many tokens as the row has: nothing is shifted."""
    (text / "w").mkdir()
    np.save(text / "w" / "train_data.npy", np.zeros((0, 64), np.int64))
    np.save(text / "w" / "val_data.npy", np.ones((2, 64), np.int64))
    (text / "w" / "metadata.json").write_text('{"sequence_length": 64}', encoding="utf-8")
    with pytest.raises(DataError, match="one train row: 0 documents give 0 tokens, a row takes 64"):
        opened(configured(data_path="w", tokenizer_name="bytes"))
