"""Replicas: equal runs whose bits must be equal at every step. Which GPU has others, since when, and in what tensor?

Each worker writes the fingerprints of its steps into its own file. At the end all are compared: first one short digest
a step, then, where those differ, the tensors of that step.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import rundir
from lockstep.config.schema import RunConfig
from lockstep.engine.state import trained
from lockstep.errors import ExitCode, LockstepError
from lockstep.health.prints import Prints, as_hex, digests
from lockstep.health.records import FILE, Stamp, first_tensor, line, read_lines
from lockstep.health.vote import Vote, vote
from lockstep.runtime import env
from lockstep.runtime.group import Group

if TYPE_CHECKING:
    from lockstep.engine.parts import Parts
    from lockstep.engine.step import Reading, Stepper

SLICE_STEPS = 4096  # compared at once: bounds what travels and what is kept
HINT = "lockstep check; if it names the same GPU, leave that one out (--gpus) and have it looked at"
MAX_BYTES_AFTER_A_FAILURE = 1 << 26  # of all records: who fails is not to be kept waiting


class Stamps:
    """The fingerprints of one worker's steps: taken by the stepper, written here when a step is settled."""

    def __init__(self, path: Path, prints: Prints, *, begin: int) -> None:
        """Steps from `begin` on are to come; what an earlier attempt wrote of them goes."""
        self.path, self.prints = path, prints
        self.tensors = [name for name, _ in prints.tensors]
        known = list(_stamps(path)) if begin and _tensors(path) == self.tensors else []
        lines = [line("workload", workload="train", tensors=self.tensors)]
        lines += [_line(stamp) for stamp in known if stamp.step < begin]
        self._write("".join(f"{each}\n" for each in lines), anew=True)

    def note(self, step: int, reading: Reading, seconds: float) -> None:
        """A step that was read: its fingerprint has arrived too, if it was due."""
        for taken in self.prints.taken(up_to=step):
            loss, norm = reading.loss.hex(), reading.grad_norm.hex()
            self._write(f"{_line(Stamp(taken.step, loss, norm, as_hex(taken.read()), round(seconds, 6)))}\n")

    def end(self, step: int, loss: str) -> None:
        """After the last step: one more stamp, of the state alone, where that step had none."""
        if step in (stamp.step for stamp in _stamps(self.path)):
            return
        state = [*self.prints.parameters.values(), *self.prints.moments.values()]
        sums = "0" * 32 * len(self.prints.parameters) + as_hex(digests(state).tolist())
        self._write(f"{_line(Stamp(step, loss, '', sums))}\n")

    def digests(self) -> dict[int, str]:
        """Step -> all its bits, in short."""
        return {stamp.step: short(stamp) for stamp in _stamps(self.path)}

    def of(self, steps: set[int]) -> dict[int, Stamp]:
        return {stamp.step: stamp for stamp in _stamps(self.path) if stamp.step in steps}

    def _write(self, text: str, *, anew: bool = False) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if anew:
                rundir.write_bytes(self.path, text.encode())
                return
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise rundir.io_error(error, self.path, doing="writing fingerprints") from error


def start(config: RunConfig, stepper: Stepper, folder: Path, *, begin: int) -> Stamps | None:
    """Let the stepper take fingerprints, if the configuration wants any; they are written into the worker's folder."""
    if config.system.mode != "replicas":
        return None
    interval = config.debug.digest_interval or 1
    live, parameters = stepper.optimizer.moments(), trained(stepper.model)
    moments = {f"{kind}.{name}": held for name, each in parameters.items() for kind, held in live[id(each)].items()}
    stepper.prints = Prints(parameters, moments, interval=interval)
    return Stamps(folder / FILE, stepper.prints, begin=begin)


def compare(parts: Parts, group: Group, *, mode: str) -> None:
    """After the last step, on every worker: an error that names the GPU whose bits differ (exit code 3)."""
    if mode != "replicas" or group.world == 1:
        return
    assert parts.stamps is not None
    parts.stamps.end(parts.progress.step - 1, parts.last.loss.hex() if parts.last else "")
    mine = parts.stamps.digests()
    result = _vote(mine, group)
    if result.agree:
        parts.tell("replicas", step=parts.progress.step, count=group.world, digest=mine.get(max(mine, default=0), ""))
        return
    steps = {each.step for each in result.outvoted.values()} | {result.undecided_step or 0}
    own = {step: (stamp.loss, stamp.norm, stamp.sums) for step, stamp in parts.stamps.of(steps).items()}
    told = group.gather({"tag": env.detect().tag, "stamps": own})
    names = [each["tag"].replace("GPU", "GPU ") or f"worker {rank}" for rank, each in enumerate(told)]
    stamps = [{int(step): Stamp(int(step), *bits) for step, bits in each["stamps"].items()} for each in told]
    said = words(names, result, stamps, parts.stamps.tensors)
    error = LockstepError(said, hint=HINT, exit_code=ExitCode.BAD_DEVICE)
    error.secondary = group.rank != min(result.outvoted, default=0)  # one tells it for all
    raise error


def _vote(mine: Mapping[int, str], group: Group) -> Vote:
    """The vote over all steps, a slice at a time. Steps at which all voters agree change nothing, and are not kept."""
    last = max(group.gather(max(mine, default=-1)))
    records: list[dict[int, str]] = [{} for _ in range(group.world)]
    result = vote(records)
    for begin in range(0, last + 1, SLICE_STEPS):
        slices = group.gather({step: mine[step] for step in range(begin, begin + SLICE_STEPS) if step in mine})
        told = [{int(step): bits for step, bits in each.items()} for each in slices]
        if any(_disagree(one, other) for one, other in itertools.combinations(_voters(told, result), 2)):
            records = [kept | new for kept, new in zip(records, told, strict=True)]
            result = vote(records)
        if result.undecided:
            break
    return result


def _voters(told: Sequence[Mapping[int, str]], result: Vote) -> list[Mapping[int, str]]:
    return [each for rank, each in enumerate(told) if rank not in result.outvoted]


def _disagree(one: Mapping[int, str], other: Mapping[int, str]) -> bool:
    """At a step that both have: one that was written down by one of them only says nothing."""
    return any(other.get(step, bits) != bits for step, bits in one.items())


def words(
    names: Sequence[str], result: Vote, stamps: Sequence[Mapping[int, Stamp]], tensors: Sequence[str]
) -> str:  # fmt: skip
    """Who has other bits, since which step, and first in what. Steps count from 0, as on the screen."""
    others = len(names) - len(result.outvoted)
    said = [
        f"{names[rank]} ends step {each.step} with other bits than the other {others} replicas, first in "
        f"{first_tensor(stamps[rank][each.step], stamps[each.right][each.step], tensors)}"
        for rank, each in result.outvoted.items()
    ]
    if (step := result.undecided_step) is not None:
        one, *rest = result.undecided
        found = [first_tensor(stamps[one][step], stamps[other][step], tensors) for other in rest]
        place = min(filter(None, found), key=lambda name: tensors.index(name) if name in tensors else len(tensors))
        who = ", ".join(names[rank] for rank in result.undecided)
        said.append(f"{who} end step {step} with different bits in {place}, and no majority says which are right")
    return "; ".join(said)


def differences_so_far(root: Path) -> str:
    """From the records of all workers in a run folder, when one of them has failed: what compare would say of them.

    Nobody is waited for. "": nothing to say, or too much to read now.
    """
    files = sorted(root.glob(f"workers/*/{FILE}"))
    if len(files) < 2 or sum(path.stat().st_size for path in files) > MAX_BYTES_AFTER_A_FAILURE:
        return ""
    tensors = [_tensors(path) for path in files]
    if any(each != tensors[0] for each in tensors):
        return ""
    stamps = [{stamp.step: stamp for stamp in _stamps(path)} for path in files]
    common = set.intersection(*(set(each) for each in stamps))
    result = vote([{step: short(each[step]) for step in common} for each in stamps])
    names = [path.parent.name.partition("-")[2].replace("GPU", "GPU ") for path in files]
    return "" if result.agree else words(names, result, stamps, tensors[0])


def short(stamp: Stamp) -> str:
    """All bits of a step in 64 of them."""
    return hashlib.sha256("\n".join(stamp.bits).encode()).hexdigest()[:16]


def _line(stamp: Stamp) -> str:
    return line(
        "step", step=stamp.step, loss=stamp.loss, norm=stamp.norm, sums=stamp.sums, seconds=stamp.seconds
    )  # fmt: skip


def _stamps(path: Path) -> Iterator[Stamp]:
    """Of a worker's file; a damaged line says nothing."""
    for content in _contents(path, "step"):
        yield Stamp(**content)


def _tensors(path: Path) -> list[str]:
    return next((list(content["tensors"]) for content in _contents(path, "workload")), [])


def _contents(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    for _, content in read_lines(path):
        if content and content.pop("kind", "") == kind:
            yield content
