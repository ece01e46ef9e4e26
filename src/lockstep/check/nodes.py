"""Several processes that check together: each its own cards, without any exchange; then what they found is gathered.

Torch-free as long as there is one process only.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.check.confirm import Order
from lockstep.check.records import Card, Replica, Work
from lockstep.check.rounds import Again
from lockstep.errors import LockstepError
from lockstep.health.records import Stamp
from lockstep.runtime import env, signals
from lockstep.runtime.env import Env

if TYPE_CHECKING:
    from lockstep.runtime.group import Group

T = TypeVar("T")
LARGEST_DUMP_BYTES = 8 << 20  # of a tensor that is sent to the first process; larger ones stay where they are


def share(numbers: Sequence[int], place: Env, *, cpu: bool) -> list[int]:
    """Those of a machine's cards that this process checks, when launchers start several on it.

    CPU workers are each process's own, numbered through.
    """
    if place.local_world == 1:
        return list(numbers)
    if cpu and len(numbers) < place.local_world:
        return [place.local_rank * len(numbers) + number for number in range(len(numbers))]
    if len(numbers) < place.local_world:  # srun has bound each to its own
        return list(numbers)
    return list(numbers[place.local_rank :: place.local_world])


def placed(cards: Sequence[Card], place: Env) -> list[Card]:
    """The cards with the number of their node, and slots that no other process of the machine has."""
    return [
        dataclasses.replace(card, node=place.node, slot=place.local_rank + card.slot * place.local_world)
        for card in cards
    ]


class Peers:
    """All processes of a check. They meet when there is something to tell, not before: nobody waits meanwhile."""

    def __init__(self, place: Env, *, patience_seconds: float) -> None:
        self.place, self._patience = place, patience_seconds
        self._began = time.monotonic()
        self._group: Group | None = None

    @property
    def first(self) -> bool:
        """Whether this is the one that judges, prints and writes."""
        return self.place.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, in the order of their ranks."""
        if self.place.world == 1:
            return [value]
        return self._within(lambda group: group.gather(value))

    def together(self, action: Callable[[], T]) -> T:
        """The first does it, all have the (JSON) value, or its error."""
        if self.place.world == 1:
            return action()
        return self._within(lambda group: group.together(action))

    def gather_replicas(self, replicas: Sequence[Replica], workloads: Sequence[str]) -> list[Replica]:
        """Everybody's, one workload after the other: a record may be long, and each process holds one of each."""
        if self.place.world == 1:
            return list(replicas)
        heads = self.gather([dataclasses.asdict(dataclasses.replace(replica, works=())) for replica in replicas])
        works: list[list[list[Work]]] = [[[] for _ in each] for each in heads]
        for name in [*workloads, "?"]:  # "?": what cannot be told which it was of
            mine = [
                [dataclasses.asdict(work) for work in replica.works if work.workload == name] for replica in replicas
            ]
            for rank, told in enumerate(self.gather(mine)):
                for number, found in enumerate(told):
                    works[rank][number] += [_work(each) for each in found]
        return [
            _replica(head, works[rank][number]) for rank, each in enumerate(heads) for number, head in enumerate(each)
        ]

    def gather_reruns(self, made: Sequence[Again], workloads: Sequence[str], work: Path) -> list[Again]:
        """Everybody's reruns; of tensors that were kept elsewhere a copy, if it is not large."""
        if self.place.world == 1:
            return list(made)
        replicas = self.gather_replicas([each.replica for each in made], workloads)
        told = self.gather([{"order": dataclasses.asdict(each.order), "dump": _encoded(each.dump)} for each in made])
        found: list[Again] = []
        for number, (about, replica) in enumerate(zip([one for each in told for one in each], replicas, strict=True)):
            dump = None
            if about["dump"] is not None:
                dump = work / f"gathered-{len(replicas)}-{number}-{time.monotonic_ns()}.safetensors"
                dump.write_bytes(base64.b64decode(about["dump"]))
            found.append(Again(order_of(about["order"]), replica, dump))
        return found

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _within(self, action: Callable[[Group], T]) -> T:
        """An exchange with all; who does not come within what this process needed itself, and then some, is missed."""
        seconds = time.monotonic() - self._began + 2 * self._patience
        with signals.listening(), _deadline(seconds):
            if self._group is None:
                env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we say ourselves who is missing
                import torch

                from lockstep.runtime.group import join

                self._group = join(self.place, torch.device("cpu"), timeout_seconds=seconds, join_seconds=seconds)
            return action(self._group)


@contextlib.contextmanager
def _deadline(seconds: float) -> Generator[None]:
    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise LockstepError(f"the other processes of this check did not answer within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds + 30.0)  # after the group, which can say who is missing
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def order_of(told: dict[str, Any]) -> Order:
    return Order(**{**told, "card": Card(**told["card"])})


def _encoded(dump: Path | None) -> str | None:
    if dump is None or dump.stat().st_size > LARGEST_DUMP_BYTES:
        return None
    return base64.b64encode(dump.read_bytes()).decode()


def _replica(head: dict[str, Any], works: Sequence[Work]) -> Replica:
    return Replica(**{**head, "card": Card(**head["card"]), "works": tuple(works), "samples": tuple(head["samples"])})


def _work(told: dict[str, Any]) -> Work:
    lists = {name: tuple(told[name]) for name in ("tensors", "dtypes", "damaged")}
    shapes = tuple(tuple(shape) for shape in told["shapes"])
    return Work(**{**told, **lists, "shapes": shapes, "stamps": tuple(Stamp(**each) for each in told["stamps"])})
