"""How many copies of a model there are, and in how many shards each: known before anything is started. Torch-free."""

from __future__ import annotations

from lockstep.errors import ConfigError


def grid(mode: str, *, world: int, nodes: int = 1) -> tuple[int, int]:
    """(copies of the model, shards of each copy). hsdp: shards in a node, copies across nodes; on one node 2 copies."""
    if mode == "fsdp":
        return 1, world
    copies = nodes if nodes > 1 else 2
    if world % copies or world < 2:
        raise ConfigError(
            f"hsdp makes {copies} equal copies of the model: {world} workers cannot be divided so",
            where="system.mode",
            hint=f"--mode fsdp, or a multiple of {copies} workers",
        )
    return copies, world // copies
