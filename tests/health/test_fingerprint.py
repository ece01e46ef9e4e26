"""The digest sees every flip, and plain position weights do not."""

from __future__ import annotations

import random

import pytest
import torch

from lockstep.health import fingerprint
from lockstep.health.fingerprint import combine, digest_model, digest_tensor, keys

INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
WIDTH = {torch.float32: 32, torch.bfloat16: 16}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    width = WIDTH[tensor.dtype]
    mask = -(1 << (width - 1)) if bit == width - 1 else 1 << bit
    tensor.view(-1).view(INTEGER[tensor.dtype])[index] ^= mask


def splitmix64(i: int) -> int:
    """An independent statement of the key, in Python integers."""
    word = (1 << 64) - 1
    z = (i + 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def test_the_sums_are_those_of_the_definition() -> None:
    tensor, offset, word = numbers(7, 3), 1 << 33, (1 << 64) - 1
    bits = tensor.view(-1).view(torch.int32).tolist()
    plain = sum(bits) & word
    keyed = sum((splitmix64(offset + i) | 1) * x for i, x in enumerate(bits)) & word
    assert [value & word for value in digest_tensor(tensor, offset).tolist()] == [plain, keyed]
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_flip_is_seen(dtype: torch.dtype) -> None:
    tensor = numbers(6, 5, dtype=dtype)
    clean = digest_tensor(tensor).tolist()
    for index in (0, 1, 13, 29):
        for bit in range(WIDTH[dtype]):
            flip(tensor, index, bit)
            assert digest_tensor(tensor).tolist() != clean, (index, bit)
            flip(tensor, index, bit)
    assert digest_tensor(tensor).tolist() == clean


def rectangles(count: int) -> tuple[int, int]:
    """How many of `count` random rectangles of equal flips the digest misses, and plain position weights miss."""
    draw, rows, columns = random.Random(7), 24, 16
    tensor = numbers(rows, columns)
    position = torch.arange(1, rows * columns + 1)
    missed = missed_by_position = 0
    clean = digest_tensor(tensor).tolist()
    bits = tensor.view(-1).view(torch.int32)
    for _ in range(count):
        top, bottom = draw.sample(range(rows), 2)
        left, right = draw.sample(range(columns), 2)
        mask = 1 << draw.randrange(31)
        before = bits.clone()
        corners = torch.tensor([row * columns + column for row in (top, bottom) for column in (left, right)])
        bits[corners] ^= mask
        missed += digest_tensor(tensor).tolist() == clean
        change = (bits - before).to(torch.int64)
        missed_by_position += int(change.sum()) == 0 and int((change * position).sum()) == 0
        bits[corners] ^= mask
    return missed, missed_by_position


def test_equal_flips_in_a_rectangle_are_seen() -> None:
    missed, missed_by_position = rectangles(300)
    assert missed == 0
    assert missed_by_position > 10  # the control: about 1 in 8


@pytest.mark.slow
def test_equal_flips_in_ten_thousand_rectangles_are_seen() -> None:
    missed, missed_by_position = rectangles(10_000)
    assert missed == 0
    assert 1_000 < missed_by_position < 1_500


@pytest.mark.parametrize("cuts", [(1,), (4, 5), (3, 7, 8)])
def test_shards_add_up_to_the_whole(cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = numbers(9, 11)
    whole = digest_tensor(tensor)
    shards = torch.tensor_split(tensor, cuts)
    offsets = [0, *(cut * 11 for cut in cuts)]
    total = sum(digest_tensor(shard, offset) for shard, offset in zip(shards, offsets, strict=True))
    assert torch.equal(torch.as_tensor(total), whole)
    assert not torch.equal(torch.as_tensor(sum(digest_tensor(shard) for shard in shards)), whole)  # offsets matter
    monkeypatch.setattr(fingerprint, "CHUNK_ELEMENTS", 7)
    assert torch.equal(digest_tensor(tensor), whole)


def test_digesting_changes_nothing_and_reads_any_layout() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        tensor = numbers(4, 6).to(dtype)
        copy = tensor.clone()
        digest_tensor(tensor)
        assert torch.equal(tensor.view(torch.int8), copy.view(torch.int8))
    tensor = numbers(4, 6)
    assert torch.equal(digest_tensor(tensor.t()), digest_tensor(tensor.t().contiguous()))
    assert digest_tensor(torch.tensor(0.0)).tolist() == [0, 0]
    assert digest_tensor(torch.empty(0)).tolist() == [0, 0]


def test_the_model_digest_depends_on_content_name_dtype_and_shape_only() -> None:
    a, b = numbers(4, 6), numbers(3, seed=1)
    digest = digest_model([("a", a), ("b", b)])
    assert len(digest) == 64
    assert digest_model([("b", b.clone()), ("a", a.clone())]) == digest
    exchanged = a.clone()
    exchanged[0, 0], exchanged[0, 1] = a[0, 1], a[0, 0]
    others = {
        "order of elements": [("a", exchanged), ("b", b)],
        "shape": [("a", a.reshape(6, 4)), ("b", b)],
        "dtype": [("a", a.view(torch.int32)), ("b", b)],
        "name": [("c", a), ("b", b)],
        "exchanged tensors": [("a", b), ("b", a)],
        "missing tensor": [("a", a)],
        "transposed": [("a", a.t()), ("b", b)],
    }
    digests = {name: digest_model(tensors) for name, tensors in others.items()}
    assert digest not in digests.values()
    assert len(set(digests.values())) == len(digests)


def test_shards_combine_to_the_model_digest() -> None:
    a = numbers(8, 5)
    sums = (digest_tensor(a[:3]) + digest_tensor(a[3:], 15)).tolist()
    assert combine([("a", "torch.float32", (8, 5), sums[0], sums[1])]) == digest_model([("a", a)])


def test_keys_are_odd_and_differ() -> None:
    k = keys(0, 4096, device=torch.device("cpu"))
    assert bool((k % 2 != 0).all())
    assert k.unique().numel() == 4096
