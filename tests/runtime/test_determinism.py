"""Same seed, same bits: golden numbers of the keyed seeds, and what --deterministic switches."""

from __future__ import annotations

import itertools
import os
import types

import pytest
import torch

from lockstep.runtime import determinism
from lockstep.runtime.determinism import label, mix, mode, reseed

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_mix_is_splitmix64() -> None:
    """The first output of the published generator for seed 0; then our own, which saved runs depend on."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(42, 0, 0) == 0x6310BF04D8207F46
    assert mix(42, 7, 3) == 0x7017364A7F5E7A5E
    assert mix() == 0
    assert mix(-1) == mix((1 << 64) - 1)


def test_different_words_differ() -> None:
    near = [mix(*words) for words in itertools.product(range(8), repeat=3)]
    assert len(set(near)) == 8**3
    assert len({mix(0), mix(0, 0), mix(0, 0, 0)}) == 3
    ones = [(a ^ b).bit_count() for a, b in itertools.pairwise(near)]
    assert 28 < sum(ones) / len(ones) < 36, "half of the 64 bits change between neighbours"
    weak = [sum(words) for words in itertools.product(range(8), repeat=3)]
    assert len(set(weak)) < 8**3, "what adding the words would do"


def test_reseeding_forgets_history() -> None:
    draws = []
    for warm_up in (0, 5):
        torch.rand(warm_up)
        reseed(CPU, 42, 3, 1)
        draws.append(torch.rand(4).tolist())
    assert draws[0] == draws[1]
    assert [value.hex() for value in draws[0]] == [
        "0x1.ebb1600000000p-5",
        "0x1.2c699e0000000p-1",
        "0x1.05bc140000000p-1",
        "0x1.20c84a0000000p-1",
    ]
    reseed(CPU, 42, 3, 2)
    assert torch.rand(4).tolist() != draws[0]


def test_a_gpu_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[int, int] = {}
    fakes = [
        types.SimpleNamespace(manual_seed=lambda seed, index=index: seeds.update({index: seed})) for index in (0, 1)
    ]
    monkeypatch.setattr(torch.cuda, "default_generators", fakes)
    reseed(torch.device("cuda", 1), 42, 0)
    assert seeds == {1: mix(42, 0)}


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What torch was told about deterministic kernels, without telling it."""
    told: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    monkeypatch.setattr(determinism, "_make_inductor_deterministic", lambda _: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be taken away again")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    return told


def test_deterministic_allows_only_kernels_that_repeat_their_bits(switched: list[bool]) -> None:
    with mode(GPU, deterministic=True, threads=1):
        assert switched == [True]
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cudnn.benchmark
    assert switched == [True, False], "and gives back what was"


@pytest.mark.parametrize(("device", "deterministic"), [(GPU, False), (CPU, True)])
def test_otherwise_nothing_is_switched(switched: list[bool], device: torch.device, deterministic: bool) -> None:
    with mode(device, deterministic=deterministic, threads=1):
        assert switched == []
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        assert torch.backends.cudnn.benchmark


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    with mode(CPU, deterministic=False, threads=2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with mode(CPU, deterministic=False, threads=0):
        assert torch.get_num_threads() == 3
    for nonsense in ("0", "many", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
        assert determinism.default_threads() == len(os.sched_getaffinity(0))


def test_the_banner_promises_no_more_than_holds() -> None:
    assert "bit-reproducible on this kind of CPU" in label(CPU, deterministic=False)
    assert label(GPU, deterministic=True) == "bit-reproducible on this kind of GPU"
    assert label(GPU, deterministic=False).startswith("not bit-reproducible")
