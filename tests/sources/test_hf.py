"""Datasets of the hub: the right files, read in the right form, few requests, and the same again without any."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.options import DataOptions
from lockstep.errors import ConfigError, ExitCode, NotFoundError
from lockstep.runtime import pins, remote_file
from lockstep.sources import hf
from tests.hub import corpora
from tests.hub.corpora import parquet, text
from tests.hub.server import Fault, LoopbackHub


def options(root: Path, name: str, **more: Any) -> DataOptions:
    return DataOptions.model_validate({"dataset_name": name, "cache_dir": str(root / "cache"), **more})


def test_wikitext_is_read_as_articles(loopback: LoopbackHub, tmp_path: Path) -> None:
    corpora.add_wikitext(loopback)
    source = hf.build(options(tmp_path, "wikitext"))
    documents = list(source.documents())
    assert len(documents) == 60
    assert documents[0].startswith(" = Bread 0 = \n")
    assert " = = Later = = \n" in documents[0]
    assert documents[59].startswith(" = Maps 59 = \n")
    assert source.name == "wikitext"


def test_c4_is_read_file_by_file_and_only_as_far_as_asked(loopback: LoopbackHub, tmp_path: Path) -> None:
    corpora.add_c4(loopback)
    source = hf.build(options(tmp_path, "c4"))
    assert [document[-3:] for document in islice(source.documents(), 3)] == ["(0)", "(1)", "(2)"]
    assert set(loopback.fetched("allenai/c4")) == {"README.md", "en/c4-train.00000-of-00003.json.gz"}
    assert len(list(source.documents())) == 60
    assert next(hf.build(options(tmp_path, "c4:realnewslike")).documents()) == text(1800)


def test_a_second_run_asks_nothing(loopback: LoopbackHub, tmp_path: Path) -> None:
    corpora.add_wikitext(loopback)
    first = hf.build(options(tmp_path, "wikitext"))
    documents = list(first.documents())
    loopback.forget()
    again = hf.build(options(tmp_path, "wikitext"))
    assert again.fingerprint() == first.fingerprint()
    assert list(again.documents()) == documents
    assert loopback.asked == []
    assert hf.reachable(options(tmp_path, "auto")) == ""
    corpora.add_wikitext(loopback, articles=5)  # a new commit does not change what was pinned
    assert hf.build(options(tmp_path, "wikitext")).fingerprint() == first.fingerprint()
    assert hf.build(options(tmp_path, "wikitext@main")).fingerprint() == first.fingerprint()
    assert loopback.asked == []


def test_a_revision_is_a_reference_of_its_own(loopback: LoopbackHub, tmp_path: Path) -> None:
    old = loopback.add("acme/notes", {"notes.jsonl": json.dumps({"text": "old"})}, tag="v1")
    loopback.add("acme/notes", {"notes.jsonl": json.dumps({"text": "new"})})
    for name, expected in (("acme/notes", "new"), ("acme/notes@v1", "old"), (f"acme/notes@{old}", "old")):
        assert list(hf.build(options(tmp_path, name)).documents()) == [expected]
    kept = {key.split(" ")[1] for key in json.loads((tmp_path / "cache" / pins.RECORD).read_text())["pins"]}
    assert kept == {"acme/notes::train@main", "acme/notes::train@v1"}  # a commit that was met has a record
    with pytest.raises(NotFoundError, match="has no revision 'v9'"):
        hf.build(options(tmp_path, "acme/notes@v9"))


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1, "pins": {"x": 1}}', '{"format": 1}', "\x00" * 50])
def test_a_damaged_record_is_made_anew(loopback: LoopbackHub, tmp_path: Path, damage: str) -> None:
    corpora.add_imdb(loopback)
    first = hf.build(options(tmp_path, "imdb")).fingerprint()
    (tmp_path / "cache" / pins.RECORD).write_text(damage)
    assert hf.build(options(tmp_path, "imdb")).fingerprint() == first
    assert len(json.loads((tmp_path / "cache" / pins.RECORD).read_text())["pins"]) == 1


def test_a_record_cannot_lead_out_of_the_dataset(loopback: LoopbackHub, tmp_path: Path) -> None:
    loopback.add("acme/notes", {"notes.jsonl": json.dumps({"text": "fine"})})
    hf.build(options(tmp_path, "acme/notes"))
    record = tmp_path / "cache" / pins.RECORD
    record.write_text(record.read_text().replace("notes.jsonl", "../../../../../../etc/passwd.txt"))
    assert list(hf.build(options(tmp_path, "acme/notes")).documents()) == ["fine"]


def test_any_dataset_by_config_split_and_column(loopback: LoopbackHub, tmp_path: Path) -> None:
    two = {"title": ["a", "b"], "body": ["first", "second"]}
    loopback.add("acme/two", {"train.parquet": parquet(two), "test.parquet": parquet(two)})
    assert list(hf.build(options(tmp_path, "acme/two", text_column="body")).documents()) == ["first", "second"]
    assert list(hf.build(options(tmp_path, "acme/two::test", text_column="title")).documents()) == ["a", "b"]
    corpora.add_wikitext(loopback)
    small = hf.build(options(tmp_path, "Salesforce/wikitext:wikitext-2-raw-v1"))
    assert next(small.documents()).startswith(" = Small = ")
    for name, expected in {
        "acme/two:nope": "has no config 'nope', but default",
        "acme/two:default:nope": "has no split 'nope', but train, test",
        "Salesforce/wikitext": "has several configs: wikitext-103-raw-v1, wikitext-2-raw-v1",
        "wikitext:wikitext-103": "has no config 'wikitext-103', but wikitext-103-raw-v1, wikitext-2-raw-v1",
    }.items():
        with pytest.raises(NotFoundError, match=expected) as caught:
            hf.build(options(tmp_path, name))
        assert caught.value.exit_code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    "name", ["x", "a/b/c", "../x", "a/..", "a/b:../c", "a/b::../c", "a/b@../c", "a/b@", "a/b:c:d:e", "a/b\0", "a--b/c"]
)
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="names no dataset"):
        hf.build(options(tmp_path, name))
    assert list(tmp_path.iterdir()) == []


def test_the_mixture_has_a_stated_order(loopback: LoopbackHub, tmp_path: Path) -> None:
    corpora.add_mixture(loopback)
    source = hf.build(options(tmp_path, "hf", max_train_samples="500k"))
    documents = list(source.documents())
    numbers = [
        int(document.rstrip(" .\n").removesuffix(" I liked it").rpartition("(")[2][:-1]) for document in documents
    ]
    squad = [300, 301, 302, 303]  # each context once
    assert numbers == [n + 50 for n in range(60)] + squad + [200 + n for n in range(12)] + [
        start + n for start in (400, 500, 600) for n in range(4)
    ]
    names = [member["dataset"] for member in source.fingerprint()["members"]]
    assert names == [reference.dataset for reference in hf.MIXTURE]


def test_above_a_million_documents_the_mixture_is_c4(loopback: LoopbackHub, tmp_path: Path) -> None:
    corpora.add_c4(loopback)
    source = hf.build(options(tmp_path, "hf", max_train_samples="1.5M"))
    assert [member["dataset"] for member in source.fingerprint()["members"]] == ["allenai/c4"]
    with pytest.raises(ConfigError, match="their own text fields"):
        hf.build(options(tmp_path, "hf", text_column="text"))


def test_a_part_that_cannot_be_had_is_an_error_that_names_it(loopback: LoopbackHub, tmp_path: Path) -> None:
    corpora.add_mixture(loopback)
    loopback.fail("fancyzhx/yelp_polarity", Fault("status", 404))
    with pytest.raises(NotFoundError, match="fancyzhx/yelp_polarity"):
        hf.build(options(tmp_path, "hf"))


@pytest.mark.parametrize("form", ["array", "lines"])
def test_imdb_from_a_file_of_the_seed(loopback: LoopbackHub, in_dir: Path, form: str) -> None:
    items = [{"text": ["A", "fine", "film"], "label": 1}, {"text": ["A", "dull", "one"], "label": 0}]
    lines = "\n".join(json.dumps(item) for item in items)
    (in_dir / "imdb_train.json").write_text(json.dumps(items) if form == "array" else lines)
    source = hf.build(options(in_dir, "imdb"))
    assert list(source.documents()) == ["A fine film", "A dull one"]
    assert loopback.asked == []
    before = source.fingerprint()
    (in_dir / "imdb_train.json").write_text(json.dumps(items[:1]))
    assert hf.build(options(in_dir, "imdb")).fingerprint() != before


def test_imdb_from_the_hub(loopback: LoopbackHub, in_dir: Path) -> None:
    corpora.add_imdb(loopback)
    assert len(list(hf.build(options(in_dir, "imdb")).documents())) == 12


def streamed(root: Path, name: str, parts: str = "parts") -> hf.HfSource:
    source = hf.build(options(root, name, streaming=True))
    source.fetch_to(root / parts)
    return source


@pytest.mark.parametrize("name", ["wikitext", "c4", "rajpurkar/squad", "hf"])
def test_a_stream_has_the_documents_of_the_download(loopback: LoopbackHub, tmp_path: Path, name: str) -> None:
    corpora.add_mixture(loopback)
    corpora.add_c4(loopback, documents=5)
    fetched, whole = streamed(tmp_path, name), hf.build(options(tmp_path, name))
    assert list(fetched.documents()) == list(whole.documents())
    assert fetched.fingerprint() == whole.fingerprint()


def test_a_stream_fetches_only_what_is_asked_for(
    loopback: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 1 << 16)
    rows = [random.Random(n).randbytes(1200).hex() for n in range(2000)]
    table = parquet({"text": rows, "other": [row[::-1] for row in rows]}, group_rows=50)
    lines = "\n".join(json.dumps({"text": row}) for row in rows)
    loopback.add("acme/wide", {"train.parquet": table})
    loopback.add("acme/long", {"train.jsonl": lines})
    for name, size in (("acme/wide", len(table)), ("acme/long", len(lines))):
        source = streamed(tmp_path, name)
        loopback.forget()
        assert list(islice(source.documents(), 3)) == rows[:3]
        assert loopback.sent_bytes < size // 4, name
        assert all(asked.range for asked in loopback.asked if asked.method == "GET")
        assert len(loopback.asked) < 40
        assert list(source.documents()) == rows
    whole = hf.build(options(tmp_path, "acme/wide"))  # the control: without streaming the file is fetched
    loopback.forget()
    next(whole.documents())
    assert loopback.sent_bytes >= len(table)


def test_what_was_fetched_is_not_fetched_again(
    loopback: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever comes next, after a kill too; a block that is torn or altered is no block."""
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 1 << 14)
    rows = [random.Random(n).randbytes(1200).hex() for n in range(200)]
    loopback.add("acme/long", {"train.jsonl": "\n".join(json.dumps({"text": row}) for row in rows)})
    assert list(islice(streamed(tmp_path, "acme/long").documents(), 50)) == rows[:50]
    before = loopback.sent_bytes
    assert list(islice(streamed(tmp_path, "acme/long").documents(), 50)) == rows[:50]
    assert loopback.sent_bytes == before
    first, second, third, *_ = sorted(file for file in (tmp_path / "parts").rglob("*") if file.is_file())
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"!" + second.read_bytes()[1:])
    third.rename(third.with_suffix(".tmp"))  # as a kill leaves it
    assert list(islice(streamed(tmp_path, "acme/long").documents(), 50)) == rows[:50]
    assert loopback.sent_bytes == before + 3 * remote_file.BLOCK_BYTES
    assert list(streamed(tmp_path, "acme/long").documents()) == rows
    (repo,) = loopback.repos.values()
    (files,) = repo.commits.values()
    assert loopback.sent_bytes < len(files["train.jsonl"]) + 3 * remote_file.BLOCK_BYTES + 10_000, "and listings"


def test_a_hub_that_serves_no_parts_cannot_be_streamed(loopback: LoopbackHub, tmp_path: Path) -> None:
    loopback.add("acme/notes", {"train.jsonl": json.dumps({"text": "x"})})
    source = streamed(tmp_path, "acme/notes")
    loopback.fail("acme/notes", Fault("deaf"))
    with pytest.raises(NotFoundError, match="does not serve parts of files"):
        list(source.documents())


def test_a_broken_stream_is_taken_up_again(loopback: LoopbackHub, tmp_path: Path) -> None:
    loopback.add("acme/notes", {"train.jsonl": json.dumps({"text": "x" * 5000})})
    source = streamed(tmp_path, "acme/notes")
    loopback.fail("acme/notes", Fault("half", times=1))
    assert list(source.documents()) == ["x" * 5000]
    loopback.fail("acme/notes", Fault("half"))
    with pytest.raises(NotFoundError, match="RemoteProtocolError"):
        list(streamed(tmp_path, "acme/notes", "elsewhere").documents())


def test_one_long_text_is_many_documents(loopback: LoopbackHub, tmp_path: Path) -> None:
    whole = "".join(f"{text(n)}\n\n" for n in range(100))
    loopback.add("acme/plays", {"input.txt": whole})
    documents = list(hf.build(options(tmp_path, "acme/plays")).documents())
    assert len(documents) >= 40
    assert "".join(str(document) for document in documents) == whole


def test_a_dataset_of_something_else(loopback: LoopbackHub, tmp_path: Path) -> None:
    loopback.add("acme/pictures", {"a.png": b"\x89PNG", "b.png": b"\x89PNG"})
    with pytest.raises(NotFoundError, match=r"no text that can be read: its files are \.png"):
        hf.build(options(tmp_path, "acme/pictures"))
    loopback.add("acme/empty", {"README.md": "# nothing"})
    with pytest.raises(NotFoundError, match="has no data files"):
        hf.build(options(tmp_path, "acme/empty"))


def test_the_program_of_a_dataset_is_not_run(loopback: LoopbackHub, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    evil = f"import pathlib; pathlib.Path({str(touched)!r}).touch()"
    loopback.add("acme/scripted", {"scripted.py": evil, "data.jsonl": json.dumps({"text": "x"})})
    with pytest.raises(
        NotFoundError, match=r"is a program \(scripted.py\), and code of a dataset is never run"
    ) as caught:
        hf.build(options(tmp_path, "acme/scripted"))
    assert "refs/convert/parquet" in caught.value.hint
    assert not touched.exists()
    assert loopback.fetched("acme/scripted") == []


@pytest.mark.parametrize("path", ["/etc/*", "../*", "https://example.org/x.jsonl", "hf://datasets/a/b/x.jsonl", "~/*"])
def test_a_card_cannot_name_files_elsewhere(loopback: LoopbackHub, tmp_path: Path, path: str) -> None:
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {json.dumps(path)}\n---\n"
    loopback.add("acme/sly", {"README.md": card, "x.jsonl": "{}"})
    with pytest.raises(Exception, match="names files outside of it") as caught:
        hf.build(options(tmp_path, "acme/sly"))
    assert caught.value.exit_code == ExitCode.DATA


def test_whether_wikitext_can_be_had(loopback: LoopbackHub, tmp_path: Path) -> None:
    assert "has no dataset 'Salesforce/wikitext'" in hf.reachable(options(tmp_path, "auto"))
    corpora.add_wikitext(loopback)
    assert hf.reachable(options(tmp_path, "auto")) == ""
    loopback.stop()
    assert "Connection refused" in hf.reachable(options(tmp_path, "auto"))
