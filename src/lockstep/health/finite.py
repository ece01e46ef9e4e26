"""Gradients under the eye of debug mode: which are not finite, which are large, which layers are dead or explode."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.runtime.parallel import local, sum_over_shards

LARGE_NORM = 100.0
EXPLODING = 10.0  # times what the same tensor usually has in the other layers
SHOWN_LAYERS = 8  # of each sort; the rest is a number


@dataclass(frozen=True)
class Gradient:
    """What debug mode knows of one gradient."""

    name: str
    nans: float
    infs: float
    norm: float

    @property
    def kind(self) -> str:
        """The same for the same tensor of every layer: "layers.*.mlp.w1.weight"."""
        return re.sub(r"\.\d+\.", ".*.", self.name)


def look(parameters: Iterable[tuple[str, nn.Parameter]], *, scale: float = 1.0) -> list[Gradient]:
    """Every gradient, with one question to the device; all ranks of a model in shards ask. For debug mode only."""
    named = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
    if not named:
        return []
    seen = torch.stack([_sums(local(gradient.detach()), scale) for _, gradient in named])
    rows = sum_over_shards(named[0][1], seen).tolist()
    return [
        Gradient(name, nans, infs, math.sqrt(square) if square >= 0 else math.nan)
        for (name, _), (nans, infs, square) in zip(named, rows, strict=True)
    ]


def gradient_warnings(seen: Iterable[Gradient]) -> Iterator[str]:
    """One line per gradient worth a word."""
    for each in seen:
        if each.nans:
            yield f"NaN in gradient: {each.name}"
        elif each.infs:
            yield f"Inf in gradient: {each.name}"
        elif each.norm > LARGE_NORM:
            yield f"Large gradient in {each.name}: {each.norm:.4f}"


def layer_table(seen: Sequence[Gradient]) -> list[str]:
    """Layers that learn nothing, and layers far above the others of their kind; no line where there is neither."""
    finite = [each for each in seen if not each.nans and not each.infs]
    dead = [(each.name, "dead", "") for each in finite if each.norm == 0]
    exploding: list[tuple[str, str, str]] = []
    for each in finite:
        others = [other.norm for other in finite if other.kind == each.kind and other is not each]
        usual = statistics.median(others) if others else 0.0
        if usual > 0 and each.norm > EXPLODING * usual:
            text = f"gradient norm {each.norm:.4g}, in other layers usually {usual:.4g}"
            exploding.append((each.name, "exploding", text))
    if not dead and not exploding:
        return []
    shown = [*dead[:SHOWN_LAYERS], *exploding[:SHOWN_LAYERS]]
    width = max(len(name) for name, _, _ in shown)
    lines = [f"  {name:<{width}}  {sort:<9}  {text}".rstrip() for name, sort, text in shown]
    rest = len(dead) + len(exploding) - len(shown)
    head = (
        f"Layers without a gradient: {len(dead)}, with a far larger one than others: {len(exploding)}, of {len(seen)}"
    )
    return [head, *lines, *([f"  and {rest} more"] if rest else [])]


class GradientWatch:
    """Debug mode's eye on the gradients of a run: a line for each that is bad or large, now and then a table."""

    def __init__(self, interval: int) -> None:
        self.interval = interval  # steps between tables; with a warning there is one at once
        self._told: list[str] = []  # the layers of the last table: the same ones are not told twice

    def lines(self, step: int, parameters: Iterable[tuple[str, nn.Parameter]], *, scale: float = 1.0) -> list[str]:
        """What is worth saying of a step. All ranks ask."""
        seen = look(parameters, scale=scale)
        warned = list(gradient_warnings(seen))
        if step <= 0 or not (
            warned or step % self.interval == 0
        ):  # additions begin at 0, and so do gradients of theirs
            return warned
        table = layer_table(seen)
        layers = [" ".join(line.split()[:2]) for line in table[1:]]
        if layers == self._told:
            return warned
        self._told = layers
        return [*warned, *table]


def _sums(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """(NaNs, infinities, square of the norm): what adds up over the parts of a gradient."""
    gradient = gradient.float() / scale
    square = torch.linalg.vector_norm(gradient).double().square()
    return torch.stack([torch.isnan(gradient).sum().double(), torch.isinf(gradient).sum().double(), square])
