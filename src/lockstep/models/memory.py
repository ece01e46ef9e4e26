"""What training a model of a shape costs in memory, by cause. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.models.llama_shapes import LlamaShape

if TYPE_CHECKING:
    from lockstep.models.options import ModelOptions
    from lockstep.models.shapes import Shape

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 2}  # fp8: what is kept is bf16
STATE_BYTES = {"bf16": 4}  # of both moments
LORA_MATRICES = {  # setting -> our name inside a block
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "o": "attention.wo",
    "gate": "mlp.w1",
    "up": "mlp.w3",
    "down": "mlp.w2",
}


@dataclass(frozen=True)
class Memory:
    """What one GPU must hold, in bytes. The states are exact; activations are an estimate, near 30 %."""

    weights: int
    gradients: int
    moments: int  # AdamW
    activations: int  # what a micro-batch leaves for the backward pass, logits, gathered weights

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.moments

    @property
    def total(self) -> int:
        return self.states + self.activations


@dataclass(frozen=True)
class Lora:
    """Low-rank additions, as far as they cost memory."""

    rank: int = 0
    targets: str = "all"

    @classmethod
    def of(cls, options: ModelOptions) -> Lora:
        """What these options ask for; rank 0: all weights learn."""
        return cls(getattr(options, "lora_rank", 0), getattr(options, "lora_targets", "all"))

    def matrices(self, shape: LlamaShape) -> list[tuple[int, int]]:
        """(rows, columns) of each A and B."""
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        width, inner = shape.hidden_size, shape.intermediate_size
        sizes = {
            "q": (query, width), "k": (key, width), "v": (key, width), "o": (width, query),
            "gate": (inner, width), "up": (inner, width), "down": (width, inner),
        }  # fmt: skip
        chosen = [sizes[target] for target in lora_targets(self.targets)] * shape.num_layers
        return [size for rows, columns in chosen for size in ((self.rank, columns), (rows, self.rank))]


def lora_targets(text: str) -> tuple[str, ...]:
    """The matrices that model.lora_targets names, in our order."""
    asked = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in asked if part not in LORA_MATRICES and part != "all"]
    if unknown or not asked:
        raise ConfigError(
            f"no matrix {unknown[0][:40]!r}" if unknown else "names no matrix",
            where="model.lora_targets",
            hint=f"all, or some of {','.join(LORA_MATRICES)}",
        )
    return tuple(name for name in LORA_MATRICES if name in asked or "all" in asked)


def check_lora(lora: Lora, shape: LlamaShape) -> None:
    """Refuse additions that are none, whether or not any are asked for: they may be later."""
    lora_targets(lora.targets)
    if lora.rank > shape.hidden_size:
        raise ConfigError(
            f"rank {lora.rank} is above the model's width {shape.hidden_size}: more to learn than all its weights",
            where="model.lora_rank",
            hint="8 to 64, or 0 to train all weights",
        )


ALL_WEIGHTS = Lora()


def memory_bytes(  # noqa: PLR0913 - all that costs memory, by name
    shape: Shape,
    *,
    batch_size: int,
    context_length: int,
    dtype_name: str,
    checkpointing: bool,
    compiled: bool,
    optimizer_states: str = "fp32",
    lora: Lora = ALL_WEIGHTS,
    shards: int = 1,
) -> Memory:
    """Memory of training with AdamW: weights, gradients and moments, and what a micro-batch leaves behind.

    Casts and what a kernel needs on its way are left out, and that early activations are gone when the last gradients
    come.
    """
    tokens, item = batch_size * context_length, ITEM_BYTES[dtype_name]
    layer = tokens * shape.layer_activation_bytes(item, compiled=compiled)
    between = tokens * shape.hidden_size * item  # two layers: all that is kept of those that are computed again
    chunk = min(shape.head_tokens(tokens), chunk_tokens(shape.vocab_size, in_place=item < 4))
    logits = chunk * shape.vocab_size * (item if item < 4 else 3 * item)  # in plain operations beside two copies
    weights, gradients, moments = (part // shards for part in _states(shape, lora, dtype_name, optimizer_states))
    kept = shape.num_layers * between + layer if checkpointing else shape.num_layers * layer
    tables = shape.parameters() - shape.matmul_parameters() + shape.vocab_size * shape.hidden_size
    whole = (2 if lora.rank else 8) * tables if shards > 1 else 0  # embedding and head are gathered from all ranks
    return Memory(weights, gradients, moments, activations=kept + logits + whole)


def _states(shape: Shape, lora: Lora, dtype_name: str, optimizer_states: str) -> tuple[int, int, int]:
    """Weights, gradients and moments of the whole model."""
    word, learns, frozen = max(4, ITEM_BYTES[dtype_name]), shape.parameters(), 0
    if lora.rank and isinstance(shape, LlamaShape):
        frozen = learns * (2 if dtype_name in ("bf16", "fp8") else word)  # kept in bf16 where the step computes in it
        learns = sum(rows * columns for rows, columns in lora.matrices(shape))
    moments = STATE_BYTES.get(optimizer_states, 2 * word)
    return frozen + word * learns, word * learns, moments * learns


def chunk_tokens(vocab_size: int, *, in_place: bool) -> int:
    """How many tokens' logits exist at once: few for large vocabularies, more for small ones.

    Each chunk reads and writes the gradient of the output matrix once, so larger ones are faster; `in_place`: where a
    kernel makes the gradient in the memory of the logits, they may be.
    """
    return max(8192 if in_place else 2048, (1 << 25) // vocab_size)
