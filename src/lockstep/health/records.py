"""Fingerprints on disk: one JSON object a line, each with its own checksum. Torch-free.

A line whose checksum does not fit was damaged on its way: that blames nobody.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "fingerprint.jsonl"
DIGITS = 32  # of the digest of one tensor: two sums of 64 bits, in hex
CHECKSUM_DIGITS = 16


@dataclass(frozen=True)
class Stamp:
    """One step of one workload on one card. `sums`: DIGITS hex digits for each tensor, in the order of the names."""

    step: int
    loss: str = ""  # float.hex()
    norm: str = ""
    sums: str = ""
    seconds: float = 0.0

    def sum_of(self, place: int) -> str:
        return self.sums[place * DIGITS : (place + 1) * DIGITS]

    @property
    def bits(self) -> tuple[str, str, str]:
        """All that must be equal on every card."""
        return self.loss, self.norm, self.sums


def first_tensor(wrong: Stamp, right: Stamp, tensors: Sequence[str]) -> str:
    """The first tensor whose digest differs; "loss" or "norm" where none does, "" where the stamps are equal."""
    for place, name in enumerate(tensors):
        if wrong.sum_of(place) != right.sum_of(place):
            return name
    return "loss" if wrong.loss != right.loss else "norm" if wrong.norm != right.norm else ""


def chain_offset(step: int) -> int:
    """Where the sums of a step lie in the chain: far from those of every other step."""
    return (step + 1) << 32


def chain_of(stamps: Iterable[Stamp]) -> str:
    """What the chain on the device (prints.Prints.chain) must be if it had the sums that these stamps have."""
    import numpy as np

    from lockstep.runtime.splitmix import splitmix64

    plain = keyed = 0
    for stamp in stamps:
        x = np.frombuffer(bytes.fromhex(stamp.sums), dtype=">u8").astype(np.uint64)
        places = np.arange(len(x), dtype=np.uint64) + np.uint64(chain_offset(stamp.step))
        plain += int(x.sum(dtype=np.uint64))
        keyed += int((x * (splitmix64(places) | np.uint64(1))).sum(dtype=np.uint64))
    return f"{plain % (1 << 64):016x}{keyed % (1 << 64):016x}"


def line(kind: str, **content: Any) -> str:
    """One line of a record, with its checksum."""
    text = json.dumps({"kind": kind, **content}, allow_nan=False, sort_keys=True)
    return json.dumps({"sum": checksum(text), "line": text})


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:CHECKSUM_DIGITS]


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(number, content) of each whole line; None: it is damaged. A line that is still being written is left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, piece in enumerate(file):
            if piece.endswith(b"\n"):
                yield number, content_of(piece)


def content_of(piece: bytes) -> dict[str, Any] | None:
    try:
        outer = json.loads(piece)
        text = outer["line"]
        if outer["sum"] != checksum(text):
            return None
        content = json.loads(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
