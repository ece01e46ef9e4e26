"""Texts with a label each, from files: what a downstream test is about. Torch-free."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep import formats
from lockstep.errors import DataError, NotFoundError
from lockstep.sources.text import TextSource

if TYPE_CHECKING:
    from lockstep.contracts import Place

WITHOUT_LABELS = ("txt", "npy")  # kinds of files that have no fields
FEWEST_TEXTS = 10
LISTED = 5
LONGEST_SHOWN = 60
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Labelled:
    """Texts and their labels: `labels[i]` is a place in `names`."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    names: tuple[str, ...]
    where: str

    def split(self, seed: int) -> tuple[list[int], list[int]]:
        """(train, test): places of texts. The hash of seed and text decides, so copies of a text are on one side."""
        order = sorted(set(self.texts), key=lambda text: _digest(text, seed))
        test = set(order[: max(1, round(TEST_SHARE * len(order)))])
        sides: tuple[list[int], list[int]] = ([], [])
        for place, text in enumerate(self.texts):
            sides[text in test].append(place)
        self._check(sides)
        return sides

    def _check(self, sides: tuple[list[int], list[int]]) -> None:
        learnt = {self.labels[place] for place in sides[0]}
        if len(learnt) < 2 or not sides[1]:
            counts = Counter(self.names[label] for label in self.labels)
            raise DataError(
                f"too few different texts to split: {_listing(counts)}",
                where=self.where,
                hint="more texts of each label",
            )


def read_labelled(
    pattern: str, *, text_column: str | None = None, label_column: str = "label", at_most: int | None = None
) -> Labelled:
    """The labelled texts of a file, folder or glob; of more than `at_most`, those whose hashes come first."""
    texts = _column(pattern, text_column, flag="--text-column")
    labels = _column(pattern, label_column, flag="--label-column", numbers=True)
    for place, _ in texts.items():
        if place not in labels:
            raise DataError(f"text {place[1]} has no label", where=pattern, hint="leave it out, or give it a label")
    pairs = sorted(((text, labels[place]) for place, text in texts.items()), key=lambda pair: _digest(pair[0], 0))
    pairs = pairs[:at_most]
    counts = Counter(label for _, label in pairs)
    if len(pairs) < FEWEST_TEXTS:
        what = f"{len(pairs)} labelled texts, at least {FEWEST_TEXTS} are needed"
        raise DataError(what, where=pattern, hint="a file of texts and labels, see docs/mlm.md")
    if len(counts) < 2:
        what = f"all {len(pairs)} texts have one label, {next(iter(counts))[:LONGEST_SHOWN]!r}"
        raise DataError(what, where=pattern, hint="texts of at least two labels; --label-column names the field")
    if len(counts) > len(pairs) // 2:
        what = f"{len(counts)} different labels in {len(pairs)} texts: {_listing(counts)}"
        raise DataError(what, where=pattern, hint="--label-column names the field that holds the class")
    names = tuple(sorted(counts))
    number = {name: place for place, name in enumerate(names)}
    return Labelled(tuple(text for text, _ in pairs), tuple(number[label] for _, label in pairs), names, where=pattern)


def _column(pattern: str, column: str | None, *, flag: str, numbers: bool = False) -> dict[Place, str]:
    """One field of every record by its place; records in which it is blank are left out."""
    try:
        source = TextSource(pattern, column=column, numbers=numbers)
    except NotFoundError as error:  # the hint of a text source names a setting of training
        raise NotFoundError(error.what, where=error.where, hint="--labels FILE, FOLDER or 'GLOB'") from None
    for name, file in source.files:
        kind = formats.kind_of(name)
        if kind and kind.name in WITHOUT_LABELS:
            hint = '.jsonl, .json, .csv or .parquet: {"text": "...", "label": "..."}'
            raise DataError(f".{kind.name} files hold no labels", where=str(file), hint=hint)
    try:
        return {place: document for place, document in source.walk() if isinstance(document, str)}
    except DataError as error:
        if "text_column" not in error.hint:
            raise
        raise DataError(error.what, where=error.where, hint=f"{flag} NAME") from None


def _digest(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\n{text}".encode("utf-8", "surrogatepass")).digest()


def _listing(counts: Counter[str]) -> str:
    shown = ", ".join(f"{name[:LONGEST_SHOWN]!r} {count} times" for name, count in counts.most_common(LISTED))
    return shown + (", ..." if len(counts) > LISTED else "")
