"""AdamW whose moments are kept in bf16 (see moments.py), updated some rows at a time.

On a GPU a kernel of our own, kernels/adamw.py, does the same with the same noise: one launch for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.engine import moments
from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from lockstep.runtime.parallel import flat_offset, local

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements at a time: bounds what lies beside the moments
Work = list[tuple[nn.Parameter, float]]  # to be updated, with their decay


@dataclass(frozen=True)
class Constants:
    """What an update knows beforehand."""

    beta1: float
    beta2: float
    epsilon: float


class CompactAdamW(AdamW):
    """The same rule and the same gate; only the keeping of the moments differs."""

    def __init__(self, model: nn.Module, options: TrainingOptions, device: torch.device, *, seed: int) -> None:
        super().__init__(model, options, device)
        self.kind = options.optimizer_states
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.keys = {
            id(parameter): torch.tensor(
                moments.stream_key(seed, names[id(parameter)]), dtype=torch.int32, device=device
            )
            for parameter in self.parameters
        }

    def _make_states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {name: torch.zeros_like(local(parameter), dtype=torch.bfloat16) for name in moments.MOMENTS}

    @torch.no_grad()
    def step(self, divisor: Tensor, skip: Tensor) -> None:
        """Update with gradients / divisor; where skip is 1 nothing changes, neither weights nor moments nor counts."""
        self.applied += 1
        work = [
            (each, group.weight_decay) for group in self.groups for each in group.parameters if each.grad is not None
        ]
        if self.has_kernel:
            work = self._by_kernel(work, divisor, skip)
        if work:
            self._by_rows(work, divisor, skip)
        self.applied -= skip

    def _by_kernel(self, work: Work, divisor: Tensor, skip: Tensor) -> Work:
        """Those that one launch of our own kernel updates; the others are returned."""
        from lockstep.kernels import adamw

        options, left = self.options, Work()
        betas = options.adam_beta1, options.adam_beta2
        shared = adamw.numbers(self.lr, self.applied, divisor, skip, betas)
        for parameter, decay in work:
            states = self.states[id(parameter)]
            row = local(parameter), _gradient(parameter), states[moments.FIRST], states[moments.SECOND]
            if adamw.is_for(*row, least=1):
                key, begin = self.keys[id(parameter)], flat_offset(parameter)
                adamw.update(*row, shared, decay=decay, betas=betas, epsilon=options.adam_epsilon, key=key, begin=begin)
            else:
                left.append((parameter, decay))
        return left

    def _by_rows(self, work: Work, divisor: Tensor, skip: Tensor) -> None:
        options, count = self.options, self.applied.double()
        shared = {
            "step": self.applied.int(),
            "rate": self.lr.double() / (1 - options.adam_beta1**count),
            "root": (1 - options.adam_beta2**count).sqrt(),
            "lr": self.lr.double(),
            "divisor": divisor,
            "kept": skip > 0,
        }
        constants = Constants(options.adam_beta1, options.adam_beta2, options.adam_epsilon)
        for parameter, decay in work:
            self._update(parameter, decay, shared, constants)

    def _update(self, parameter: nn.Parameter, decay: float, shared: dict[str, Tensor], constants: Constants) -> None:
        part, gradient = local(parameter), _gradient(parameter)
        if not part.numel():
            return
        begin, states = flat_offset(parameter), self.states[id(parameter)]
        numbers = {name: _as(value, part.dtype) for name, value in shared.items()}
        for rows, first in _chunks(part):
            start = torch.full((), moments.signed(begin + first), dtype=torch.int32, device=part.device)
            _update_rows(
                part[rows],
                gradient[rows],
                {name: kept[rows] for name, kept in states.items()},
                {**numbers, "key": self.keys[id(parameter)], "first": start},
                constants=constants,
                decay=decay,
            )


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Its part here."""
    assert parameter.grad is not None
    return local(parameter.grad)


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _chunks(part: Tensor) -> Iterator[tuple[slice, int]]:
    """Runs of rows, and the flat index of their first element."""
    width = part[:1].numel()
    rows = max(1, CHUNK.get(part.device.type, 1 << 20) // width)
    for start in range(0, part.shape[0], rows):
        yield slice(start, start + rows), start * width


def _update_rows(
    part: Tensor, gradient: Tensor, states: dict[str, Tensor], given: dict[str, Tensor], *, constants: Constants,
    decay: float,
) -> None:  # fmt: skip
    """AdamW on some rows, in place."""
    old_first, old_second = (states[name].to(part.dtype) for name in moments.MOMENTS)
    gradient = gradient / given["divisor"]
    first = old_first + (gradient - old_first) * (1 - constants.beta1)
    second = old_second * constants.beta2 + gradient * gradient * (1 - constants.beta2)
    new = part * (1 - given["lr"] * decay) if decay else part
    new = new - given["rate"] * first / (second.sqrt() / given["root"] + constants.epsilon)
    bits = moments.noise(part.shape, first=given["first"], key=given["key"], step=given["step"])
    part.copy_(torch.where(given["kept"], part, new))
    for name, moment, random in zip(moments.MOMENTS, (first, second), moments.halves(bits), strict=True):
        states[name].copy_(torch.where(given["kept"], states[name], moments.round_to_bf16(moment, random)))


def make_optimizer(model: nn.Module, options: TrainingOptions, device: torch.device, *, seed: int) -> AdamW:
    """The optimizer that `training.optimizer_states` asks for."""
    if options.optimizer_states == "fp32":
        return AdamW(model, options, device)
    return CompactAdamW(model, options, device, seed=seed)
