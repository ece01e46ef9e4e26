"""Agents on several ranks, whole or in shards: one process's gradients and measures, and what a reader reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.contracts import Batch, Draw, Rows
from lockstep.engine.council import Council
from lockstep.engine.options import TrainingOptions
from lockstep.engine.step import Stepper
from lockstep.models.agent import Agent
from lockstep.models.initialise import initialise
from lockstep.objectives.distill import Distill
from lockstep.runtime import faults
from lockstep.runtime.group import Group
from lockstep.runtime.marks import NoMarks
from lockstep.runtime.parallel import Sharded, whole
from lockstep.runtime.precision import Precision
from lockstep.runtime.reduce import Reducer
from lockstep.worlds.observed import Histories
from tests.agents import HORIZON, REGIONS, SIZE, histories, lived, step_by_step
from tests.ranks.pool import Pool

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")
SHAPE = replace(REGIONS, dynamics=True)
ROWS, LENGTH = 12, 25
TERMS = {"loss_token_type": 0.5, "loss_dynamics": 2.0}


def make(sharded: Sharded | None) -> Agent:
    with torch.device("meta"):
        agent = Agent(SHAPE, attention="native_flash").double()
    if sharded:
        sharded.shard(agent)
    agent.to_empty(device=CPU)
    agent.rebuild_buffers()
    initialise(agent, seed=1, std=0.2)
    return agent


def objective() -> Distill:
    steps = np.stack([part.numpy() for part in lived(ROWS, 50)]).astype(np.uint8)
    about = Histories(steps, size=SIZE, horizon=HORIZON, actions=5, region=10)
    return Distill().with_histories(about, length=LENGTH, terms=TERMS)


def batches(made: Distill, rank: int, world: int) -> list[Batch]:
    """Two micro-batches of this rank."""
    each = ROWS // world // 2
    parts = [np.arange(first, first + each) for first in (2 * rank * each, (2 * rank + 1) * each)]
    columns = [{"histories": ids[:, None].astype(np.int32)} for ids in parts]
    return [
        made.collate(Rows(ids, np.zeros_like(ids), ids, held), Draw(3, 0, ROWS))
        for ids, held in zip(parts, columns, strict=True)
    ]


def trained(group: Group, mode: str) -> dict[str, Any]:
    """Three steps: what was told of each, and the weights after them; then a walk's reading."""
    sharded = Sharded(mode, group, CPU) if mode == "fsdp" else None
    agent, made = make(sharded), objective()
    options = TrainingOptions(learning_rate=0.01, max_steps=50, warmup_steps=0)
    stepper = Stepper(agent, made, options, precision=Precision("fp64", CPU), seed=0, faults=faults.plan(""))
    if group.world > 1:
        exchange = sharded or Reducer(stepper.parameters, group)
        stepper.connect(exchange, Council(made.terms, group), NoMarks())
    told = [stepper.launch(step, batches(made, group.rank, group.world)).read() for step in range(3)]
    agent.eval()
    seen = histories(2, 24)
    read = torch.stack([logits for _, logits in step_by_step(agent, seen, context=20)], 1)
    with torch.no_grad():
        forward = agent(seen)["action"]
    return {
        "told": [(reading.loss, reading.grad_norm, *reading.measures.values()) for reading in told],
        "names": list(told[0].measures),
        "weights": {name: whole(parameter.detach()).tolist() for name, parameter in agent.named_parameters()},
        "apart": float((read - forward).abs().max()),
        "read": read.tolist(),
    }


@pytest.mark.parametrize(
    ("mode", "world"),
    [("fsdp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddp", 2), ("ddp", 3), ("fsdp", 3)))],
)
def test_ranks_together_are_one_process(ranks: Pool, mode: str, world: int) -> None:
    alone = trained(Group(), "ddp")
    assert alone["names"] == [
        "loss_action", "acc_action", "loss_token_type", "acc_token_type", "loss_dynamics", "acc_dynamics"
    ]  # fmt: skip
    for found in ranks(world, trained, mode):
        np.testing.assert_allclose(found["told"], alone["told"], rtol=1e-6, atol=1e-9)
        for name, weight in alone["weights"].items():
            np.testing.assert_allclose(found["weights"][name], weight, rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found["read"], alone["read"], rtol=0, atol=1e-5)
        assert found["apart"] < 1e-9
    loss, _, action, _, kind, _, outcome, _ = alone["told"][0]
    assert loss == pytest.approx(action + 0.5 * kind + 2 * outcome, rel=1e-9)
    assert np.abs(np.subtract(alone["told"][0], alone["told"][2]))[:-1].min() > 1e-3, "control: steps differ"
