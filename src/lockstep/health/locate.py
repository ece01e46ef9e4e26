"""Which module and operation made the first number that is not finite, by running the step again.

First block by block with the kernels of training: hooks inside a compiled block are skipped, so a block is watched from
outside, by what goes in and what comes out, forward and backward. Then without the compiler inside the block that is
guilty, operation by operation (watch.py). A model in shards runs whole passes only: each needs all ranks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lockstep.health.finding import Place, Table, bad_tables
from lockstep.health.watch import OperationWatch, Origin, Surroundings, current_node, flaws, only_forbids
from lockstep.runtime.parallel import local

logger = logging.getLogger(__name__)

ROOT, LOSS = "model", "loss"
Again = Callable[[], torch.Tensor]  # the step once more: its loss on this rank; gradients are left where they belong


class Enough(Exception):
    """What was looked for has been seen; the rest of the pass need not be run."""


@dataclass(frozen=True)
class Seen:
    """A block in one direction: whether what went in and what came out was finite, as flags on the device."""

    name: str
    phase: str
    batch: int
    fine_in: torch.Tensor
    fine_out: torch.Tensor


@dataclass(frozen=True)
class Subject:
    """What is run again, and how."""

    model: nn.Module
    again: Again
    inputs: Sequence[tuple[str, torch.Tensor]] = ()
    sharded: bool = False
    plainly: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # around an eager block
    beat: Callable[[], object] = lambda: None

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return blocks_of(self.model)


def locate(subject: Subject) -> Place | None:
    """Where it begins; None if the step is fine this time. Every rank of a model in shards must call it."""
    guilty = guilty_block(subject)
    try:
        place = _eager_place(subject, guilty)
    except Exception as error:  # without the compiler there may be too little memory
        if subject.sharded:
            raise
        logger.debug("Inside %s nothing can be seen: %s", guilty.block if guilty else "the model", error)
        return guilty
    if guilty is None:
        return place
    if place is None:  # compiled it happens, eagerly it does not
        return replace(guilty, eager=False)
    return replace(place, block=guilty.block, batch=guilty.batch if place.batch < 0 else place.batch)


# ------------------------------------------------------------------------------------------------ block by block


def guilty_block(subject: Subject) -> Place | None:
    """The first block in forward order, else in backward order, that makes bad numbers of good ones."""
    seen: list[Seen] = []
    around = Surroundings(subject.model)
    with contextlib.ExitStack() as closing:
        closing.enter_context(_counting(subject.model, around))
        for name, block in subject.blocks.items():
            closing.enter_context(called_by(block, _observer(name, own_call(block), around, seen)))
        subject.again()
    fine = torch.stack([torch.stack((each.fine_in, each.fine_out)) for each in seen]).tolist() if seen else []
    entries = list(zip(seen, fine, strict=True))
    for each, (fine_in, fine_out) in entries:
        if each.phase == "forward" and fine_in and not fine_out:
            return Place("forward", each.name, block=each.name, batch=each.batch)
    if any(not fine_in or not fine_out for each, (fine_in, fine_out) in entries if each.phase == "forward"):
        return None  # it came into the first block from outside
    sums = [] if subject.sharded else _gradients(subject.model)  # in shards they are of all ranks
    bad = [name for name, tensor in sums if any(flaws(tensor))]
    for each, (fine_in, fine_out) in entries:  # as backward met them
        if each.phase == "backward" and fine_in and (not fine_out or _has(bad, each.name)):
            return Place("backward", each.name, block=each.name, batch=each.batch)
    return None


def _observer(name: str, call: Callable[..., Any], around: Surroundings, seen: list[Seen]) -> Callable[..., Any]:
    def observed(*args: Any, **named: Any) -> Any:
        output = call(*args, **named)
        if current_node() is not None:  # computed once more for its backward pass
            return output
        batch = around.batch
        given, made = _floats((args, named)), _floats(output)
        seen.append(Seen(name, "forward", batch, _all_fine(given), _all_fine(made)))
        flowing: list[torch.Tensor] = []

        def before(gradient: torch.Tensor) -> None:
            flowing.append(_all_fine([gradient]))

        def after(gradient: torch.Tensor) -> None:
            fine_in = torch.stack(flowing).all() if flowing else torch.ones_like(_all_fine([gradient]))
            seen.append(Seen(name, "backward", batch, fine_in, _all_fine([gradient])))

        for tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(before)
        for tensor in given[:1]:
            if tensor.requires_grad:
                tensor.register_hook(after)
        return output

    return observed


def _all_fine(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A flag on the device. Minus infinity only forbids: a mask that is passed on is fine."""
    with torch.no_grad():
        parts = [local(tensor.detach()) for tensor in tensors]
        flags = [(torch.isfinite(part) | torch.isneginf(part)).all() for part in parts if part.numel()]
        return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)


def _has(names: Sequence[str], block: str) -> bool:
    return any(name.startswith(f"{block}.") for name in names)


# ------------------------------------------------------------------------------------------- operation by operation


def _eager_place(subject: Subject, guilty: Place | None) -> Place | None:
    """By operation; by module alone where a kernel cannot be watched from inside."""
    try:
        return _by_operation(subject, guilty, operations=True)
    except Exception as error:
        if subject.sharded:
            raise
        logger.debug("Operations cannot be watched: %s", error)
        return _by_operation(subject, guilty, operations=False)


def _by_operation(subject: Subject, guilty: Place | None, *, operations: bool) -> Place | None:
    """Eagerly: the operation and the innermost module. Only the guilty block, where the forward pass is to blame."""
    around = Surroundings(subject.model)
    watch = OperationWatch(around, subject.beat)
    modules = _ModuleWatch(around)
    blocks = subject.blocks
    only = guilty.block if guilty and guilty.phase == "forward" and not subject.sharded else ""
    found: list[Place | None] = []
    with contextlib.ExitStack() as closing:
        closing.enter_context(_counting(subject.model, around))
        for name, block in blocks.items():
            eager = eagerly(block, subject.plainly)
            if not only:
                closing.enter_context(called_by(block, eager))
            elif name == only:
                closing.enter_context(called_by(block, _until_bad(eager, watch, modules, found, operations)))
        skipped = [name for name in blocks if only and name != only]
        for name, module in subject.model.named_modules():
            if not any(name == block or name.startswith(f"{block}.") for block in skipped):
                closing.enter_context(modules.on(name or ROOT, module))
        watch.give("weights", subject.model.named_parameters())
        watch.give("weights", subject.model.named_buffers())
        watch.give("input", subject.inputs)
        closing.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        closing.enter_context(without_anomaly_warning())
        if operations and not only:
            closing.enter_context(watch)
        try:
            loss = subject.again()
        except Enough:
            return found[0]
    return found[0] if found else _conclusion(subject, loss, watch, modules)


def _until_bad(
    eager: Callable[..., Any], watch: OperationWatch, modules: _ModuleWatch, found: list[Place | None], operations: bool
) -> Callable[..., Any]:
    """The guilty block, watched; ends the pass with the micro-batch that makes it guilty."""

    def call(*args: Any, **named: Any) -> Any:
        if current_node() is not None:
            return eager(*args, **named)
        with watch if operations else contextlib.nullcontext():
            output = eager(*args, **named)
        bad = [tensor for tensor in _floats(output) if _is_bad(tensor)]
        if bad:
            found.append(modules.add_to(_place(watch.origin_of(bad[0]))))
            raise Enough
        return output

    return call


def _conclusion(subject: Subject, loss: torch.Tensor, watch: OperationWatch, modules: _ModuleWatch) -> Place | None:
    """What the whole pass has shown."""
    if any(flaws(loss)):
        return modules.add_to(_place(watch.origin_of(loss))) or Place(LOSS, LOSS)
    bad = [(name, tensor) for name, tensor in _gradients(subject.model) if any(flaws(tensor))]
    if not bad:
        return None
    origins = [origin for _, tensor in bad if (origin := watch.origin_of(tensor)) and origin.phase != "unknown"]
    if origins:
        first = min(origins, key=lambda origin: origin.order)
        place = _place(first)
        owner = next(name for name, tensor in bad if watch.origin_of(tensor) is first)
        if place and (place.phase == LOSS or not place.module):  # written after the backward pass
            return replace(place, phase="backward", module=owner.rpartition(".")[0], batch=-1)
        return place
    if subject.sharded:  # between a gradient and its sum over all ranks the trail is lost
        met = modules.first.module if modules.first else ""
        likely = (each for each in watch.made if each.phase == "backward" or (met and each.module == met))
        return modules.add_to(_place(next(likely, None)))
    name = bad[-1][0]  # the last in forward order is the first in backward order
    return Place("backward", name.rpartition(".")[0], tensors=bad_tables(bad[-1:]))


def _place(origin: Origin | None) -> Place | None:
    if origin is None or origin.phase == "unknown":
        return None
    phase, module = origin.phase, origin.module
    if phase == "forward" and not module:
        phase = module = LOSS
    if phase == "weights":
        module = module.rpartition(".")[0] or module
    return Place(phase, module, origin.operation, origin.line, batch=origin.batch, tensors=origin.tensors)


class _ModuleWatch:
    """Which module the pass is in; and the first that makes bad numbers of good ones, innermost first."""

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.first: Place | None = None

    @contextlib.contextmanager
    def on(self, name: str, module: nn.Module) -> Iterator[None]:
        begun: list[int] = []

        def enter(_module: nn.Module, _args: Any) -> None:
            if current_node() is None:
                self.around.stack.append(name)
                begun.append(sequence_number())

        def leave(_module: nn.Module, args: Any, output: Any) -> None:
            if current_node() is None:
                self._judge(name, args, output)
                self.around.stack.pop()
                self.around.spans.append((begun.pop(), sequence_number(), name))

        first = module.register_forward_pre_hook(enter, prepend=True)
        last = module.register_forward_hook(leave)
        try:
            yield
        finally:
            first.remove()
            last.remove()

    def add_to(self, place: Place | None) -> Place | None:
        """A place with what this module was given and has made; without one, the module that was met first."""
        if place is None or self.first is None:
            return place or self.first
        same = place.module == self.first.module
        return replace(place, tensors=(*place.tensors, *self.first.tensors)) if same else place

    def _judge(self, name: str, args: Any, output: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage] - torch has no other name for it
            made, given = _floats(output), _floats(args)
            if self.first or not any(_is_bad(tensor) for tensor in made) or any(_is_bad(tensor) for tensor in given):
                return
            tables = [Table.of(f"{name} input {place}", tensor) for place, tensor in enumerate(given)]
            tables += [Table.of(f"{name} output", tensor) for tensor in made]
        self.first = Place("forward", name, batch=self.around.batch, tensors=tuple(tables))


# ---------------------------------------------------------------------------------------------------------- tools


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers, in order, and what else is compiled by itself: the last norm."""
    layers: Any = getattr(model, "layers", None)
    found = {f"layers.{name}": block for name, block in layers.named_children()} if layers is not None else {}
    compiled = {name: each for name, each in model.named_children() if each._compiled_call_impl is not None}
    return {**found, **compiled}


def _is_bad(tensor: torch.Tensor) -> bool:
    what = flaws(tensor)
    return any(what) and not only_forbids(what)


def _floats(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _gradients(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named: Mapping[str, nn.Parameter] = dict(model.named_parameters())
    return [(name, parameter.grad) for name, parameter in named.items() if parameter.grad is not None]


def sequence_number() -> int:
    known: Any = torch.autograd
    return known._get_sequence_nr()


def own_call(block: nn.Module) -> Callable[..., Any]:
    """As it is called in training, compiled or not."""
    compiled: Any = block._compiled_call_impl
    return compiled if compiled is not None else block._call_impl


def eagerly(
    block: nn.Module, plainly: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
) -> Callable[..., Any]:
    """The same without the compiler. In shards it is the forward alone that was compiled."""
    call: Any = block._call_impl
    inside = hasattr(block.forward, "_torchdynamo_orig_callable")

    def eager(*args: Any, **named: Any) -> Any:
        with plainly(), torch.compiler.set_stance("force_eager") if inside else contextlib.nullcontext():
            return call(*args, **named)

    return eager


@contextlib.contextmanager
def called_by(block: Any, call: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, calling the block is calling `call`: also from within activation checkpointing."""
    before = block._compiled_call_impl
    block._compiled_call_impl = call
    try:
        yield
    finally:
        block._compiled_call_impl = before


@contextlib.contextmanager
def _counting(model: nn.Module, around: Surroundings) -> Iterator[None]:
    """Micro-batches are counted: each calls the model once."""

    def count(_module: nn.Module, _args: Any) -> None:
        around.batch += 1

    handle = model.register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def without_anomaly_warning() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
