"""What the readers of every config.json share. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.errors import ConfigError

HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Reader:
    """Numbers of a JSON object, or an error that names the key."""

    def __init__(self, tree: Mapping[str, Any], where: str) -> None:
        self.tree = tree
        self.where = where

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.tree.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
            raise ConfigError(f"{key}: expected a positive whole number, got {str(value)[:80]}", where=self.where)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.tree.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{key}: expected a positive number, got {str(value)[:80]}", where=self.where)
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.tree.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{key}: expected true or false, got {str(value)[:80]}", where=self.where)
        return value

    def token(self, key: str) -> int | None:
        """An id of the vocabulary, where there is one."""
        value = self.tree.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def tokens(self, key: str) -> tuple[int, ...]:
        """The same where there may be several."""
        value: object = self.tree.get(key)
        listed: list[object] = value if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownVariableType]
        return tuple(item for item in listed if isinstance(item, int) and not isinstance(item, bool))

    def only(self, **allowed: object) -> None:
        """Refuse whatever the model would not compute exactly."""
        for key, value in allowed.items():
            if self.tree.get(key, value) != value:
                raise ConfigError(f"{key} is {self.tree[key]!r}, this model has {value!r}", where=self.where)


def one_or_all(tokens: tuple[int, ...]) -> int | list[int] | None:
    """Ids as config.json spells them."""
    return None if not tokens else tokens[0] if len(tokens) == 1 else list(tokens)


def check_context(context_length: int, positions: int) -> None:
    """A row must not be longer than the model's positions."""
    if context_length > positions:
        raise ConfigError(
            f"context_length {context_length} is above the model's {positions} positions",
            where="training.context_length",
            hint=f"at most {positions}, or raise model.max_position_embeddings",
        )


def divided(hidden_size: int, num_heads: int, *, hint: str = "a divisor") -> int:
    """The width of one head."""
    if hidden_size % num_heads:
        raise ConfigError(
            f"{num_heads} heads do not divide hidden_size {hidden_size}", where="model.num_attention_heads", hint=hint
        )
    return hidden_size // num_heads
