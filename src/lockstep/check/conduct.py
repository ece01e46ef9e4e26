"""`lockstep check`: decides what is run on which card, has it run, judges, runs suspects again, reports. Torch-free."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import rundir
from lockstep.check import cards, confirm, coverage, golden, locate, nodes, report, verdict
from lockstep.check.crew import Crew
from lockstep.check.nodes import Peers
from lockstep.check.outcome import CardVerdict, Checked, Judgement, Status
from lockstep.check.progress import Progress
from lockstep.check.records import Card, Replica, Workload
from lockstep.check.rounds import THREADS, Again, Plan, Rounds
from lockstep.check.workloads import named, workloads
from lockstep.errors import ConfigError, LockstepError
from lockstep.guard import say
from lockstep.runtime import devices, env, pins

LASTS = {  # all workloads of a level; what is compiled for the first time comes on top
    "cuda": {"quick": "about a minute", "default": "some minutes", "deep": "half an hour or more"},
    "cpu": {"quick": "less than a minute", "default": "about a minute", "deep": "some minutes"},
}
UNFINISHED = "unfinished"  # a file in the folder of a check that has not come to its end
PATIENCE_SECONDS = {"quick": 300.0, "default": 600.0, "deep": 1200.0}  # compiling for a card writes nothing meanwhile
SLOW_RATIO = {"cuda": verdict.SLOW_RATIO, "cpu": 1.5}  # whoever else computes on this machine slows a CPU worker
SHORTEST_SECONDS = {"cuda": 1.0, "cpu": 0.0}  # of a workload whose times are judged: 5 % of milliseconds are chance


@dataclass(frozen=True)
class Asked:
    """The words of the command line."""

    level: str = "default"
    device: str = "auto"
    gpus: str = "all"
    workload: str = ""
    golden: Path | None = None
    slow_ratio: float | None = None  # None: by the device
    out: Path = Path("runs")
    name: str = ""
    json: bool = False
    timeout_seconds: float | None = None


def check(asked: Asked) -> int:
    """Check the cards of this process, and with other processes all of theirs; the exit code is that of all."""
    place = env.detect()
    device = _device(asked)
    mine = _cards(asked, place, cpu=device == "cpu")
    chosen = _workloads(asked, device, [card.index for card in mine])
    book = _open_golden(asked.golden) if asked.golden else None
    patience = asked.timeout_seconds or PATIENCE_SECONDS[asked.level]
    peers = Peers(place, patience_seconds=patience)
    shown = peers.first and not asked.json
    progress = Progress(chosen, shown=shown)
    with Crew() as crew:
        folder = _folder(asked) if peers.first else crew.work
        plan = Plan(device, chosen, folder, pins.cache_roots(pins.CACHE)[0], patience, _memory(mine, device))
        rounds = Rounds(crew, plan, mine, progress.tell)
        try:
            found = _Check(asked, peers, rounds, progress, book)
            found.run()
            code, lines = peers.together(found.conclude)
            rounds.clear()
        except BaseException as error:
            _mark(folder, f"ended early: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            raise
        finally:
            peers.close()
    if peers.first:
        say(*lines)
    return code


class _Check:
    """The rounds of one check, and what was found in them."""

    def __init__(
        self, asked: Asked, peers: Peers, rounds: Rounds, progress: Progress, book: golden.Golden | None
    ) -> None:
        self.asked, self.peers, self.rounds, self.progress = asked, peers, rounds, progress
        self.book = book  # as it was before the check: whatever becomes of the file, all is judged by the same
        self.plan = rounds.plan
        self.names = [workload.name for workload in self.plan.workloads]
        self.began, self._since = time.time(), time.monotonic()  # the clock on the wall may be set meanwhile
        self.found: list[Replica] = []  # of all processes
        self.made: list[Again] = []

    def run(self) -> None:
        """All that runs. Every process takes part in each exchange; the first decides for all."""
        many = f" on each of {self.peers.place.world} processes" if self.peers.place.world > 1 else ""
        long = "" if self.asked.workload else f" ({LASTS[self.plan.device][self.asked.level]})"
        self.progress.begin(f"Checking {_count(self.rounds.cards)}{many}: {', '.join(self.names)}{long}")
        self.rounds.prepare()
        self.progress.begin("")
        replicas = self.rounds.first()
        everyone = sum(self.peers.gather(len(replicas)))
        if everyone == 1:
            self.progress.begin("Once more: one card has only itself to be compared with")
            replicas += self.rounds.second()
        self.found = self.peers.gather_replicas(self.rounds.with_facts(replicas), self.names)
        self._run_again()

    def conclude(self) -> tuple[int, list[str]]:
        """Judge, keep golden bits, write the files: (exit code, lines to show). Only the first process does this."""
        found, plan, seconds = self.found, self.plan, time.monotonic() - self._since
        checked = Checked(
            judgement=_located(self._judge(), found, self.made),
            replicas=tuple(found),
            workloads=plan.workloads,
            level=self.asked.level,
            device=plan.device,
            config_hash=self._config_hash(),
            versions=_versions(found),
            covered=coverage.covered(found, plan.workloads, seconds),
            not_covered=coverage.not_covered(found, plan.workloads, plan.device),
            began=self.began,
            seconds=seconds,
        )
        return _finish(plan.folder, dataclasses.replace(checked, golden=self._golden(checked)), self.asked)

    def _config_hash(self) -> str:
        plan = self.plan
        return golden.config_hash(plan.workloads, device=plan.device, threads=THREADS, versions=_versions(self.found))

    def _judge(self) -> Judgement:
        book = dataclasses.replace(self.book, config_hash=self._config_hash()) if self.book else None
        reruns = [each.replica for each in self.made]
        ratio, chosen = self.asked.slow_ratio or SLOW_RATIO[self.plan.device], self.plan.workloads
        shortest = SHORTEST_SECONDS[self.plan.device]
        return verdict.judge(
            self.found, golden=book, slow_ratio=ratio, shortest_seconds=shortest, reruns=reruns, workloads=chosen
        )

    def _golden(self, checked: Checked) -> dict[str, Any]:
        """What came of --golden. Only bits of a check that all cards passed are kept."""
        path = self.asked.golden
        if path is None or self.book is None:
            return {}
        book, found = dataclasses.replace(self.book, config_hash=checked.config_hash), checked.replicas
        known = any(book.of(replica.card, replica.versions) for replica in found)
        keys = sorted({book.key(replica.card, replica.versions) for replica in found})
        state, why = "used" if known else "no entry", ""
        try:
            if checked.judgement.passed and golden.add(path, checked.config_hash, found):
                state = "written"
        except LockstepError as error:  # what was found of the cards is not lost for that
            state, why = "used" if known else "not written", error.what
        return {"file": str(path), "key": ", ".join(keys), "state": state, **({"why": why} if why else {})}

    def _run_again(self) -> None:
        """Suspects where they differ, each beside a card that passed; nothing where all agree."""
        orders = [nodes.order_of(told) for told in self.peers.together(self._orders)]
        for number, wave in enumerate(confirm.waves(orders), start=2):
            self.progress.say(f"Run again: {', '.join(f'{order.card.name} ({order})' for order in wave)}")
            again = self.rounds.again([order for order in wave if order.card in self.rounds.cards], number=number)
            self.made += self.peers.gather_reruns(again, self.names, self.rounds.crew.work)

    def _orders(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(order) for order in confirm.orders(self._judge())]


# ------------------------------------------------------------------------------------------------ before


def _device(asked: Asked) -> str:
    """cuda or cpu; a GPU that is asked for is never replaced by the CPU."""
    wanted = asked.device
    if wanted == "auto" and env.launcher_wishes().get("system.device") == "cpu":
        wanted = "cpu"
    if wanted not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"{wanted[:40]!r} is no device", where="--device", hint="cuda or cpu")
    if wanted != "cpu" and not devices.visible_gpus():
        raise ConfigError(
            "no GPU can be used here", where="lockstep check", hint="lockstep check --device cpu --gpus 4"
        )
    return "cpu" if wanted == "cpu" else "cuda"


def _cards(asked: Asked, place: env.Env, *, cpu: bool) -> list[Card]:
    numbers = nodes.share(devices.choose(asked.gpus, cpu=cpu, repeats=True), place, cpu=cpu)
    if not cpu:
        cards.refuse_held(numbers)
    return nodes.placed(cards.workers(numbers) if cpu else cards.gpus(numbers), place)


def _workloads(asked: Asked, device: str, numbers: Sequence[int]) -> tuple[Workload, ...]:
    memory = cards.memory_bytes(numbers) if device == "cuda" else 0
    capability = cards.capability(numbers) if device == "cuda" else None
    chosen = workloads(asked.level, device, memory, capability)
    if not asked.workload:
        return chosen
    every = {each.name: each for each in workloads("default", device, memory, capability)}  # --quick has fewer
    return named(tuple((every | {each.name: each for each in chosen}).values()), asked.workload)


def _memory(mine: Sequence[Card], device: str) -> int:
    """A bound for each replica where several share a card; else none."""
    indices = [card.index for card in mine]
    shared = device == "cuda" and len(set(indices)) < len(indices)
    return cards.memory_bytes(indices) if shared else 0


def _open_golden(path: Path) -> golden.Golden:
    """What is known. Refuse a file that cannot be read or written, before an hour of work depends on it."""
    if not path.parent.is_dir():
        raise ConfigError("its folder is not there", where=f"--golden {path}", hint=f"mkdir -p {path.parent}")
    if path.is_dir():
        raise ConfigError("is a folder, not a file", where=f"--golden {path}", hint=f"--golden {path / 'golden.json'}")
    return golden.open_book(path, "")


def _folder(asked: Asked) -> Path:
    name = asked.name or f"check-{rundir.timestamp()}"
    if not asked.name and (asked.out / name).exists():  # another check that began in this second
        name += f"-{os.getpid()}"
    folder = rundir.create_run(asked.out, name).root
    _mark(folder, "still running, or killed")
    return folder


def _mark(folder: Path, words: str) -> None:
    with contextlib.suppress(OSError):
        (folder / UNFINISHED).write_text(f"{env.redact(words)}\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ after


def _finish(folder: Path, checked: Checked, asked: Asked) -> tuple[int, list[str]]:
    """The files written: (exit code, lines to show). Only the first process does this."""
    told = report.write(folder, checked)
    (folder / UNFINISHED).unlink(missing_ok=True)
    if asked.json:
        return int(checked.exit_code), [told.model_dump_json(indent=1)]
    width = shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty() and not env.get("NO_COLOR")
    return int(checked.exit_code), report.lines(told, width=width, colour=colour, folder=folder)


def _located(judgement: Judgement, found: Sequence[Replica], made: Sequence[Again]) -> Judgement:
    """The differences with number, place and bits of the elements, as far as anything kept can tell."""
    verdicts = tuple(_with_elements(each, judgement, found, made) for each in judgement.verdicts)
    return dataclasses.replace(judgement, verdicts=verdicts)


def _with_elements(
    suspect: CardVerdict, judgement: Judgement, found: Sequence[Replica], made: Sequence[Again]
) -> CardVerdict:
    difference = suspect.difference
    if difference is None or suspect.status is not Status.FAIL or ":" not in difference.tensor:
        return suspect
    healthy = {each.card for each in judgement.verdicts if each.status is Status.PASS}
    right = next((replica.work(difference.workload) for replica in found if replica.card in healthy), None)
    wrong = next((replica.work(difference.workload) for replica in found if replica.card == suspect.card), None)
    kept = [each for each in made if each.dump is not None and _is_of(each, difference.workload, difference.step)]
    own = next((each.dump for each in kept if each.order.card == suspect.card), None)
    others = next((each.dump for each in kept if each.order.card in healthy), None)
    good = own if difference.nature == "transient" else others  # then its second run is as the others'
    good = good or others
    if right is None or wrong is None or good is None:
        return suspect
    bad = own if difference.nature == "persistent" else None
    filled = locate.describe(
        difference,
        right=right,
        wrong=wrong,
        right_dump=locate.read_dump(good),
        wrong_dump=locate.read_dump(bad) if bad else None,
    )
    return dataclasses.replace(suspect, difference=filled)


def _is_of(made: Again, workload: str, step: int) -> bool:
    return (made.order.workload, made.order.step) == (workload, step)


def _count(mine: Sequence[Card]) -> str:
    kind = "GPU" if mine[0].uuid else "CPU worker"
    return f"{len(mine)} {kind}{'s' if len(mine) > 1 else ''}"


def _versions(found: Sequence[Replica]) -> Mapping[str, str]:
    return next((replica.versions for replica in found if replica.versions), {})
