"""Whether ranks that must have equal weights still do: a flipped bit on one of them is no error that anybody else sees.

Under ddp every rank has all weights, under hsdp every copy. Each takes the digest of its own on the device, 32 bytes
travel, and the minority is named. Nothing is saved before the weights were looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lockstep.engine.parts import Parts
from lockstep.engine.state import trained
from lockstep.errors import ExitCode, LockstepError
from lockstep.health.prints import as_hex, digests
from lockstep.health.records import Stamp, first_tensor
from lockstep.health.vote import Vote, vote
from lockstep.runtime import env
from lockstep.runtime.parallel import Sharded

ON = "go on from the last checkpoint (--resume)"
ANEW = "start again"
HINT = "{on}, without that GPU (--gpus) if it happens again; lockstep check tests it"
UNDECIDED = "lockstep check tells which of them it is; then {on} without it (--gpus)"


def is_due(parts: Parts, done: int) -> bool:
    """Whether the ranks are to be compared after `done` steps."""
    interval = parts.config.debug.agree_interval
    return _copies(parts) > 1 and interval > 0 and done % interval == 0


def check(parts: Parts) -> None:
    """Raise an error (exit code 3) that names the rank with other weights. All ranks call it, between two steps."""
    group, step = parts.council.group, parts.progress.step
    copies = _copies(parts)
    if copies < 2 or not parts.config.debug.agree_interval or parts.agreed_step == step:
        return
    named = trained(parts.stepper.model)
    sums = as_hex(digests(list(named.values())).tolist())
    told = group.gather(hashlib.sha256(sums.encode()).hexdigest())
    shards = group.world // copies
    alike = [range(shard, group.world, shards) for shard in range(shards)]  # ranks with the same part of the weights
    votes = [vote([{step: told[rank]} for rank in ranks]) for ranks in alike]
    if all(result.agree for result in votes):
        parts.agreed_step = step
        return
    whole = group.gather({"tag": env.detect().tag, "sums": sums})
    names = [each["tag"].replace("GPU", "GPU ") or f"rank {rank}" for rank, each in enumerate(whole)]
    stamps = [Stamp(step, sums=each["sums"]) for each in whole]
    said = [_words(result, ranks, names, stamps, list(named)) for result, ranks in zip(votes, alike, strict=True)]
    wrong = [ranks[voter] for result, ranks in zip(votes, alike, strict=True) for voter in result.outvoted]
    since = f"they were equal after step {parts.agreed_step - 1}" if parts.agreed_step > 0 else "not looked at before"
    hint = (HINT if wrong else UNDECIDED).format(on=ON if parts.checkpointer.found() else ANEW)
    error = LockstepError(
        f"after step {step - 1} {'; '.join(filter(None, said))} ({since})", hint=hint, exit_code=ExitCode.BAD_DEVICE
    )
    error.secondary = group.rank != min(wrong, default=0)  # one tells it for all
    raise error


def _copies(parts: Parts) -> int:
    """How many ranks have the same weights."""
    exchange = parts.stepper.exchange
    return exchange.copies if isinstance(exchange, Sharded) else parts.council.group.world


def _words(
    result: Vote, ranks: Sequence[int], names: Sequence[str], stamps: Sequence[Stamp], tensors: Sequence[str]
) -> str:
    """What one vote says; "" if all agree."""
    if result.undecided:
        one, *rest = (ranks[voter] for voter in result.undecided)
        found = [first_tensor(stamps[one], stamps[other], tensors) for other in rest]
        place = min(filter(None, found), key=list(tensors).index)
        who = " and ".join(names[ranks[voter]] for voter in result.undecided)
        return f"the weights of {who} differ in {place}, and no majority says which are right"
    others = len(ranks) - len(result.outvoted)
    return "; ".join(
        f"{names[ranks[voter]]} has other weights than the other {others}, first in "
        f"{first_tensor(stamps[ranks[voter]], stamps[ranks[each.right]], tensors)}"
        for voter, each in result.outvoted.items()
    )
