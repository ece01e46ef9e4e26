"""Sizes of agents: transformers that read a history of steps and say the next action. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.models.reading import Reader, divided

if TYPE_CHECKING:
    from lockstep.models.options import AgentOptions

MODEL_TYPE = "lockstep_agent"
SIDE = 16  # of the largest grid: the rows of the table of each coordinate
REWARDS = 3  # nothing was paid, it was, there was no step before
FIRST = 2  # whether an episode begins
KINDS = 3  # inside a region of the source learner, where one begins, where one ends


@dataclass(frozen=True)
class AgentShape:
    """Every number that decides the tensors and the maths of an agent. Its vocabulary are the actions."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    attention_dropout: float = 0.0
    compressed: bool = False  # the history is read region by region
    region: int = 80  # steps
    summary_tokens: int = 8  # of a region, carried into the next; 0: what lies before a region is forgotten
    dynamics: bool = False  # also says where a step leads and what it pays
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def model_type(self) -> str:
        return MODEL_TYPE

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_position_embeddings(self) -> int:
        return 1 << 30  # rotary positions end nowhere

    @property
    def free_sizes(self) -> frozenset[str]:
        """Those that weights do not depend on."""
        return frozenset({"num_layers", "attention_dropout", "region", "bos", "eos"})

    @property
    def input_rows(self) -> int:
        """Of the table that a step is looked up in: two coordinates, the action and the reward before, the start."""
        return 2 * SIDE + self.vocab_size + 1 + REWARDS + FIRST

    @property
    def said(self) -> dict[str, int]:
        """What is said of a step: how many choices each answer has."""
        outcome = {"x": SIDE, "y": SIDE, "reward": 2} if self.dynamics else {}
        return {"action": self.vocab_size, **({"kind": KINDS} if self.compressed else {}), **outcome}

    def parameters(self) -> int:
        """How many numbers are trained."""
        width = self.hidden_size
        taken = self.vocab_size * width if self.dynamics else 0
        summaries = 2 * self.summary_tokens * width if self.compressed else 0  # the first ones, and what asks for more
        tables = self.input_rows * width + taken + summaries
        return tables + self.num_layers * (self._layer_matmul() + 2 * width) + width + sum(self.said.values()) * width

    def matmul_parameters(self) -> int:
        """Those that multiply a step."""
        return self.num_layers * self._layer_matmul() + sum(self.said.values()) * self.hidden_size

    def flops_per_token(self, context_length: int) -> float:
        """Forward and backward; each step sees those before it, half of all on average, and summaries cost theirs."""
        seen = (min(context_length, self.region) if self.compressed else context_length) * self._tokens_per_step()
        layers = self.num_layers * (self._layer_matmul() + self.hidden_size * seen) * self._tokens_per_step()
        return 6 * (layers + sum(self.said.values()) * self.hidden_size)

    def _layer_matmul(self) -> int:
        return 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size

    def _tokens_per_step(self) -> float:
        """That the blocks read: in each region also the summaries of the one before, and what asks for its own."""
        return 1 + 2 * self.summary_tokens / self.region if self.compressed else 1.0

    def layer_activation_bytes(self, item: int, *, compiled: bool) -> int:
        """What one layer keeps per step, dropout's masks included; by a kernel that keeps no probabilities."""
        width, inner = self.hidden_size, self.intermediate_size
        if compiled:
            return int(item * (9 * width + 2 * inner) * self._tokens_per_step())
        norms = 4 * width * item if item >= 4 else 2 * width * (4 + item)
        return int((norms + item * (8 * width + 3 * inner)) * self._tokens_per_step())

    def head_tokens(self, tokens: int) -> int:
        """Every step has an answer."""
        return tokens

    def first_loss(self, std: float) -> float:
        """Of random weights: the action is a guess. The objective knows what else is guessed."""
        return math.log(self.vocab_size) + self.hidden_size * std**2 / 2

    def notices(self) -> tuple[str, ...]:
        """What its user should hear about these sizes."""
        if self.compressed and not self.summary_tokens:
            return (f"no summary tokens: what lies before a region of {self.region} steps is forgotten",)
        return ()

    def to_hf(self, *, dtype_name: str = "fp32") -> dict[str, Any]:
        """As a config.json; transformers has no such class."""
        del dtype_name
        tree = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("bos", "eos")}
        return {"model_type": MODEL_TYPE, **tree}

    @classmethod
    def from_hf(cls, tree: Mapping[str, Any], *, where: str = "config.json") -> AgentShape:
        """Read such a config.json."""
        read = Reader(tree, where)
        shape = cls(
            vocab_size=read.whole("vocab_size"),
            hidden_size=read.whole("hidden_size"),
            intermediate_size=read.whole("intermediate_size"),
            num_layers=read.whole("num_layers"),
            num_heads=read.whole("num_heads"),
            norm_eps=read.real("norm_eps"),
            rope_theta=read.real("rope_theta"),
            attention_dropout=read.real("attention_dropout") if tree.get("attention_dropout") else 0.0,
            compressed=read.flag("compressed"),
            region=read.whole("region"),
            summary_tokens=read.whole("summary_tokens") if tree.get("summary_tokens") else 0,
            dynamics=read.flag("dynamics"),
        )
        _check_heads(shape, where)
        return shape


KNOWN: dict[str, AgentShape] = {
    "lockstep/ad-tiny": AgentShape(5, 32, 64, 2, 2),
    "lockstep/ad-demo": AgentShape(5, 64, 256, 3, 4),
    "lockstep/ad": AgentShape(5, 64, 128, 4, 4),  # ad_dr.yaml
    "lockstep/ad-compressed": AgentShape(5, 128, 128, 6, 8, compressed=True),  # ad_dr_compressed.yaml
}


def overridden(options: AgentOptions, base: AgentShape, *, context_length: int) -> AgentShape:
    """The shape named by model_path, overridden key by key; the feed-forward layer keeps its share of the width."""
    sizes = {
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_layers": options.num_layers,
        "num_heads": options.num_attention_heads,
        "vocab_size": options.vocab_size,
        "compressed": options.compressed,
        "region": options.region,
        "summary_tokens": options.summary_tokens,
        "attention_dropout": options.attention_dropout,
        "dynamics": options.dynamics,
    }
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    if "hidden_size" in given and "intermediate_size" not in given:
        given["intermediate_size"] = max(1, base.intermediate_size * given["hidden_size"] // base.hidden_size)
    shape = replace(base, **given)
    _check_heads(shape, "model.num_attention_heads")
    if options.max_position_embeddings is not None:
        raise ConfigError(
            "an agent has rotary positions, which end nowhere",
            where="model.max_position_embeddings",
            hint="leave it out; training.context_length is what it sees",
        )
    if shape.compressed and context_length <= shape.region:
        raise ConfigError(
            f"a context of {context_length} steps is one region of {shape.region}: nothing would be summarised",
            where="model.region",
            hint=f"model.region={max(1, context_length // 2)}, or a longer training.context_length",
        )
    return shape


def _check_heads(shape: AgentShape, where: str) -> None:
    head = divided(shape.hidden_size, shape.num_heads)
    if head % 2:
        raise ConfigError(f"head size {head} is odd: rotary positions turn pairs", where=where, hint="fewer heads")
