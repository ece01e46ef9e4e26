"""Replicas: equal runs that must end with equal bits. Which GPU does not?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.engine.parts import Parts
from lockstep.engine.state import trained
from lockstep.errors import ExitCode, LockstepError
from lockstep.health.fingerprint import digest_model
from lockstep.runtime import env
from lockstep.runtime.group import Group


@dataclass(frozen=True)
class Verdict:
    """What a vote of equal runs says. No majority: they differ, and nobody can say who is wrong."""

    agree: bool
    wrong: tuple[int, ...] = ()


def vote(results: Sequence[str]) -> Verdict:
    """The majority is right: flipped bits do not flip alike."""
    counts = Counter(results).most_common(2)
    if len(counts) < 2:
        return Verdict(agree=True)
    right, count = counts[0]
    if count == counts[1][1]:
        return Verdict(agree=False)
    return Verdict(agree=False, wrong=tuple(rank for rank, result in enumerate(results) if result != right))


def compare(parts: Parts, group: Group, *, mode: str) -> None:
    """After the last step, on every worker: an error that names the GPU whose bits differ (exit code 3)."""
    if mode != "replicas" or group.world == 1:
        return
    moments = parts.stepper.optimizer.moments()
    named = trained(parts.stepper.model)
    kept = ((f"{kind}.{name}", held) for name, tensor in named.items() for kind, held in moments[id(tensor)].items())
    tensors = [*named.items(), *kept]
    loss = parts.last.loss.hex() if parts.last else ""
    mine = {"tag": env.detect().tag, "result": f"{digest_model(tensors)} {loss}"}
    told = group.gather(mine)
    verdict = vote([each["result"] for each in told])
    if verdict.agree:
        parts.tell("replicas", step=parts.progress.step, count=group.world, digest=mine["result"].split()[0])
        return
    names = [each["tag"].replace("GPU", "GPU ") or f"worker {rank}" for rank, each in enumerate(told)]
    hint = "run it again; if it is the same GPU, leave it out (--gpus) and have it looked at"
    error = LockstepError(_words(names, verdict, step=parts.progress.step), hint=hint, exit_code=ExitCode.BAD_DEVICE)
    error.secondary = group.rank != (verdict.wrong[0] if verdict.wrong else 0)  # one tells it for all
    raise error


def _words(names: Sequence[str], verdict: Verdict, *, step: int) -> str:
    if not verdict.wrong:
        return f"{', '.join(names)} end step {step} with different bits, and no majority says which are right"
    wrong = ", ".join(names[rank] for rank in verdict.wrong)
    return f"{wrong} ends step {step} with other bits than the other {len(names) - len(verdict.wrong)} replicas"
