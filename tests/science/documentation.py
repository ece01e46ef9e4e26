"""Several megabytes of English that every machine has: the documentation inside the installed Python files."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 200  # characters of a document


def documents() -> Iterator[str]:
    """The docstrings of each Python file as one document, in a fixed order; each only once."""
    seen: set[str] = set()
    for place in ("stdlib", "purelib"):
        for file in sorted(Path(sysconfig.get_paths()[place]).rglob("*.py")):
            if place == "stdlib" and "site-packages" in file.parts:  # of the base installation: thousands of files
                continue
            text = "\n\n".join(_docstrings(file))
            if len(text) >= SHORTEST and text not in seen:
                seen.add(text)
                yield text


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):  # a file that is meant to be broken
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def write(path: Path, megabytes: float) -> int:
    """So much of it as lines of JSON; returns how many characters there are."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in documents():
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size >= megabytes * 1e6:
                break
    return size
