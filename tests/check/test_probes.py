"""Probes on the CPU: right memory is silent, a flipped bit is named, kernels repeat their bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lockstep.check import probes
from lockstep.check.probes import PATTERN, Pattern
from lockstep.check.records import Work, Workload
from lockstep.health.records import first_tensor
from lockstep.runtime import faults
from tests.check.tiny import SMALL, done

CPU = torch.device("cpu")
MEMORY = Workload("memory", kind="memory", settings=SMALL, steps=4, batches=2, pattern_bytes=3 << 20)
SIZES = {"rows": 1, "heads": 4, "kv_heads": 2, "length": 96, "width": 32, "backend": "native_flash"}
ATTENTION = Workload("attention_probe", kind="attention_probe", settings=SIZES, steps=3)
FP8 = Workload("fp8_probe", kind="fp8_probe", settings={"rows": 64, "inner": 128, "columns": 96}, steps=3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probes.CHUNK_WORDS, "cpu", 1 << 10)


def only(folder: Path, workload: Workload, **more: str) -> Work:
    [work] = done(folder, workload, **more).works
    return work


@pytest.mark.usefixtures("small")
def test_right_memory_is_silent_in_both_polarities() -> None:
    pattern = Pattern(CPU, 5 * 8 << 10)
    assert len(pattern.chunks) == 5
    assert pattern.size_bytes == 5 * 8 << 10
    first = pattern.chunks[3].clone()
    assert [pattern.look() for _ in range(4)] == [([0, 0], [])] * 4
    assert torch.equal(pattern.chunks[3], first), "turned an even number of times"
    assert len({int(chunk[0]) for chunk in pattern.chunks}) == 5, "no two chunks are alike: wrong addresses are seen"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("looks", [0, 1])
@pytest.mark.parametrize("bit", [0, 31, 63])
def test_a_flipped_bit_is_seen_with_its_place(looks: int, bit: int) -> None:
    pattern = Pattern(CPU, 4 * 8 << 10)
    for _ in range(looks):
        pattern.look()
    faults.flip(pattern.chunks[2], 77, bits=1 << bit)
    folded, found = pattern.look()
    assert folded != [0, 0]
    [word] = found
    assert word["word"] == 2 * 1024 + 77
    assert int(word["right"], 16) ^ int(word["wrong"], 16) == 1 << bit
    assert pattern.look()[1], "it stays wrong"


@pytest.mark.usefixtures("small")
def test_two_opposite_flips_at_one_place_do_not_cancel() -> None:
    pattern = Pattern(CPU, 4 * 8 << 10)
    pattern.chunks[0][5] += 8
    pattern.chunks[1][5] -= 8
    folded, found = pattern.look()
    assert folded[1] != 0
    assert [word["word"] for word in found] == [5, 1024 + 5]


def test_memory_beside_training(tmp_path: Path) -> None:
    right = only(tmp_path / "a", MEMORY)
    wrong = only(tmp_path / "b", MEMORY, fault=f"flip_weight@step=2,tensor={PATTERN},index=9,bit=40")
    assert right.tensors[-1] == PATTERN
    assert all(stamp.sum_of(len(right.tensors) - 1) == "0" * 32 for stamp in right.stamps)
    assert right.facts["wrong_words"] == []
    assert right.facts["pattern_bytes"] == 3 << 20
    assert [one.bits == other.bits for one, other in zip(right.stamps, wrong.stamps, strict=True)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert first_tensor(wrong.stamps[2], right.stamps[2], right.tensors) == PATTERN
    assert wrong.facts["wrong_words"][0]["word"] == 9
    assert wrong.facts["wrong_words"][0]["step"] == 2
    assert len(wrong.facts["wrong_words"]) == 2


def test_a_flip_in_the_model_beside_the_pattern_is_the_models(tmp_path: Path) -> None:
    right = only(tmp_path / "a", MEMORY)
    wrong = only(tmp_path / "b", MEMORY, fault="flip_weight@step=2,tensor=layers.0.mlp.w1.weight,bit=3")
    assert first_tensor(wrong.stamps[2], right.stamps[2], right.tensors) == "weights:layers.0.mlp.w1.weight"
    assert wrong.facts["wrong_words"] == []


@pytest.mark.parametrize(("workload", "names"), [(ATTENTION, ("forward", "dk", "dv")), (FP8, ("product",))])
def test_a_kernel_repeats_its_bits(tmp_path: Path, workload: Workload, names: tuple[str, ...]) -> None:
    one, other = only(tmp_path / "a", workload), only(tmp_path / "b", workload)
    assert one.tensors == names
    assert len(one.stamps) == 3
    assert {stamp.bits for stamp in one.stamps} == {other.stamps[0].bits}
    assert set(one.dtypes) == {"bfloat16"}


@pytest.mark.parametrize(("workload", "name"), [(ATTENTION, "dk"), (FP8, "product")])
def test_a_flip_in_an_output_is_named(tmp_path: Path, workload: Workload, name: str) -> None:
    right = only(tmp_path / "a", workload)
    wrong = only(tmp_path / "b", workload, fault=f"flip_weight@step=1,tensor={name},index=3,bit=0")
    assert [one.bits == other.bits for one, other in zip(right.stamps, wrong.stamps, strict=True)] == [
        True, False, True,
    ]  # fmt: skip
    assert first_tensor(wrong.stamps[1], right.stamps[1], right.tensors) == name


def test_what_a_card_cannot_do_is_said(tmp_path: Path) -> None:
    plain = dataclasses.replace(ATTENTION, settings={key: SIZES[key] for key in SIZES if key != "backend"})
    work = only(tmp_path, plain)
    assert work.complete
    assert not work.stamps
    assert "CUDA" in work.facts["skipped"]
