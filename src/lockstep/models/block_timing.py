"""How long a block of a model takes, as it is or compiled: forward and backward, by the GPU's own clock.

The block is one of a model of one layer with hardly any vocabulary, and is given what that model gives it: masks and
rotary tables are those of a run. Nothing of it is left: no memory, no random number that was drawn, and nothing that
the compiler has learnt: seeing another number of rows than before, it would compile the run for any number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.models import initialise, lora
from lockstep.models.build import Model, blank, compile_blocks, forget_compiled, give_memory, keep_traces
from lockstep.models.options import ModelOptions
from lockstep.models.shapes import AnyShape
from lockstep.runtime import gpu_clock
from lockstep.runtime.precision import Precision

VOCABULARY = 16  # ids that the embedding before the block knows
IN_A_ROW = 4  # passes of a timing: the host of a real step is ahead of the GPU too, where it can be
SEED, STD = 0, 0.02


@dataclass(frozen=True)
class BlockWork:
    """What a run asks of its blocks."""

    options: ModelOptions
    shape: AnyShape
    rows: int
    length: int
    dtype_name: str
    attention: str
    checkpointing: bool
    documents_apart: bool
    sharded: bool

    def deciding(self) -> dict[str, Any]:
        """All of it that a time depends on; models of more layers have the same blocks."""
        ours = {name: value for name, value in vars(self).items() if name not in ("options", "shape")}
        asked = self.options.model_dump(mode="json")
        additions = {name: value for name, value in asked.items() if name.startswith("lora_")}
        return {**ours, "shape": asdict(self._one_layer()), "dropout": self.options.dropout, **additions}

    def model(self, device: torch.device) -> Model:
        """One layer with weights."""
        made, _ = blank(
            self.options,
            self._one_layer(),
            attention=self.attention,
            dtype_name=self.dtype_name,
            checkpointing=self.checkpointing,
        )
        give_memory(made, device, sharded=False)
        made.rebuild_buffers()
        initialise.initialise(made, seed=SEED, std=STD)
        lora.initialise_additions(made, seed=SEED)
        return made

    def _one_layer(self) -> AnyShape:
        return replace(self.shape, num_layers=1, vocab_size=VOCABULARY)


class Asked(nn.Module):
    """Stands where a block does, computes nothing, and keeps what that was to be given."""

    given: Tensor
    rest: tuple[Any, ...]

    def forward(self, given: Tensor, *rest: Any) -> Tensor:
        self.given, self.rest = given, rest
        return given


def milliseconds(work: BlockWork, device: torch.device, *, compiled: bool) -> float:
    """Of one forward and backward pass: the median of a few."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout draws
            return _milliseconds(work, device, compiled=compiled)
    finally:
        forget_compiled()


def _milliseconds(work: BlockWork, device: torch.device, *, compiled: bool) -> float:
    model, precision = work.model(device), Precision(work.dtype_name, device)
    block: Any = model.layers[0]
    with precision.context():
        given, rest = _given(model, work, device)
    learning = [given, *(parameter for parameter in block.parameters() if parameter.requires_grad)]
    back = torch.randn(given.shape, generator=torch.Generator(device).manual_seed(SEED), device=device)
    if compiled:
        keep_traces(work.dtype_name)
        compile_blocks(model, device, sharded=work.sharded)

    def both_ways() -> None:
        with precision.context():  # anew in each pass, as in a step: it keeps the weights it has cast
            if model.checkpointing:
                out: Tensor = checkpoint(
                    block, given, *rest, use_reentrant=False, preserve_rng_state=work.options.dropout > 0
                )
            else:
                out = block(given, *rest)
        torch.autograd.grad(out, learning, back.to(out.dtype))

    return gpu_clock.milliseconds(both_ways, in_a_row=IN_A_ROW)


def _given(model: Model, work: BlockWork, device: torch.device) -> tuple[Tensor, tuple[Any, ...]]:
    """What the model hands to its block: numbers that want a gradient, as all but the first block's do; the rest."""
    generator, sizes = torch.Generator(device).manual_seed(SEED), (work.rows, work.length)
    documents = {"documents_BL": torch.ones(sizes, dtype=torch.long, device=device)} if work.documents_apart else {}
    block, asked = model.layers[0], Asked()
    model.layers[0] = asked
    model(torch.randint(VOCABULARY, sizes, generator=generator, device=device), **documents)
    model.layers[0] = block
    return asked.given.detach().requires_grad_(), asked.rest
