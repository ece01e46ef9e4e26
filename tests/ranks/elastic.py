"""What the ranks of the elastic tests do: a leg of a run that begins and ends on any number of ranks, in any mode."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lockstep.contracts import Batch
from lockstep.engine import checkpoint, loop
from lockstep.engine.parts import Parts
from lockstep.engine.step import Pending, Stepper
from lockstep.errors import Stopped
from lockstep.health.fingerprint import digest_model
from lockstep.runtime.group import Group
from tests.gates.training import FEW_ANSWERS, FEW_DOCUMENTS, FEW_WORDS, Recorder, run
from tests.ranks.pool import Pool

ROWS = 24  # of a global batch: divided by 1, 2, 3, 4 and 8 ranks
STEPS = 6
SHARED: dict[str, Any] = {
    "training.batch_size": 1, "training.max_steps": STEPS, "training.eval_interval": 0, "training.save_interval": 0,
    "training.eval_batches": 1, "training.learning_rate": 1e-2, "model.dropout": 0.1, "data.num_workers": 0,
    "report.tensorboard": False, "checkpoint.keep_last": 100,
}  # fmt: skip
SMALL: dict[str, Any] = {"model.hidden_size": 16, "model.num_attention_heads": 2, "model.intermediate_size": 24}
TEXT: dict[str, Any] = {**SMALL, "training.context_length": 8, "data.data_path": FEW_WORDS}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # all that each draws: masks, times, lengths, windows
    "llama": ("llama", {**TEXT, "model.num_key_value_heads": 1, "model.vocab_size": 300}),
    "mlm": ("mlm", {"data.data_path": FEW_DOCUMENTS, "training.context_length": 16, "training.epochs": 20, **SMALL,
                    "objective.mask_probability": 0.3, "objective.last_mask_probability": 0.15}),
    "llada": ("llada", {**TEXT, "training.context_length": 16, "objective.random_length_probability": 0.3,
                        "data.validation_fraction": 0.2}),
    "answers": ("llada", {"data.data_path": FEW_ANSWERS, "data.documents": "answers", "training.context_length": 64,
                          **SMALL, "data.validation_fraction": 0.2}),
    "ad": ("ad", {"training.context_length": 20, "data.train_source_timesteps": 40, "model.dynamics": True,
                  "model.attention_dropout": 0.1, "training.gen_episodes": 0}),
}  # fmt: skip


@dataclass(frozen=True)
class Leg:
    """What one rank made of its part of a run."""

    step: int  # how far it came
    numbers: list[tuple[int, str, str]]  # step, loss and gradient norm
    rows: dict[tuple[int, int], str]  # (step, place in the global batch) -> hash of what the model was given
    measures: dict[str, float]
    weights: str
    micro: tuple[int, int]  # rows of a micro-batch, micro-batches


def leg(group: Group, folder: Path, settings: Mapping[str, Any], family: str, point: Path | None, until: int) -> Leg:
    """Train from a checkpoint until so many steps are done; it saves where it ends."""
    seen: dict[tuple[int, int], str] = {}
    launch = Stepper.launch
    enough = Stopped("stopped between two steps")

    def noting(self: Stepper, step: int, batches: Sequence[Batch]) -> Pending:
        if step == until:
            raise enough
        first = group.rank * len(batches)
        seen.update({(step, first + place): _hash(batch) for place, batch in enumerate(batches)})
        return launch(self, step, batches)

    recorder = Recorder()
    with mock.patch.object(Stepper, "launch", noting):
        try:
            run(folder, settings, family=family, point=point, group=group, recorder=recorder)
        except Stopped as stopped:
            if stopped is not enough:
                raise
            assert isinstance(recorder.parts, Parts)
            loop.save(recorder.parts, "interrupted")
    parts = recorder.parts
    assert isinstance(parts, Parts)
    numbers = [(record.step, record.loss.hex(), record.grad_norm.hex()) for record in recorder.records]
    saved = checkpoint.load(folder / "checkpoints" / f"step_{parts.progress.step:08d}")
    options = parts.config.training
    return Leg(
        parts.progress.step,
        numbers,
        seen,
        dict(parts.measures),
        digest_model([*saved.model.items(), *saved.optimizer.items()]),
        (options.batch_size, options.grad_accum_nums),
    )


def _hash(batch: Batch) -> str:
    content = hashlib.sha256(repr((sorted(batch.weights.items()), batch.rows, batch.tokens)).encode())
    for name, tensor in sorted(batch.tensors.items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()


@dataclass(frozen=True)
class Journey:
    """A run, leg after leg."""

    numbers: list[tuple[int, str, str]]
    rows: dict[tuple[int, int], str]
    measures: dict[str, float]
    weights: str  # digest of weights and moments at the end
    micro: list[tuple[int, int]]
    last: Path  # the checkpoint at its end

    def difference(self, other: Journey) -> float:
        """The largest relative difference of any loss, norm, measure or weight."""

        def values(numbers: list[tuple[int, str, str]]) -> torch.Tensor:
            return torch.tensor([[float.fromhex(text) for text in texts] for _, *texts in numbers], dtype=torch.float64)

        assert [step for step, *_ in self.numbers] == [step for step, *_ in other.numbers]
        assert self.measures.keys() == other.measures.keys()
        found = [_relative(values(self.numbers), values(other.numbers))]
        found += [
            _relative(torch.tensor(self.measures[name]), torch.tensor(other.measures[name])) for name in self.measures
        ]
        mine, theirs = checkpoint.load(self.last).model, checkpoint.load(other.last).model
        one, two = (torch.cat([each[name].double().flatten() for name in mine]) for each in (mine, theirs))
        return max(*found, float((one - two).norm() / one.norm()))


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).abs() / one.abs().clamp(min=1e-12)).max())


def travel(
    ranks: Pool,
    folder: Path,
    name: str,
    way: Sequence[tuple[int, str]],
    changes: Mapping[str, Any],
    *,
    rows: int = ROWS,
) -> Journey:
    """Train on the ranks and in the modes of `way`, a step each, the last to the end; settings are the first leg's."""
    family, own = FAMILIES[name]
    settings = {**SHARED, **own, **changes}
    settings |= {"training.grad_accum_nums": rows // way[0][0] // int(settings["training.batch_size"])}
    numbers: list[tuple[int, str, str]] = []
    seen: dict[tuple[int, int], str] = {}
    micro: list[tuple[int, int]] = []
    point, done = None, Leg(0, [], {}, {}, "", (0, 0))
    for place, (world, mode) in enumerate(way):
        here = folder / f"{place}-{mode}-{world}"
        until = STEPS if place == len(way) - 1 else place + 1
        asked = (here, {**settings, "system.mode": mode}, family, point, until)
        legs = ranks(world, leg, *asked) if world > 1 else [leg(Group(), *asked)]
        done = legs[0]
        assert len({(each.step, tuple(each.numbers), each.weights) for each in legs}) == 1, "the ranks do not agree"
        assert done.step == until
        numbers += done.numbers
        seen |= {key: value for each in legs for key, value in each.rows.items()}
        micro.append(done.micro)
        point = here / "checkpoints" / f"step_{done.step:08d}"
    assert point is not None
    return Journey(numbers, seen, done.measures, done.weights, micro, point)
