"""Real text of several kinds, offline: documentation of four packages, to pretrain on and, from other files, to label.

A labelled text is sixteen words of one file, without digits and signs, and without words that name the package: which
kind it is must be told from how its authors write.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch", "transformers", "sympy")
TELLING = re.compile("torch|transformers|sympy|tensor|python")
WORDS, SHORTEST = 16, 200
LABELLED, PRETRAINING_CHARACTERS = 600, 1_200_000  # of each kind
PER_FILE = 4


def write(folder: Path) -> tuple[Path, Path, Path]:
    """Files of texts, of labelled texts, and of the same with shuffled labels; no file of code is in both."""
    drawn = random.Random(5)
    texts: list[str] = []
    labelled: list[tuple[str, str]] = []
    for kind, files in _files():
        known, some = 0, []
        drawn.shuffle(files)
        for number, file in enumerate(files):
            if known >= PRETRAINING_CHARACTERS and len(some) >= LABELLED:
                break
            text = "\n\n".join(_docstrings(file))
            if len(text) < SHORTEST:
                continue
            if number % 2 and known < PRETRAINING_CHARACTERS:
                known += len(text)
                texts.append(text)
            elif not number % 2:
                some += _snippets(text, drawn)
        labelled += [(snippet, kind) for snippet in some[:LABELLED]]
    drawn.shuffle(texts)
    shuffled = [kind for _, kind in labelled]
    drawn.shuffle(shuffled)
    named = {
        "texts": [{"text": text} for text in texts],
        "labels": [{"text": text, "label": kind} for text, kind in labelled],
        "shuffled": [{"text": text, "label": kind} for (text, _), kind in zip(labelled, shuffled, strict=True)],
    }
    paths = tuple(folder / f"{name}.jsonl" for name in named)
    for path, items in zip(paths, named.values(), strict=True):
        path.write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    return paths[0], paths[1], paths[2]


def _files() -> Iterator[tuple[str, list[Path]]]:
    places = {name: Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")}
    own = [path for path in sorted(places["stdlib"].rglob("*.py")) if not {"site-packages", "test"} & set(path.parts)]
    yield "stdlib", own
    for package in PACKAGES:
        yield package, sorted((places["purelib"] / package).rglob("*.py"))


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def _snippets(text: str, drawn: random.Random) -> list[str]:
    words = [word for word in re.findall(r"[a-z]+", text.lower()) if not TELLING.search(word)]
    starts = list(range(0, len(words) - WORDS, WORDS))
    return [" ".join(words[at : at + WORDS]) for at in drawn.sample(starts, min(PER_FILE, len(starts)))]
