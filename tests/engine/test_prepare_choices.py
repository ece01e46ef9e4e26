"""Which source and which tokenizer a configuration means, and every refusal in one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr

from lockstep.data.tokenize import AlphabetTokenizer, ByteTokenizer, load_tokenizer
from lockstep.engine import building
from lockstep.engine import choices as module
from lockstep.errors import ConfigError, DataError, ExitCode, NotFoundError
from tests.data.stories import configuration, prepared, story, write_stories


@pytest.fixture
def stories(in_dir: Path) -> Path:
    """A working directory with 60 stories in it."""
    return write_stories(in_dir)


def test_auto_says_what_it_took(in_dir: Path, stories: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = prepared(configuration())
    assert len(made.notices) == 1
    assert "No tokenizer named" in made.notices[0]
    assert made.notices[0] in caplog.messages
    assert prepared(configuration(tokenizer_name="builtin")).notices == ()


@pytest.mark.parametrize("name", ["wikitext", "c4", "allenai/c4"])
def test_hub_datasets_are_refused_at_once(in_dir: Path, name: str) -> None:
    """Item 43: a dataset named explicitly never falls back."""
    with pytest.raises(NotFoundError, match="hub") as caught:
        prepared(configuration(dataset_name=name, data_path=None))
    assert caught.value.exit_code == ExitCode.NOT_FOUND
    assert "HF_HUB_OFFLINE" in caught.value.hint


def test_a_misspelt_name_is_no_dataset(in_dir: Path) -> None:
    with pytest.raises(ConfigError, match="'builtln' names no dataset"):
        prepared(configuration(dataset_name="builtln", data_path=None))


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
    assert asked == [("some/model", "tokenizer.json", None)]  # the one of the environment is taken when it is sent
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


def test_a_tokenizer_with_holes_is_measured_by_its_highest_id(stories: Path) -> None:
    """257 entries would fit; the id 5000 would be outside the model's vocabulary."""
    ByteTokenizer().save(stories)
    tree = json.loads((stories / "tokenizer.json").read_text(encoding="utf-8"))
    tree["model"]["vocab"]["A"] = 5000
    (stories / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match="5001 ids, the model has room for 1000"):
        prepared(configuration(tokenizer_name="tokenizer.json"))
    assert prepared(configuration(tokenizer_name="tokenizer.json"), vocab_limit=5001).tokenizer.vocab_size == 5001


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
        with pytest.raises(DataError, match="document"):
            prepared(configuration(data_path=name))


def test_text_that_changes_meanwhile_is_not_published(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = building.Builder.write_rows

    def meddle(self: Any, folder: Path, *rest: Any) -> int:
        with (stories / "stories.jsonl").open("a") as file:
            file.write("\n" + json.dumps({"text": "late"}))
        return real(self, folder, *rest)

    monkeypatch.setattr(building.Builder, "write_rows", meddle)
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
