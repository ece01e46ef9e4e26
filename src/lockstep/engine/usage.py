"""How each worker has used its GPU, for the summary."""

from __future__ import annotations

from typing import Any

from lockstep.engine.parts import Parts
from lockstep.runtime import env, hardware
from lockstep.runtime.gpu_facts import Sampler
from lockstep.runtime.group import Group


def gather(parts: Parts, everyone: Group, sampler: Sampler, *, seconds: float) -> list[dict[str, Any]]:
    """One entry for each worker, of replicas too. All call it."""
    options, pace = parts.config.training, parts.pace
    timed = pace.steps - pace.warm_up if pace.steps > pace.warm_up else pace.steps
    own, place = hardware.peak_memory_bytes(parts.device), env.detect()
    name = place.tag.replace("GPU", "GPU ") or (f"CPU {everyone.rank}" if everyone.world > 1 else "CPU")
    mine = {
        "name": f"node {place.node} {name}" if place.nodes > 1 else name,
        "seconds": seconds,
        "samples_per_second": timed * options.batch_size * options.grad_accum_nums / max(pace.seconds, 1e-9),
        "peak_memory_bytes": own if parts.device.type == "cuda" else sampler.peak_memory_bytes() or own,
        "utilisation": sampler.mean_utilisation(),
    }
    return everyone.gather(mine)
