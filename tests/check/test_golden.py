"""The file of known bits: found again by everything that decides bits, and never half written."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep.check import golden
from lockstep.check.records import Card, Replica, Work, Workload
from lockstep.errors import DataError, ExitCode, NotFoundError
from lockstep.health.records import Stamp

VERSIONS = {"torch": "2.11.0", "cuda": "12.8", "numpy": "2.1"}
CARD = Card(0, 0, uuid="GPU-0", model="H200", driver="570")
WORKLOADS = (Workload("production", settings={"model.num_layers": 2, "training.seed": 7}), Workload("memory"))


def stamp(step: int, sums: str = "ab") -> Stamp:
    return Stamp(step, (1.5).hex(), (0.5).hex(), sums, seconds=0.25)


def replica(card: Card = CARD, *, sums: str = "ab", torch: str = "2.11.0") -> Replica:
    work = Work("production", stamps=tuple(stamp(step, sums) for step in range(4)), complete=True)
    return Replica(card, (work, Work("broken", stamps=(stamp(0),))), {**VERSIONS, "torch": torch})


def hashed(workloads: tuple[Workload, ...] = WORKLOADS, **other: Any) -> str:
    told: dict[str, Any] = {"device": "cuda", "threads": 1, "versions": VERSIONS} | other
    return golden.config_hash(workloads, **told)


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    assert golden.open_book(path, "h").of(CARD, VERSIONS) == {}
    assert golden.add(path, "h", [replica()]) == ["H200 | 570 | 2.11.0 | h"]
    known = golden.open_book(path, "h").of(CARD, VERSIONS)
    assert list(known) == ["production"]  # what was not finished is not golden
    assert known["production"].steps == {step: golden.digest(stamp(step)) for step in range(4)}
    assert known["production"].median_seconds == 0.25


@pytest.mark.parametrize(
    ("card", "torch", "config"),
    [(dataclasses.replace(CARD, model="H100"), "2.11.0", "h"), (dataclasses.replace(CARD, driver="580"), "2.11.0", "h"),
     (CARD, "2.12.0", "h"), (CARD, "2.11.0", "other")],
)  # fmt: skip
def test_another_card_driver_torch_or_config_has_no_entry(tmp_path: Path, card: Card, torch: str, config: str) -> None:
    path = tmp_path / "golden.json"
    golden.add(path, "h", [replica()])
    assert golden.open_book(path, config).of(card, {"torch": torch}) == {}
    assert golden.open_book(path, "h").of(dataclasses.replace(CARD, index=5, uuid="GPU-5"), VERSIONS)  # any such card


def test_what_is_there_stays_and_what_is_new_is_added(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    golden.add(path, "h", [replica()])
    before = path.read_bytes()
    assert golden.add(path, "h", [replica(sums="cd")]) == []
    assert path.read_bytes() == before
    assert golden.add(path, "h", [replica(), replica(torch="2.12.0")]) == ["H200 | 570 | 2.12.0 | h"]
    assert len(golden.open_book(path, "h").entries) == 2
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"kind": "other"}', b"\xff\xfe\x00", b"[" * 100_000,
     b'{"kind": "lockstep golden", "format": 1, "entries": {}}', b'{"kind": "lockstep golden", "format": 99}'],
    ids=repr,
)  # fmt: skip
def test_a_foreign_file_is_one_clear_error_and_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "golden.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="golden record") as caught:
        golden.open_book(path, "h")
    assert caught.value.exit_code is ExitCode.DATA
    assert str(path) in str(caught.value)
    with pytest.raises(DataError):
        golden.add(path, "h", [replica()])
    assert path.read_bytes() == content


def test_every_damaged_byte_of_a_value_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    golden.add(path, "h", [replica()])
    document = json.loads(path.read_text())
    [entry] = document["entries"].values()
    entry["workloads"]["production"]["steps"]["2"] = "0" * 32
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="checksum"):
        golden.open_book(path, "h")


def test_a_missing_folder_and_a_folder_in_place_of_a_file_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such folder"):
        golden.open_book(tmp_path / "nowhere" / "golden.json", "h")
    with pytest.raises(DataError, match="not a plain file"):
        golden.open_book(tmp_path, "h")


def test_two_checks_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    versions = [f"2.{minor}.0" for minor in range(12)]
    with ThreadPoolExecutor(6) as pool:
        written = list(pool.map(lambda torch: golden.add(path, "h", [replica(torch=torch)]), versions * 2))
    assert sorted(name for names in written for name in names) == sorted(
        f"H200 | 570 | {each} | h" for each in versions
    )
    assert len(golden.open_book(path, "h").entries) == 12


def test_the_hash_is_of_everything_that_decides_bits_and_of_nothing_else() -> None:
    first = WORKLOADS[0]
    assert hashed() == hashed()
    turned = dataclasses.replace(first, settings=dict(reversed(list(first.settings.items()))))
    assert hashed((turned, WORKLOADS[1])) == hashed()  # the order of keys means nothing
    assert hashed(versions={**VERSIONS, "numpy": "9"}) == hashed()
    assert hashed(threads=4) == hashed()
    others = [
        hashed((first,)),
        hashed((dataclasses.replace(first, steps=21), WORKLOADS[1])),
        hashed((dataclasses.replace(first, settings={**first.settings, "training.seed": 8}), WORKLOADS[1])),
        hashed(versions={**VERSIONS, "torch": "2.12"}),
        hashed(device="cpu"),
        hashed(device="cpu", threads=4),
    ]
    assert len({hashed(), *others}) == 1 + len(others)


def test_the_digest_of_a_step_is_of_all_its_bits() -> None:
    one = stamp(3)
    changed = [dataclasses.replace(one, **{name: "x"}) for name in ("loss", "norm", "sums")]
    assert len({golden.digest(each) for each in (one, *changed)}) == 4
    assert golden.digest(dataclasses.replace(one, seconds=9.0)) == golden.digest(one)
