"""Fingerprints on a real GPU: the kernel gives the bits of the plain way, waits for nothing, and sees every flip.

On a machine without pytest-timeout: pytest -c /dev/null --rootdir=. tests/gpu
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lockstep.health import fingerprint
from lockstep.health.fingerprint import INTEGERS, digest_tensor, digest_tensors
from lockstep.health.prints import Prints, as_hex
from lockstep.health.records import Stamp, chain_of, first_tensor
from lockstep.runtime import faults
from tests.gpu.ready import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]
CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool,
          torch.float8_e4m3fn)  # fmt: skip
LENGTHS = (0, 1, 2, 3, 127, 1023, 1024, 1025, 16383, 16384, 16385, 100_003, (1 << 20) + 1)


def some(length: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(1000 * seed + length)
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(-128, 128, (length * size,), generator=generator, dtype=torch.int8, device=CUDA)
    return bits > 0 if dtype == torch.bool else bits.view(dtype)


def plain(tensors: list[torch.Tensor]) -> list[list[int]]:
    return torch.stack([digest_tensor(tensor) for tensor in tensors]).tolist()


def used_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the launches."""
    from lockstep.kernels import digest as kernel

    launches: list[int] = []
    launch = kernel.add_digests

    def counted(*args: Any) -> None:
        launches.append(1)
        launch(*args)

    monkeypatch.setattr(kernel, "add_digests", counted)
    return launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_the_bits_of_the_plain_way(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = used_kernel(monkeypatch)
    for length in LENGTHS:
        tensors = [some(length, dtype, seed=seed) for seed in range(5)]  # a launch of four and one of one
        assert digest_tensors(tensors).tolist() == plain(tensors), length
        assert digest_tensors(tensors[:3]).tolist() == plain(tensors[:3]), length
    assert len(launches) == 3 * (len(LENGTHS) - 1)
    on_host = [tensor.cpu() for tensor in tensors]
    assert digest_tensors(on_host).tolist() == plain(tensors), "the CPU has the same digests"


def test_any_layout_and_any_alignment() -> None:
    base = some(5000, torch.float32)
    tensors = [base[1:4097], base[3:4099], base.view(50, 100).t(), base.view(50, 100)[:, ::2], base[:1].view(())]
    tensors += [some(5000, torch.bfloat16)[1:4098], some(64, torch.int8)[5:37]]
    assert digest_tensors(tensors).tolist() == plain(tensors)
    assert digest_tensors([base]).tolist() != digest_tensors([base.flip(0)]).tolist()


def test_places_beyond_two_to_the_31() -> None:
    """One tensor with more elements than 32 bits count, and a shard that begins beyond."""
    from lockstep.kernels.digest import add_digests

    large = torch.zeros((1 << 31) + 4097, dtype=torch.int8, device=CUDA)
    large[-3:] = torch.tensor([5, -7, 127], dtype=torch.int8)
    large[12] = 3
    assert digest_tensors([large]).tolist() == plain([large])
    shard, far = some(100_003, torch.float32), (1 << 33) + 5
    sums = torch.zeros(2, dtype=torch.int64, device=CUDA)
    add_digests([shard.view(torch.int32)], [sums], far)
    assert sums.tolist() == digest_tensor(shard, far).tolist() != digest_tensor(shard).tolist()


def test_the_same_sums_every_time() -> None:
    tensors = [some(3_000_001, torch.float32, seed=seed) for seed in range(4)]
    assert len({str(digest_tensors(tensors).tolist()) for _ in range(20)}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    tensor = some(1 << 17, dtype)
    clean, width = digest_tensors([tensor]).tolist(), 8 * tensor.element_size()
    for bit in range(width):
        faults.flip(tensor, 977 * bit, bits=1 << bit)
        assert digest_tensors([tensor]).tolist() != clean, bit
        faults.flip(tensor, 977 * bit, bits=1 << bit)
    assert digest_tensors([tensor]).tolist() == clean


def test_fingerprints_wait_for_nothing_and_name_the_tensor() -> None:
    """torch's own guard raises at any wait; the chain on the device is that of the record on the host."""
    parameters = {f"w{place}": torch.nn.Parameter(some(4099, torch.float32, seed=place)) for place in range(3)}
    moments = {f"exp_avg.{name}": tensor.detach().clone() for name, tensor in parameters.items()}
    for tensor in parameters.values():
        tensor.grad = torch.ones_like(tensor)
    prints = Prints(parameters, moments)
    prints.of_gradients(0)
    prints.of_state(0)  # compiles
    with no_waiting():
        for step in (1, 2):
            if step == 2:
                moments["exp_avg.w1"].view(torch.int32)[17].bitwise_xor_(1)
            prints.of_gradients(step)
            prints.of_state(step)
        with pytest.raises(RuntimeError, match="synchroniz"):
            moments["exp_avg.w1"].sum().item()  # the control
    stamps = [Stamp(taken.step, sums=as_hex(taken.read())) for taken in prints.taken()]
    assert [stamp.step for stamp in stamps] == [0, 1, 2]
    assert stamps[0].sums == stamps[1].sums
    names = [name for name, _ in prints.tensors]
    assert first_tensor(stamps[2], stamps[1], names) == "moments:exp_avg.w1"
    assert chain_of(stamps) == prints.told_chain()


def test_without_triton_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [some(length, torch.float32, seed=length) for length in (5, 5, 1000, (1 << 20) + 3)]
    wanted = digest_tensors(tensors).tolist()
    monkeypatch.setattr(fingerprint, "has_kernel", lambda: False)
    assert digest_tensors(tensors).tolist() == wanted == plain(tensors)
    assert set(INTEGERS) == {1, 2, 4, 8}
