"""AdamW, all state on the device, with a gate that lets a bad step change nothing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn

from lockstep.engine.moments import FIRST, SECOND
from lockstep.engine.options import TrainingOptions
from lockstep.runtime.parallel import is_sharded, local

Columns = tuple[list[Any], list[Any], list[Any], list[Any]]  # weights, gradients, both moments


@dataclass(frozen=True)
class Group:
    """Parameters that share a decay, with their moments in the same order."""

    parameters: list[nn.Parameter]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    weight_decay: float


class AdamW:
    """Decoupled weight decay; none on norms, embeddings and 1-D tensors.

    torch.optim.AdamW calls the same kernel, but rebuilds its lists and counts per tensor at every step; here one count
    (`applied`) serves all, so the schedule and the bias correction can never disagree.
    """

    def __init__(self, model: nn.Module, options: TrainingOptions, device: torch.device) -> None:
        self.options = options
        self.kind: str = "fp32"
        self.lr = torch.zeros((), device=device)
        # updates that took effect; exact in float32 up to 2^24
        self.applied: torch.Tensor = torch.zeros((), device=device)
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        plain = [item for item in trained if item.ndim < 2 or id(item) in embeddings]
        exempt = {id(item) for item in plain}
        decayed = [item for item in trained if id(item) not in exempt]
        self.sharded = any(is_sharded(parameter) for parameter in trained)  # asked once: it takes a while
        self.states = {id(item): self._make_states(item) for item in (*decayed, *plain)}
        self.groups = [
            Group(items, self._kept(items, FIRST), self._kept(items, SECOND), decay)
            for items, decay in ((decayed, options.weight_decay), (plain, 0.0))
            if items
        ]
        self.has_kernel = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self._shared: torch.Tensor | None = None  # numbers of a step, made for its first large tensor

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the order of the moments."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def moments(self) -> dict[int, dict[str, torch.Tensor]]:
        """id(parameter) -> its two moments, and their scales where there are any; live."""
        return self.states

    def _kept(self, parameters: list[nn.Parameter], kind: str) -> list[torch.Tensor]:
        return [self.states[id(parameter)][kind] for parameter in parameters]

    def _make_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Of a parameter in shards: for the part that lies here."""
        return {kind: torch.zeros_like(local(parameter)) for kind in (FIRST, SECOND)}

    @torch.no_grad()
    def step(self, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with gradients / divisor; where skip is 1 nothing changes, neither weights nor moments nor counts."""
        self.applied += 1
        self._shared = None  # a step's own
        for group in self.groups:
            gradients = [parameter.grad for parameter in group.parameters]
            columns: Columns = (group.parameters, gradients, group.exp_avgs, group.exp_avg_sqs)
            if any(gradient is None for gradient in gradients):
                columns = _only(columns, [gradient is not None for gradient in gradients])
            if self.sharded:
                weights, gradients, first, second = columns
                columns = ([local(item) for item in weights], [local(item) for item in gradients], first, second)
            if self.has_kernel:
                columns = self._update_large(columns, group.weight_decay, divisor, skip)
            if columns[0]:
                self._update_together(columns, group.weight_decay, divisor, skip)
        self.applied -= skip

    def _update_large(self, columns: Columns, decay: float, divisor: torch.Tensor, skip: torch.Tensor) -> Columns:
        """Those tensors that are worth a launch each, by a kernel of our own; the others are returned."""
        from lockstep.kernels import adamw

        options, small = self.options, list[bool]()
        betas = options.adam_beta1, options.adam_beta2
        for row in zip(*columns, strict=True):
            small.append(not adamw.is_for(*row))
            if small[-1]:
                continue
            if self._shared is None:
                self._shared = adamw.numbers(self.lr, self.applied, divisor, skip, betas)
            adamw.update(*row, self._shared, decay=decay, betas=betas, epsilon=options.adam_epsilon)
        return _only(columns, small)

    def _update_together(self, columns: Columns, decay: float, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """By torch's kernel, which takes many tensors in one launch."""
        options = self.options
        parameters, gradients, first, second = columns
        if divisor.dtype == torch.float64:  # the kernel reads a divisor of 32 bits
            torch._foreach_div_(gradients, divisor)  # pyright: ignore[reportPrivateImportUsage]
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            parameters,
            gradients,
            first,
            second,
            [],
            [self.applied] * len(parameters),
            lr=self.lr,
            beta1=options.adam_beta1,
            beta2=options.adam_beta2,
            weight_decay=decay,
            eps=options.adam_epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor if divisor.dtype == torch.float32 else None,
            found_inf=skip,
        )

    def state_dict(self) -> dict[str, Any]:
        """The layout of torch.optim.AdamW, which the documented .pt files hold."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        groups: list[dict[str, Any]] = []
        for group in self.groups:
            places = range(len(state), len(state) + len(group.parameters))
            for place, parameter in zip(places, group.parameters, strict=True):
                state[place] = {"step": self.applied, **self.states[id(parameter)]}
            groups.append(
                {
                    "params": list(places),
                    "lr": self.lr.item(),
                    "betas": (self.options.adam_beta1, self.options.adam_beta2),
                    "eps": self.options.adam_epsilon,
                    "weight_decay": group.weight_decay,
                    "amsgrad": False,
                    "maximize": False,
                }
            )
        return {"state": state, "param_groups": groups}


def _only(columns: Columns, wanted: list[bool]) -> Columns:
    """Those rows of four lists that are wanted."""
    weights, gradients, first, second = (list(compress(column, wanted)) for column in columns)
    return weights, gradients, first, second
