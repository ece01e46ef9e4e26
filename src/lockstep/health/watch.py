"""Every operation of a forward and backward pass under the eye: which one made the first number that is not finite.

Slow: each operation waits for the device. A bad number has an origin, the operation that made it of finite ones, and
carries it along wherever it goes; the storage of a tensor is its name. So the origin of a bad loss or gradient is known
without a second look. Minus infinity that was written on purpose (a mask, a forbidden token) is no bad number as long
as it only forbids.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.health.finding import Table
from lockstep.runtime.parallel import local

TORCH = str(Path(str(torch.__file__)).parent)
PACKAGE = Path(__file__).parents[1]
NOT_MEANT = tuple(str(PACKAGE / part) for part in ("health", "engine/autopsy", "engine/replay", "check"))  # who looks
FRESH = ("empty", "new_empty")  # memory as it was found
UNWRITTEN = ("resize", "set_", "record_stream", "_local_scalar_dense")
FILLING = ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "masked_fill")
FORBIDDING = (
    "full",
    "scalar_tensor",
    "masked_fill",
    "where",
    "fill",
    "new_full",
    "lift_fresh",
    "tensor",
    "triu",
    "tril",
)
EXCHANGES = ("c10d", "_c10d_functional", "fsdp")
Tensors = list[torch.Tensor]
Flaws = tuple[bool, bool, bool]  # NaN, Inf, -Inf


@dataclass(frozen=True)
class Origin:
    """Where a bad number came from. `order` counts what was met."""

    order: int
    phase: str
    module: str = ""
    operation: str = ""
    line: str = ""
    batch: int = -1
    forbids: bool = False  # minus infinity on purpose
    tensors: tuple[Table, ...] = ()


class Surroundings:
    """In which module and micro-batch the pass is; filled by who runs it."""

    def __init__(self, model: nn.Module) -> None:
        self.owners = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        self.stack: list[str] = []
        self.spans: list[tuple[int, int, str]] = []  # autograd's numbers at a module's begin and end
        self.batch = -1

    def module(self) -> str:
        return self.stack[-1] if self.stack else ""

    def module_of(self, number: int) -> str:
        """The innermost module whose forward pass made a node of autograd."""
        inside = [(end - begin, name) for begin, end, name in self.spans if begin <= number < end]
        return min(inside)[1] if inside else ""

    def owner(self, node: Any) -> str:
        """The module of the weight whose gradients a node of autograd sums up."""
        return self.owners.get(id(getattr(node, "variable", None)), "")


class OperationWatch(TorchDispatchMode):
    """Sees every operation; `origin_of` tells where a tensor's bad number was made."""

    def __init__(self, around: Surroundings, beat: Callable[[], object]) -> None:
        super().__init__()
        self.around, self.beat = around, beat
        self.count = 0
        self.made: list[Origin] = []  # as they were met, but for what only forbids
        self._exact: dict[tuple[int, int, int], Origin] = {}  # by storage, place in it and size
        self._around: dict[int, Origin] = {}  # by storage: of views of a bad tensor

    def give(self, phase: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What is bad before the pass begins."""
        for name, tensor in tensors:
            what = flaws(tensor)
            if any(what):
                self.count += 1
                forbids, tables = only_forbids(what), (Table.of(name, tensor),)
                self._keep(tensor, Origin(self.count, phase, name, forbids=forbids, tensors=tables))

    def origin_of(self, tensor: torch.Tensor) -> Origin | None:
        """Of a bad tensor."""
        return self._exact.get(_place_of(tensor)) or self._around.get(_storage(tensor))

    def _keep(self, tensor: torch.Tensor, origin: Origin) -> None:
        self._exact[_place_of(tensor)] = self._around[_storage(tensor)] = origin

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        name = str(func._schema.name).rpartition("::")[2]
        inputs, written = _inputs(func, name, args, named), tensors_in(written_by(func, args, named))
        changing = {_storage(tensor) for tensor in written}
        before = self._origins(tensor for tensor in inputs if _storage(tensor) in changing)  # while it is as it was
        result = func(*args, **named)
        self.count += 1
        if self.count % 64 == 0:
            self.beat()
        if name.startswith(FRESH):
            self._around.pop(_storage(result), None)
        elif not name.startswith(UNWRITTEN):
            kept = [tensor for tensor in inputs if _storage(tensor) not in changing]
            self._look(func, name, before, inputs=kept, outputs=[*tensors_in(result), *written])
        return result

    def _look(self, func: Any, name: str, before: list[Origin], *, inputs: Tensors, outputs: Tensors) -> None:
        for output in outputs:
            what = flaws(output)
            if any(what):
                inherited = self._inherited([*before, *self._origins(inputs)], what)
                self._keep(output, inherited or self._made(func, name, inputs, output, what))
                continue
            self._exact.pop(_place_of(output), None)
            if _is_whole(output):  # else a good part of something bad
                self._around.pop(_storage(output), None)

    def _origins(self, tensors: Iterable[torch.Tensor]) -> list[Origin]:
        """Of those that are bad."""
        return [self.origin_of(tensor) or Origin(0, "unknown") for tensor in tensors if any(flaws(tensor))]

    def _inherited(self, known: list[Origin], what: Flaws) -> Origin | None:
        """The first origin among the inputs; a mask is one only of what is still a mask."""
        real = [origin for origin in known if not origin.forbids]
        if real:
            return min(real, key=lambda origin: origin.order or sys.maxsize)
        return known[0] if known and only_forbids(what) else None

    def _made(self, func: Any, name: str, inputs: Tensors, output: torch.Tensor, what: Flaws) -> Origin:
        forbids = only_forbids(what) and name.startswith(FORBIDDING)
        if forbids:
            return Origin(self.count, "forward", operation=str(func), forbids=True)
        if func.namespace in EXCHANGES:  # it was made on another rank
            return Origin(self.count, "unknown")
        tables = [Table.of(f"input {place}", each) for place, each in enumerate(inputs) if each.is_floating_point()]
        node = current_node()
        phase, module, line = "forward", self.around.module(), own_line()
        operation = f"{name.rstrip('_')} ({func})"
        if node is not None:
            phase, module = "backward", self.around.module_of(node._sequence_nr()) or self.around.owner(node)
            line = line_of(node)
            operation = f"{node.name().rpartition('::')[2]} ({func})"
        tables = [*tables[:4], Table.of("output", output)]
        self.made.append(Origin(self.count, phase, module, operation, line, self.around.batch, tensors=tuple(tables)))
        return self.made[-1]


def current_node() -> Any:
    """The node of autograd at work; None: this is no backward pass."""
    known: Any = torch._C
    return known._current_autograd_node()


@torch.no_grad()
def flaws(tensor: torch.Tensor) -> Flaws:
    """Whether there is NaN, Inf and -Inf in it. Waits for the device."""
    part = local(tensor.detach())
    if not part.is_floating_point() or part.is_meta or not part.numel():
        return False, False, False
    part = part.float() if part.element_size() == 1 else part  # float8 has no arithmetic of its own
    if bool(torch.isfinite(torch.linalg.vector_norm(part))):  # without a copy; a norm may be too large by itself
        return False, False, False
    seen = torch.stack([torch.isnan(part).any(), torch.isposinf(part).any(), torch.isneginf(part).any()]).tolist()
    return seen[0], seen[1], seen[2]


def only_forbids(what: Flaws) -> bool:
    """Minus infinity and nothing worse."""
    return what == (False, False, True)


def _storage(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether there is nothing else in its memory."""
    part = local(tensor)
    return part.numel() * part.element_size() == part.untyped_storage().nbytes()


def _place_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    part = local(tensor)
    return _storage(part), int(part.storage_offset()), part.numel()


def tensors_in(tree: Any) -> Tensors:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _inputs(func: Any, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensors:
    """What the operation reads: not what it only writes to."""
    skip = 1 if name.startswith(FILLING) and name.rstrip("0123456789").endswith("_") and name != "masked_fill_" else 0
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    return tensors_in((args[skip:], {key: value for key, value in named.items() if key not in outs}))


def written_by(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    """What the operation changes in place."""
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(named.get(argument.name, args[place] if place < len(args) else None))
    return written


def own_line() -> str:
    """The innermost line that is neither torch's nor that of who looks."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_meant(name):
            return _shown(name, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_of(node: Any) -> str:
    """The line of the forward pass that made a node of autograd."""
    for entry in reversed(node.metadata.get("traceback_", [])):
        name, _, rest = entry.strip().removeprefix('File "').partition('", line ')
        number = rest.partition(",")[0]
        if _is_meant(name) and number.isdigit():
            return _shown(name, int(number))
    return ""


def _is_meant(file: str) -> bool:
    return not file.startswith((TORCH, *NOT_MEANT, "<")) and "/contextlib.py" not in file


def _shown(file: str, number: int) -> str:
    path = Path(file)
    short = path.relative_to(PACKAGE.parent).as_posix() if path.is_relative_to(PACKAGE.parent) else file
    return f"{short}:{number}: {linecache.getline(file, number).strip()}".rstrip(": ")
