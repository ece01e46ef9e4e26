"""Float8 layers on the CPU, where torch computes the same products: against fp64, at the edges, and in whole runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError, NonFiniteError
from lockstep.kernels import float8_head
from lockstep.models import float8
from lockstep.models import llama as llama_module
from lockstep.models.build import Built, build
from lockstep.models.options import EncoderOptions, LladaOptions, LlamaOptions, ModelOptions
from lockstep.models.shapes import resolve
from lockstep.runtime import precision
from tests.counting import graphs
from tests.float8_reference import (
    ROUNDED,
    SIZES,
    by_reference,
    check_products,
    computed,
    drawn,
    error,
    exact,
    of_rounded,
)
from tests.gates.training import run

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------ the products


@pytest.mark.parametrize(("tokens", "width", "rows"), SIZES)
def test_all_three_products(tokens: int, width: int, rows: int) -> None:
    for seed in range(3):
        x, weight, grad = drawn(tokens, width, seed=seed), drawn(rows, width, kind=torch.float32), drawn(tokens, rows)
        check_products(x, weight, grad)


def test_a_wrong_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    x, weight, grad = drawn(64, 48), drawn(32, 48, kind=torch.float32), drawn(64, 32)
    expected, right = of_rounded(x, weight, grad), float8.cast

    def twice(*args: Any, **named: Any) -> float8.Cast:
        numbers, scale = right(*args, **named)
        return numbers, scale * 1.02

    def saturated(x: Tensor, *args: Any, **named: Any) -> float8.Cast:
        numbers, scale = right(x / 2, *args, **named)
        return (numbers.float() * 2).clamp(-448, 448).to(numbers.dtype), scale

    for wrong in (twice, saturated):
        monkeypatch.setattr(float8, "cast", wrong)
        found = computed(x, weight, grad)
        assert all(error(found[name], expected[name]) > 2 * ROUNDED for name in expected), wrong


def test_gradients_keep_the_range_of_their_type_and_weights_their_digits() -> None:
    """One scale for all: a row that is smaller by 2^22 is within e5m2, not within e4m3's largest number."""
    x, weight, grad = drawn(64, 48), drawn(32, 48, kind=torch.float32), drawn(64, 32)
    found, expected = computed(x, weight, grad), of_rounded(x, weight, grad)
    assert error(found["dw"], expected["dw"]) < 1e-5, "the gradient of a weight in fp32 comes in fp32"
    grad[5] *= 2.0**-22
    found = computed(x, weight, grad)
    assert error(found["dx"][5], grad[5].double() @ weight.double()) < 0.08


@pytest.mark.parametrize(("trained", "products"), [(("x", "weight"), 3), (("x",), 2), (("weight",), 2)])
def test_nothing_is_multiplied_in_vain_and_all_in_multiples_of_16(
    trained: tuple[str, ...], products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"x": drawn(37, 48), "weight": drawn(32, 48, kind=torch.float32)}
    plain, common = float8.product, list[int]()

    def product(left: float8.Cast, right: float8.Cast, **named: Any) -> Tensor:
        common.append(left[0].shape[1])
        return plain(left, right, **named)

    monkeypatch.setattr(float8, "product", product)
    for name in trained:
        given[name].requires_grad_()
    float8.linear(given["x"], given["weight"]).sum().backward()
    assert len(common) == products
    assert not any(size % float8.ALIGNMENT for size in common)


def test_rows_and_a_bias() -> None:
    x, weight, bias = drawn(3, 5, 7, 32), drawn(48, 32, kind=torch.float32), drawn(48, kind=torch.float32)
    y = float8.linear(x, weight, bias)
    assert y.shape == (3, 5, 7, 48)
    assert error(y, F.linear(x.double(), weight.double(), bias.double())) < 0.05
    plain = float8.linear(x.flatten(0, 2), weight)
    assert torch.equal(y, (plain + bias.to(torch.bfloat16)).view(3, 5, 7, 48))


@pytest.mark.parametrize("factor", [0.0, 2.0**-120, 2.0**-90, 2.0**-60, 2.0**60, 2.0**100])
def test_numbers_of_any_size(factor: float) -> None:
    x, weight, grad = drawn(32, 48) * factor, drawn(16, 48, kind=torch.float32), drawn(32, 16)
    found, expected = computed(x, weight, grad), exact(x, weight, grad)
    assert all(tensor.isfinite().all() for tensor in found.values())
    if factor == 0:
        assert not found["y"].any()
    elif factor >= 2.0**-90:
        assert error(found["y"], expected["y"]) < 0.06
        assert error(found["dw"], expected["dw"]) < 0.08
    assert error(found["dx"], expected["dx"]) < 0.08
    nothing = computed(drawn(32, 48), weight, grad * 0)
    assert not nothing["dx"].any()
    assert not nothing["dw"].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("place", "touched"), [("x", ("y", "dw")), ("weight", ("y", "dx")), ("grad", ("dx", "dw"))])
def test_what_is_not_finite_stays_so(place: str, touched: tuple[str, ...], bad: float) -> None:
    """Casts to float8 saturate: an infinity would become 448, and nobody would hear of it."""
    given = {"x": drawn(32, 48), "weight": drawn(16, 48, kind=torch.float32), "grad": drawn(32, 16)}
    given[place][3, 5] = bad
    found = computed(**given)
    for name, tensor in found.items():
        assert tensor.isfinite().all() == (name not in touched), name


# ------------------------------------------------------------------------------------------------ models


def made(options: ModelOptions, kind: str, **values: Any) -> Built:
    asked: dict[str, Any] = {"checkpointing": False, "deterministic": False, "debug": False, **values}
    return build(options, resolve(options, context_length=32), device=CPU, dtype_name=kind, seed=1, **asked)


def llama(**values: Any) -> LlamaOptions:
    return LlamaOptions.model_validate({"model_path": "lockstep/tiny", "init_std": 0.05, **values})


def learnt(built: Built, *, rows: int = 2, seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    ids = torch.randint(0, 500, (rows, 32), generator=torch.Generator().manual_seed(seed))
    places = {"places_M": torch.arange(0, ids.numel(), 3)} if hasattr(built.model, "head") else {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = built.model(ids, ids.flatten()[places["places_M"]] if places else ids, **places)
    named = {name: each for name, each in built.model.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()))
    return float(loss.detach()), dict(zip(named, gradients, strict=True))


def all_of(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten().double() for gradient in gradients.values()])


def coarse(right: Any, x: Tensor, kind: torch.dtype = torch.float8_e4m3fn, **named: Any) -> float8.Cast:
    """A cast that loses one bit more than it should."""
    numbers, scale = right(x, kind, **named)
    return (numbers.view(torch.uint8) & 0xFE).view(kind), scale


def test_a_model_computes_what_rounded_numbers_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding alone, by the reference, moves the gradients by `away`; ours may differ from it by a fifth of that."""
    plain, built = made(llama(), "bf16"), made(llama(), "fp8")
    assert [name for name, _ in built.model.named_parameters()] == [name for name, _ in plain.model.named_parameters()]
    told = "float8: 28 matrices of the blocks, and the output matrix's gradients, one scale for each matrix"
    assert f"{told}; slow, because nothing is compiled" in built.notices
    output: Any = built.model.output
    assert type(output) is nn.Linear, "the output matrix stays"
    assert all(parameter.dtype == torch.float32 for parameter in built.model.parameters())
    (loss, unrounded), (found_loss, found) = learnt(plain), learnt(built)
    assert found_loss != loss
    by_reference(plain.model)
    expected_loss, expected = learnt(plain)
    away, apart = error(all_of(expected), all_of(unrounded)), error(all_of(found), all_of(expected))
    assert found_loss == pytest.approx(expected_loss, rel=1e-4)
    assert 0.05 < away < 0.15
    assert apart < away / 5
    monkeypatch.setattr(float8, "cast", partial(coarse, float8.cast))
    _, wrong = learnt(built)
    assert error(all_of(wrong), all_of(expected)) > away / 2, "one bit less, and it is not seen"


def test_layers_with_a_bias_compute_what_rounded_numbers_give() -> None:
    values = {"model_path": "lockstep/mlm-tiny", "hidden_size": 128, "num_attention_heads": 2, "dropout": 0.0,
              "init_std": 0.05}  # fmt: skip
    plain, built = (made(EncoderOptions.model_validate(values), each) for each in ("bf16", "fp8"))
    with torch.no_grad():
        for model in (plain.model, built.model):
            generator = torch.Generator().manual_seed(3)
            for name, each in model.named_parameters():
                if name.endswith(".bias"):
                    each.normal_(generator=generator)
    by_reference(plain.model)
    (_, expected), (_, found) = learnt(plain), learnt(built)
    for name, right in expected.items():
        assert error(found[name], right) < 0.02, name


@pytest.mark.slow  # half a minute of C++; tests/gpu has the same of whole blocks
@pytest.mark.filterwarnings("ignore")  # the compiler has its own
def test_the_compiler_takes_a_block_whole_and_once() -> None:
    built = made(llama(num_layers=1, compile="on"), "fp8")
    assert built.compiled
    eager = made(llama(num_layers=1), "fp8")
    seen = graphs()
    for seed in range(3):
        (loss, expected), (found_loss, found) = learnt(eager, seed=seed), learnt(built, seed=seed)
        assert found_loss == pytest.approx(loss, rel=2e-3)
        assert error(all_of(found), all_of(expected)) < 0.15  # a number rounded another way in bf16 is one in float8
        assert graphs() > seen if seed == 0 else graphs() == seen
        seen = graphs()


def test_recomputed_blocks_have_the_same_gradients() -> None:
    kept, again = (learnt(made(llama(), "fp8", checkpointing=each)) for each in (False, True))
    assert kept[0] == again[0]
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])


def test_additions_to_frozen_float8_matrices() -> None:
    values = {"model_path": "lockstep/llada-tiny", "lora_rank": 4, "init_std": 0.05}
    plain, built = (made(LladaOptions.model_validate(values), kind) for kind in ("bf16", "fp8"))
    with torch.no_grad():  # which begins at zero, and then lora_a has no gradient
        for model in (plain.model, built.model):
            generator = torch.Generator().manual_seed(3)
            for name, each in model.named_parameters():
                if name.endswith("lora_b"):
                    each.normal_(std=0.05, generator=generator)
    frozen = {name: each.dtype for name, each in built.model.named_parameters() if not each.requires_grad}
    assert frozen["layers.0.mlp.w1.weight"] == torch.bfloat16
    (_, unrounded), (_, found) = learnt(plain), learnt(built)
    assert set(found) == set(unrounded)
    by_reference(plain.model)
    _, expected = learnt(plain)
    away, apart = error(all_of(expected), all_of(unrounded)), error(all_of(found), all_of(expected))
    assert 0.05 < away < 0.2
    assert apart < away / 5


def test_matrices_that_do_not_fit_stay_and_are_counted() -> None:
    built = made(llama(model_path="lockstep/demo"), "fp8")
    assert any("float8: 16 matrices of the blocks" in line and "; 12 stay in bf16" in line for line in built.notices)
    built = made(llama(vocab_size=500), "fp8")
    told = "float8: 28 matrices of the blocks, one scale for each matrix; the output matrix stays in bf16, having sides"
    assert any(line.startswith(told) for line in built.notices)
    learnt(built)
    narrow = EncoderOptions.model_validate(
        {"model_path": "lockstep/mlm-tiny", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    )
    with pytest.raises(ConfigError, match="no matrix of this model's blocks") as caught:
        made(narrow, "fp8")
    assert caught.value.hint == "--precision bf16"


# ------------------------------------------------------------------------------------------------ runs

SETTINGS: dict[str, Any] = {
    "training.precision": "fp8", "data.dataset_name": "synthetic", "training.max_steps": 6,
    "training.save_interval": 3, "training.eval_batches": 1, "report.sample_prompt": "", "data.num_workers": 0,
}  # fmt: skip


@pytest.fixture
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch, shared_cache: None) -> None:
    """Through a door that users do not have."""
    monkeypatch.setattr(precision, "float8_obstacle", lambda *_: "")


@pytest.mark.usefixtures("_on_the_cpu")
@pytest.mark.parametrize("in_chunks", [False, True], ids=["blocks", "and the head"])
def test_a_run_repeats_its_bits_and_goes_on_with_them(
    in_chunks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU takes so few tokens at once, and by plain operations, unless it is told otherwise."""
    if in_chunks:
        monkeypatch.setattr(llama_module, "chunk_tokens", lambda *_, **__: 64)
    made, real = list[float](), float8_head.chunked_sum

    def noted(*args: Any, **named: Any) -> Any:
        made.append(named["ahead"])
        return real(*args, **named)

    monkeypatch.setattr(float8_head, "chunked_sum", noted)
    _, whole = run(tmp_path / "whole", SETTINGS)
    _, again = run(tmp_path / "again", SETTINGS)
    assert again.trace == whole.trace
    _, rest = run(tmp_path / "rest", SETTINGS, point=tmp_path / "whole" / "checkpoints" / "step_00000003")
    assert rest.trace == whole.trace[3:]
    assert bool(made) is in_chunks
    _, plain = run(tmp_path / "plain", {**SETTINGS, "training.precision": "bf16"})
    assert [each.loss for each in plain.records] != [each.loss for each in whole.records]
    with pytest.raises(ConfigError, match=r"training\.precision"):
        run(
            tmp_path / "other",
            {**SETTINGS, "training.precision": "bf16"},
            point=tmp_path / "whole" / "checkpoints" / "step_00000003",
        )


@pytest.mark.usefixtures("_on_the_cpu")
def test_a_number_that_is_not_finite_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An overflow between two float8 layers, in whose own operations the search must be able to look."""
    weights = ("layers.1.mlp.w1.weight", "layers.1.mlp.w3.weight")
    monkeypatch.setenv("LOCKSTEP_FAULT", ";".join(f"flip_weight@step=1,tensor={name},bit=30" for name in weights))
    with pytest.raises(NonFiniteError):
        run(tmp_path, SETTINGS)
    assert "First bad value: layers.1.mlp (forward, mul" in caplog.text


@pytest.mark.usefixtures("_on_the_cpu")
def test_one_in_the_head_is_found_as_without_float8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(llama_module, "chunk_tokens", lambda *_, **__: 64)
    monkeypatch.setenv("LOCKSTEP_FAULT", "inf_weight@step=1,tensor=output.weight,index=70")
    with pytest.raises(NonFiniteError):
        run(tmp_path, SETTINGS)
    [told] = [line for line in caplog.text.splitlines() if "First bad value" in line]
    assert told.endswith("First bad value: output (weights)")
