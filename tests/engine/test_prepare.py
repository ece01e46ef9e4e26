"""From a configuration to rows: which source, which tokenizer, which key, and every refusal in one message."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from lockstep.config.schema import RunConfig
from lockstep.data.cache import check, clean, entries
from lockstep.data.options import DataOptions
from lockstep.data.tokenize import AlphabetTokenizer, ByteTokenizer, load_tokenizer, train_bpe
from lockstep.engine import prepare as module
from lockstep.engine.options import TrainingOptions
from lockstep.engine.prepare import Prepared, Split, cache_roots, prepare
from lockstep.errors import ConfigError, DataError, ExitCode, NotFoundError
from lockstep.models.options import LlamaOptions
from lockstep.objectives.causal import Causal
from lockstep.runtime.options import SystemOptions

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps", "in", "warm", "sun"]


def story(index: int) -> str:
    random = np.random.default_rng(index)
    return f"Story {index}. " + " ".join(random.choice(WORDS, 80)) + ".\n"


@pytest.fixture
def stories(in_dir: Path) -> Path:
    """A working directory with 60 stories in it."""
    lines = [json.dumps({"text": story(index)}) for index in range(60)]
    (in_dir / "stories.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return in_dir


def configuration(*, context: int = 32, seed: int = 1, lr: float = 1e-3, model: str = "x", **data: Any) -> RunConfig:
    return RunConfig(
        training=TrainingOptions(context_length=context, learning_rate=lr),
        system=SystemOptions(seed=seed),
        model=LlamaOptions(model_path=model),
        data=DataOptions(**({"data_path": "stories.jsonl", "tokenizer_vocab_size": 400} | data)),
    )


def prepared(config: RunConfig, *, vocab_limit: int = 1000) -> Prepared:
    return prepare(config, Causal(), vocab_limit=vocab_limit)


def stream(table: Any) -> list[int]:
    """The tokens of rows that overlap by one."""
    rows = np.asarray(table.columns["tokens"])
    return [int(rows[0, 0]), *rows[:, 1:].ravel().tolist()]


# ----------------------------------------------------------------------------------------------------- the rows


def test_rows_hold_the_documents_and_nothing_else(stories: Path) -> None:
    """Every story is on exactly one side, whole, followed by the separator."""
    made = prepared(configuration(validation_fraction=0.2))
    texts = {story(index) for index in range(60)}
    seen: dict[str, list[str]] = {}
    for name, table in (("train", made.train), ("validation", made.validation)):
        ids = stream(table)
        ends = [place for place, token in enumerate(ids) if token == made.tokenizer.separator]
        starts = [0, *(end + 1 for end in ends)]
        seen[name] = [made.tokenizer.decode(ids[left:right]) for left, right in zip(starts, ends, strict=False)]
        assert set(seen[name]) <= texts
    meta = json.loads((made.folder / "meta.json").read_text(encoding="utf-8"))
    assert meta["documents"] == {"train": 48, "validation": 12}
    for name in seen:  # only the tail that fills no row is missing
        assert 0 <= meta["tokens"][name] - len(stream(getattr(made, name))) <= 32
    assert not set(seen["train"]) & set(seen["validation"])
    assert len(seen["train"]) + len(seen["validation"]) >= 58


def test_the_tokenizer_never_sees_the_validation_split(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_texts: list[str] = []
    real = module.train_bpe

    def spy(texts: Any, size: int) -> Any:
        given_texts.extend(texts)
        return real(given_texts, size)

    monkeypatch.setattr(module, "train_bpe", spy)
    made = prepared(configuration(validation_fraction=0.2))
    assert len(given_texts) == 48
    assert made.tokenizer.fingerprint() == train_bpe(given_texts, 400).fingerprint()


def test_ids_take_two_bytes_where_they_fit(stories: Path) -> None:
    table = prepared(configuration()).train
    assert table.columns["tokens"].dtype == np.uint16
    assert table.take(np.array([0]))["tokens"].dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=5), max_size=60), st.floats(0.01, 0.99))
def test_copies_are_never_on_both_sides(documents: list[str], fraction: float) -> None:
    try:
        split = Split.of(documents, fraction)
    except DataError:
        assert len(set(documents)) < 2
        return
    sides = {name: list(split.texts(documents, name)) for name in ("train", "validation")}
    assert {name: len(texts) for name, texts in sides.items()} == split.counts
    assert sorted(sides["train"] + sides["validation"]) == sorted(documents)
    assert all(sides.values())
    assert not set(sides["train"]) & set(sides["validation"])


def test_long_documents_are_encoded_whole(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 100)
    lines = [json.dumps("x" * 150 + f"end{index:02}") for index in range(20)]
    (in_dir / "long.jsonl").write_text("\n".join(lines), encoding="utf-8")
    made = prepared(configuration(data_path="long.jsonl", tokenizer_name="bytes"))
    meta = json.loads((made.folder / "meta.json").read_text(encoding="utf-8"))
    assert sum(meta["tokens"].values()) == 20 * (155 + 1)


# ------------------------------------------------------------------------------------------------------- the key


def test_what_changes_the_key_and_what_does_not(stories: Path) -> None:
    """Item 35."""
    base = prepared(configuration()).key
    assert prepared(configuration(seed=2)).key == base
    assert prepared(configuration(lr=1e-5)).key == base
    assert prepared(configuration(model="another name of the same kind")).key == base
    others = [
        {"context": 16},
        {"max_train_samples": 50},
        {"validation_fraction": 0.1},
        {"tokenizer_name": "bytes"},
        {"tokenizer_vocab_size": 350},
        {"text_column": "text"},
        {"dataset_name": "synthetic", "data_path": None},
    ]
    keys = [prepared(configuration(**other)).key for other in others]
    assert len({base, *keys}) == 1 + len(others)
    (stories / "stories.jsonl").write_text("\n".join(json.dumps(story(index)) for index in range(1, 61)), "utf-8")
    assert prepared(configuration()).key not in {base, *keys}


def test_a_second_run_reads_no_text(
    stories: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Item 31, for local files."""
    caplog.set_level(logging.INFO)
    first = prepared(configuration())
    assert "Preparing dataset cache..." in caplog.messages
    assert "Dataset: text" in caplog.messages
    assert f"[Cache] Saved to {first.folder}" in caplog.messages
    caplog.clear()
    monkeypatch.setattr("lockstep.sources.text.TextSource.documents", lambda _: pytest.fail("the text was read"))
    second = prepared(configuration())
    tokens = json.loads((first.folder / "meta.json").read_text(encoding="utf-8"))["tokens"]["train"]
    assert f"[Cache] Loaded train data from cache ({tokens} tokens)" in caplog.messages
    assert f"Dataset ready: {first.train.rows} samples" in caplog.messages
    assert f"Cache location: {first.folder}" in caplog.messages
    assert np.array_equal(first.train.columns["tokens"], second.train.columns["tokens"])


def test_the_builtin_corpus_opens_at_once(in_dir: Path) -> None:
    config = configuration(context=8192, dataset_name="builtin", data_path=None, tokenizer_vocab_size=4096)
    made = prepared(config, vocab_limit=128_256)
    assert made.train.rows >= 40
    assert made.validation.rows >= 2
    assert made.tokenizer.vocab_size == 4096
    start = time.process_time()
    prepared(config, vocab_limit=128_256)
    assert time.process_time() - start < 0.3


# ----------------------------------------------------------------------------------------------------- the place


def test_where_caches_lie(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items 33 and 34."""
    made = prepared(configuration())
    assert made.folder == Path(".cache/datasets") / made.key
    shutil.rmtree(".cache")
    again = prepared(configuration())
    assert again.folder.is_dir()
    Path("cache").mkdir()
    shutil.move(".cache/datasets", "cache/datasets")
    shutil.rmtree(".cache")
    assert prepared(configuration()).folder == Path("cache/datasets") / made.key
    assert not Path(".cache").exists()
    assert prepared(configuration(cache_dir="mine")).folder == Path("mine") / made.key
    monkeypatch.setenv("DATASET_CACHE_DIR", str(stories / "moved"))
    assert prepared(configuration()).folder == stories / "moved" / made.key
    assert cache_roots(DataOptions(cache_dir="mine")) == [Path("mine")]
    with pytest.raises(ConfigError, match="no folder"):
        cache_roots(DataOptions(cache_dir="~nobody-of-this-name/cache"))


def test_housekeeping(stories: Path) -> None:
    made = prepared(configuration())
    (entry,) = entries(made.folder.parent)
    assert entry.key == made.key
    assert entry.meta["source"] == "text"
    check(entry.folder, full=True)
    assert made.key in clean(made.folder.parent)
    assert entries(made.folder.parent) == []


NAMES = [
    "../../x",
    "/tmp/x",
    "a/b",
    "x" * 300,
    "..",
    ".",
    "a\nb",
    "a\0b",
    "wikitext",
    "c4",
    "stories.jsonl",
    "~nobody/x",
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES) | st.text(max_size=20))
def test_names_never_become_paths(stories: Path, name: str) -> None:
    """Faults row 38: nothing is written outside, whatever a dataset or a tokenizer is called."""
    if name in ("auto", "builtin", "synthetic", "text", "bytes", ""):
        return
    with pytest.raises((NotFoundError, ConfigError)):
        prepared(configuration(dataset_name=name, data_path=None, cache_dir="deep/er/cache"))
    with pytest.raises((NotFoundError, DataError)) as caught:
        prepared(configuration(tokenizer_name=name, cache_dir="deep/er/cache"))
    assert "tokenizer" in str(caught.value)
    assert [path.name for path in stories.iterdir()] == ["stories.jsonl"]


# ---------------------------------------------------------------------------------------------------- the choices


def test_auto_says_what_it_took(in_dir: Path, stories: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, notice = module.choose_source(DataOptions())
    assert source.name == "builtin"
    assert "built into Python" in notice
    assert module.choose_source(DataOptions(data_path="stories.jsonl"))[1] == ""
    made = prepared(configuration())
    assert len(made.notices) == 1
    assert "No tokenizer named" in made.notices[0]
    assert made.notices[0] in caplog.messages
    assert prepared(configuration(tokenizer_name="builtin")).notices == ()


@pytest.mark.parametrize("name", ["wikitext", "c4", "allenai/c4", "builtln"])
def test_hub_datasets_are_refused_at_once(in_dir: Path, name: str) -> None:
    """Item 43: a dataset named explicitly never falls back."""
    with pytest.raises(NotFoundError, match="hub") as caught:
        prepared(configuration(dataset_name=name, data_path=None))
    assert caught.value.exit_code == ExitCode.NOT_FOUND
    assert "data.data_path" in caught.value.hint


def test_a_path_nobody_would_read_is_refused(stories: Path) -> None:
    with pytest.raises(ConfigError, match="reads no files"):
        prepared(configuration(dataset_name="builtin"))


@pytest.mark.parametrize("name", ["nobody/nothing", "../../etc", "gpt", "x/y/z", "a\0b"])
def test_a_hub_tokenizer_fails_in_one_message(stories: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 43: the tests are offline; what is no id is not even asked for."""
    monkeypatch.setenv("HF_TOKEN", "hf_canary_secret")
    with pytest.raises(NotFoundError) as caught:
        prepared(configuration(tokenizer_name=name))
    assert caught.value.exit_code == ExitCode.NOT_FOUND
    assert repr(name) in str(caught.value)
    assert "HF_TOKEN" in str(caught.value)
    assert "hf_canary_secret" not in f"{caught.value}{caught.value.__cause__}"


def test_a_hub_tokenizer_is_used_and_the_token_reaches_only_the_hub(
    stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answer(model_id: str, filename: str, *, token: str | None) -> Path:
        asked.append((model_id, filename, token))
        folder = stories / f"hub{len(asked)}"
        folder.mkdir()
        ByteTokenizer().save(folder)
        return folder / filename

    monkeypatch.setattr(module.hub, "download", answer)
    monkeypatch.setenv("HF_TOKEN", "hf_canary_secret")
    made = prepared(configuration(tokenizer_name="some/model"))
    assert asked == [("some/model", "tokenizer.json", "hf_canary_secret")]
    assert made.key == prepared(configuration(tokenizer_name="bytes")).key  # the content counts, not the name
    prepared(configuration(tokenizer_name="some/model", hf_token=SecretStr("hf_other")))
    assert asked[-1][-1] == "hf_other"
    written = b"".join(path.read_bytes() for path in stories.rglob("*") if path.is_file())
    assert b"hf_canary_secret" not in written
    assert b"hf_other" not in written


def test_a_model_folder_brings_its_tokenizer(stories: Path) -> None:
    folder = stories / "model"
    folder.mkdir()
    ByteTokenizer().save(folder)
    made = prepared(configuration(model="model"))
    assert made.notices == ()
    assert made.tokenizer.fingerprint() == ByteTokenizer().fingerprint()
    for name in ("model", "model/tokenizer.json"):
        assert prepared(configuration(tokenizer_name=name)).key == made.key
    assert prepared(configuration(model="model", tokenizer_name="builtin")).key != made.key


def test_the_synthetic_source_brings_its_alphabet(in_dir: Path) -> None:
    config = configuration(context=64, dataset_name="synthetic", data_path=None, max_train_samples=40)
    made = prepared(config, vocab_limit=16)
    assert (made.tokenizer.vocab_size, made.notices) == (16, ())
    assert int(np.max(made.train.columns["tokens"])) == 15
    assert (
        load_tokenizer(made.folder / "tokenizer.json").fingerprint()
        == AlphabetTokenizer("abcdefghijklmnop").fingerprint()
    )


@pytest.mark.parametrize(
    ("data", "limit", "numbers"),
    [({"tokenizer_name": "bytes"}, 256, ("257", "256")), ({"tokenizer_name": "builtin"}, 100, ("257", "100")),
     ({"dataset_name": "synthetic", "data_path": None}, 15, ("16", "15"))],
)  # fmt: skip
def test_a_tokenizer_that_does_not_fit_the_model(
    stories: Path, data: dict[str, Any], limit: int, numbers: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(configuration(**data), vocab_limit=limit)
    assert caught.value.exit_code == ExitCode.USAGE
    assert all(number in str(caught.value) for number in numbers)


def test_the_builtin_tokenizer_is_cut_to_the_model(stories: Path) -> None:
    assert prepared(configuration(tokenizer_vocab_size=4096), vocab_limit=300).tokenizer.vocab_size <= 300


def test_too_little_text_says_how_much_there_is(stories: Path) -> None:
    with pytest.raises(DataError, match=r"one train row: 57 documents give \d+ tokens, a row takes 100001") as caught:
        prepared(configuration(context=100_000))
    assert caught.value.exit_code == ExitCode.DATA
    assert "training.context_length" in caught.value.hint
    with pytest.raises(DataError, match="one validation row: 3 documents") as caught:
        prepared(configuration(context=500))
    assert "data.validation_fraction" in caught.value.hint
    assert not list(Path(".cache/datasets").glob("*/meta.json"))


def test_one_document_cannot_be_split(in_dir: Path) -> None:
    for name, content in (("a.txt", "One line."), ("b.jsonl", '"same"\n"same"\n'), ("c.txt", "")):
        (in_dir / name).write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match="documents"):
            prepared(configuration(data_path=name))


def test_text_that_changes_meanwhile_is_not_published(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._Builder._write

    def meddle(self: Any, folder: Path, *rest: Any) -> int:
        with (stories / "stories.jsonl").open("a") as file:
            file.write("\n" + json.dumps({"text": "late"}))
        return real(self, folder, *rest)

    monkeypatch.setattr(module._Builder, "_write", meddle)
    with pytest.raises(DataError, match="changed while"):
        prepared(configuration())
    assert not list(Path(".cache/datasets").glob("*/meta.json"))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "parquet", "folder", "glob"])
def test_each_kind_of_file_becomes_rows(in_dir: Path, kind: str) -> None:
    """Item 40, the local part."""
    texts = [story(index) for index in range(60)]
    (in_dir / "d").mkdir()
    (in_dir / "d" / "s.txt").write_text("\n".join(texts), encoding="utf-8")
    (in_dir / "s.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    (in_dir / "s.json").write_text(json.dumps(texts), encoding="utf-8")
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts}), in_dir / "s.parquet")
    path = {"txt": "d/s.txt", "folder": "d", "glob": "*.jsonl"}.get(kind, f"s.{kind}")
    made = prepared(configuration(data_path=path))
    assert made.train.rows > 20
    assert made.validation.rows >= 1


def test_a_source_of_ones_own(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_dir / "own_source.py").write_text(
        "class Own:\n    name = 'own'\n    def fingerprint(self): return {'v': 1}\n"
        "    def documents(self): return (f'document {i} ' * 9 for i in range(50))\n"
        "def build(options): return Own()\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(in_dir))
    assert prepared(configuration(dataset_name="own_source:build", data_path=None)).source == "own"
