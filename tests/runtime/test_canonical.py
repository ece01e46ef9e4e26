"""Canonical sums: 1, 2, 4 and 8 ranks, here threads of one process, have the same bits; plain sums have not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.load import load
from lockstep.engine import epochs
from lockstep.errors import ConfigError
from lockstep.runtime.canonical import Canonical, tree
from lockstep.runtime.determinism import label, mode
from lockstep.runtime.grid import BLOCKS, check_canonical
from lockstep.runtime.options import Deterministic
from lockstep.runtime.reduce import Reducer, in_sequence, total_norm

MICRO_BATCHES = 24  # of the global batch: three in a block
WORLDS = (1, 2, 4, 8)


@dataclass
class Board:
    """Where the ranks of a group, each a thread, lay down what they exchange."""

    world: int
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meeting = threading.Barrier(self.world)


@dataclass
class Rank:
    """A group as one of its ranks sees it."""

    rank: int
    board: Board

    @property
    def world(self) -> int:
        return self.board.world

    def everyone(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.board.tensors[self.rank] = tensor.clone()
        self.board.meeting.wait(10)
        found = [self.board.tensors[rank] for rank in range(self.world)]
        self.board.meeting.wait(10)
        return found

    def deal(self, out: torch.Tensor, tensor: torch.Tensor, async_op: bool = False) -> None:
        out.copy_(torch.cat([each.chunk(self.world)[self.rank] for each in self.everyone(tensor)]))

    def collect(self, out: torch.Tensor, share: torch.Tensor, async_op: bool = False) -> None:
        out.copy_(torch.cat(self.everyone(share)))

    def sum_(self, tensor: torch.Tensor, async_op: bool = False) -> None:
        tensor.copy_(in_sequence(self.everyone(tensor)))


def step(
    rank: int, board: Board, net: nn.Module, plain: bool, overlap: bool
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Gradients, their norm and two small sums of one rank after a second step: the first leaves nothing behind."""
    net = copy.deepcopy(net)
    rows = torch.randn(MICRO_BATCHES, 3, 7, generator=torch.Generator().manual_seed(1))
    count = MICRO_BATCHES // board.world
    mine, parameters = rows[rank * count : (rank + 1) * count], list(net.parameters())
    group: Any = Rank(rank, board)
    kinds: Any = {"bucket_bytes": 600, "overlap": overlap}
    exchange = (
        Reducer(parameters, group, **kinds) if plain else Canonical(parameters, group, micro_batches=count, **kinds)
    )
    assert len(exchange.buckets) > 1
    norm, sums = torch.zeros(()), torch.zeros(())
    for scale in (3.0, 1.0):
        exchange.zero()
        losses: list[torch.Tensor] = []
        for index, row in enumerate(mine):
            exchange.before_backward(last=index == count - 1)
            loss = (net(row) * scale).square().sum()
            loss.backward()
            losses.append(loss.detach())
        exchange.finish()
        norm, mean = exchange.norm(parameters), exchange.add_up(losses)
        sums = exchange.total(torch.stack((mean, mean / 3)))
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None], norm, sums


def steps(world: int, *, plain: bool = False, overlap: bool = True) -> list[Any]:
    torch.manual_seed(0)  # here: threads share one generator
    net, board = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)), Board(world)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: step(rank, board, net, plain, overlap), range(world)))


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip([*one[0], *one[1:]], [*other[0], *other[1:]], strict=True))


@pytest.mark.parametrize("overlap", [True, False])
def test_any_number_of_ranks_has_the_same_bits(overlap: bool) -> None:
    (alone,) = steps(1)
    for world in WORLDS[1:]:
        assert all(same(each, alone) for each in steps(world, overlap=overlap)), f"{world} ranks"


def test_plain_sums_have_other_bits() -> None:
    """Negative control: and yet the sums are the same but for their last bits."""
    (alone,), (four, *_), (canonical,) = steps(1, plain=True), steps(4, plain=True), steps(1)
    assert not same(four, alone)
    for one, other, third in zip(alone[0], four[0], canonical[0], strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, third)
    torch.testing.assert_close(alone[1:], canonical[1:])


def test_whose_gradient_was_bad_is_known() -> None:
    """The sums are bad on all ranks; what a rank had made itself only on one."""
    board = Board(2)

    def made(rank: int) -> tuple[bool, bool]:
        weight = nn.Parameter(torch.ones(3))
        group: Any = Rank(rank, board)
        exchange = Canonical([weight], group, micro_batches=4)
        exchange.zero()
        for index in range(4):
            exchange.before_backward(last=index == 3)
            (weight * (torch.nan if (rank, index) == (1, 0) else 1.0)).sum().backward()
        exchange.finish()
        norm = exchange.norm([weight])
        return bool(norm.isfinite()), bool(exchange.own(norm).isfinite())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(made, range(2))) == [(False, True), (False, False)]


def test_the_norm_is_taken_in_float64() -> None:
    """In float32 many small gradients beside a large one are partly lost."""
    weight = nn.Parameter(torch.zeros(4097))
    alone: Any = Rank(0, Board(1))
    exchange = Canonical([weight], alone, micro_batches=BLOCKS)
    assert weight.grad is not None
    weight.grad.fill_(1e-3)[0] = 8.0
    exact = weight.grad.double().norm().float()
    assert not torch.equal(total_norm([weight]), exact)
    assert torch.equal(exchange.norm([weight]), exact)
    assert exchange.norm([weight]).dtype is torch.float32


def test_the_tree_is_the_one_that_is_told() -> None:
    """In so many numbers that another order has other bits somewhere."""
    parts = list(torch.randn(BLOCKS, 1000, generator=torch.Generator().manual_seed(2)))
    a, b, c, d, e, f, g, h = parts
    assert torch.equal(tree(parts), ((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert not torch.equal(tree(parts), in_sequence(parts))


@pytest.mark.parametrize(
    ("world", "micro_batches", "says", "hint"),
    [
        (3, None, "cannot be shared out to 3 workers", "--gpus 1, 2, 4 or 8"),
        (16, 1, "cannot be shared out to 16 workers", "--gpus 1, 2, 4 or 8"),
        (1, 4, "1 x 4 micro-batches cannot be cut into 8", "--training.grad-accum-nums 8"),
        (4, 3, "4 x 3 micro-batches cannot be cut into 8", "--training.grad-accum-nums 4"),
    ],
)
def test_what_cannot_be_cut_into_blocks_is_refused(world: int, micro_batches: int | None, says: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        check_canonical(world=world, micro_batches=micro_batches)
    assert refused.value.hint.startswith(hint)
    for able in WORLDS:
        check_canonical(world=able, micro_batches=BLOCKS // able)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([("canonical", None), ("mode", "fsdp")], "of ddp: fsdp adds in an order that depends on the number"),
        ([("mode", "hsdp"), ("system.deterministic", "canonical")], "hsdp adds in an order"),
        ([("canonical", "true"), ("mode", "replicas")], "replicas exchange no gradients"),
    ],
)
def test_other_modes_are_refused_with_the_reason(flags: list[tuple[str, str | None]], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        load("llama", preset="tiny", flags=flags).config.check()
    assert "--mode ddp" in refused.value.hint


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ([], False),
        ([("canonical", None)], "canonical"),
        ([("canonical", None), ("canonical", "false")], False),
        ([("deterministic", None)], True),
        ([("no-deterministic", None)], False),
        ([("deterministic", "yes")], True),
        ([("system.deterministic", "canonical")], "canonical"),
    ],
)
def test_how_it_is_asked_for(flags: list[tuple[str, str | None]], value: bool | str) -> None:
    system = load("llama", preset="tiny", flags=flags).config.system
    assert system.deterministic == value
    assert type(system.deterministic) is type(value)
    assert system.canonical == (value == "canonical")


@pytest.mark.parametrize(
    ("deterministic", "micro"),
    [("true", (3, 1)), ("canonical", (6, 4))],
)
def test_a_micro_batch_is_what_is_added_and_stays(deterministic: str, micro: tuple[int, int]) -> None:
    """A run of 24 rows goes on with 8 workers: 3 rows each cannot be micro-batches of 6, and only plain sums shrink."""
    flags = {"system.deterministic": deterministic, "training.batch_size": "6", "training.grad_accum_nums": "4"}
    config = load("llama", preset="tiny", flags=list(flags.items())).config
    moved = epochs.with_batch(config, 24, world=8).training
    assert (moved.batch_size, moved.grad_accum_nums) == micro


def test_workers_that_share_the_cores_have_as_many_threads_as_one_alone() -> None:
    cpu, before = torch.device("cpu"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3")
        cases: list[tuple[Deterministic, int, int]] = [("canonical", 0, 1), ("canonical", 2, 2), (True, 0, 3)]
        for deterministic, asked, threads in cases:
            with mode(cpu, deterministic=deterministic, threads=asked):
                assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before
    assert "1, 2, 4 or 8 workers" in label(cpu, deterministic="canonical")
    assert "workers" not in label(cpu, deterministic=True)


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (["--mode", "fsdp"], "--canonical: system.deterministic: canonical sums are of ddp: fsdp adds", "--mode ddp"),
        (["--gpus", "3"], "cannot be shared out to 3 workers", "--gpus 1, 2, 4 or 8"),
        (["--training.grad-accum-nums", "3"], "1 x 3 micro-batches cannot be cut", "--training.grad-accum-nums 8"),
    ],
)
def test_canonical_sums_that_cannot_be_had_are_refused_at_once(
    lockstep: Callable[..., Any], in_dir: Path, words: list[str], says: str, hint: str
) -> None:
    result = lockstep("train", "llama", "tiny", "--device", "cpu", "--canonical", *words)
    assert result.code == 2
    assert says in result.err
    assert hint in result.err
    assert list(in_dir.iterdir()) == [], "before anything is made"
