"""Who exchanges gradients between ranks, and how: sums, in an order that is fixed when the run is built.

torch's DistributedDataParallel rebuilds its buckets after the first backward pass; from 3 ranks on that changes the
order of additions, so that a resumed run has other bits than one that never stopped. Here nothing is ever rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import Work

    from lockstep.runtime.group import Group

BUCKET_BYTES = 25 << 20  # large enough for the bandwidth, small enough to overlap with the backward pass
ALIGNMENT = 64  # elements: fused kernels like gradients that begin at round addresses


class Exchange(Protocol):
    """What a step needs from whoever exchanges gradients."""

    waited_seconds: float  # for other ranks, on the host, inside forward and backward, since `zero`

    def before_backward(self, *, last: bool) -> None:
        """Before each micro-batch's backward; in that of the last one gradients are exchanged."""
        ...

    def finish(self) -> None:
        """After the last backward: from here on every gradient is the SUM over ranks, never an average."""
        ...

    def zero(self) -> None:
        """Clear the gradients before a step."""
        ...

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """2-norm of the whole gradient, equal on all ranks."""
        ...

    def own(self, norm: Tensor) -> Tensor:
        """Finite if this rank's own gradients were, before they were exchanged; `norm` is that of the sums."""
        ...

    def add_up(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of small tensors, one of each micro-batch of this rank, in the order of its gradients."""
        ...

    def total(self, loss: Tensor) -> Tensor:
        """The SUM of a small tensor over ranks, on the device."""
        ...


def in_sequence(parts: Sequence[Tensor]) -> Tensor:
    """One added to the other."""
    total = parts[0].new_zeros(())
    for part in parts:
        total = total + part
    return total


class Alone:
    """One process: there is nobody to exchange anything with."""

    waited_seconds = 0.0

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def before_backward(self, *, last: bool) -> None: ...

    def finish(self) -> None: ...

    def zero(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return total_norm(parameters)

    def add_up(self, parts: Sequence[Tensor]) -> Tensor:
        return in_sequence(parts)

    def own(self, norm: Tensor) -> Tensor:
        return norm

    def total(self, loss: Tensor) -> Tensor:
        return loss


@dataclass
class Bucket:
    """A run of parameters whose gradients are views of one flat tensor."""

    flat: Tensor
    parameters: list[nn.Parameter]
    missing: int = 0  # gradients that this backward pass has not written yet


class Reducer:
    """Data parallelism: whole gradients on every rank, summed bucket by bucket while backward goes on.

    Buckets are filled in reverse order of the parameters, which is about the order of the backward pass, and are
    launched strictly one after the other, whatever the order in which they become full: the same on every rank.
    With overlap=False nothing is launched before `finish` (faults that spoil gradients strike before the exchange).
    """

    waited_seconds = 0.0  # backward never waits, `finish` does

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        *,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.group, self.overlap = group, overlap
        self.buckets = [_make_bucket(items) for items in _cut(list(reversed(parameters)), bucket_bytes)]
        self._launching = False
        self._next = 0
        self._works: list[Work] = []
        self._norms: list[Tensor] = []  # of each bucket before it was exchanged: tells whose gradient was bad
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._when_written(bucket))

    def before_backward(self, *, last: bool) -> None:
        self._launching = last and self.overlap
        if last:
            self._next = 0
            self._norms.clear()
            for bucket in self.buckets:
                bucket.missing = len(bucket.parameters)

    def finish(self) -> None:
        self._launching = False
        while self._next < len(self.buckets):  # all without overlap; else those with a gradient that never came
            self._launch()
        for work in self._works:
            work.wait()  # on a GPU: the stream waits, not the host
        self._works.clear()

    def zero(self) -> None:
        for bucket in self.buckets:
            bucket.flat.zero_()

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return total_norm(parameters)

    def add_up(self, parts: Sequence[Tensor]) -> Tensor:
        return in_sequence(parts)

    def own(self, norm: Tensor) -> Tensor:
        return torch.stack(self._norms).sum().to(norm.dtype) if self._norms else norm

    def total(self, loss: Tensor) -> Tensor:
        summed = loss.detach().clone()
        self.group.sum_(summed)
        return summed

    def _when_written(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def hook(_parameter: Tensor) -> None:
            if not self._launching:
                return
            bucket.missing -= 1
            while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
                self._launch()

        return hook

    def _launch(self) -> None:
        flat = self.buckets[self._next].flat
        self._norms.append(torch.linalg.vector_norm(flat))
        work = self.group.sum_(flat, async_op=True)
        self._next += 1
        if work is not None:
            self._works.append(work)


class Apart(Alone):
    """A Reducer's gradients as each rank has made them: nothing is exchanged."""

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(())
        self.reducer = reducer

    def zero(self) -> None:
        self.reducer.zero()


def total_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def _cut(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Runs of at most `bucket_bytes` (or one parameter) of one dtype and device."""
    runs: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        alike = runs and (runs[-1][0].dtype, runs[-1][0].device) == (parameter.dtype, parameter.device)
        if not alike or filled + size > bucket_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(parameter)
        filled += size
    return runs


def _make_bucket(parameters: list[nn.Parameter]) -> Bucket:
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    flat = torch.zeros(end, dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
    return Bucket(flat, parameters)
