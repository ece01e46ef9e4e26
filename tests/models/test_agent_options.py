"""Every option of an agent acts, and what the engine counts on holds: checkpointing, compiling, decay, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from lockstep.models import attention
from lockstep.models.agent import Agent, Attention
from lockstep.models.agent_shapes import AgentShape
from lockstep.models.build import build, compile_blocks
from lockstep.models.initialise import fill, initialise
from lockstep.models.options import AgentOptions
from lockstep.models.shapes import memory_bytes, resolve
from tests.agents import REGIONS, TINY, histories, make
from tests.kept import saved_bytes

CPU = torch.device("cpu")


def gradients(agent: Agent, total: Tensor) -> dict[str, Tensor]:
    parameters = dict(agent.named_parameters())
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).norm() / (expected[name].norm() + 1e-12)) for name in expected)


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "change",
    [
        {"intermediate_size": 32}, {"num_heads": 4}, {"num_layers": 3}, {"hidden_size": 16}, {"region": 8},
        {"summary_tokens": 5}, {"summary_tokens": 0}, {"compressed": False}, {"rope_theta": 100.0},
    ],
    ids=str,
)  # fmt: skip
def test_every_size_acts(change: dict[str, Any]) -> None:
    seen = histories(1, 25)
    with torch.no_grad():
        one, other = (make(shape).eval()(seen)["action"] for shape in (REGIONS, replace(REGIONS, **change)))
    assert float((one - other)[:, -1].abs().max()) > 1e-4


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
@pytest.mark.parametrize("backend", ["native_flash", "native_math"])
def test_dropout_acts_in_training_repeats_and_is_off_otherwise(kind: str, backend: str) -> None:
    shape = replace(TINY, attention_dropout=0.4) if kind == "attention_dropout" else TINY
    agent = make(shape, dropout=0.4 if kind == "dropout" else 0.0, attention=backend)
    seen, plain = histories(2, 70), make(attention=backend)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return agent(seen)["action"].detach()

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.isclose(drawn(1), drawn(2)).any(-1).all()
    agent.eval()
    with torch.no_grad():
        assert torch.equal(drawn(1), drawn(2))
        assert torch.equal(drawn(1), plain.eval()(seen)["action"])


def test_attention_dropout_is_of_probabilities() -> None:
    """Half of them gone and the others doubled: values add up to the plain answer on average, and never are all there.

    With one token there is one probability: it stays and counts double, or goes.
    """
    attention = Attention(replace(TINY, attention_dropout=0.5), "native_flash")
    for number, weight in enumerate(attention.parameters()):
        fill(weight, seed=number, name="a", std=0.2)
    x = torch.randn(4000, 1, 32, generator=torch.Generator().manual_seed(0))
    one = torch.ones(1, 1, 8), torch.zeros(1, 1, 8)  # no rotation
    torch.manual_seed(0)
    with torch.no_grad():
        dropped = attention(x, one, None, None)
        plain = attention.eval()(x, one, None, None)
        heads_of = attention.wo.weight.T.reshape(2, 16, 32)
        values = attention.wqkv(x)[..., 64:].reshape(4000, 2, 16)
        parts = torch.einsum("nhe,hed->nhd", values, heads_of)
    signs = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]])
    possible = torch.einsum("sh,nhd->nsd", signs, parts)
    near = (possible - dropped).norm(dim=-1)
    assert float(near.amin(1).max()) < 1e-4
    shares = near.argmin(1).bincount(minlength=4) / 4000
    assert float((shares - 0.25).abs().max()) < 0.04
    assert float((parts.sum(1) - plain[:, 0]).abs().max()) < 1e-4


# ---------------------------------------------------------------------------------------------- what the engine needs


@pytest.mark.parametrize("shape", [TINY, REGIONS], ids=["plain", "summaries"])
@pytest.mark.parametrize(("dropout", "attention"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3)])
def test_checkpointing_changes_no_bit_and_repeats_dropout(shape: AgentShape, dropout: float, attention: float) -> None:
    """Contract 26; of attention's dropout too."""
    seen, results = histories(2, 30), list[dict[str, Tensor]]()
    noisy = replace(shape, attention_dropout=attention)
    for which, checkpointing in ((noisy, False), (noisy, True), (shape, False)):
        agent = make(which, dropout=dropout if which is noisy else 0.0, checkpointing=checkpointing, wide=True)
        torch.manual_seed(9)
        results.append(gradients(agent, agent(seen)["action"].square().sum()))
        assert set(results[-1]) == {name for name, _ in agent.named_parameters()}
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    drops = dropout + attention > 0
    assert (
        torch.equal(results[0]["layers.0.attention.wqkv.weight"], results[2]["layers.0.attention.wqkv.weight"]) != drops
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides its own warning; an error is not hidden
@pytest.mark.parametrize("shape", [TINY, pytest.param(REGIONS, marks=pytest.mark.slow)], ids=["plain", "summaries"])
def test_compiled_blocks_are_one_graph_each_and_compute_the_same(shape: AgentShape) -> None:
    seen, agent = histories(2, 30), make(shape)
    expected = gradients(agent, agent(seen)["action"].square().sum())
    compile_blocks(agent, torch.device("cpu"), sharded=False, backend="aot_eager")
    try:
        assert distance(gradients(agent, agent(seen)["action"].square().sum()), expected) < 1e-4
        with torch.no_grad():
            agent.eval()(seen)
    finally:
        torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_regions_have_fixed_lengths() -> None:
    """Two: all regions but the last are asked for summaries. Flex attention is not made for lengths that vary."""
    shapes, varying = set[Any](), list[Any]()

    def backend(graph: Any, inputs: list[Any]) -> Any:
        shapes.update(tuple(value.shape) for value in inputs if isinstance(value, Tensor))
        varying.extend(value for value in inputs if not isinstance(value, Tensor))
        return graph.forward

    agent = make(REGIONS)
    compile_blocks(agent, torch.device("cpu"), sharded=False, backend=backend)
    try:
        agent(histories(2, 34))
    finally:
        torch.compiler.reset()
    region, summaries, width = REGIONS.region, REGIONS.summary_tokens, REGIONS.hidden_size
    assert {(2, region + 2 * summaries, width), (2, 4 + summaries, width)} <= shapes
    assert not varying


def test_only_what_is_needed_is_kept_and_saved() -> None:
    """No buffer in a checkpoint; in training no key or value outlives its block but for the backward pass."""
    for shape in (TINY, REGIONS, replace(REGIONS, dynamics=True)):
        agent = make(shape)
        assert set(agent.state_dict()) == {name for name, _ in agent.named_parameters()}
    handed: list[Any] = []
    agent = make(REGIONS)
    agent.layers[0].register_forward_hook(lambda _m, given, out: handed.append((given[3], type(out))))
    agent(histories(1, 30))
    assert handed == [(None, Tensor)] * 3


def test_buffers_come_back_after_to_empty() -> None:
    with torch.device("meta"):
        agent = Agent(REGIONS, attention="native_math")
    agent.to_empty(device="cpu").rebuild_buffers()
    fresh = Agent(REGIONS, attention="native_math")
    for name, buffer in fresh.named_buffers():
        assert torch.equal(agent.get_buffer(name), buffer)
    assert dict(fresh.named_buffers())["first_rows_F"].tolist() == [0, 16, 32, 38, 41]


def test_features_never_share_rows_and_all_rows_can_be_reached() -> None:
    agent = make()
    most = torch.tensor([15, 15, TINY.vocab_size, 2, 1])
    assert (agent.first_rows_F + most).tolist() == [15, 31, 37, 40, 42]
    assert TINY.input_rows == 43


def test_all_weights_are_filled_and_none_of_the_tables_decays() -> None:
    agent = make(replace(REGIONS, dynamics=True), std=0.02)
    for name, parameter in agent.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.25), name
    optimizer = AdamW(agent, TrainingOptions(weight_decay=0.1), CPU)
    names = {id(parameter): name for name, parameter in agent.named_parameters()}
    groups = {group.weight_decay: {names[id(each)] for each in group.parameters} for group in optimizer.groups}
    tables = {"tok_embed.weight", "taken_embed.weight", "summaries.weight", "askers.weight"}
    assert tables < groups[0.0]
    assert groups[0.0] - tables == {name for name in names.values() if "norm" in name}
    assert groups[0.1] == {name for name in names.values() if "layers" in name and "norm" not in name} | {
        "output.weight", "outcome.weight"
    }  # fmt: skip


def test_the_heads_have_a_spread_of_their_own() -> None:
    agent = Agent(replace(REGIONS, dynamics=True), attention="native_math")
    initialise(agent, seed=1, std=0.02, head_std=0.2)
    for name, parameter in agent.named_parameters():
        if parameter.ndim > 1:
            assert float(parameter.detach().std()) == pytest.approx(
                0.2 if name.startswith("out") else 0.02, rel=0.25
            ), name


def read_bytes(agent: Agent, *, bf16: bool) -> int:
    return saved_bytes(agent, lambda: agent(histories(4, 80)), bf16=bf16)


@pytest.mark.parametrize(("dropout", "said"), [(0.1, True), (0.0, False)])
def test_who_asks_for_a_kernel_hears_what_runs(dropout: float, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention drops no probabilities: the plain maths does it, and the notice says so."""
    options = AgentOptions(attention_dropout=dropout, compile="off")
    monkeypatch.setattr(attention, "resolve", lambda *_, **__: ("flex", "attention: flex, as asked"))
    built = build(
        options, resolve(options, context_length=80), device=torch.device("cpu"), dtype_name="fp32", seed=1,
        checkpointing=False, deterministic=False, debug=False,
    )  # fmt: skip
    notice = "attention: flex, as asked; native_math in training, for model.attention_dropout"
    assert (notice in built.notices) == said
    assert said or "attention: flex, as asked" in built.notices


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_the_memory_estimate_is_what_is_kept(compressed: bool, bf16: bool) -> None:
    shape = AgentShape(5, 128, 512, 6, 8, compressed=compressed, region=20, summary_tokens=4)
    sizes: dict[str, Any] = {"batch_size": 4, "context_length": 80, "dtype_name": "bf16" if bf16 else "fp32"}
    plain, saving = (memory_bytes(shape, **sizes, checkpointing=flag, compiled=False) for flag in (False, True))
    kept = read_bytes(make(shape, dropout=0.1), bf16=bf16)
    casts = 2 * shape.matmul_parameters() if bf16 else 0  # weights in half precision, which are not counted
    assert plain.activations == pytest.approx(kept - casts, rel=0.15)
    assert read_bytes(make(shape, dropout=0.1, checkpointing=True), bf16=bf16) < kept / 2
    assert saving.activations < plain.activations / 2
