"""One model in shards: FSDP2 on every block and the root, and what part of each tensor lies on this rank.

A tensor is cut along its first dimension, as FSDP2 does: rank r of n holds rows r * ceil(rows / n) on, the last ranks
fewer or none. Such a part is contiguous in the whole, so one number says where it begins.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.runtime.grid import grid
from lockstep.runtime.marks import Marks, NoMarks
from lockstep.runtime.reduce import in_sequence

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.runtime.group import Group

GRADIENT_DIVISOR = 1.0  # sums, never means: the loss was divided by the weight of the global batch


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank; a plain tensor is all here. Ask again at each use: FSDP2 may move it."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Tensor) -> bool:
    return local(tensor) is not tensor


def offset(tensor: Tensor) -> tuple[int, ...]:
    """Where local(tensor) begins in the whole, dimension by dimension."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim
    mesh, dimension = _cut(tensor)
    rows_each = -(-tensor.shape[0] // mesh.size(dimension))
    return (min(tensor.shape[0], mesh.get_local_rank(dimension) * rows_each), *(0,) * (tensor.ndim - 1))


def flat_offset(tensor: Tensor) -> int:
    """The flat index, in the whole, of the first element of local(tensor)."""
    return offset(tensor)[0] * tensor.shape[1:].numel() if tensor.ndim else 0


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """`part`, which has the rows of local(parameter) as a moment does, with their place in the whole."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    shared: Any = parameter
    shape = torch.Size((parameter.shape[0], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, shared.device_mesh, shared.placements, run_check=False, shape=shape, stride=stride)


def with_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Other numbers, on any device, in the place that local(tensor) has in the whole."""
    if not is_sharded(tensor):
        return rows
    from torch.distributed.tensor import DTensor

    shared: Any = tensor
    make: Any = DTensor  # not from_local, which would move them to the device of the mesh
    return make(rows, shared._spec, requires_grad=False)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. All ranks must ask."""
    shared: Any = tensor
    return shared.full_tensor() if is_sharded(tensor) else tensor


def sum_over_shards(tensor: Tensor, values: Tensor) -> Tensor:
    """SUM of values over the ranks that hold the parts of `tensor`; nothing to do where it is whole."""
    if is_sharded(tensor):
        mesh, dimension = _cut(tensor)
        torch.distributed.all_reduce(values, group=mesh.get_group(dimension))
    return values


def _cut(tensor: Tensor) -> tuple[DeviceMesh, int]:
    """The mesh of a tensor in shards, and which of its dimensions cuts the rows."""
    shared: Any = tensor
    cut = [dimension for dimension, placement in enumerate(shared.placements) if placement.is_shard(0)]
    assert len(cut) == 1, f"cut along the first dimension, once: {shared.placements}"
    return shared.device_mesh, cut[0]


class Sharded:
    """Gradients of a model in shards: summed over all ranks by FSDP2 itself, each rank keeping its part."""

    def __init__(
        self, mode: str, group: Group, device: torch.device, *, nodes: int = 1, link: Marks | None = None
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.group, self.device, self.link = group, device, link or NoMarks()
        self.waited_seconds = 0.0  # in collectives, on the host, since `zero`
        self.copies, self.shards = grid(mode, world=group.world, nodes=nodes)
        sizes = (self.copies, self.shards) if mode == "hsdp" else (self.shards,)
        self.mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copy", "shard")[-len(sizes) :])
        self.writes = group.rank < self.shards  # the first copy: one is enough in a checkpoint
        self.model: Any = None
        self._own_square = torch.zeros(())

    def shard(self, model: nn.Module) -> None:
        """Cut the model's parameters; from here on each forward gathers a block's, uses them and lets them go."""
        from torch.distributed.fsdp import fully_shard

        blocks: Any = model.layers
        for block in blocks:
            fully_shard(block, mesh=self.mesh)
        self.model = fully_shard(model, mesh=self.mesh)
        for module in (*blocks, self.model):
            module.set_gradient_divide_factor(GRADIENT_DIVISOR)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(Waiting(self, "all_gather_single", "all_gather_into_tensor"))
            module.set_custom_reduce_scatter(Waiting(self, "reduce_scatter_single", "reduce_scatter_tensor"))
        model.register_forward_hook(_let_go)

    def before_backward(self, *, last: bool) -> None:
        """Gradients of a step's earlier micro-batches stay here; the last one's backward sums them all."""
        self.model.set_requires_gradient_sync(last)

    def finish(self) -> None:
        """FSDP2 waits for its sums at the end of backward."""

    def zero(self) -> None:
        self.waited_seconds = 0.0
        for parameter in self.model.parameters():
            parameter.grad = None

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of the whole gradient: squares in float64, so that no finite norm overflows on the way.

        Over all copies, though they are equal: should one of them be spoilt, everyone must see it.
        """
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
        square = torch.stack(norms).double().square().sum()
        self._own_square = square.clone()
        self.group.sum_(square)
        return (square / self.copies).sqrt().to(gradients[0].dtype)

    def add_up(self, parts: Sequence[Tensor]) -> Tensor:
        return in_sequence(parts)

    def own(self, norm: Tensor) -> Tensor:
        """Of the part of the gradient that lies here, which is of all ranks: theirs are never whole anywhere."""
        return self._own_square.to(norm.dtype)

    def total(self, loss: Tensor) -> Tensor:
        loss = loss.clone()
        self.group.sum_(loss)
        return loss


class Waiting:
    """A collective of FSDP2. On the CPU it waits for the other ranks: a watchdog must not take that for being stuck."""

    def __init__(self, owner: Sharded, name: str, old_name: str) -> None:
        known: Any = torch.distributed
        self.owner = owner
        self.collective = (
            getattr(known, name) if hasattr(known, name) else getattr(known, old_name)
        )  # before torch 2.13

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        link, since = self.owner.link, time.perf_counter()
        before = getattr(link, "section", "")
        link.enter("communication")
        try:
            return self.collective(output_tensor, input_tensor, **options)
        finally:
            self.owner.waited_seconds += time.perf_counter() - since
            if before:
                link.enter(before)


def _let_go(model: Any, _inputs: Any, _output: Any) -> None:
    """Without a backward pass nobody else gives the root's gathered parameters back, and a save would find them."""
    if not torch.is_grad_enabled():
        model.reshard()
