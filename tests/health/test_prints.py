"""Fingerprints of a step: the fast ways give the bits of the plain one; records and votes blame nobody wrongly."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lockstep.health import fingerprint, records
from lockstep.health.fingerprint import digest_tensor, digest_tensors
from lockstep.health.prints import Prints, as_hex, digests
from lockstep.health.records import Stamp, chain_of, first_tensor
from lockstep.health.vote import vote
from tests import interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool,
          torch.float8_e4m3fn)  # fmt: skip
LENGTHS = (0, 1, 2, 3, 31, 1023, 1024, 1025, 5000)


def some(length: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    bits = torch.randint(-128, 128, (length * 8,), generator=generator, dtype=torch.int8)
    if dtype == torch.bool:
        return bits[:length] > 0
    return bits.view(dtype)[:length].clone() if length else torch.empty(0, dtype=dtype)


def plain(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [digest_tensor(tensor).tolist() for tensor in tensors]


def test_tensors_of_equal_length_in_one_go_have_the_digests_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [some(length, dtype, seed=seed) for length in LENGTHS for dtype in DTYPES for seed in (1, 2)]
    tensors += [some(35).view(5, 7).t(), some(64).view(8, 8)[:, ::2], torch.tensor(1.5)]
    wanted = plain(tensors)
    assert digest_tensors(tensors).tolist() == wanted
    monkeypatch.setattr(fingerprint, "CHUNK_ELEMENTS", 100)  # long ones in pieces, short ones in several stacks
    assert digest_tensors(tensors).tolist() == wanted
    tensors[-3] = tensors[-3].t()
    assert digest_tensors(tensors).tolist() != wanted


@pytest.mark.parametrize("rounds", [2, 16])
def test_every_line_of_the_kernel_gives_the_plain_digest(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """By Triton's interpreter; the compiled kernel is in tests/gpu/test_cuda_prints.py."""
    with interpreted.module(monkeypatch, "digest") as kernel:
        monkeypatch.setattr(kernel, "ROUNDS", rounds)
        monkeypatch.setattr(kernel, "BLOCK", 64)
        for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.float64):  # of each width one
            for length in LENGTHS:
                tensors = [some(length, dtype, seed=seed) for seed in range(5)]
                bits = [tensor.view(fingerprint.INTEGERS[tensor.element_size()]) for tensor in tensors]
                sums = torch.zeros(5, 2, dtype=torch.int64)
                fingerprint._add_by_kernel(bits, list(sums.unbind()))
                assert sums.tolist() == plain(tensors), (dtype, length)
        far, sums = some(200), torch.zeros(2, dtype=torch.int64)
        kernel.add_digests([far.view(torch.int32)], [sums], offset=(1 << 33) + 5)
        assert sums.tolist() == digest_tensor(far, (1 << 33) + 5).tolist() != digest_tensor(far).tolist()


def model() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    parameters = {"a": some(12).abs(), "b": some(5, seed=3)}
    for tensor in parameters.values():
        tensor.grad = tensor.flip(0).clone()
    return parameters, {f"exp_avg.{name}": tensor.clone() for name, tensor in parameters.items()}


def stamp_of(prints: Prints, step: int) -> Stamp:
    prints.of_gradients(step)
    prints.of_state(step)
    (taken,) = prints.taken(up_to=step)
    return Stamp(step, sums=as_hex(taken.read()))


def test_what_is_taken_has_a_name_and_every_flip_changes_its_own_sum_only() -> None:
    parameters, moments = model()
    prints = Prints(parameters, moments)
    names = [name for name, _ in prints.tensors]
    assert names == ["gradients:a", "gradients:b", "weights:a", "weights:b", "moments:exp_avg.a", "moments:exp_avg.b"]
    clean = stamp_of(prints, 0)
    live = [*(tensor.grad for tensor in parameters.values()), *parameters.values(), *moments.values()]
    for place, tensor in enumerate(live):
        assert tensor is not None
        tensor.view(torch.int32)[3] ^= 1
        flipped = stamp_of(prints, 0)
        changed = [other for other in range(len(live)) if flipped.sum_of(other) != clean.sum_of(other)]
        assert changed == [place]
        assert first_tensor(flipped, clean, names) == names[place]
        tensor.view(torch.int32)[3] ^= 1
    assert stamp_of(prints, 0) == clean


def test_fingerprints_at_an_interval_and_none_of_a_rehearsal() -> None:
    prints = Prints(*model(), interval=3)
    for step in range(-1, 7):
        prints.of_gradients(step)
        prints.of_state(step)
    assert [taken.step for taken in prints.taken(up_to=4)] == [2]
    assert [taken.step for taken in prints.taken()] == [5]
    assert not any(Prints(*model(), interval=0).due(step) for step in range(10))


def test_a_gradient_there_is_none_of_has_the_digest_of_nothing() -> None:
    assert digests([None, some(4), None]).tolist() == [[0, 0], digest_tensor(some(4)).tolist(), [0, 0]]


def test_the_record_on_the_host_is_held_against_the_chain_of_the_device() -> None:
    """Any digit of any stamp that was changed, two that were exchanged, one that was lost: the chain differs."""
    prints = Prints(*model())
    stamps = []
    for step in range(4):
        prints.parameters["a"].add_(0.25)
        stamps.append(stamp_of(prints, step))
    assert chain_of(stamps) == prints.told_chain() != chain_of([])
    draw = random.Random(1)
    for _ in range(50):
        place, which = draw.randrange(len(stamps[0].sums)), draw.randrange(4)
        digit = f"{int(stamps[which].sums[place], 16) ^ (1 << draw.randrange(4)):x}"
        sums = stamps[which].sums[:place] + digit + stamps[which].sums[place + 1 :]
        damaged = [Stamp(stamp.step, sums=sums if stamp.step == which else stamp.sums) for stamp in stamps]
        assert chain_of(damaged) != prints.told_chain()
    exchanged = [Stamp(0, sums=stamps[1].sums), Stamp(1, sums=stamps[0].sums), *stamps[2:]]
    assert chain_of(exchanged) != prints.told_chain() != chain_of(stamps[1:])


def test_a_damaged_line_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / records.FILE
    lines = [records.line("step", step=step, loss=(0.5 * step).hex(), sums="0" * 32) for step in range(4)]
    lines[1] = lines[1].replace("0000", "0001", 1)
    lines[2] = "[1, 2"
    path.write_text("\n".join(lines), encoding="utf-8")  # the last one is still being written
    found = dict(records.read_lines(path))
    assert list(found) == [0, 1, 2]
    assert found[0] == {"kind": "step", "step": 0, "loss": "0x0.0p+0", "sums": "0" * 32}
    assert found[1] is None
    assert found[2] is None
    assert list(records.read_lines(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("runs", "outvoted", "undecided", "letters"),
    [
        (["aaa", "aaa", "aaa"], {}, None, ["...", "...", "..."]),
        (["aaa", "abb", "aaa"], {1: (1, 0)}, None, ["...", ".xx", "..."]),
        (["baa", "aaa", "aaa"], {0: (0, 1)}, None, ["xxx", "...", "..."]),  # equal again later is still suspect
        (["aaa", "aab"], {}, 2, ["..?", "..?"]),
        (["aab", "aab", "aaa", "aaa"], {}, 2, ["..?"] * 4),
        (["aab", "aac", "aaa", "aaa"], {}, 2, ["..?"] * 4),  # two of four are no majority
        (["aab", "aab", "aaa", "aaa", "aaa"], {0: (2, 2), 1: (2, 2)}, None, ["..x", "..x", "...", "...", "..."]),
        (["abc", "aab", "aaa", "aaa"], {0: (1, 1), 1: (2, 2)}, None, [".xx", "..x", "...", "..."]),
        (["abb", "acc", "aaa", "aaa", "aaa"], {0: (1, 2), 1: (1, 2)}, None, [".xx", ".xx", "...", "...", "..."]),
        (["abb", "aab", "aaa"], {0: (1, 1)}, 2, [".xx", "..?", "..?"]),  # a bad one has no vote any more
        (["a-b", "aaa", "aa-", "aab"], {1: (2, 0)}, None, [".-.", "..x", "..-", "..."]),
        (["a--", "aaa", "aaa"], {}, None, [".--", "...", "..."]),
        (["abc"], {}, None, ["..."]),
        ([], {}, None, []),
    ],
)
def test_the_majority_is_right_and_a_tie_names_nobody(
    runs: list[str], outvoted: dict[int, tuple[int, int]], undecided: int | None, letters: list[str]
) -> None:
    result = vote([{step: bits for step, bits in enumerate(run) if bits != "-"} for run in runs])
    assert {voter: (each.step, each.right) for voter, each in result.outvoted.items()} == outvoted
    assert result.undecided_step == undecided
    assert list(result.letters) == letters
    assert result.agree == (not outvoted and undecided is None)
