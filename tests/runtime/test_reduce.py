"""Gradient buckets: fixed when built, launched in one order, views that survive a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.runtime.reduce import Alone, Reducer, total_norm


class Peers:
    """A group whose other ranks have the same gradients: a sum doubles. Remembers what was summed, and when."""

    rank, world = 0, 2

    def __init__(self) -> None:
        self.summed: list[int] = []
        self.waited = 0

    def sum_(self, tensor: torch.Tensor, async_op: bool = False) -> Any:
        self.summed.append(tensor.numel())
        tensor *= 2
        return self if async_op else None

    def wait(self) -> None:
        self.waited += 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 32)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().sum()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def reducer(net: Net, peers: Peers, **options: Any) -> Reducer:
    return Reducer(list(net.parameters()), peers, bucket_bytes=600, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("overlap", [True, False])
def test_only_the_last_backward_exchanges_and_in_one_order(net: Net, overlap: bool) -> None:
    peers = Peers()
    exchange = reducer(net, peers, overlap=overlap)
    sizes = [bucket.flat.numel() for bucket in exchange.buckets]
    assert len(sizes) > 2
    for _ in range(2):
        exchange.zero()
        for last in (False, False, True):
            assert peers.summed == []
            exchange.before_backward(last=last)
            net(torch.ones(2, 8)).backward()
        early = len(peers.summed)
        exchange.finish()
        assert (early > 0) == overlap
        assert peers.summed == sizes, "each bucket once, in the order in which they were built"
        assert peers.waited == len(sizes)
        peers.summed.clear()
        peers.waited = 0


def test_gradients_are_sums_of_all_micro_batches_and_ranks(net: Net) -> None:
    torch.manual_seed(0)
    other = Net()
    alone = Alone(list(other.parameters()))
    exchange = reducer(net, Peers())
    for step in range(2):  # the second time everything starts from zero again
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        for model, each in ((net, exchange), (other, alone)):
            each.zero()
            for last in (False, True):
                each.before_backward(last=last)
                model(x).backward()
            each.finish()
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            expected = torch.zeros_like(two) if two.grad is None else two.grad * 2
            assert one.grad is not None
            assert torch.equal(one.grad, expected)
        assert exchange.norm(list(net.parameters())) == pytest.approx(2 * float(total_norm(list(other.parameters()))))
    assert float(exchange.total(torch.tensor(3.0))) == 6.0
    assert float(alone.total(torch.tensor(3.0))) == 3.0


def test_buckets_hold_one_dtype_and_the_parameters_in_reverse() -> None:
    parameters = [nn.Parameter(torch.zeros(10, dtype=kind)) for kind in (torch.float32, torch.float32, torch.float64)]
    buckets = Reducer(parameters, Peers()).buckets  # pyright: ignore[reportArgumentType] - stands for a Group
    assert [bucket.flat.dtype for bucket in buckets] == [torch.float64, torch.float32]
    assert [id(each) for bucket in buckets for each in bucket.parameters] == [id(each) for each in parameters[::-1]]
    assert all(each.grad is not None and each.grad.data_ptr() % 64 == 0 for each in parameters)
