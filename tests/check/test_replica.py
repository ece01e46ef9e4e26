"""What a replica does: equal runs have equal stamps, a flipped bit is where it was flipped, and what fails is told."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.check import condition, replica, rounds, training
from lockstep.check.crew import Ending
from lockstep.check.errand import FILE, Dump
from lockstep.check.records import Card, Replica, Work, Workload
from lockstep.check.workloads import prepare_all, workloads
from lockstep.health.fingerprint import digest_tensor
from lockstep.health.prints import as_hex
from lockstep.health.records import chain_of, first_tensor
from tests import fake_smi
from tests.check.tiny import GRADIENT, LLAMA, SMALL, WEIGHT, data, done, errand, run

SHORT = dataclasses.replace(LLAMA, name="short", steps=3)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return only(done(tmp_path_factory.mktemp("clean")))


def only(told: Replica) -> Work:
    [work] = told.works
    return work


def bits(work: Work) -> list[tuple[str, str, str]]:
    return [stamp.bits for stamp in work.stamps]


def differing(work: Work, right: Work) -> list[tuple[int, str]]:
    """(step, first tensor) wherever two records differ."""
    pairs = zip(work.stamps, right.stamps, strict=True)
    return [(own.step, first_tensor(own, other, work.tensors)) for own, other in pairs if own.bits != other.bits]


def test_two_runs_have_equal_stamps(clean: Work, tmp_path: Path) -> None:
    again = done(tmp_path, card=5)
    assert bits(only(again)) == bits(clean)
    assert len(set(bits(clean))) == LLAMA.steps == len(clean.stamps), "steps differ from each other"
    assert clean.complete
    assert not clean.error
    assert clean.tensors[0].startswith("gradients:")
    assert len(clean.tensors) == len(clean.shapes) == len(clean.dtypes) == len(clean.stamps[0].sums) // 32
    assert set(clean.dtypes) == {"float32"}
    assert clean.facts["attention"] == "native_flash"
    assert clean.facts["compiled"] is False
    assert all(stamp.seconds > 0 for stamp in clean.stamps)
    assert again.versions["torch"] == torch.__version__


@pytest.mark.slow
@pytest.mark.parametrize("workload", workloads("default", "cpu"), ids=lambda each: each.name)
def test_two_runs_of_every_workload_have_equal_stamps(workload: Workload, tmp_path: Path) -> None:
    prepare_all([workload], data())
    one, other = (only(done(tmp_path / name, workload)) for name in "ab")
    assert bits(one) == bits(other)
    assert len(set(bits(one))) == workload.steps == len(one.stamps)


def test_two_runs_in_half_precision_have_equal_stamps(tmp_path: Path) -> None:
    workload = Workload("bf16", settings={**SMALL, "training.precision": "bf16"}, steps=2, batches=2)
    one, other = (only(done(tmp_path / name, workload)) for name in "ab")
    assert bits(one) == bits(other)
    assert one.facts["precision"] == "bf16"


@pytest.mark.parametrize(("kind", "tensor", "where"), [("grad", GRADIENT, "gradients"), ("weight", WEIGHT, "weights")])
@pytest.mark.parametrize("bit", [0, 22])
def test_a_flip_is_at_exactly_its_step_and_tensor(
    clean: Work, tmp_path: Path, kind: str, tensor: str, where: str, bit: int
) -> None:
    fault = f"flip_{kind}@rank=1,step=3,tensor={tensor},index=7,bit={bit}"
    wrong = only(done(tmp_path, card=1, fault=fault))
    assert differing(wrong, clean)[0] == (3, f"{where}:{tensor}")
    changed = [name for place, name in enumerate(clean.tensors)
               if wrong.stamps[3].sum_of(place) != clean.stamps[3].sum_of(place)]  # fmt: skip
    assert changed[0] == f"{where}:{tensor}"
    assert [name for name in changed if name.startswith(f"{where}:")] == [f"{where}:{tensor}"]


@pytest.mark.parametrize("fault", [f"flip_grad@rank=2,step=3,tensor={GRADIENT},bit=22",
                                   f"flip_grad@workload=other,step=3,tensor={GRADIENT},bit=22"])  # fmt: skip
def test_a_flip_of_another_card_or_workload_is_not_here(clean: Work, tmp_path: Path, fault: str) -> None:
    assert bits(only(done(tmp_path, card=1, fault=fault))) == bits(clean)


def test_the_device_has_added_up_what_the_record_says(clean: Work) -> None:
    assert clean.chain == chain_of(clean.stamps)
    stamps = list(clean.stamps)
    digit = "0" if stamps[2].sums[-1] != "0" else "1"
    stamps[2] = dataclasses.replace(stamps[2], sums=stamps[2].sums[:-1] + digit)
    assert clean.chain != chain_of(stamps)


def test_a_workload_has_the_same_bits_alone_and_after_others(clean: Work, tmp_path: Path) -> None:
    others = Workload("before", settings={**SMALL, "training.precision": "bf16"}, steps=2, batches=2)
    told = done(tmp_path, others, LLAMA)
    assert [work.workload for work in told.works] == ["before", "llama"]
    assert bits(told.works[1]) == bits(clean)


@pytest.mark.parametrize("fault", ["", f"flip_grad@step=3,tensor={GRADIENT},index=7,bit=20"])
@pytest.mark.parametrize("name", [f"gradients:{GRADIENT}", f"weights:{GRADIENT}", f"moments:exp_avg_sq.{GRADIENT}"])
def test_until_and_dump(clean: Work, tmp_path: Path, name: str, fault: str) -> None:
    own = errand(tmp_path, until=3, dump=Dump("llama", 3, name))
    code, told = run(own, fault)
    assert code == 0
    work = only(told)
    assert [stamp.step for stamp in work.stamps] == [0, 1, 2, 3]
    assert (bits(work) == bits(clean)[:4]) == (not fault)
    kept = load_file(own.dump_file)[name]
    place = work.tensors.index(name)
    assert tuple(kept.shape) == work.shapes[place]
    assert as_hex([digest_tensor(kept).tolist()]) == work.stamps[3].sum_of(place)


def test_the_dump_of_a_flip_differs_in_that_bit_of_that_element(tmp_path: Path) -> None:
    name = f"gradients:{GRADIENT}"
    kept: list[torch.Tensor] = []
    for folder, fault in (("right", ""), ("wrong", f"flip_grad@step=3,tensor={GRADIENT},index=7,bit=20")):
        own = errand(tmp_path / folder, until=3, dump=Dump("llama", 3, name))
        run(own, fault)
        kept.append(load_file(own.dump_file)[name].view(torch.int32).flatten())
    assert torch.nonzero(kept[0] != kept[1]).flatten().tolist() == [7]
    assert int(kept[0][7] ^ kept[1][7]) == 1 << 20


@pytest.mark.parametrize(("fault", "words"), [
    ("nan_loss@step=2", "loss nan, gradient norm"),
    ("inf_grad@step=2", "gradient norm inf"),
    ("oom@step=2", "MemoryError"),
    ("raise@step=2", "injected fault raise"),
])  # fmt: skip
def test_what_fails_is_told_and_the_others_go_on(clean: Work, tmp_path: Path, fault: str, words: str) -> None:
    kind, _, rest = fault.partition("@")
    code, told = run(errand(tmp_path, LLAMA, SHORT), f"{kind}@workload=llama,{rest}")
    bad, good = told.works
    assert code == 1
    assert words in bad.error
    assert not bad.complete
    finite = 2 if kind in ("nan_loss", "inf_grad") else 1  # the step before it was still in flight
    assert bits(bad)[:finite] == bits(clean)[:finite]
    assert len(bad.stamps) == (3 if finite == 2 else 1)
    assert good.complete
    assert len(good.stamps) == SHORT.steps


def test_a_workload_that_cannot_begin_is_told(tmp_path: Path) -> None:
    impossible = dataclasses.replace(SHORT, settings={**SMALL, "model.attention_backend": "cudnn"})
    code, told = run(errand(tmp_path, impossible))
    assert code == 1
    assert "attention_backend cudnn cannot be used" in only(told).error


def test_a_lost_device_ends_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "_free", lambda _: "CUDA error: an illegal memory access was encountered")
    code, told = run(errand(tmp_path, SHORT, LLAMA))
    assert code == 1
    assert told.works[0].complete
    assert told.works[1].workload == "llama"
    assert "the device is lost" in told.works[1].error


def test_fingerprints_at_an_interval(clean: Work, tmp_path: Path) -> None:
    work = only(done(tmp_path, dataclasses.replace(LLAMA, interval=2)))
    assert [bool(stamp.sums) for stamp in work.stamps] == [False, True] * 3
    assert [stamp.sums for stamp in work.stamps[1::2]] == [stamp.sums for stamp in clean.stamps[1::2]]
    assert [stamp.loss for stamp in work.stamps] == [stamp.loss for stamp in clean.stamps]


def test_pauses_change_no_bits_and_are_in_no_steps_time(
    clean: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), sleep(0.05)))
    began = time.perf_counter()
    work = only(done(tmp_path, dataclasses.replace(LLAMA, pulse_seconds=1e-6)))
    assert pauses == [1e-6] * LLAMA.steps
    assert bits(work) == bits(clean)
    assert sum(stamp.seconds for stamp in work.stamps) <= time.perf_counter() - began - 0.05 * LLAMA.steps


def test_a_slow_card_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of the test, which only a pause moves."""
    now = [0.0]

    def tick() -> float:
        now[0] += 1e-3
        return now[0]

    monkeypatch.setattr(training, "own_seconds", tick)
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    plain = only(done(tmp_path / "a", SHORT)).stamps[-1].seconds
    slow = only(done(tmp_path / "b", SHORT, fault="slow@where=loader,factor=3")).stamps[-1].seconds
    assert slow == pytest.approx(3 * plain, rel=0.01)


def test_a_replica_notes_how_its_gpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sampler of training, by its UUID; a last line that was cut short costs nothing."""
    fake_smi.plant(tmp_path / "bin", monkeypatch, [fake_smi.gpu(0), fake_smi.gpu(1) | {"temperature.gpu": 57}])
    own = dataclasses.replace(errand(tmp_path, SHORT), card=Card(1, 1, uuid="GPU-0001"))
    assert replica.run(own) == 0
    with own.samples.open("a") as file:
        file.write('{"time": 12')
    told = rounds._replica(own, Ending(0))
    assert condition.peak_temperature(told) == 57.0
    assert told.samples[0]["time"] > 1.7e9
    assert not errand(tmp_path / "cpu", SHORT).card.uuid, "and a CPU worker has nothing to note"
    assert rounds._replica(errand(tmp_path / "cpu", SHORT), Ending(0)).samples == ()


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = errand(tmp_path, SHORT)
    path = own.write(tmp_path / FILE)
    assert replica.main(["--prepare", str(path)]) == 0
    assert not own.record.exists()
    assert replica.main([str(path)]) == 0
    assert own.record.exists()
    assert replica.main([]) == 2
    assert replica.main([str(tmp_path / "nothing")]) == 65
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 2
    assert "ERRAND.json" in told[0]
    assert "cannot read the errand" in told[1]
