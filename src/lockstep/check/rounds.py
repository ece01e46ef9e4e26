"""The replicas of this process, round by round: errands written, processes started, records read. Torch-free."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.check import cards as driver
from lockstep.check import errand as errands
from lockstep.check import records
from lockstep.check.confirm import Order
from lockstep.check.crew import Crew, Ending, Member, Task
from lockstep.check.errand import Dump, Errand
from lockstep.check.records import Card, Replica, Workload
from lockstep.check.workloads import is_prepared
from lockstep.errors import ExitCode, LockstepError
from lockstep.rundir import RunDir
from lockstep.runtime import env, faults

REPLICA = "lockstep.check.replica"  # what the processes run
THREADS = 1  # of the host, in every replica: another number could mean other bits
HINT = "try: "  # before the last line of an error
OURS = (
    "LOCKSTEP_WORK",
    "GPU_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
FOREIGN = ("GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_", "PMI", "ACCELERATE_")  # how launchers say who is who


@dataclass(frozen=True)
class Again:
    """One order as it was carried out. `dump`: the tensor that was kept."""

    order: Order
    replica: Replica
    dump: Path | None = None


@dataclass(frozen=True)
class Plan:
    """What all replicas have in common."""

    device: str
    workloads: tuple[Workload, ...]
    folder: Path  # of the check; each replica has its own in it
    data: Path
    patience_seconds: float
    memory_bytes: int = 0  # of the card, for each; 0: all of it


class Rounds:
    """Runs replicas on the cards of this process. `tell` hears how far each is."""

    def __init__(self, crew: Crew, plan: Plan, cards: Sequence[Card], tell: Callable[[Sequence[Member]], None]) -> None:
        self.crew, self.plan, self.cards, self.tell = crew, plan, list(cards), tell
        self._before: dict[str, dict[str, Any]] = {}
        self._dumps: list[Path] = []

    def prepare(self) -> None:
        """Make the data, once, in a process of its own; replicas only read it. Nothing to do where it is there."""
        if is_prepared(self.plan.workloads, self.plan.data):
            return
        task = self._task("prepare", self._errand(self.cards[0], self.crew.work / "prepare"), "--prepare")
        task = dataclasses.replace(task, record=None)
        [ending] = self.crew.run([task], patience_seconds=float("inf"), tell=lambda _: None)
        if ending.error:
            lines = [line.strip() for line in ending.tail if line.strip()] or [ending.error]
            hint = lines.pop().removeprefix(HINT) if len(lines) > 1 and lines[-1].startswith(HINT) else ""
            raise LockstepError(
                f"the data of the check cannot be prepared: {lines[-1][:300]}",
                where=str(self.plan.data),
                hint=hint,
                exit_code=next((known for known in ExitCode if known == ending.code), ExitCode.FAILED),
            )

    def first(self) -> list[Replica]:
        """All workloads on all cards at once. A card alone does them twice, one after the other."""
        self._before = self._ask_driver()
        return self._run([(card, self._errand(card, self._folder(card))) for card in self.cards], number=0)

    def second(self) -> list[Replica]:
        """The same again, for a card that has nobody to be compared with but itself."""
        return self._run([(card, self._errand(card, self._folder(card, "again"))) for card in self.cards], number=1)

    def again(self, orders: Iterable[Order], *, number: int) -> list[Again]:
        """Carry out orders for cards of this process, all at once."""
        jobs: list[tuple[Order, Errand]] = []
        for place, order in enumerate(orders):
            dump = Dump(order.workload, order.step, order.tensor) if order.tensor else None
            chosen = tuple(each for each in self.plan.workloads if each.name == order.workload)
            plain = self._errand(order.card, self._folder(order.card, f"rerun-{number}-{place}"))
            jobs.append(
                (
                    order,
                    dataclasses.replace(plain, workloads=chosen, until=None if order.whole else order.step, dump=dump),
                )
            )
        replicas = self._run([(order.card, errand) for order, errand in jobs], number=number)
        self._dumps += [errand.dump_file for _, errand in jobs]
        return [
            Again(order, replica, errand.dump_file if errand.dump_file.exists() else None)
            for (order, errand), replica in zip(jobs, replicas, strict=True)
        ]

    def clear(self) -> None:
        """Remove the tensors that were kept: they may be large, and what they told is in the report."""
        for dump in self._dumps:
            dump.unlink(missing_ok=True)

    def with_facts(self, replicas: Sequence[Replica]) -> list[Replica]:
        """The replicas with what the driver said of their cards before the first round and says now."""
        after = self._ask_driver()
        return [
            dataclasses.replace(
                replica, before=self._before.get(replica.card.uuid, {}), after=after.get(replica.card.uuid, {})
            )
            for replica in replicas
        ]

    def _ask_driver(self) -> dict[str, dict[str, Any]]:
        return driver.ask(sorted({card.uuid for card in self.cards})) if self.plan.device == "cuda" else {}

    def _run(self, jobs: Sequence[tuple[Card, Errand]], *, number: int) -> list[Replica]:
        tasks = [self._task(card.name, errand, number=number) for card, errand in jobs]
        endings = self.crew.run(tasks, patience_seconds=self.plan.patience_seconds, tell=self.tell)
        return [_replica(errand, ending) for (_, errand), ending in zip(jobs, endings, strict=True)]

    def _errand(self, card: Card, folder: Path) -> Errand:
        folder.mkdir(parents=True, exist_ok=True)
        plan = self.plan
        return Errand(
            card=card,
            device=plan.device,
            workloads=plan.workloads,
            folder=folder.absolute(),
            data=plan.data.absolute(),
            threads=THREADS,
            memory_bytes=plan.memory_bytes,
        )

    def _task(self, name: str, errand: Errand, *flags: str, number: int = 0) -> Task:
        file = errand.write(Path(errand.folder) / errands.FILE)
        command = (sys.executable, "-m", REPLICA, *flags, str(file))
        environ = self._environment(errand.card, number)
        return Task(name, command, environ, Path(errand.folder), record=errand.record)

    def _environment(self, card: Card, number: int) -> dict[str, str]:
        """Of a replica: alone in the world, with one card, whoever has started us."""
        known = env.child()
        kept = {name: value for name, value in known.items() if name not in OURS and not name.startswith(FOREIGN)}
        kept[faults.REPLICA] = f"rank={card.index},slot={card.slot},round={number},node={card.node}"
        kept |= {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"}
        if self.plan.device == "cuda":
            one = card.uuid if card.uuid.startswith(("GPU-", "MIG-")) else str(card.index)
            kept |= {"CUDA_VISIBLE_DEVICES": one, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", env.DEVICE: "cuda"}
            kept["HIP_VISIBLE_DEVICES"] = str(card.index)
        return kept

    def _folder(self, card: Card, part: str = "") -> Path:
        shared = sum(other.index == card.index for other in self.cards) > 1
        tag = f"{'GPU' if self.plan.device == 'cuda' else 'CPU'}{card.index}{f'-slot{card.slot}' if shared else ''}"
        folder = RunDir(self.plan.folder).worker(tag, card.node)
        return folder / part if part else folder


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    """What the replica's sampler has written; a line that was cut short says nothing."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _replica(errand: Errand, ending: Ending) -> Replica:
    """What its record says, and how its process ended where the record does not."""
    replica = records.read(errand.record, errand.card, samples=tuple(_samples(errand.samples)))
    told = any(work.error for work in replica.works)
    error = "" if told and ending.code == ExitCode.FAILED else ending.error
    return dataclasses.replace(replica, exit_code=ending.code, error=error)
