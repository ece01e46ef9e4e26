"""The corpus built into Python: enough of it, clean, the same every time, and robust."""

from __future__ import annotations

import re
import sys
from itertools import islice
from pathlib import Path

import pytest

from lockstep.sources import builtin
from lockstep.sources.builtin import BuiltinSource, clean, comments, docstrings


@pytest.fixture(scope="module")
def corpus() -> BuiltinSource:
    return BuiltinSource()


def test_enough_text(corpus: BuiltinSource) -> None:
    documents = list(corpus.documents())
    again = list(islice(builtin._documents(corpus.root), 300))
    assert again == documents[: len(again)], "the same at any time"
    assert sum(map(len, documents)) > 2_000_000
    assert len(documents) > 300
    assert max(map(len, documents)) < 2 * builtin.DOCUMENT_CHARACTERS


def test_text_is_clean_and_not_repeated(corpus: BuiltinSource) -> None:
    documents = list(corpus.documents())
    whole = "\n\n".join(documents)
    assert not re.search(r"[^\n\x20-\x7e\xa0-\U0010ffff]|[ ]\n|\n\n\n|^={4,}$|:class:`", whole, re.MULTILINE)
    paragraphs = [part for part in whole.split("\n\n") if len(part) >= builtin.REPEATABLE_CHARACTERS]
    assert len(set(paragraphs)) == len(paragraphs)
    assert "\njson.dumps\n\nSerialize obj to a JSON formatted str" in whole
    letters = sum(character.isalpha() or character.isspace() for character in whole)
    assert letters > 0.8 * len(whole)


def test_nothing_of_other_people_or_of_tests(corpus: BuiltinSource) -> None:
    modules = [module for module, _, _ in builtin.library_files(corpus.root)]
    assert modules == sorted(modules)
    assert len(modules) > 200
    assert "json" in modules
    assert not [name for name in modules if {"site-packages", "test", "idlelib", "lib2to3"} & set(name.split("."))]


def test_the_fingerprint_reads_no_file_and_follows_them(
    corpus: BuiltinSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda *_, **__: pytest.fail("a file was read"))
        patch.setattr("io.open", lambda *_, **__: pytest.fail("a file was read"))
        first = corpus.fingerprint()
    assert first == BuiltinSource().fingerprint()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text('"""A docstring about something."""\n', encoding="utf-8")
    before = BuiltinSource(tmp_path / "lib").fingerprint()
    (tmp_path / "lib" / "b.py").write_text('"""Another docstring."""\n', encoding="utf-8")
    assert len({str(item) for item in (first, before, BuiltinSource(tmp_path / "lib").fingerprint())}) == 3


def library(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    for name in names:
        text = f'"""The module {name} has a documentation that is long enough to keep."""\n'
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def test_the_order_is_not_that_of_the_disk(tmp_path: Path) -> None:
    names = ["b", "a", "d", "c"]
    one, other = library(tmp_path / "one", names), library(tmp_path / "other", sorted(names))
    assert list(BuiltinSource(one).documents()) == list(BuiltinSource(other).documents())


def test_what_cannot_be_parsed_is_left_out(tmp_path: Path) -> None:
    root = library(tmp_path / "lib", ["good"])
    (root / "bad_syntax.py").write_text("def :\n", encoding="utf-8")
    (root / "bad_bytes.py").write_bytes(b'"""\xff\xfe"""')
    (root / "nul.py").write_bytes(b"\x00\x00")
    (root / "deep.py").write_text("(" * 5000 + ")" * 5000, encoding="utf-8")
    (root / "gone.py").symlink_to(tmp_path / "nowhere")
    (root / "escape.py").write_text(
        '"""An old escape \\d in a docstring that is long enough to keep."""\n', encoding="utf-8"
    )
    documents = list(BuiltinSource(root).documents())
    assert [document.split("\n")[0] for document in documents if document.startswith(("good", "escape"))] == [
        "escape",
        "good",
    ]


def test_without_sources_the_topics_remain(tmp_path: Path) -> None:
    documents = list(BuiltinSource(tmp_path / "nothing").documents())
    assert sum(map(len, documents)) > 300_000


def test_without_topics_the_sources_remain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert len(list(BuiltinSource(library(tmp_path / "lib", ["one", "two"])).documents())) == 2
    assert list(BuiltinSource(tmp_path / "nothing").documents()) == []


def test_cleaning() -> None:
    text = "Title\n*****\n\n\n\nSee :class:`~a.B` and ``code``.\t\x0cEnd   \n====\n"
    assert clean(text) == "Title\n\nSee a.B and code. End"


def test_docstrings_in_order_of_the_source() -> None:
    source = '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        """F."""\n\nasync def g():\n    """G."""\n'
    assert list(docstrings(source, "m")) == [("m", "M."), ("m.A", "A."), ("m.A.f", "F."), ("m.g", "G.")]


def test_comments_are_prose_of_three_lines() -> None:
    prose = "# This is a comment that explains\n# why the code below is\n# the way it is.\n"
    code = "# x = [1, 2, 3]\n# y = {4: 5}\n# z = f(x)[y] % 7\n"
    assert list(comments(f"x = 1\n{prose}y = 2\n# short\n{code}")) == [prose.replace("# ", "")]
