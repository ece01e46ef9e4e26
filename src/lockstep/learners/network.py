"""Many small actor-critic networks as one stack: two towers (policy, value) of two tanh layers each, a batched product.

Parameters of all networks lie in one flat tensor, so that Adam is one call; gradients are written out by hand, which
saves the bookkeeping of autograd and most of the memory traffic: `collect ad_dr` by autograd took 1.6 to 1.8 times as
long. Each network computes exactly what it would alone.
Shapes: N networks, B samples, D inputs, H hidden units, A actions, S distinct inputs; 2N = policy towers, value towers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.learners.draws import WEIGHTS, bits, uniform

LINE = 16  # floats of a cache line: all rows are whole lines, for the rounding of a product depends on where they lie


class Weights(NamedTuple):
    """Views of one flat tensor. The last layer is a line wide: the policy uses A columns of it, the value one."""

    w1: Tensor  # (2N, D, H)
    b1: Tensor  # (2N, 1, H)
    w2: Tensor  # (2N, H, H)
    b2: Tensor  # (2N, 1, H)
    w3: Tensor  # (2N, H, LINE)
    b3: Tensor  # (2N, 1, LINE)


class Stack:
    """The networks, their gradients, and one step of Adam with each network's gradient clipped by its own norm."""

    def __init__(self, keys: Tensor, inputs: int, *, hidden: int, actions: int) -> None:
        assert hidden % LINE == 0
        assert actions <= LINE
        self.networks, self.hidden, self.actions, self.device = len(keys), hidden, actions, keys.device
        shapes = [(inputs, hidden), (1, hidden), (hidden, hidden), (1, hidden), (hidden, LINE), (1, LINE)]
        lengths = [2 * len(keys) * rows * columns for rows, columns in shapes]
        self.flat, self.slope, self.mean, self.square = (
            torch.zeros(sum(lengths), device=self.device) for _ in range(4)
        )
        self.weights, self.slopes = (
            Weights(*(part.view(-1, *shape) for part, shape in zip(flat.split(lengths), shapes, strict=True)))
            for flat in (self.flat, self.slope)
        )
        self.updates = torch.zeros((), device=self.device)
        self._room: dict[int, tuple[Tensor, ...]] = {}
        self._draw_weights(keys)

    def _draw_weights(self, keys: Tensor) -> None:
        """Orthogonal, with gains sqrt(2) for the towers, 0.01 for the policy's head and 1 for the value's; biases 0."""
        w, count = self.weights, self.networks
        for tower, (columns, gain) in enumerate(((self.actions, 0.01), (1, 1.0))):
            own = slice(tower * count, (tower + 1) * count)
            for number, (weight, size) in enumerate(((w.w1, 2**0.5), (w.w2, 2**0.5), (w.w3[..., :columns], gain))):
                weight[own] = _orthogonal(keys, weight.shape[1:], 2 * number + tower).mul_(size)

    def forward(self, inputs_NBD: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N, B, A) and values (N, B); what `backward` needs is kept until the next forward."""
        w, count = self.weights, self.networks
        first, second, _, last, _ = self._rooms(inputs_NBD.shape[1])
        for tower in (slice(0, count), slice(count, 2 * count)):
            torch.baddbmm(w.b1[tower], inputs_NBD, w.w1[tower], out=first[tower])
        torch.baddbmm(w.b2, _tanh(first), w.w2, out=second)
        torch.baddbmm(w.b3, _tanh(second), w.w3, out=last)
        return last[:count, :, : self.actions].contiguous(), last[count:, :, 0].contiguous()

    def backward(self, inputs_NBD: Tensor, by_logits_NBA: Tensor, by_values_NB: Tensor) -> None:
        """Gradients of all parameters from those of the last forward's outputs."""
        w, slopes, count = self.weights, self.slopes, self.networks
        first, second, back, last, ones = self._rooms(inputs_NBD.shape[1])
        last.zero_()
        last[:count, :, : self.actions] = by_logits_NBA
        last[count:, :, 0] = by_values_NB
        torch.bmm(second.mT, last, out=slopes.w3)
        torch.bmm(ones, last, out=slopes.b3)
        torch.bmm(last, w.w3.mT, out=back)
        _through_tanh(back, second)
        torch.bmm(first.mT, back, out=slopes.w2)
        torch.bmm(ones, back, out=slopes.b2)
        torch.bmm(back, w.w2.mT, out=second)
        _through_tanh(second, first)
        for tower in (slice(0, count), slice(count, 2 * count)):
            torch.bmm(inputs_NBD.mT, second[tower], out=slopes.w1[tower])
        torch.bmm(ones, second, out=slopes.b1)

    def update(self, *, rate: float, max_norm: float, epsilon: float) -> Tensor:
        """Clip each network's gradient, and take Adam's step; the norms before clipping."""
        count = self.networks
        squares = torch.zeros(count, device=self.device)
        for slope in self.slopes:
            squares += torch.linalg.vector_norm(slope.view(2, count, -1), dim=-1).square_().sum(0)
        norms = squares.sqrt_()
        share = (max_norm / (norms + 1e-6)).clamp_(max=1.0)
        for slope in self.slopes:
            slope.view(2, count, -1).mul_(share[:, None])
        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
            [self.flat], [self.slope], [self.mean], [self.square], [], [self.updates.add_(1)],
            lr=rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip
        return norms

    def _rooms(self, samples: int) -> tuple[Tensor, ...]:
        """Tensors to compute in, for this many samples: fresh memory would cost as much as the arithmetic."""
        if samples not in self._room:
            both, hidden = 2 * self.networks, self.hidden
            rooms = [torch.empty((both, samples, wide), device=self.device) for wide in (hidden, hidden, hidden, LINE)]
            self._room[samples] = (*rooms, torch.ones((both, 1, samples), device=self.device))
        return self._room[samples]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Several threads would cut a tensor where a vector loop ends, and its last numbers round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tanh(x: Tensor) -> Tensor:
    """In place, by the logistic function: torch's tanh takes three times as long on a CPU (2 parts in 10^7 apart)."""
    return x.mul_(2).sigmoid_().mul_(2).sub_(1)


def _through_tanh(slope: Tensor, output: Tensor) -> None:
    """slope *= 1 - output², in place, in one pass."""
    torch.ops.aten.tanh_backward.grad_input(slope, output, grad_input=slope)


def _orthogonal(keys: Tensor, shape: torch.Size, number: int) -> Tensor:
    """(N, *shape): orthogonal matrices, each from its own key, by QR of normal numbers in float64 on the CPU."""
    rows, columns = shape
    places = torch.arange(rows * columns, device=keys.device)
    drawn = [bits(keys[:, None], WEIGHTS, places + (2 * number + half) * (1 << 20)).cpu() for half in (0, 1)]
    radius = (-2.0 * torch.log1p(-uniform(drawn[0]).double())).sqrt()
    normal = (radius * (uniform(drawn[1]).double() * (2 * math.pi)).cos()).view(-1, rows, columns)
    tall = normal if rows >= columns else normal.mT
    q, r = torch.linalg.qr(tall)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return (q if rows >= columns else q.mT).float().to(keys.device)
