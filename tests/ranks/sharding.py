"""What the ranks of the sharding tests do: real training of a model in shards, with odd batches where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config.load import load
from lockstep.contracts import Batch, Draw, Rows
from lockstep.engine import loop
from lockstep.engine.build import Assembled, assemble, plan
from lockstep.engine.resume import ResumePoint
from lockstep.engine.state import digest
from lockstep.engine.train import rehearse
from lockstep.objectives.causal import Causal, expanded
from lockstep.rundir import RunDir
from lockstep.runtime.group import Group
from lockstep.runtime.signals import StopRequest
from tests.gates.training import FEW_WORDS, Recorder, flags

IGNORE = -100
ROWS = 12  # of a global batch: divided by 1, 2, 3 and 4 ranks
MICRO = {1: (12, 1), 2: (2, 3), 3: (2, 2), 4: (1, 3)}  # ranks -> rows of a micro-batch, micro-batches
SMALL: dict[str, Any] = {
    "system.device": "cpu",
    "model.vocab_size": 301,  # no world size divides it
    "model.hidden_size": 18,
    "model.num_attention_heads": 3,
    "model.num_key_value_heads": 1,
    "model.head_dim": 2,  # keys have 2 rows: fewer than 3 or 4 ranks
    "model.intermediate_size": 22,
    "training.context_length": 8,
    "training.eval_interval": 0,
    "training.save_interval": 0,
    "training.max_grad_norm": 0.5,
    "training.max_steps": 50,
    "data.num_workers": 0,
    "data.data_path": FEW_WORDS,  # so few rows that 50 steps walk over them several times
    "report.tensorboard": False,
}


class Odd(Causal):
    """Rows of different lengths, and one run of slots without any target: whoever has them has nothing to learn."""

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        batch = super().collate(rows, draw)
        targets = expanded(batch)["targets"].clone()
        for row, slot in enumerate(rows.slots.tolist()):
            targets[row, 1 + slot % 7 :] = IGNORE
            if slot >= ROWS // 2:  # the second rank of two, and more ranks of more
                targets[row] = IGNORE
        count = int((targets != IGNORE).sum())
        return Batch({**expanded(batch), "targets": targets}, {"loss": count}, rows=batch.rows, tokens=batch.tokens)


def assembled(
    group: Group, folder: Path, settings: Mapping[str, Any], point: Path | None = None, odd: bool = False
) -> tuple[Assembled, Recorder]:
    """A run in `folder`, ready for its first step."""
    rows, count = MICRO[group.world]
    micro = {"training.batch_size": rows, "training.grad_accum_nums": count}
    loaded = load("llama", preset="tiny", flags=flags({**SMALL, **micro, **settings}))
    planned = plan(loaded, torch.device("cpu"))
    if odd:
        planned = replace(planned, objective=Odd())
    recorder = Recorder()
    where = ResumePoint(point, None) if point else None
    made = assemble(planned, RunDir(folder), point=where, sinks=[recorder], stop=StopRequest(), group=group)
    recorder.parts = made.parts
    if made.parts.progress.step < made.parts.config.training.max_steps:
        rehearse(made.parts, planned)
    return made, recorder


def train(
    group: Group, folder: Path, settings: Mapping[str, Any], point: Path | None = None, odd: bool = False
) -> list[tuple[Any, ...]]:
    """Train in a folder; the bits of every step. The last step saves."""
    made, recorder = assembled(group, folder, settings, point, odd)
    try:
        loop.run(made.parts)
    finally:
        made.loader.close()
    return recorder.trace


def resave(group: Group, source: Path, folder: Path, settings: Mapping[str, Any]) -> str:
    """Load a checkpoint into another mode or world and save it there at once; the digest of what was loaded."""
    made, _ = assembled(group, folder, {**settings, "checkpoint.allow_mismatch": True}, source)
    made.loader.close()
    loop.save(made.parts, "again")
    return digest(made.parts.stepper.model)


def numbers(trace: list[tuple[Any, ...]]) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    return [(float.fromhex(entry[1]), float.fromhex(entry[2])) for entry in trace]
