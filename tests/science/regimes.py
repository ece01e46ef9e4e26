"""Texts with a hidden structure: a Markov chain of regimes, each with words of its own, and a label nobody has seen.

At each word the regime stays, or another is drawn; a word is drawn uniformly from those of the regime. All words are
equally frequent, and which words belong together is nowhere written: it can be learnt from texts alone, as they stand
beside each other. The label of a text is whether it was mostly in regimes of odd number.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

REGIMES, WORDS, LENGTH, STAYS = 6, 300, 30, 0.95


def texts(count: int, seed: int) -> list[tuple[str, int]]:
    """(text, label)."""
    drawn = random.Random(seed)
    found: list[tuple[str, int]] = []
    for _ in range(count):
        regime, odd = drawn.randrange(REGIMES), 0
        words: list[str] = []
        for _ in range(LENGTH):
            if drawn.random() > STAYS:
                regime = drawn.randrange(REGIMES)
            odd += 1 if regime % 2 else -1
            words.append(f"w{REGIMES * drawn.randrange(WORDS // REGIMES) + regime}")
        found.append((" ".join(words), int(odd > 0)))
    return found


def write(path: Path, pairs: list[tuple[str, int]], *, shuffled: bool = False) -> Path:
    """Lines of JSON with a text and a label; `shuffled`: with the labels of other texts."""
    labels = [label for _, label in pairs]
    if shuffled:
        random.Random(3).shuffle(labels)
    lines = (json.dumps({"text": text, "label": label}) for (text, _), label in zip(pairs, labels, strict=True))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
