"""Sizes of agents: by name, overridden, written and read; counts, memory, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from lockstep.errors import ConfigError, LockstepError
from lockstep.models import hf, shapes
from lockstep.models.agent import Agent
from lockstep.models.agent_shapes import KNOWN, AgentShape
from lockstep.models.build import build, lay_out
from lockstep.models.options import AgentOptions, EncoderOptions
from lockstep.models.shapes import memory_bytes, resolve

CPU = torch.device("cpu")
TINY = KNOWN["lockstep/ad-tiny"]
VARIANTS = {
    "plain": TINY,
    "dynamics": replace(TINY, dynamics=True),
    "summaries": replace(TINY, compressed=True, summary_tokens=3),
    "forgetful": replace(TINY, compressed=True, summary_tokens=0),
    "all": AgentShape(7, 48, 99, 3, 6, compressed=True, region=11, summary_tokens=5, dynamics=True),
    **KNOWN,
}


def options(**values: Any) -> AgentOptions:
    return AgentOptions.model_validate({"model_path": "lockstep/ad-tiny", **values})


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_are_what_is_there(name: str) -> None:
    shape = VARIANTS[name]
    with torch.device("meta"):
        agent = lay_out(shape, attention="native_math")
    assert isinstance(agent, Agent)
    counted = {name: parameter.numel() for name, parameter in agent.named_parameters()}
    assert sum(counted.values()) == shape.parameters()
    tables = ("tok_embed", "taken_embed", "summaries", "askers")
    matrices = sum(count for name, count in counted.items() if not name.startswith(tables) and "norm" not in name)
    assert matrices == shape.matmul_parameters()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_the_memory_of_the_states_is_counted(name: str, states: str) -> None:
    """Contract 170; here to the byte, where the documented bound is 15 %."""
    shape = VARIANTS[name]
    told = memory_bytes(
        shape, batch_size=2, context_length=40, dtype_name="fp32", checkpointing=False, compiled=False,
        optimizer_states=states,
    )  # fmt: skip
    agent = Agent(shape, attention="native_math")
    parameters = sum(4 * parameter.numel() for parameter in agent.parameters())
    optimizer = AdamW(agent, TrainingOptions(), CPU)
    kept = sum(each.nbytes for moments in optimizer.states.values() for each in moments.values())
    assert told.weights == told.gradients == parameters
    assert told.moments == (kept if states == "fp32" else kept // 2)


def test_flops_count_summaries() -> None:
    plain, summed = VARIANTS["plain"], replace(VARIANTS["summaries"], region=80, summary_tokens=8)
    layers = 2 * (4 * 32**2 + 2 * 32 * 64)
    assert plain.flops_per_token(100) == pytest.approx(6 * (layers + 32 * 5) + 6 * 32 * 100 * 2)
    read = 1.2  # 96 tokens for 80 steps
    assert summed.flops_per_token(160) == pytest.approx(6 * (read * (layers + 2 * 32 * 96) + 32 * 8))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_config_json_is_read_back(name: str) -> None:
    shape = VARIANTS[name]
    assert shapes.from_hf(json.loads(json.dumps(shape.to_hf()))) == shape


@pytest.mark.parametrize(
    "change",
    [
        {"summary_tokens": "x"}, {"summary_tokens": -1}, {"summary_tokens": 1.5}, {"attention_dropout": "x"},
        {"region": 0}, {"num_heads": 3}, {"num_heads": 32}, {"hidden_size": None}, {"compressed": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_config_json_is_refused_in_a_line(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        shapes.from_hf({**TINY.to_hf(), **change}, where="a/config.json")


def test_weights_are_written_and_read_back(tmp_path: Path) -> None:
    asked = options(compressed=True, region=10, summary_tokens=3, dynamics=True)
    how: dict[str, Any] = {
        "device": CPU, "dtype_name": "fp32", "checkpointing": False, "deterministic": False, "debug": False,
    }  # fmt: skip
    first = build(asked, resolve(asked, context_length=40), seed=5, **how).model
    hf.export(first, first.shape, tmp_path / "hf", dtype="fp32")
    again = options(model_path=str(tmp_path / "hf"), init="pretrained", dynamics=True)
    second = build(again, resolve(again, context_length=40), seed=6, **how).model
    theirs = second.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in first.state_dict().items())
    for change in ({"summary_tokens": 4}, {"dynamics": False}, {"hidden_size": 64}):
        with pytest.raises(LockstepError):
            resolve(again.model_copy(update=change), context_length=40)


def test_overrides_and_what_follows_from_them() -> None:
    asked = options(hidden_size=48, num_attention_heads=6, num_layers=3, attention_dropout=0.2, dynamics=True)
    expected = AgentShape(5, 48, 96, 3, 6, attention_dropout=0.2, dynamics=True)  # twice the width, as it was
    assert resolve(asked, context_length=40) == expected
    assert resolve(options(intermediate_size=99), context_length=40) == replace(
        TINY, intermediate_size=99, attention_dropout=0.1
    )
    summed = resolve(options(compressed=True, region=20, summary_tokens=2), context_length=21)
    assert (summed.region, summed.summary_tokens, summed.said) == (20, 2, {"action": 5, "kind": 3})  # pyright: ignore
    assert any("forgotten" in notice for notice in VARIANTS["forgetful"].notices())
    assert not VARIANTS["summaries"].notices()


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"num_attention_heads": 3}, "model.num_attention_heads"),
        ({"num_attention_heads": 32}, "model.num_attention_heads"),
        ({"max_position_embeddings": 64}, "model.max_position_embeddings"),
        ({"compressed": True, "region": 40}, "model.region"),
        ({"model_path": "lockstep/mlm-tiny"}, "model.model_path"),
        ({"init": "pretrained"}, "model.init"),
    ],
)
def test_impossible_sizes_name_the_key(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(options(**values), context_length=40)
    assert caught.value.where == key


def test_names_are_those_the_family_can_train() -> None:
    assert set(shapes.names(AgentOptions)) == set(KNOWN)
    assert not set(shapes.names(EncoderOptions)) & set(KNOWN)
