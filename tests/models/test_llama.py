"""The model's promises to the loop: sums, checkpointing, first loss, kernels that agree, ids that fit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import DataError
from lockstep.models import layers, llama
from lockstep.models.initialise import initialise
from lockstep.models.layers import rope_frequencies, rope_tables
from lockstep.models.llama import Llama
from lockstep.models.shapes import KNOWN, LlamaShape, memory_bytes
from tests.kept import saved_bytes

TINY = KNOWN["lockstep/tiny"]


def make(shape: LlamaShape = TINY, *, std: float = 0.1, **options: object) -> Llama:
    model = Llama(shape, **{"attention": "native_flash", **options})
    initialise(model, seed=1, std=std)
    return model


def ids(rows: int, length: int, vocab: int = 512) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(3))


def gradients(model: Llama, total: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))


def next_bytes(model: Llama, batch: Tensor, *, bf16: bool = False) -> int:
    return saved_bytes(model, lambda: model(batch, batch), bf16=bf16)


def test_parameter_names_are_the_documented_ones() -> None:
    names = [name for name, _ in make().named_parameters()]
    inner = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "mlp.w1", "mlp.w2", "mlp.w3")
    layer = [*inner, "attention_norm", "mlp_norm"]
    expected = {f"layers.{n}.{part}.weight" for n in range(2) for part in layer}
    assert set(names) == expected | {"tok_embed.weight", "norm.weight", "output.weight"}
    assert "output.weight" not in dict(make(replace(TINY, tied=True)).named_parameters())
    assert set(make().state_dict()) == set(names)  # rotary tables are in no checkpoint


@pytest.mark.parametrize("name", ["lockstep/tiny", "lockstep/demo"])
@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_are_what_the_shape_says(name: str, layers: int) -> None:
    shape = replace(KNOWN[name], num_layers=layers)
    assert sum(parameter.numel() for parameter in make(shape).parameters()) == shape.parameters()


@pytest.mark.parametrize(("vocab", "width"), [(512, 64), (4096, 64), (2048, 256), (512, 512)])
@pytest.mark.parametrize("std", [0.02, 0.04])
def test_the_first_loss_is_the_formula(vocab: int, width: int, std: float) -> None:
    """ln V + d std^2 / 2 (science C2), not ln V: at d 512 and std .04 the difference is 0.41."""
    shape = replace(TINY, vocab_size=vocab, hidden_size=width, head_dim=width // 4)
    batch = ids(8, 65, vocab)
    with torch.no_grad():
        loss = float(make(shape, std=std)(batch[:, :-1], batch[:, 1:])) / (8 * 64)
    assert loss == pytest.approx(math.log(vocab) + width * std**2 / 2, abs=0.1)


def test_checkpointing_changes_no_bit_and_keeps_less() -> None:
    """Contract 26."""
    shape = replace(TINY, num_layers=6)
    plain, saving = make(shape), make(shape, checkpointing=True)
    batch = ids(4, 129)
    losses = [model(batch[:, :-1], batch[:, 1:]) for model in (plain, saving)]
    assert torch.equal(losses[0], losses[1])
    first, second = (gradients(model, loss) for model, loss in zip((plain, saving), losses, strict=True))
    assert all(torch.equal(first[name], second[name]) for name in first)
    logits = 4 * 129 * 512 * 4  # kept by the loss either way
    assert next_bytes(saving, batch) - logits < (next_bytes(plain, batch) - logits) / 4


def test_checkpointing_repeats_dropout() -> None:
    plain, saving = make(dropout=0.3), make(dropout=0.3, checkpointing=True)
    batch = ids(2, 33)
    results = []
    for model in (plain, saving, make()):
        torch.manual_seed(9)
        results.append(gradients(model, model(batch, batch)))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert not torch.equal(results[0]["norm.weight"], results[2]["norm.weight"])  # dropout acts
    assert torch.equal(plain.eval()(batch, batch), make()(batch, batch))  # and is off outside training


@pytest.mark.parametrize("bf16", [False, True])
def test_the_memory_estimate_is_what_is_kept(bf16: bool) -> None:
    shape = replace(KNOWN["lockstep/demo"], num_layers=6, vocab_size=512)
    estimate = memory_bytes(
        shape, batch_size=4, context_length=64, dtype_name="bf16" if bf16 else "fp32",
        checkpointing=False, compiled=False,
    )  # fmt: skip
    model = make(shape)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert estimate.states == 4 * 4 * counted  # weights, gradients, two moments
    log_softmax = 4 * 64 * 512 * 4
    kept = next_bytes(model, ids(4, 64), bf16=bf16) - log_softmax
    casts = 2 * shape.matmul_parameters() if bf16 else 0
    assert estimate.activations == pytest.approx(kept - casts, rel=0.15)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # by torch's own compiler
def test_a_compiled_block_keeps_no_copy_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices in half precision are made again in the backward pass: same bits, two bytes a parameter less."""
    shape = replace(TINY, intermediate_size=192)
    turns = rope_tables(rope_frequencies(shape), 15)

    def trained() -> tuple[int, list[Tensor]]:
        torch.manual_seed(3)
        block = layers.Block(shape, backend="native_flash", dropout=0.0)
        compiled = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
        x_BLD, kept = torch.randn(3, 15, shape.hidden_size, requires_grad=True), list[Tensor]()
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            total = compiled(x_BLD, *turns, None).square().sum()
        total.backward()
        sizes = {size for weight in block.parameters() if weight.dim() == 2 for size in (weight.shape, weight.T.shape)}
        copies = sum(each.dtype == torch.bfloat16 and each.shape in sizes for each in kept)
        return copies, [each.grad for each in (x_BLD, *block.parameters()) if each.grad is not None]

    copies, learnt = trained()
    monkeypatch.setattr(layers, "Linear", nn.Linear)
    torch.compiler.reset()
    usual, same = trained()
    assert (copies, usual) == (0, 7)
    assert len(learnt) == len(same) == 10
    assert all(torch.equal(one, other) for one, other in zip(learnt, same, strict=True))


def test_kernels_agree() -> None:
    """Contract 27."""
    flash, plain = make(), make(attention="native_math")
    batch = ids(4, 129)
    losses = [model(batch[:, :-1], batch[:, 1:]) for model in (flash, plain)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-6)
    first, second = (gradients(model, loss) for model, loss in zip((flash, plain), losses, strict=True))
    for name in first:
        assert float((first[name] - second[name]).norm() / second[name].norm()) < 1e-4


def test_accumulation_equals_one_batch_also_with_ragged_targets() -> None:
    """Contract 28: sums over weights; a mean of means is seen to differ."""
    model, batch = make(), ids(5, 33)
    inputs, targets = batch[:, :-1], batch[:, 1:].clone()
    targets[0, 5:] = -100
    targets[3, :30] = -100
    weight = int((targets != -100).sum())
    whole = gradients(model, model(inputs, targets) / weight)
    summed = {name: torch.zeros_like(gradient) for name, gradient in whole.items()}
    means = {name: torch.zeros_like(gradient) for name, gradient in whole.items()}
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):  # the last micro-batch is short
        total = model(inputs[rows], targets[rows])
        part = gradients(model, total)
        count = int((targets[rows] != -100).sum())
        for name in part:
            summed[name] += part[name] / weight
            means[name] += part[name] / count / 3
    error = max(float((summed[name] - whole[name]).norm() / whole[name].norm()) for name in whole)
    wrong = max(float((means[name] - whole[name]).norm() / whole[name].norm()) for name in whole)
    assert error < 1e-5
    assert wrong > 0.05


def test_token_weights_scale_each_target() -> None:
    model, batch = make(), ids(3, 17)
    weights = torch.rand(3, 16) * 5
    inputs, targets = batch[:, :-1], batch[:, 1:]
    with torch.no_grad():
        each = [
            float(model(inputs[row : row + 1], targets[row : row + 1].where(torch.arange(16) == at, -100)))
            for row in range(3)
            for at in range(16)
        ]
        assert float(model(inputs, targets, weights)) == pytest.approx(
            sum(w * loss for w, loss in zip(weights.flatten().tolist(), each, strict=True)), rel=1e-5
        )


@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("bad", [512, -1, 1 << 40])
def test_ids_outside_the_vocabulary_raise_and_are_named(where: str, bad: int) -> None:
    batch = {"inputs": ids(2, 8), "targets": ids(2, 8)}
    batch[where][1, 2] = bad
    with pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of 512"):
        make()(batch["inputs"], batch["targets"])


def test_ids_are_named_also_by_the_chunked_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index error is a plain RuntimeError."""
    monkeypatch.setattr(llama, "chunk_tokens", lambda _, **_how: 4)
    batch = ids(2, 8)
    batch[1, 2] = 512
    with pytest.raises(DataError, match="token id 512"):
        make()(ids(2, 8), batch)


@pytest.mark.parametrize(
    ("how", "in_place"), [({}, True), ({"count_correct": True}, False), ({"per_target": True}, False)]
)
def test_scores_have_the_chunks_of_plain_operations(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, bool], in_place: bool
) -> None:
    """Where the loss has a kernel, scores have none: of its large chunks they would make copies in fp32."""
    asked: list[bool] = []
    monkeypatch.setattr(llama, "has_kernel", lambda _: True)
    monkeypatch.setattr(llama, "chunk_tokens", lambda _, *, in_place: asked.append(in_place) or 4)
    with torch.no_grad():
        make()(ids(2, 8), ids(2, 8), **how)
    assert asked == [in_place]


def test_running_out_of_memory_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at the ids takes memory too, and would fail in turn."""
    model = make()
    looked: list[Tensor] = []
    monkeypatch.setattr(model, "_check_ids", lambda *given: looked.extend(given))
    monkeypatch.setattr(model.norm, "forward", lambda _: torch.empty(1 << 50))
    with pytest.raises(RuntimeError, match="allocate"):
        model(ids(2, 8), ids(2, 8))
    assert not looked


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="indices"):
        make()(ids(2, 8).float())


def test_no_token_sees_the_future() -> None:
    model, batch = make(), ids(1, 40)
    changed = batch.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 512
    with torch.no_grad():
        before, after = model(batch), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])
