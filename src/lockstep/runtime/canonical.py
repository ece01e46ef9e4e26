"""Gradients summed in one order whatever the number of workers: 1, 2, 4 and 8 of them give the same bits.

The micro-batches of a global batch lie in 8 blocks. Inside a block gradients are added one after the other, across
blocks along a fixed tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). A rank has 8 / world neighbouring blocks, which
are a branch of that tree; where its own branch ends, the exchange goes on along the same tree. Loss and measures are
added up the same way, and the norm is taken in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.runtime.grid import BLOCKS
from lockstep.runtime.reduce import BUCKET_BYTES, Bucket, Reducer, in_sequence

if TYPE_CHECKING:
    from torch.distributed import Work

    from lockstep.runtime.group import Group


class Canonical(Reducer):
    """A Reducer whose sums have one order. Also for one process alone, which must add as eight would.

    Across ranks each is given all ranks' parts of its share of a bucket, adds them up along the tree and tells the sum
    to all: as many bytes travel as in a ring. Beside the gradients lie as many copies of them as the own branch has
    levels, and one for the parts of others.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        *,
        micro_batches: int,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(parameters, group, overlap=overlap, bucket_bytes=bucket_bytes)
        self.blocks = BLOCKS // group.world  # of this rank
        self.in_block, rest = divmod(micro_batches, self.blocks)
        assert self.in_block, "check_canonical refuses it"
        assert rest == 0, "check_canonical refuses it"
        self._done = 0  # micro-batches of this step
        levels = range(self.blocks.bit_length() - 1)
        self._kept = [[torch.empty_like(bucket.flat) for _ in levels] for bucket in self.buckets]
        self._parts = [torch.empty_like(bucket.flat) for bucket in self.buckets] if group.world > 1 else []

    def zero(self) -> None:
        self._done = 0
        super().zero()

    def before_backward(self, *, last: bool) -> None:
        finished, begins = divmod(self._done, self.in_block)
        if finished and not begins:
            self._keep(finished)
        self._done += 1
        super().before_backward(last=last)

    def finish(self) -> None:
        super().finish()  # every rank has its parts
        gathering = [self._sum_parts(*each) for each in zip(self.buckets, self._parts, strict=False)]
        for work in gathering:
            if work is not None:
                work.wait()

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = torch._foreach_norm(gradients, 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
        return torch.linalg.vector_norm(torch.stack(norms)).to(gradients[0].dtype)

    def add_up(self, parts: Sequence[Tensor]) -> Tensor:
        count, rest = divmod(len(parts), self.blocks)
        assert rest == 0, "a step has the micro-batches that were planned"
        return tree([in_sequence(parts[first : first + count]) for first in range(0, len(parts), count)])

    def total(self, loss: Tensor) -> Tensor:
        mine = loss.detach().reshape(-1)
        if self.group.world == 1:
            return loss.detach()
        everyone = mine.new_empty(self.group.world * mine.numel())
        self.group.collect(everyone, mine)
        return tree(list(everyone.view(self.group.world, *loss.shape)))

    def _keep(self, finished: int) -> None:
        """Put the block that ended aside, together with those it makes a whole branch with: as one counts in binary."""
        for bucket, kept in zip(self.buckets, self._kept, strict=True):
            level = 0
            while not finished >> level & 1:
                bucket.flat.add_(kept[level])
                level += 1
            kept[level].copy_(bucket.flat)
            bucket.flat.zero_()

    def _launch(self) -> None:
        """The last block ends the branch of this rank; its parts go to those who add them up."""
        place = self._next
        flat = self.buckets[place].flat
        for earlier in self._kept[place]:
            flat.add_(earlier)
        self._norms.append(torch.linalg.vector_norm(flat))
        self._next += 1
        if self._parts and (work := self.group.deal(self._parts[place], flat, async_op=True)) is not None:
            self._works.append(work)

    def _sum_parts(self, bucket: Bucket, parts: Tensor) -> Work | None:
        """Add up what all ranks have of this rank's share, and begin to tell them the sum."""
        return self.group.collect(bucket.flat, tree(list(parts.view(self.group.world, -1))), async_op=True)


def tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum of 1, 2, 4 or 8 tensors: neighbours first, then neighbouring sums."""
    while len(parts) > 1:
        parts = [parts[place] + parts[place + 1] for place in range(0, len(parts), 2)]
    return parts[0]
