"""Fingerprints of a step: the digest of every gradient, weight and moment, taken on the device, read later.

Gradients are taken before the update (which divides them, and so may round a flipped bit away), weights and moments
after it. Nothing here waits for the device: the sums are copied beside the work, and whoever wants them asks. All sums
also go into one chain that stays on the device: what the host has on record can be held against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.health.fingerprint import WORD, digest_tensor, digest_tensors
from lockstep.health.records import chain_offset
from lockstep.runtime.parallel import local

GRADIENTS, WEIGHTS, MOMENTS = KINDS = ("gradients", "weights", "moments")  # in the order in which a step makes them


@dataclass(frozen=True)
class Taken:
    """The sums of one step, on their way to the host."""

    step: int
    sums: torch.Tensor  # (tensors, 2) int64
    ended: torch.cuda.Event | None = None

    def read(self) -> list[list[int]]:
        if self.ended:
            self.ended.synchronize()
        return self.sums.tolist()


class Prints:
    """Takes the fingerprints of every `interval`-th step. `moments`: "exp_avg.NAME" -> the live tensor."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor], *, interval: int = 1
    ) -> None:
        self.parameters, self.moments, self.interval = dict(parameters), dict(moments), interval
        self.chain = _nothing(next(iter(self.parameters.values())).device)
        self._gradients: torch.Tensor | None = None
        self._taken: list[Taken] = []

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All names, in the order of the sums, each with a tensor of its shape and type."""
        named = [(f"{GRADIENTS}:{name}", tensor) for name, tensor in self.parameters.items()]
        named += [(f"{WEIGHTS}:{name}", tensor) for name, tensor in self.parameters.items()]
        return named + [(f"{MOMENTS}:{name}", tensor) for name, tensor in self.moments.items()]

    def due(self, step: int) -> bool:
        return self.interval > 0 and step >= 0 and (step + 1) % self.interval == 0

    def of_gradients(self, step: int) -> None:
        """Just before the update."""
        if self.due(step):
            self._gradients = digests([tensor.grad for tensor in self.parameters.values()])

    def of_state(self, step: int) -> None:
        """Just after the update."""
        if not self.due(step) or self._gradients is None:
            return
        state = digests([*self.parameters.values(), *self.moments.values()])
        sums, self._gradients = torch.cat((self._gradients, state)), None
        self.chain += digest_tensor(sums, chain_offset(step))
        if sums.device.type == "cuda":
            pinned = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            pinned.copy_(sums, non_blocking=True)
            ended = torch.cuda.Event()
            ended.record()
            self._taken.append(Taken(step, pinned, ended))
        else:
            self._taken.append(Taken(step, sums))

    def told_chain(self) -> str:
        """What the device itself says of all sums so far; waits for it. The record on the host must say the same."""
        return as_hex([self.chain.tolist()])

    def taken(self, up_to: int | None = None) -> Iterator[Taken]:
        """Those not yet asked for, of steps up to this one; waits for each when it is read."""
        while self._taken and (up_to is None or self._taken[0].step <= up_to):
            yield self._taken.pop(0)


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """(n, 2) int64 on the device of the tensors, without waiting for it. None: a gradient there is none of."""
    device = next(tensor.device for tensor in tensors if tensor is not None)
    nothing = torch.empty(0, device=device)
    return digest_tensors([nothing if tensor is None else local(tensor) for tensor in tensors])


def _nothing(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def as_hex(sums: Sequence[Sequence[int]]) -> str:
    """The sums of all tensors as one string, 32 digits each."""
    return "".join(f"{plain & WORD:016x}{keyed & WORD:016x}" for plain, keyed in sums)
