"""What an agent sees: nothing leaks back, steps one by one are the window, and summaries carry what has gone by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.models.agent import Reader
from lockstep.models.agent_shapes import AgentShape
from lockstep.worlds.observed import FEATURES
from tests.agents import FORGETFUL, HORIZON, REGIONS, TINY, histories, lived, make, shown, step_by_step

# --------------------------------------------------------------------------------------------------- who sees what


@pytest.mark.parametrize("shape", [TINY, REGIONS, FORGETFUL], ids=["plain", "summaries", "forgetful"])
@pytest.mark.parametrize("feature", range(len(FEATURES)), ids=FEATURES)
def test_a_later_step_never_changes_an_earlier_answer(shape: AgentShape, feature: int) -> None:
    """Bit for bit; and its own answer does change."""
    agent, seen = make(shape).eval(), histories(2, 35)
    changed = seen.clone()
    changed[0, 23, feature] = 1 - changed[0, 23, feature].clamp(0, 1)
    with torch.no_grad():
        before, after = agent(seen), agent(changed)
    for name, logits in before.items():
        assert torch.equal(logits[0, :23], after[name][0, :23])
        assert torch.equal(logits[1], after[name][1])
        assert not torch.equal(logits[0, 23], after[name][0, 23])
        same = torch.isclose(logits[0, 24:], after[name][0, 24:], rtol=0, atol=1e-7).all(-1)
        assert not same[:6].any()  # those of its region
        assert bool(same[6:].all()) == (shape is FORGETFUL)  # what summaries or the window carry


@pytest.mark.parametrize("shape", [TINY, REGIONS, FORGETFUL], ids=["plain", "summaries", "forgetful"])
def test_a_short_history_among_longer_ones_and_a_longer_one(shape: AgentShape) -> None:
    """Contract 142: what follows, another row's steps or padding, is nothing to the steps before it."""
    agent = make(shape, wide=True).eval()
    for length in (1, 4, 10, 11, 26):
        short = histories(1, length, seed=length)
        batched = torch.cat((histories(2, 40), torch.zeros(1, 40, len(FEATURES), dtype=torch.long)))
        batched[2, :length] = short[0]
        with torch.no_grad():
            alone, together = agent(short)["action"][0], agent(batched)["action"][2]
        assert float((alone - together[:length]).abs().max()) < 1e-9
        assert float((alone[-1] - together[-1]).abs().max()) > 1e-3, "control: said from the padding at the end"


def test_what_is_taken_is_not_told_to_the_action() -> None:
    """The outcome knows the action, the action's own logits must not."""
    agent, seen = make(replace(REGIONS, dynamics=True)).eval(), histories(2, 20)
    said = [agent(seen, torch.full((2, 20), action)) for action in (0, 3)]
    for name in said[0]:
        assert torch.equal(said[0][name], said[1][name]) == (name in ("action", "kind")), name
    assert set(said[0]) == {"action", "kind", "x", "y", "reward"}
    assert {name: logits.shape[-1] for name, logits in said[0].items()} == agent.shape.said
    assert set(agent(seen)) == {"action", "kind"}
    assert set(make()(seen)) == {"action"}


# ------------------------------------------------------------------------------------------------------ step by step


def window(time: int, context: int) -> int:
    """Where the window of a step begins: as soon as it would be too long, its first episode goes."""
    first = 0
    while time - first >= context:
        first += HORIZON
    return first


@pytest.mark.parametrize("context", [5, 20, 23], ids=lambda context: f"context-{context}")
def test_reading_step_by_step_is_the_window_as_training_has_it(context: int) -> None:
    """Before and after the context is full; the first step of what is left knows of no step before it."""
    agent, steps = make(wide=True).eval(), lived(3, 52)
    seen, worst, stale = shown(steps), 0.0, 0.0
    for time, logits in step_by_step(agent, seen, context=context):
        first = window(time, context)
        assert first % HORIZON == 0
        cut = slice(first, time + 1)
        own = shown((steps[0][:, cut], steps[1][:, cut], steps[2][:, cut]))
        with torch.no_grad():
            worst = max(worst, float((logits - agent(own)["action"][:, -1]).abs().max()))
            stale = max(stale, float((logits - agent(seen[:, cut])["action"][:, -1]).abs().max()))
    assert worst < 1e-9
    assert stale > 1e-4, "control: with what the dropped step did, it would be another"


@pytest.mark.parametrize("shape", [REGIONS, FORGETFUL], ids=["summaries", "forgetful"])
def test_reading_regions_step_by_step_is_the_forward_pass(shape: AgentShape) -> None:
    """Over four regions and a bit: the summaries of summaries."""
    agent, seen = make(shape, wide=True).eval(), histories(2, 43)
    with torch.no_grad():
        expected = agent(seen)["action"]
        plain = make(replace(shape, compressed=False, summary_tokens=0), wide=True).eval()(seen)["action"]
    found = torch.stack([logits for _, logits in step_by_step(agent, seen, context=20)], 1)
    assert float((found - expected).abs().max()) < 1e-9
    assert float((plain - expected)[:, -1].abs().max()) > 1e-3, "control: all regions in sight say something else"


def test_the_reader_under_bf16_says_what_the_forward_pass_says() -> None:
    agent, seen = make(REGIONS, std=0.1).eval(), histories(2, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected = agent(seen)["action"].float()
        found = torch.stack([logits for _, logits in step_by_step(agent, seen, context=20)], 1).float()
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("backend", ["native_math", "native_flash"])
def test_the_kernel_changes_no_answer(backend: str) -> None:
    seen = histories(2, 25)
    with torch.no_grad():
        expected = make(REGIONS, wide=True, attention="native_math").eval()(seen)["action"]
        agent = make(REGIONS, wide=True, attention=backend).eval()
        found = torch.stack([logits for _, logits in step_by_step(agent, seen, context=20)], 1)
    assert float((found - expected).abs().max()) < 1e-9


def test_a_reader_refuses_what_training_never_saw() -> None:
    agent, seen = make(), histories(2, 5)
    with pytest.raises(AssertionError, match="drops nothing"):
        agent.reader(2, context_length=10, horizon=HORIZON).see(seen[:, 0])
    with pytest.raises(AssertionError, match="at least one episode"):
        agent.reader(2, context_length=4, horizon=HORIZON)
    with pytest.raises(AssertionError, match="a step of each"):
        agent.eval().reader(3, context_length=10, horizon=HORIZON).see(seen[:, 0])


def test_reading_goes_through_the_forward_pass() -> None:
    """Of a model in shards the root's weights are whole only in there: hooks around it must be called."""
    agent, called = make(REGIONS).eval(), []
    agent.register_forward_pre_hook(lambda *_: called.append(True))
    inside = [False]
    agent.tok_embed.register_forward_pre_hook(lambda *_: inside.__setitem__(0, bool(called)))
    reader = agent.reader(1, context_length=20, horizon=HORIZON)
    assert not called, "nothing is read before the first step"
    reader.see(histories(1, 1)[:, 0])
    assert called == [True]
    assert inside == [True]


def test_steps_at_hand_cost_one_pass_of_one_token() -> None:
    """Keys and values are kept: the blocks see one token per step, but where an episode goes or a region is summed."""
    for shape, expected in (
        (TINY, [1] * 20 + [15] + [1] * 5 + [15] + [1] * 5),
        (REGIONS, [3] + ([1] * 10 + [3, 3]) * 3),
    ):
        agent, widths = make(shape).eval(), list[int]()

        def note(_block: nn.Module, given: Any, widths: list[int] = widths) -> None:
            widths.append(given[0].shape[1])

        agent.layers[0].register_forward_pre_hook(note)
        for _ in step_by_step(agent, histories(1, 31 if shape is REGIONS else 30), context=20):
            pass
        assert widths[: len(expected)] == expected[: len(widths)]
        assert abs(len(widths) - len(expected)) <= 1


# ------------------------------------------------------------------------------------------------------------ regions


def test_old_regions_are_seen_through_summaries_only() -> None:
    """Without summary tokens not at all, bit for bit, not even what their last step did; with them ever after."""
    steps, others = lived(1, 40), lived(1, 40, seed=4)
    cells, actions, rewards = (
        torch.cat((other[:, :10], own[:, 10:]), 1) for own, other in zip(steps, others, strict=True)
    )
    for shape, reach in ((FORGETFUL, 10), (REGIONS, 40), (TINY, 40)):
        agent = make(shape, wide=True).eval()
        with torch.no_grad():
            one, other = (agent(shown(each))["action"] for each in (steps, (cells, actions, rewards)))
        assert (one != other).any(-1)[0].tolist() == [place < reach for place in range(40)]


def test_gradients_flow_from_the_last_region_to_the_first() -> None:
    seen = histories(2, 40)
    for shape, flows in ((REGIONS, True), (FORGETFUL, False)):
        agent = make(shape)
        inputs: list[Tensor] = []

        def note(_table: nn.Module, _given: Any, out: Tensor, inputs: list[Tensor] = inputs) -> None:
            out.retain_grad()
            inputs.append(out)

        agent.tok_embed.register_forward_hook(note)
        agent(seen)["action"][:, 30:].square().sum().backward()
        reached = inputs[0].grad
        assert reached is not None
        strength = reached.flatten(2).norm(dim=-1)
        assert bool((strength[:, :10] > 0).all()) == flows
        assert bool((strength[:, 30:] > 0).all())
        if flows:
            for name in ("summaries.weight", "askers.weight"):
                gradient = agent.get_parameter(name).grad
                assert gradient is not None
                assert (gradient.norm(dim=-1) > 0).all()


def test_a_last_region_need_not_be_whole() -> None:
    agent = make(REGIONS, wide=True).eval()
    seen = histories(1, 40)
    with torch.no_grad():
        whole = agent(seen)["action"]
        for length in (1, 9, 10, 11, 35):
            assert float((agent(seen[:, :length])["action"] - whole[:, :length]).abs().max()) < 1e-9


def test_no_rows_at_all() -> None:
    """A rank may have no walk left while the others go on."""
    agent = make(REGIONS).eval()
    reader = Reader(agent, 0, context_length=20, horizon=HORIZON)
    for time in range(22):
        assert reader.see(histories(1, 22)[:0, time]).shape == (0, 5)
