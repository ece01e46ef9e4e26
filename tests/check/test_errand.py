"""The errand of a replica: what is written is what is read, and anything else is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.check import errand
from lockstep.check.errand import Dump, Errand
from lockstep.check.records import Card, Workload
from lockstep.errors import DataError

WHOLE = Errand(
    Card(3, 1, node=2, host="h", uuid="GPU-1", serial="7", model="H200", driver="570"),
    "cuda",
    (Workload("production", settings={"model.num_layers": 2, "training.precision": "bf16"}), Workload("memory")),
    Path("a folder/é"),
    Path("data"),
    until=7,
    dump=Dump("production", 7, "gradients:layers.1.w"),
    threads=2,
    memory_bytes=1 << 34,
)


@pytest.mark.parametrize("own", [WHOLE, Errand(Card(0, 0), "cpu", (), Path("f"), Path("d"))])
def test_a_round_trip_changes_nothing(tmp_path: Path, own: Errand) -> None:
    assert errand.read(own.write(tmp_path / errand.FILE)) == own


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"card": 3}', '{"card": {"index": 0, "nose": 1}}', "\x00"])
def test_what_is_no_errand_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "errand.json"
    path.write_text(text)
    with pytest.raises(DataError, match="no errand of a replica") as told:
        errand.read(path)
    assert str(path) in str(told.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the errand"):
        errand.read(tmp_path / "nothing.json")
