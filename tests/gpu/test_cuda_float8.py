"""Float8 layers on a real GPU: the tensor cores' products, compiled blocks, bits that repeat, and whole runs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import NonFiniteError
from lockstep.kernels import float8_head
from lockstep.kernels.float8 import scaled_product
from lockstep.models import float8
from lockstep.models.build import Built, build
from lockstep.models.options import EncoderOptions, LladaOptions, LlamaOptions, ModelOptions
from lockstep.models.shapes import resolve
from lockstep.runtime import determinism, precision
from tests.counting import graphs
from tests.float8_head_reference import check_gradients, gradients, head_case
from tests.float8_reference import SIZES, by_reference, check_products, computed, drawn, error, of_rounded
from tests.gates.training import run

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(precision.float8_obstacle(CUDA)),
        reason="needs a GPU that multiplies float8 numbers",
    ),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
SUMS = 0.02  # what sums in the tensor cores lose, at most; the casts round 4 to 6 %
LENGTH = 256
BLUR, BLURS = 0.001, 8  # bf16 rounds by so much; how often the loss is looked at


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


# ------------------------------------------------------------------------------------------------ the products


def factors(tokens: int, width: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    weight = drawn(rows, width, seed=seed + 10, kind=torch.float32, device="cuda")
    return drawn(tokens, width, seed=seed, device="cuda"), weight, drawn(tokens, rows, seed=seed + 20, device="cuda")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("tokens", "width", "rows"), [*SIZES, (4096, 1024, 2816), (1000, 512, 512)])
def test_all_three_products(
    tokens: int, width: int, rows: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled:
        monkeypatch.setattr(float8, "linear", torch.compile(float8.linear, fullgraph=True, dynamic=False))
    for seed in range(2):
        check_products(*factors(tokens, width, rows, seed), sums=SUMS)


def test_long_sums_lose_less_than_the_casts_round() -> None:
    """The production shape: 32,768 tokens are what the gradient of a weight is summed over, 14,336 what w2 sums."""
    for sizes in ((32768, 1024, 512), (512, 14336, 1024)):
        x, weight, grad = factors(*sizes)
        found, expected = computed(x, weight, grad), of_rounded(x, weight, grad)
        errors = {name: error(found[name], expected[name]) for name in expected}
        print(sizes, {name: f"{value:.5f}" for name, value in errors.items()})
        assert all(value < SUMS for value in errors.values())
        for _ in range(3):
            again = computed(x, weight, grad)
            assert all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_not_finite_stays_so(bad: float, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled:
        monkeypatch.setattr(float8, "linear", torch.compile(float8.linear, fullgraph=True, dynamic=False))
    touched = {0: ("y", "dw"), 1: ("y", "dx"), 2: ("dx", "dw")}
    for place, names in touched.items():
        given = factors(64, 48, 32)
        given[place][3, 5] = bad
        found = computed(*given)
        assert {name for name, tensor in found.items() if not tensor.isfinite().all()} == set(names)
    zeros = computed(*(tensor * 0 for tensor in factors(64, 48, 32)))
    assert not any(tensor.any() for tensor in zeros.values())


def at_an_edge(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two matrices: the largest products are over 1.75 and rounded to it, where the scale becomes another one."""
    chance = torch.Generator().manual_seed(seed)
    left, right = (torch.rand(rows, columns, generator=chance) * 2 - 1 for _ in range(2))
    largest = (torch.arange(rows)[:, None] + torch.arange(columns)) % 16 == 0  # one in each row and column at least
    left[largest], right[largest] = 169 / 128, 170 / 128
    return left.to("cuda", torch.bfloat16), right.to("cuda", torch.bfloat16)


@pytest.mark.parametrize("wrong", [1.0, 2.0])
def test_numbers_are_multiplied_by_the_scale_they_were_made_with(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales and numbers are made in several kernels, some of which see a product before it is rounded to bf16.

    The control: a scale that is another power of two than the one the numbers were made with.
    """
    right = float8.cast
    if wrong != 1:
        monkeypatch.setattr(float8, "cast", lambda *given: (right(*given)[0], right(*given)[1] * wrong))

    def around(x: Tensor, factor: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
        return float8.linear(x * factor, weight) * gain

    tokens, width, rows = 768, 128, 512
    (x, factor), (gain, grad) = at_an_edge(tokens, width, 1), at_an_edge(tokens, rows, 2)
    weight = drawn(rows, width, seed=3, kind=torch.float32, device="cuda")
    inputs, into = x.double() * factor.double(), gain.double() * grad.double()
    exact = (inputs @ weight.double().T * gain.double(), into @ weight.double() * factor.double(), into.T @ inputs)
    given = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = torch.compile(around, fullgraph=True, dynamic=False)(given[0], factor, given[1], gain)
    found = (y.detach(), *torch.autograd.grad(y, given, grad))
    errors = [error(one, other) for one, other in zip(found, exact, strict=True)]
    print(wrong, [f"{each:.4f}" for each in errors])
    assert max(errors) < 0.08 if wrong == 1 else max(errors) > 0.3, errors


# ------------------------------------------------------------------------------------------------ the output matrix


@pytest.mark.parametrize(
    ("tokens", "width", "words"), [(16, 16, 16), (37, 64, 96), (1000, 256, 4112), (300, 512, 50_000)]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kernels_of_the_head_compute_what_plain_operations_do(
    tokens: int, width: int, words: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where exp differs in its last bit a number may be rounded to its neighbour; sums and all else are the same."""
    given = head_case(tokens, width, words, weighted=weighted, device="cuda")
    found, again = (gradients(given, chunk=256, foretold=0.3) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), "bits repeat"
    monkeypatch.setattr(float8_head, "has_kernel", lambda _x: False)
    plain = gradients(given, chunk=256)
    assert float(found[0]) == pytest.approx(float(plain[0]), rel=1e-5)
    for one, other in zip(found[1:], plain[1:], strict=True):
        assert error(one, other.double()) < 0.005
    check_gradients(given, found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_head_hides_nothing_that_is_not_finite(bad: float, place: int) -> None:
    given = head_case(64, 64, 96, weighted=False, device="cuda")
    with torch.no_grad():
        given[:2][place][3, 5] = bad
    total, *found = gradients(given, chunk=256)
    assert not total.isfinite()
    assert not any(each.isfinite().all() for each in found)


def test_sums_of_the_head_are_exact() -> None:
    """Many small terms beside a large one: what the tensor cores' own sums would lose is there."""
    words = 131_072
    left = torch.full((16, words), 2.0**-6, device="cuda")
    left[:, 0] = 2.0**6
    right = torch.ones(16, words, device="cuda")
    one = torch.ones((), device="cuda")
    casts = (left.to(torch.float8_e5m2), one), (right.to(torch.float8_e4m3fn), one)
    expected = 64 + (words - 1) / 64
    assert float((float8_head.product(*casts) / expected - 1).abs().max()) < 1e-5
    (numbers, _), (others, _) = casts
    rough = scaled_product((numbers, one), (others.t(), one), out_dtype=torch.float32, exact=False)
    print("sums of the tensor cores alone are off by", float((rough / expected - 1).abs().max()))


# ------------------------------------------------------------------------------------------------ models


def made(options: ModelOptions, kind: str, *, deterministic: bool = False, checkpointing: bool = False) -> Built:
    return build(
        options, resolve(options, context_length=LENGTH), device=CUDA, dtype_name=kind, seed=5,
        checkpointing=checkpointing, deterministic=deterministic, debug=False,
    )  # fmt: skip


def llama(**values: Any) -> LlamaOptions:
    return LlamaOptions.model_validate(
        {"model_path": "lockstep/tiny", "num_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1408, "init_std": 0.05, "compile": "on",
         **values}
    )  # fmt: skip


def loss_of(built: Built, *, rows: int = 4, length: int = LENGTH, seed: int = 0) -> Tensor:
    ids = torch.randint(5, 500, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()
    places = {"places_M": torch.arange(0, ids.numel(), 3).cuda()} if hasattr(built.model, "head") else {}
    targets = ids.flatten()[places["places_M"]] if places else ids
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return built.model(ids, targets, **places)


def learnt(built: Built, **size: int) -> tuple[float, dict[str, Tensor]]:
    loss = loss_of(built, **size)
    named = {name: each for name, each in built.model.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()))
    return float(loss.detach()), {name: each.double() for name, each in zip(named, gradients, strict=True)}


def all_of(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients.values()])


def check_against_rounded_numbers(options: ModelOptions, given: list[dict[str, int]], **how: bool) -> None:
    """Hold compiled float8 blocks against layers of numbers that were rounded in fp64 (tests/float8_reference.py).

    The compiler does not round to bf16 what goes into a layer. That alone changes which way numbers are rounded to
    float8, and so nearly all of it: the reference, blurred by as little as bf16 rounds, is as far from itself. So ours
    is to be as far from bf16 as the reference, and no further from the reference than it is from itself when blurred;
    the loss, a single number, within four times what blurring usually does to it.
    """
    eager = options.model_copy(update={"compile": "off"})
    plain, built = (made(options, each, **how) for each in ("bf16", "fp8"))
    reference, other = (made(eager, "bf16", **how) for _ in range(2))
    built.model.float8_head = False  # pyright: ignore[reportArgumentType] - it has tests of its own
    by_reference(reference.model)
    by_reference(other.model, noise=BLUR)
    for number, size in enumerate(given):
        torch.manual_seed(1)
        (loss, unrounded), (right, expected), (_, blurred) = (
            learnt(each, **size) for each in (plain, reference, other)
        )
        before = graphs()
        found_loss, found = learnt(built, **size)
        compiled = graphs() - before
        assert compiled if number == 0 else not compiled or "length" in size, "not compiled, or again"
        away, ours_away = (error(all_of(each), all_of(unrounded)) for each in (expected, found))
        apart = {name: error(blurred[name], each) for name, each in expected.items() if each.any()}
        ours = {name: error(found[name], expected[name]) for name in apart}
        worst = max(ours, key=lambda name: ours[name] / apart[name])
        print(type(options).__name__, size, f"from bf16: reference {away:.4f}, ours {ours_away:.4f};")
        print(f"  {worst} from the reference: blurred {apart[worst]:.4f}, ours {ours[worst]:.4f}")
        with torch.no_grad():
            usual = statistics.fmean((float(loss_of(other, **size)) - right) ** 2 for _ in range(BLURS)) ** 0.5
        print(f"  loss {right:.2f}: blurred {usual:.2f} away, ours {found_loss - right:+.2f}, bf16 {loss - right:+.2f}")
        assert abs(found_loss - right) < 4 * usual
        assert ours_away == pytest.approx(away, rel=0.1)
        assert ours[worst] < 2 * apart[worst], worst  # the doubled columns of one matrix are lost in a sum of all


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_compiled_blocks_compute_what_rounded_numbers_give(deterministic: bool) -> None:
    check_against_rounded_numbers(llama(), [{"seed": seed} for seed in range(4)], deterministic=deterministic)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_same_bits_again(checkpointing: bool) -> None:
    with determinism.mode(CUDA, deterministic=True, threads=0):
        built = made(llama(), "fp8", deterministic=True, checkpointing=checkpointing)
        loss, first = learnt(built)
        for _ in range(5):
            again_loss, again = learnt(built)
            assert again_loss == loss
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_encoders_additions_and_rows_of_any_length() -> None:
    encoder: dict[str, Any] = {"model_path": "lockstep/mlm-tiny", "hidden_size": 128, "num_attention_heads": 2,
                               "dropout": 0.0, "init_std": 0.05, "compile": "on"}  # fmt: skip
    llada = {"model_path": "lockstep/llada-tiny", "init_std": 0.05, "compile": "on"}
    sizes = [{"rows": 3, "length": length} for length in (LENGTH, 77)]  # also tokens that are no multiple of 16
    for options in (
        EncoderOptions.model_validate(encoder),
        LladaOptions.model_validate(llada),
        LladaOptions.model_validate({**llada, "lora_rank": 4}),
    ):
        check_against_rounded_numbers(options, sizes)


# ------------------------------------------------------------------------------------------------ runs

SETTINGS: dict[str, Any] = {
    "system.device": "cuda", "training.precision": "fp8", "data.dataset_name": "synthetic", "training.max_steps": 12,
    "training.save_interval": 6, "training.eval_batches": 1, "report.sample_prompt": "", "data.num_workers": 0,
    "model.compile": "on", "system.deterministic": True, "model.hidden_size": 256, "model.intermediate_size": 512,
    "model.num_attention_heads": 4, "model.num_key_value_heads": 2, "model.head_dim": 64, "training.batch_size": 4,
    "training.context_length": 256,
}  # fmt: skip


@pytest.mark.usefixtures("shared_cache")
def test_a_run_repeats_its_bits_and_goes_on_with_them(tmp_path: Path) -> None:
    settings = SETTINGS
    with determinism.mode(CUDA, deterministic=True, threads=0):
        _, whole = run(tmp_path / "whole", settings)
        _, again = run(tmp_path / "again", settings)
        assert again.trace == whole.trace
        torch.compiler.reset()  # as a process of its own would begin
        _, rest = run(tmp_path / "rest", settings, point=tmp_path / "whole" / "checkpoints" / "step_00000006")
        assert rest.trace == whole.trace[6:]
        _, plain = run(tmp_path / "plain", {**settings, "training.precision": "bf16"})
    assert plain.records[-1].loss == pytest.approx(whole.records[-1].loss, rel=0.05)
    assert plain.records[-1].loss != whole.records[-1].loss
    assert whole.records[-1].loss < whole.records[0].loss
    assert whole.records[-1].mfu, "over the peak of bf16, as peers count"


@pytest.mark.usefixtures("shared_cache")
def test_an_overflow_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = ("layers.1.mlp.w1.weight", "layers.1.mlp.w3.weight")
    monkeypatch.setenv("LOCKSTEP_FAULT", ";".join(f"flip_weight@step=1,tensor={name},bit=30" for name in weights))
    with pytest.raises(NonFiniteError):
        run(tmp_path, {**SETTINGS, "system.deterministic": False})
    assert "First bad value: layers.1.mlp (forward, mul" in caplog.text
