"""Which element is wrong: from two digests alone, and from two dumps."""

from __future__ import annotations

import pytest
import torch

from lockstep.check import locate
from lockstep.check.outcome import Difference
from lockstep.check.records import Work
from lockstep.errors import DataError
from lockstep.health.fingerprint import INTEGERS, digest_tensor, keys
from lockstep.health.prints import as_hex
from lockstep.health.records import Stamp
from lockstep.runtime.faults import flip

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)


def digest(tensor: torch.Tensor) -> str:
    return as_hex([digest_tensor(tensor).tolist()])


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def found(right: torch.Tensor, wrong: torch.Tensor) -> locate.Element | None:
    return locate.single(digest(right), digest(wrong), elements=right.numel(), element_bytes=right.element_size())


def test_the_keys_are_those_of_the_fingerprint() -> None:
    for start in (0, 123_456, 2**31 - 5, 2**40):
        here = torch.from_numpy(locate.keys(start, start + 1000).view("int64"))
        assert torch.equal(here, keys(start, start + 1000, device=torch.device("cpu")))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_of_every_type_is_located(dtype: torch.dtype) -> None:
    right = noise(37, 41, dtype=dtype)
    for bit in range(8 * right.element_size()):
        index = (bit * 97 + 13) % right.numel()
        wrong = right.clone()
        flip(wrong, index, bits=1 << bit)
        element = found(right, wrong)
        assert element is not None
        assert element.index == index
        before, after = (int(tensor.view(INTEGERS[right.element_size()]).flatten()[index]) for tensor in (right, wrong))
        assert (element.change - (after - before)) % 2**64 == 0


@pytest.mark.parametrize("mask", [0x80000001, 0xFFFF0000, 0xAAAAAAAA, 0x00F0, 0xFFFFFFFF], ids=hex)
def test_masks_of_many_bits_are_located_whichever_sign_the_change_has(mask: int) -> None:
    signs = set[bool]()
    for seed in range(8):
        right = noise(1000, seed=seed)
        wrong = right.clone()
        flip(wrong, 777, bits=mask)
        element = found(right, wrong)
        assert element is not None
        assert element.index == 777
        signs.add(element.change < 0)
    assert signs == {True, False}  # both were met


def test_the_last_element_of_a_large_tensor_is_located() -> None:
    right = torch.zeros(3_000_001)
    wrong = right.clone()
    flip(wrong, 3_000_000, bits=1 << 30)
    assert found(right, wrong) == locate.Element(3_000_000, 1 << 30)


def test_more_than_one_element_is_not_taken_for_one() -> None:
    right = noise(5000)
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randperm(5000, generator=generator)[:2].tolist()
        wrong = right.clone()
        flip(wrong, a, bits=1 << (seed % 32))
        flip(wrong, b, bits=1 << (seed * 7 % 32))
        assert found(right, wrong) is None


def test_changes_that_cancel_out_and_equal_tensors_name_no_element() -> None:
    right = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    assert found(right, torch.tensor([2, 1, 3, 4], dtype=torch.int32)) is None  # the plain sums are equal
    assert found(right, right.clone()) is None


def test_a_change_wider_than_an_element_is_of_more_than_one() -> None:
    right = torch.zeros(10, dtype=torch.int8)
    word = int(locate.keys(3, 4)[0])
    wrong = as_hex([[300, 300 * word]])  # fits element 3, but no int8 changes by 300
    assert locate.single(digest(right), wrong, elements=10, element_bytes=1) is None
    assert locate.single(digest(right), wrong, elements=10, element_bytes=2) == locate.Element(3, 300)


def test_several_elements_that_fit_name_none() -> None:
    """A flip of the top bit of 64 leaves one bit of the key, and every key is odd."""
    right = torch.zeros(100, dtype=torch.int64)
    wrong = right.clone()
    flip(wrong, 42, bits=1 << 63)
    assert found(right, wrong) is None
    assert found(right[:1], torch.tensor([-(2**63)])) == locate.Element(0, -(2**63))  # one element: it must be that


def test_dumps_are_compared_element_by_element() -> None:
    right = noise(3, 300_000, dtype=torch.bfloat16)
    wrong = right.clone()
    places = [5, 262_143, 262_144, 899_999]
    for place in places:
        flip(wrong, place, bits=1 << 15)
    told = locate.compare(raw(right), raw(wrong), element_bytes=2)
    assert (told.count, list(told.indices)) == (4, places)
    first = int(right.view(torch.int16).flatten()[5]) & 0xFFFF
    assert (told.right[0], told.wrong[0]) == (f"0x{first:04x}", f"0x{first ^ 0x8000:04x}")
    assert locate.compare(raw(right), raw(right), element_bytes=2) == locate.Elements(0)
    with pytest.raises(DataError, match="2 and 4 bytes"):
        locate.compare(b"12", b"1234", element_bytes=2)


def test_only_the_first_of_many_are_shown() -> None:
    told = locate.compare(bytes(4000), b"\1" * 4000, element_bytes=4)
    assert told.count == 1000
    assert told.indices == tuple(range(locate.SHOWN))


def work(tensor: torch.Tensor, *, step: int = 4) -> Work:
    stamp = Stamp(step, sums=digest(torch.zeros(3)) + digest(tensor))
    shapes, dtypes = ((3,), tuple(tensor.shape)), ("float32", str(tensor.dtype))
    return Work("production", ("gradients:a", "gradients:b"), shapes=shapes, dtypes=dtypes, stamps=(stamp,))


DIFFERENCE = Difference("production", 4, "gradients:b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_flip_that_did_not_come_back_is_described_from_the_digests(dtype: torch.dtype) -> None:
    right = noise(7, 5, 3, dtype=dtype)
    wrong = right.clone()
    flip(wrong, 64, bits=1 << 7)
    told = locate.describe(DIFFERENCE, right=work(right), wrong=work(wrong), right_dump=raw(right))
    from_dumps = locate.describe(
        DIFFERENCE, right=work(right), wrong=work(wrong), right_dump=raw(right), wrong_dump=raw(wrong)
    )
    assert told == from_dumps
    assert (told.elements, told.positions) == (1, ((4, 1, 1),))
    assert int(told.right[0], 16) ^ int(told.wrong[0], 16) == 1 << 7


def test_what_cannot_be_told_is_left_open() -> None:
    right = noise(50)
    wrong = noise(50, seed=1)
    told = locate.describe(DIFFERENCE, right=work(right), wrong=work(wrong), right_dump=raw(right))
    assert told == DIFFERENCE  # all 50 differ: the digests do not say how many
    whole = locate.describe(
        DIFFERENCE, right=work(right), wrong=work(wrong), right_dump=raw(right), wrong_dump=raw(wrong)
    )
    assert whole.elements == 50
    flip(moved := right.clone(), 9, bits=4)
    without = locate.describe(DIFFERENCE, right=work(right), wrong=work(moved), right_dump=None)
    assert (without.elements, without.positions, without.right) == (1, ((9,),), ())
    loss = Difference("production", 4, "loss")
    assert locate.describe(loss, right=work(right), wrong=work(wrong), right_dump=None) == loss


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("torch.float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1), ("torch.int64", 8), ("bool", 1), ("uint8", 1)],
)
def test_the_size_of_an_element_is_in_its_type(dtype: str, size: int) -> None:
    assert locate.bytes_of(dtype) == size


def test_unknown_types_and_foreign_dumps_are_one_clear_error(tmp_path) -> None:
    with pytest.raises(DataError, match="complex"):
        locate.bytes_of("complex128")
    (tmp_path / "dump").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="no dump of a tensor"):
        locate.read_dump(tmp_path / "dump")
    with pytest.raises(DataError, match="cannot be read"):
        locate.read_dump(tmp_path / "missing")


def test_a_dump_is_read_whatever_its_type(tmp_path) -> None:
    from safetensors.torch import save_file

    tensor = noise(9, dtype=torch.bfloat16)
    save_file({"gradients:b": tensor}, tmp_path / "dump.safetensors")
    assert locate.read_dump(tmp_path / "dump.safetensors") == raw(tensor)


@pytest.mark.slow
def test_a_billion_elements_are_searched_in_bounded_memory() -> None:
    import tracemalloc

    index, change = 999_999_998, -(1 << 20)
    right = as_hex([[0, 0]])
    wrong = as_hex([[change, change * int(locate.keys(index, index + 1)[0])]])
    tracemalloc.start()
    element = locate.single(right, wrong, elements=1_000_000_000, element_bytes=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert element == locate.Element(index, change)
    assert peak < 64 << 20
