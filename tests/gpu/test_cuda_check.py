"""Replicas of `lockstep check` on a real GPU: equal bits with the production kernels, a flip that is named.

Several processes share the one card, each with a cap on its memory. LOCKSTEP_CHECK_ON_CPU=1 runs every line on the CPU
with small sizes. What is worth reading goes to $OUT, if it is set.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from lockstep.check import probes, records, verdict
from lockstep.check.errand import FILE, Errand
from lockstep.check.records import Card, Replica, Work, Workload
from lockstep.check.workloads import GIB, MADE, prepare_all, workloads
from lockstep.health.records import chain_of, first_tensor
from lockstep.launch.watchdog import slow_ones
from tests.check import tiny

ON_CPU = bool(os.environ.get("LOCKSTEP_CHECK_ON_CPU"))
DEVICE = "cpu" if ON_CPU else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
SHORT = {"model.num_layers": 2, "training.context_length": 2048, "training.batch_size": 1, "training.precision": "bf16"}
FULL = {**SHORT, "model.num_layers": 4, "training.context_length": 8192}
SMALL = {"training.batch_size": 2, "training.context_length": 32, "training.precision": "bf16", **MADE}
BACKENDS = {"native_flash": "native_flash"} if ON_CPU else {"auto": "flex", "native_flash": "native_flash"}
FLIPPED = tiny.GRADIENT if ON_CPU else "layers.1.mlp.w2.weight"
SECONDS = 540


def workload(settings: dict[str, object], steps: int, backend: str = "auto") -> Workload:
    chosen = dict(SMALL if ON_CPU else settings) | {"model.attention_backend": backend}
    return Workload("production", preset="tiny" if ON_CPU else "production", settings=chosen, steps=steps)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture
def together(tmp_path: Path, rows: Path) -> Callable[..., list[Replica]]:
    """So many replicas at the same time, each a process."""

    def run(count: int, chosen: Sequence[Workload], memory: int = 0, fault: str = "") -> list[Replica]:
        prepare_all(chosen, rows)
        processes: list[tuple[Errand, subprocess.Popen[str]]] = []
        for index in range(count):
            folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            own = Errand(Card(index, index), DEVICE, tuple(chosen), folder, rows, memory_bytes=memory)
            command = [sys.executable, "-m", "lockstep.check.replica", str(own.write(folder / FILE))]
            environ = {**os.environ, "LOCKSTEP_FAULT": fault, "OMP_NUM_THREADS": "1"}
            processes.append((own, subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)))
        told: list[Replica] = []
        try:
            for own, process in processes:
                _, said = process.communicate(timeout=SECONDS)
                told.append(records.read(own.record, own.card, exit_code=process.returncode, error=said[-2000:]))
        finally:
            for _, process in processes:
                process.kill()
        for each in told:
            assert each.exit_code == 0, (each.error, [work.error for work in each.works])
        return told

    return run


def tell(name: str, lines: Sequence[str]) -> None:
    """For who runs this: on the screen, and in $OUT."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if out := os.environ.get("OUT"):
        (Path(out) / f"check-{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def paces(replicas: Sequence[Replica]) -> list[str]:
    return [
        f"replica {each.card.index}, {work.workload}: {len(work.stamps)} steps, "
        f"attention {work.facts.get('attention')}, "
        f"median {1e3 * statistics.median([stamp.seconds for stamp in work.stamps] or [0.0]):.1f} ms, "
        f"{work.facts.get('skipped', '')}"
        for each in replicas
        for work in each.works
    ]


def check_equal(works: Sequence[Work], steps: int) -> None:
    first = works[0]
    for work in works:
        assert work.complete, work.error
        assert [stamp.step for stamp in work.stamps] == list(range(steps))
        for own, other in zip(work.stamps, first.stamps, strict=True):
            assert own.bits == other.bits, (own.step, first_tensor(own, other, first.tensors))


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_four_replicas_of_the_production_width_have_equal_bits(
    together: Callable[..., list[Replica]], backend: str
) -> None:
    steps = 5 if ON_CPU else 100
    told = together(4, [workload(SHORT, steps, backend)], 33 * GIB)
    works = [each.works[0] for each in told]
    tell(f"four-{backend}", paces(told))
    check_equal(works, steps)
    assert len({stamp.bits for stamp in works[0].stamps}) == steps
    for work in works:
        assert work.facts["attention"] == BACKENDS[backend]
        assert work.facts["compiled"] is not ON_CPU
        assert work.chain == chain_of(work.stamps)


def test_two_replicas_of_the_full_production_shape_have_equal_bits(together: Callable[..., list[Replica]]) -> None:
    told = together(2, [workload(FULL, 20)], 64 * GIB)
    tell("full", paces(told))
    check_equal([each.works[0] for each in told], 20)


@pytest.mark.parametrize("kind", ["grad", "weight"])
def test_a_flip_in_one_replica_is_at_its_step_and_tensor(together: Callable[..., list[Replica]], kind: str) -> None:
    fault = f"flip_{kind}@rank=1,step=7,tensor={FLIPPED},index=1000,bit=3"
    told = together(3, [workload(SHORT, 10)], 40 * GIB, fault)
    right, wrong, other = (each.works[0] for each in told)
    check_equal([right, other], 10)
    differ = [(own.step, first_tensor(own, good, right.tensors)) for own, good in zip(wrong.stamps, right.stamps,
              strict=True) if own.bits != good.bits]  # fmt: skip
    assert differ[0] == (7, f"{'gradients' if kind == 'grad' else 'weights'}:{FLIPPED}")
    assert wrong.chain == chain_of(wrong.stamps), "the card knows what it has computed, right or wrong"


def test_every_workload_has_equal_bits_on_two_replicas(together: Callable[..., list[Replica]]) -> None:
    chosen = workloads("default", DEVICE, 60 * GIB, (9, 0))
    few = [dataclasses.replace(each, steps=4, pulse_seconds=min(0.1, each.pulse_seconds)) for each in chosen]
    few = [dataclasses.replace(each, pattern_bytes=min(each.pattern_bytes, 8 * GIB)) for each in few]
    told = together(2, few, 66 * GIB)
    tell("every-workload", paces(told))
    for one, other in zip(told[0].works, told[1].works, strict=True):
        if "skipped" not in one.facts:
            check_equal([one, other], 4)
        assert not one.facts.get("wrong_words")


def test_a_flipped_bit_in_the_memory_pattern_is_seen(together: Callable[..., list[Replica]]) -> None:
    [memory] = [each for each in workloads("quick", DEVICE, 60 * GIB, (9, 0)) if each.kind == "memory"]
    memory = dataclasses.replace(memory, steps=3, pattern_bytes=min(memory.pattern_bytes, 16 * GIB))
    told = together(2, [memory], 66 * GIB, fault=f"flip_weight@rank=1,step=1,tensor={probes.PATTERN},index=5,bit=50")
    right, wrong = (each.works[0] for each in told)
    assert right.facts["pattern_bytes"] == memory.pattern_bytes
    assert right.facts["wrong_words"] == []
    assert [one.bits == other.bits for one, other in zip(right.stamps, wrong.stamps, strict=True)] == [
        True, False, False,
    ]  # fmt: skip
    word = wrong.facts["wrong_words"][0]
    assert (word["step"], word["word"]) == (1, 5)
    assert int(word["right"], 16) ^ int(word["wrong"], 16) == 1 << 50


@pytest.mark.skipif(ON_CPU, reason="CPU workers share cores: they are judged by another ratio")
def test_a_card_with_a_delay_is_called_slow_and_no_other(together: Callable[..., list[Replica]]) -> None:
    """Each has the card for itself, one after the other, as if there were many: sharing it is not to count.

    Groups of four are drawn from stretches of 40 steps: three of them clean, in one the host sleeps in each step.
    """
    warm, steps, groups, delays = 10, 40, 100, {"5": 0.05, "10": 0.1, "30": 0.3}
    work = workload({**SHORT, "training.context_length": 4096}, warm + 2 * steps)
    names = ["first", "second", "third", *delays]
    fault = ";".join(f"slow@workload={name},factor={1 + share}" for name, share in delays.items())
    [told] = together(1, [dataclasses.replace(work, name=name) for name in names], fault=fault)
    stretches: dict[str, list[list[float]]] = {}
    for each in told.works:
        seconds = [stamp.seconds for stamp in each.stamps][warm:]
        stretches[each.workload] = [seconds[start : start + steps] for start in range(0, len(seconds), steps)]
    clean = [stretch for name in names[:3] for stretch in stretches[name]]
    chance, named, false = random.Random(9), dict[float, int](), dict[float, int]()
    for share, slow in {0.0: clean, **{delays[name]: stretches[name] for name in delays}}.items():
        named[share] = false[share] = 0
        for _ in range(groups):
            seconds = [chance.choice(slow), *chance.sample(clean, 3)]
            found = slow_ones(dict(enumerate(seconds)), factor=verdict.SLOW_RATIO)
            named[share] += share > 0 and 0 in found
            false[share] += any(share == 0 or card != 0 for card in found)
    medians = [1e3 * statistics.median(stretch) for stretch in clean]
    lines = [f"delay {share:.0%}: named in {named[share]}, another in {false[share]}" for share in named]
    span = f"clean stretches {min(medians):.2f} to {max(medians):.2f} ms; of {groups} groups each:"
    tell("delays", [span, *lines])
    assert max(false.values()) <= groups // 100
    assert named[0.1] == named[0.3] == groups
