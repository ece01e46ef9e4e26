"""What training a model of a shape costs in memory, by cause. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.models.llama_shapes import LlamaShape

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.models.options import ModelOptions
    from lockstep.models.shapes import Shape

FLOAT8_SIDE = 16  # sides of an output matrix are multiples of it, or its gradients stay bf16
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
    """An estimate of what one GPU must hold, in bytes, by cause."""

    weights: int
    gradients: int
    moments: int  # AdamW
    copies: int  # of weights: in half precision, made by autocast; gathered from other ranks
    activations: int  # kept for the backward pass
    head: int  # logits of one chunk and their gradient
    block: int  # what the backward pass of one block makes on its way
    awaited: int  # gradients that are not there yet when all activations are
    last: int  # what is left of a micro-batch when the last gradients come

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.moments

    @property
    def passing(self) -> int:
        """Beside the state, at the worst time of a step: activations lie where gradients will."""
        return max(self.copies + self.activations + max(self.head, self.block) - self.awaited, self.last)

    @property
    def total(self) -> int:
        return self.states + self.passing


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


@dataclass(frozen=True)
class Sharing:
    """How the state lies on the ranks: in so many parts, or whole with gradients that are always there."""

    shards: int = 1
    standing_gradients: bool = False  # in the buckets of data parallelism, or from one micro-batch to the next

    @classmethod
    def of(cls, config: RunConfig, shards: int, *, world: int) -> Sharing:
        """Of a run of so many workers."""
        in_buckets = shards == 1 and config.system.mode == "ddp" and world > 1
        return cls(shards, standing_gradients=in_buckets or config.training.grad_accum_nums > 1)


ALL_WEIGHTS, ALONE = Lora(), Sharing()


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
    sharing: Sharing = ALONE,
) -> Memory:
    """Memory of training with AdamW: weights, gradients and moments, and what a micro-batch leaves behind."""
    tokens, item = batch_size * context_length, ITEM_BYTES[dtype_name]
    recast = dtype_name == "fp8" or (compiled and isinstance(shape, LlamaShape))  # in each pass, as recomputed blocks
    layer = tokens * shape.layer_activation_bytes(item, compiled=compiled)
    residual = tokens * shape.hidden_size * item
    kept = shape.num_layers * residual + layer if checkpointing else shape.num_layers * layer
    head_tokens, chunk = shape.head_tokens(tokens), chunk_tokens(shape.vocab_size, in_place=item < 4)
    weights, gradients, moments = (
        part // sharing.shards for part in _states(shape, lora, dtype_name, optimizer_states)
    )
    whole = head_tokens <= chunk
    table = 0 if lora.rank else max(4, item) * shape.vocab_size * shape.hidden_size // sharing.shards
    after_table = 0 if getattr(shape, "tied", True) else table  # the gradient of an output matrix is the first one
    gathered = _gathered_bytes(shape, lora, dtype_name, sharing)  # embedding and head from the first to the last
    return Memory(
        weights=weights,
        gradients=gradients,
        moments=moments,
        copies=_cast_bytes(shape, lora, item, recast) + gathered,
        activations=kept + 3 * residual,
        head=min(head_tokens, chunk) * shape.vocab_size * _logit_bytes(item, whole=whole)
        + _float8_head_bytes(shape, lora, dtype_name, min(head_tokens, chunk), whole),
        block=layer,
        awaited=0 if sharing.standing_gradients else max(0, gradients - table),
        last=gathered + 3 * residual + max(0, 2 * layer - after_table),
    )


def _logit_bytes(item: int, *, whole: bool) -> int:
    """Of one logit. Halves are a GPU's, whose kernel needs no more memory than the logits themselves.

    In plain operations autograd keeps the logits, their softmax and its gradient; those of a chunk less.
    """
    return item if item < 4 else 3 * item if whole else 2 * max(4, item) + item


def _float8_head_bytes(shape: Shape, lora: Lora, dtype_name: str, tokens: int, whole: bool) -> int:
    """What float8 gradients of an output matrix need beside its logits.

    The matrix turned over, and the logits' gradient both ways; when the logits are gone, a product in fp32 is there,
    to be added to the gradient, which the first one is itself.
    """
    fits = isinstance(shape, LlamaShape) and not (shape.vocab_size % FLOAT8_SIDE or shape.hidden_size % FLOAT8_SIDE)
    if dtype_name != "fp8" or not fits:
        return 0
    delta, matrix = tokens * shape.vocab_size, shape.vocab_size * shape.hidden_size
    product = 0 if lora.rank or whole else 4 * matrix
    return matrix + 2 * delta + max(0, product - ITEM_BYTES[dtype_name] * delta)


def _states(shape: Shape, lora: Lora, dtype_name: str, optimizer_states: str) -> tuple[int, int, int]:
    """Weights, gradients and moments of the whole model."""
    word, count = max(4, ITEM_BYTES[dtype_name]), shape.parameters()
    if not lora.rank or not isinstance(shape, LlamaShape):
        moments = STATE_BYTES.get(optimizer_states, 2 * word) * count
        return word * count, word * count, int(moments)
    matrices = lora.matrices(shape)
    added = sum(rows * columns for rows, columns in matrices)
    moments = int(STATE_BYTES.get(optimizer_states, 2 * word) * added)
    return _frozen_bytes(dtype_name) * count + word * added, word * added, moments


def _frozen_bytes(dtype_name: str) -> int:
    """Frozen matrices are kept in bf16 where the step computes in it."""
    return 2 if dtype_name in ("bf16", "fp8") else max(4, ITEM_BYTES[dtype_name])


def _cast_bytes(shape: Shape, lora: Lora, item: int, recast: bool) -> int:
    """Weights in half precision, beside the fp32 ones.

    Until the forward pass ends autocast holds all it has made, also in blocks that are recomputed.
    """
    if item >= 4 or (lora.rank and item == _frozen_bytes("bf16")):
        return 0
    return item * (shape.vocab_size * shape.hidden_size if recast else shape.matmul_parameters())


def _gathered_bytes(shape: Shape, lora: Lora, dtype_name: str, sharing: Sharing) -> int:
    """Of a model in shards: the embedding and the head, and two layers with their gradients, are whole for a while."""
    if sharing.shards < 2:
        return 0
    word = max(4, ITEM_BYTES[dtype_name])
    each = _frozen_bytes(dtype_name) if lora.rank else 2 * word
    vocabulary = shape.vocab_size * shape.hidden_size
    layers = shape.matmul_parameters() - vocabulary
    root = shape.parameters() - layers
    return each * (root + 2 * layers // shape.num_layers) * (sharing.shards - 1) // sharing.shards


def chunk_tokens(vocab_size: int, *, in_place: bool) -> int:
    """How many tokens' logits exist at once: few for large vocabularies, more for small ones.

    Each chunk reads and writes the gradient of the output matrix once, so larger ones are faster; `in_place`: where a
    kernel makes the gradient in the memory of the logits, they may be.
    """
    return max(8192 if in_place else 2048, (1 << 25) // vocab_size)
