"""Several processes: who checks which card, and that nothing is lost when records travel."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lockstep.check import nodes
from lockstep.check.confirm import Order
from lockstep.check.records import Card, Replica, Work
from lockstep.health.records import Stamp
from lockstep.runtime.env import Env


def of_rank(local_rank: int, local_world: int) -> Env:
    return Env(rank=local_rank, world=local_world, local_rank=local_rank, local_world=local_world)


@pytest.mark.parametrize(
    ("numbers", "local_world", "cpu", "shares"),
    [
        ([0, 1, 2, 3], 1, False, [[0, 1, 2, 3]]),  # one process on the machine
        ([0, 1, 2, 3], 4, False, [[0], [1], [2], [3]]),  # one for each card
        ([0, 1, 2, 3, 4], 2, False, [[0, 2, 4], [1, 3]]),
        ([5], 2, False, [[5], [5]]),  # srun has bound each process to a card of its own, and it sees no other
        ([0], 3, True, [[0], [1], [2]]),
        ([0, 1], 3, True, [[0, 1], [2, 3], [4, 5]]),
        ([0, 1, 2, 3], 2, True, [[0, 2], [1, 3]]),
    ],
)
def test_cards_are_shared_among_the_processes_of_a_machine(
    numbers: list[int], local_world: int, cpu: bool, shares: list[list[int]]
) -> None:
    places = [of_rank(rank, local_world) for rank in range(local_world)]
    assert [nodes.share(numbers, place, cpu=cpu) for place in places] == shares


def test_no_two_cards_of_a_machine_have_one_slot() -> None:
    cards = [Card(index=index, slot=index) for index in range(2)]
    slots = [card.slot for rank in range(3) for card in nodes.placed(cards, of_rank(rank, 3))]
    assert sorted(slots) == list(range(6))
    assert {card.node for card in nodes.placed(cards, Env(node=3, nodes=4, world=4, rank=3))} == {3}


def test_records_survive_the_way() -> None:
    work = Work(
        "llama", ("weights:w",), ((2, 3),), ("float32",), (Stamp(0, "0x1p+0", "0x1p-1", "ab" * 16, 0.5),),
        facts={"attention": "flex"}, damaged=(3,), complete=True,
    )  # fmt: skip
    card = Card(index=1, slot=0, node=1, host="a", uuid="GPU-1")
    replica = Replica(card, (work,), {"torch": "2"}, {"temperature_c": 4}, {}, ({"time": 1.0},), exit_code=0)
    told = json.loads(json.dumps(dataclasses.asdict(replica)))
    assert nodes._replica(told, [nodes._work(each) for each in told["works"]]) == replica
    order = Order(card, "llama", 4, "weights:w", whole=True)
    assert nodes.order_of(json.loads(json.dumps(dataclasses.asdict(order)))) == order


def test_one_process_needs_no_group() -> None:
    peers = nodes.Peers(Env(), patience_seconds=1)
    assert peers.first
    assert peers.gather({"a": 1}) == [{"a": 1}]
    assert peers.together(lambda: 3) == 3
    peers.close()
