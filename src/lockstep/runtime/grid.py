"""How work is shared out: copies and shards of a model, and blocks of canonical sums. Known before anything is started.

Torch-free.
"""

from __future__ import annotations

from lockstep.errors import ConfigError

BLOCKS = 8  # of a global batch whose gradients are summed in one order; part of what those bits are


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


def shards(mode: str, *, world: int, nodes: int = 1) -> int:
    """In how many parts the state of the model is cut; whatever could not be divided so is refused by `grid`."""
    if mode == "hsdp":
        return world // nodes if nodes > 1 else max(1, world // 2)
    return world if mode == "fsdp" else 1


def check_canonical(*, world: int, micro_batches: int | None = None) -> None:
    """Refuse what cannot be cut into blocks. `micro_batches`: of one worker in a step, where that is known."""
    where = "system.deterministic"
    if BLOCKS % world:
        raise ConfigError(
            f"canonical sums: the {BLOCKS} blocks of a global batch cannot be shared out to {world} workers",
            where=where,
            hint="--gpus 1, 2, 4 or 8",
        )
    if micro_batches is not None and world * micro_batches % BLOCKS:
        each = BLOCKS // world
        raise ConfigError(
            f"canonical sums: {world} x {micro_batches} micro-batches cannot be cut into {BLOCKS} equal blocks",
            where=where,
            hint=f"--training.grad-accum-nums {-(-micro_batches // each) * each}, "
            "with a smaller --batch-size for the same global batch",
        )
