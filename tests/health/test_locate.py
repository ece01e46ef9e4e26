"""Where the first number that is not finite is made: real causes, in every part of a model, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from lockstep.health import locate as locating
from lockstep.health.finding import Place
from lockstep.health.locate import Subject, guilty_block, locate

WIDTH = 8


class Root(torch.autograd.Function):
    """The square root, whose derivative at 0 is infinite: times a 0 that comes back it is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / (2 * x.sqrt())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.mask = -float("inf")
        self.trouble = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        scores = (y @ y.transpose(-1, -2)).masked_fill(torch.ones(4, 4).triu(1).bool(), self.mask)
        y = scores.softmax(-1) @ y  # infinities that forbid, as in every causal model
        if self.trouble == "divide":
            y = y / (y - y)
        if self.trouble == "root":
            y = y + Root.apply((y - y).abs()) * 0
        if self.trouble == "log":
            y = y + (y - y).log() - (y - y).log()
        if self.trouble == "in place":
            y = (y - y).add_(1e3).exp_()
        if self.trouble == "in place by itself":
            nothing = (y - y).detach()
            y = y + nothing.div_(nothing)
        if self.trouble == "part of a tensor":
            room = torch.empty_like(y).fill_(0)
            room[:, 1] = (y / (y - y))[:, 1]
            y = y + room
        return x + self.second(y)


class Model(nn.Module):
    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.norm(x).square().sum()


def subject_of(
    model: Model, *, batches: int = 2, dtype: torch.dtype | None = None, after: Callable[[Tensor], Tensor] | None = None
) -> Subject:
    def again() -> Tensor:
        model.zero_grad()
        total = torch.zeros(())
        for number in range(batches):
            tokens = torch.arange(8).view(2, 4) + number
            with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                loss = model(tokens).float()
            loss = after(loss) if after else loss
            loss.backward()
            total = total + loss.detach()
        return total

    return Subject(model, again)


def place_of(model: Model, **how: Any) -> Place:
    place = locate(subject_of(model, **how))
    assert place is not None
    return place


@pytest.fixture(params=[False, True], ids=["plain", "checkpointing"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(checkpointing=request.param)


def block(model: Model, number: int) -> Any:
    return model.layers[number]


def test_a_sound_model_has_no_place(model: Model) -> None:
    """Negative control: masks of minus infinity are everywhere, and nothing is wrong."""
    assert locate(subject_of(model)) is None


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_operation_inside_a_block(model: Model, number: int) -> None:
    block(model, number).trouble = "divide"
    place = place_of(model)
    assert (place.phase, place.module, place.block) == ("forward", f"layers.{number}", f"layers.{number}")
    assert place.operation == "div (aten.div.Tensor)"
    assert place.line.endswith("y = y / (y - y)")
    assert place.batch == 0
    assert all(table.bad for table in place.tensors if table.name.endswith("output"))
    assert not any(table.bad for table in place.tensors if "input" in table.name), "what went in was fine"
    assert len(place.tensors) == 5, "of the operation two inputs and an output; of the module one each"


def test_infinity_counts_and_comes_before_the_nan_it_turns_into(model: Model) -> None:
    block(model, 1).trouble = "log"
    place = place_of(model)
    assert (place.module, place.operation) == ("layers.1", "log (aten.log.default)")


@pytest.mark.parametrize(
    ("trouble", "operation"),
    [
        ("in place", "exp (aten.exp_.default)"),
        ("in place by itself", "div (aten.div_.Tensor)"),
        ("part of a tensor", "div (aten.div.Tensor)"),
    ],
)
def test_what_is_changed_in_place(trouble: str, operation: str) -> None:
    """When the operation is done its input is bad too: what counts is how it was before."""
    model = Model()
    block(model, 1).trouble = trouble
    place = place_of(model)
    assert (place.module, place.operation, place.block) == ("layers.1", operation, "layers.1")
    assert not any(table.bad for table in place.tensors if table.name.startswith("input"))


class Unwatchable(nn.Linear):
    """A kernel that lets nobody look at it from inside: flex attention, which torch itself refuses then."""

    spoils = False

    def forward(self, input: Tensor) -> Tensor:
        if _get_current_dispatch_mode_stack():  # without one it would have to be compiled
            flex_attention(*[torch.zeros(1, 1, 16, 16)] * 3)
            pytest.fail("torch has let it be watched")
        made = super().forward(input)
        return made / 0 if self.spoils else made


@pytest.mark.parametrize("spoils", [True, False])
def test_a_kernel_that_cannot_be_watched_from_inside(model: Model, spoils: bool) -> None:
    """Then modules are watched, and the innermost one is named; what is wrong elsewhere is found as well."""
    for each in model.layers:
        each.first = Unwatchable(WIDTH, WIDTH)
    block(model, 1).first.spoils = spoils
    block(model, 1).trouble = "" if spoils else "divide"
    place = place_of(model)
    assert (place.phase, place.module, place.block) == (
        "forward",
        "layers.1.first" if spoils else "layers.1",
        "layers.1",
    )
    assert place.operation == ""
    assert place.tensors
    assert place.tensors[-1].bad


def test_only_the_gradient_of_what_cannot_be_watched(model: Model) -> None:
    for each in model.layers:
        each.first = Unwatchable(WIDTH, WIDTH)
    block(model, 1).trouble = "root"
    place = place_of(model)
    assert (place.phase, place.block) == ("backward", "layers.1")


def test_a_block_is_named_where_nothing_inside_can_be_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory without the compiler, say. Nobody may conclude that the compiler is to blame."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no more memory")

    block(model, 1).trouble = "divide"
    monkeypatch.setattr(locating, "_by_operation", fails)
    place = place_of(model)
    assert (place.module, place.block, place.operation, place.eager) == ("layers.1", "layers.1", "", True)


def test_a_large_weight_overflows_where_it_is_used(model: Model) -> None:
    block(model, 2).second.weight.data.fill_(3e38)
    place = place_of(model)
    assert (place.phase, place.module) == ("forward", "layers.2.second")
    assert place.operation.startswith("addmm")


def test_fp16_overflow(model: Model) -> None:
    block(model, 1).first.weight.data.fill_(60000.0)
    place = place_of(model, dtype=torch.float16)
    assert place.phase == "forward"
    assert place.module.startswith("layers.1")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_only_the_gradient_is_bad(model: Model, number: int) -> None:
    """The loss is fine: the derivative of a root at 0 is not."""
    block(model, number).trouble = "root"
    subject = subject_of(model)
    assert torch.isfinite(subject.again())
    place = place_of(model)
    assert (place.phase, place.module, place.block) == ("backward", f"layers.{number}", f"layers.{number}")
    assert place.operation.startswith("RootBackward")
    assert "Root.apply" in place.line


def test_of_two_bad_gradients_the_first_in_backward_order(model: Model) -> None:
    """Only of weights: what flows back is fine, so nothing but the order tells which was first."""
    for number in (0, 2):
        block(model, number).second.weight.register_hook(lambda gradient: gradient / 0)
    place = place_of(model)
    assert (place.phase, place.block) == ("backward", "layers.2")
    assert place.module == "layers.2.second"
    assert place.operation.endswith("(aten.div.Tensor)")


def test_a_weight_that_is_nan_before_the_step(model: Model) -> None:
    block(model, 1).first.weight.data[0, 0] = float("nan")
    place = place_of(model)
    assert (place.phase, place.module) == ("weights", "layers.1.first")


@pytest.mark.parametrize(("part", "name"), [("embed", "embed"), ("norm", "norm")])
def test_outside_the_blocks(model: Model, part: str, name: str) -> None:
    def spoil(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output / 0

    getattr(model, part).register_forward_hook(spoil)
    place = place_of(model)
    assert (place.phase, place.module, place.block) == ("forward", name, "")


def test_after_the_model(model: Model) -> None:
    place = place_of(model, after=lambda loss: loss * torch.tensor(float("1e38")) * 1e38)
    assert (place.phase, place.module) == ("loss", "loss")


def test_the_second_micro_batch(model: Model) -> None:
    seen: list[int] = []

    def spoil(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        seen.append(1)
        return output / 0 if len(seen) % 2 == 0 else output

    plain = Model()
    plain.layers[1].second.register_forward_hook(spoil)  # pyright: ignore[reportAttributeAccessIssue] - a block has one
    place = place_of(plain)
    assert (place.module, place.batch) == ("layers.1.second", 1)


def test_nothing_is_left_behind(model: Model) -> None:
    block(model, 1).trouble = "divide"
    place_of(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(each._compiled_call_impl is None for each in model.layers)
    assert not torch.is_anomaly_enabled()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("trouble", ["divide", "root"])
def test_compiled_blocks(model: Model, trouble: str) -> None:
    """Hooks inside are skipped: the block is seen from outside, the operation without the compiler."""
    for each in model.layers:
        each.compile(fullgraph=True)
    block(model, 1).trouble = trouble
    subject = subject_of(model)
    subject.again()
    guilty = guilty_block(subject)
    assert guilty is not None
    assert guilty.block == "layers.1"
    place = place_of(model)
    assert (place.block, place.module, place.eager) == ("layers.1", "layers.1", True)
    assert place.operation.startswith(("div", "RootBackward"))


@pytest.mark.slow
def test_what_only_the_compiled_block_does(model: Model) -> None:
    """A kernel that is wrong: eagerly there is nothing to be found."""
    right = block(model, 1)._call_impl
    block(model, 1)._compiled_call_impl = lambda x: right(x) / 0
    place = place_of(model)
    assert (place.block, place.eager) == ("layers.1", False)


def test_gradients_that_overflow_only_when_they_are_summed(model: Model) -> None:
    """Each micro-batch is fine by itself: it is the sum over two that is not, and it belongs to a weight."""
    block(model, 1).second.weight.register_hook(lambda gradient: gradient * 0 + 2e38)
    assert locate(subject_of(model, batches=1)) is None, "control"
    place = place_of(model)
    assert (place.phase, place.module) == ("backward", "layers.1.second")
    assert place.operation.startswith("AccumulateGrad")
