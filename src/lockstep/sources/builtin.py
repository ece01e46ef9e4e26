"""The corpus every CPython carries: its documentation topics, and the English in its standard library.

Documents are the topics of `pydoc_data`, then per module its docstrings under their qualified names together with its
longer comments, in the order of names; whatever cannot be read or parsed is left out.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.options import DataOptions

EXTRACTION = 1  # raise it when the text below would come out differently: part of the fingerprint
SKIPPED = frozenset({
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib-dynload", "lib2to3",
    "pydoc_data", "site-packages", "test", "tests", "turtledemo",
})  # fmt: skip
DOCUMENT_CHARACTERS = 16_384  # longer modules become several documents, so that a split by document is fine enough
MIN_TEXT_CHARACTERS = 40  # shorter docstrings say nothing
REPEATABLE_CHARACTERS = 80  # shorter paragraphs may come again

RULER = re.compile(r"^[ \t]*([-=~*^#+\"_.`'])\1{3,}[ \t]*$", re.MULTILINE)
ROLE = re.compile(r":[a-z:]+:`~?([^`]+)`")
LITERAL = re.compile(r"``([^`]+)``")
CONTROL = re.compile(r"[^\n\x20-\x7e\xa0-\U0010ffff]")
COMMENT = re.compile(
    r"(?:^[ \t]*#[^!\n][^\n]*\n|^[ \t]*#\n){3,}", re.MULTILINE
)  # shorter ones are about a line of code
COMMENT_SIGN = re.compile(r"^[ \t]*#+ ?", re.MULTILINE)


def clean(text: str) -> str:
    """Plain paragraphs: no rulers, no reST roles, no control characters, no trailing blanks, one blank line at most."""
    text = CONTROL.sub("", text.expandtabs())
    text = LITERAL.sub(r"\1", ROLE.sub(r"\1", RULER.sub("", text)))
    text = re.sub(r"[ \xa0]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def comments(source: str) -> Iterator[str]:
    """Blocks of whole-line comments, without their signs. Code that was commented out is no text."""
    for block in COMMENT.finditer(source):
        text = COMMENT_SIGN.sub("", block.group())
        if sum(character.isalpha() or character in " \n,.'" for character in text) > 0.9 * len(text):
            yield text


def docstrings(source: str, module: str) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of a module and everything defined in it, in the order of the source."""
    waiting: list[tuple[str, ast.AST]] = [(module, ast.parse(source))]
    while waiting:
        name, node = waiting.pop()
        inside = node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield name, text
        named = [child for child in inside if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
        waiting.extend((f"{name}.{child.name}", child) for child in reversed(named))


def pieces_of_module(path: Path, module: str) -> Iterator[str]:
    """The texts of one source file; none when it cannot be read or parsed."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in somebody else's strings
            documented = list(docstrings(source, module))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for name, text in documented:
        if len(text := clean(text)) >= MIN_TEXT_CHARACTERS:
            yield f"{name}\n\n{text}"
    for text in comments(source):
        if text := clean(text):
            yield text


def topics() -> Iterator[str]:
    """The language reference as `help()` shows it; some distributions leave it out."""
    try:
        from pydoc_data.topics import topics as found
    except ImportError:
        return
    for name in sorted(found):
        yield clean(found[name])


def library_files(root: Path) -> list[tuple[str, Path, int]]:
    """(module name, file, bytes) of the standard library, sorted by name and not by how the disk lists them."""
    found: list[tuple[str, Path, int]] = []
    waiting = [(root, "")]
    while waiting:
        folder, prefix = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if entry.name in SKIPPED or entry.name.startswith(("config-", ".")):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append((Path(entry.path), f"{prefix}{entry.name}."))
            elif entry.name.endswith(".py") and entry.is_file():
                module = (prefix + entry.name[:-3]).removesuffix(".__init__")
                found.append((module, Path(entry.path), entry.stat().st_size))
    return sorted(found)


def unseen(text: str, seen: set[str]) -> list[str]:
    """The paragraphs of a text that were nowhere before; topics quote each other and modules copy docstrings."""
    paragraphs = text.split("\n\n")
    fresh: list[str] = []
    for part in paragraphs:
        if len(part) < REPEATABLE_CHARACTERS or part not in seen:
            fresh.append(part)
            seen.add(part)
    return [] if fresh == paragraphs[:1] != paragraphs else fresh  # a heading alone says nothing


@cache
def corpus(root: Path) -> tuple[str, ...]:
    """All documents, read once in a process."""
    return tuple(_documents(root))


def _documents(root: Path) -> Iterator[str]:
    """Topics and modules, nothing twice, long ones cut between two paragraphs."""
    seen: set[str] = set()
    modules = (list(pieces_of_module(path, module)) for module, path, _ in library_files(root))
    for group in chain(([topic] for topic in topics()), modules):
        document: list[str] = []
        characters = 0
        for paragraph in chain.from_iterable(unseen(text, seen) for text in group):
            if characters + len(paragraph) > DOCUMENT_CHARACTERS and document:
                yield "\n\n".join(document)
                document, characters = [], 0
            document.append(paragraph)
            characters += len(paragraph) + 2
        if characters >= MIN_TEXT_CHARACTERS:
            yield "\n\n".join(document)


class BuiltinSource:
    """About 2.5 MB of English about Python, in some 700 documents."""

    name = "builtin"

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_path("stdlib"))

    def fingerprint(self) -> Mapping[str, Any]:
        """Version, names and sizes: a release of Python fixes its text, and a listing takes a hundredth of reading."""
        listing = hashlib.sha256()
        for module, _, size in library_files(self.root):
            listing.update(f"{module} {size}\n".encode())
        return {
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "listing": listing.hexdigest(),
            "extraction": EXTRACTION,
        }

    def documents(self) -> Iterator[str]:
        return iter(corpus(self.root))


def build(options: DataOptions) -> BuiltinSource:  # noqa: ARG001 - Python's own text has no settings
    return BuiltinSource()
