"""Which operations do not repeat their bits: one step twice on one card, everything that was computed compared.

Twice over: block by block with the kernels of training, compiled ones included, which cannot be watched from inside;
and operation by operation without the compiler. An operation is named if it made different bits of equal ones; what
comes after it differs too and is only counted. Nothing is wrong with a card whose fast kernels do not repeat.
`python -m lockstep.check.audit ERRAND.json`
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.check import errand as errands
from lockstep.check.errand import Errand
from lockstep.check.records import Workload
from lockstep.check.training import Ready, make_ready, plan_faults
from lockstep.errors import ExitCode, LockstepError
from lockstep.health.locate import blocks_of, called_by, eagerly, own_call, sequence_number, without_anomaly_warning
from lockstep.health.prints import digests
from lockstep.health.watch import (
    FRESH,
    UNWRITTEN,
    Surroundings,
    current_node,
    line_of,
    own_line,
    tensors_in,
    written_by,
)
from lockstep.models.build import forget_compiled
from lockstep.runtime import determinism, hardware

SHOWN = 5
STEP = 0


@dataclass(frozen=True)
class Place:
    """Something that was computed: an operation, or a block as a whole."""

    phase: str  # forward or backward
    module: str
    operation: str = ""
    line: str = ""

    def __str__(self) -> str:
        words = [self.phase, self.module or "outside any module", self.operation, self.line]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class Computed:
    """A place with what went in and what came out, as digests on the device."""

    place: Place
    given: torch.Tensor  # (n, 2)
    made: torch.Tensor


@dataclass(frozen=True)
class Compared:
    """Two passes held against each other."""

    count: int  # of all that was watched
    differ: int  # what came out
    origins: tuple[Place, ...]  # those that made it of equal bits, in the order in which they ran
    obstacle: str = ""  # why there was nothing to compare


@dataclass(frozen=True)
class Audited:
    """A workload."""

    workload: str
    facts: Mapping[str, Any]
    blocks: Compared
    operations: Compared

    def lines(self) -> list[str]:
        """For people."""
        kernels = f"attention {self.facts['attention']}, {'compiled' if self.facts['compiled'] else 'not compiled'}"
        return [
            f"{self.workload}: {self.facts['precision']}, {kernels}; one step, twice",
            *_told("blocks, with the kernels of training", self.blocks),
            *_told("operations, without the compiler", self.operations),
        ]


def _told(what: str, compared: Compared) -> list[str]:
    if compared.obstacle:
        return [f"  {what}: cannot be watched ({compared.obstacle})"]
    if not compared.differ:
        return [f"  {what}: all {compared.count} repeat their bits"]
    lines = [
        f"  {what}: {compared.differ} of {compared.count} differ, {len(compared.origins)} of them on equal inputs; "
        "the first:"
    ]
    lines += [f"    {place}" for place in compared.origins[:SHOWN]]
    return lines + ([f"    and {len(compared.origins) - SHOWN} more"] if len(compared.origins) > SHOWN else [])


# ------------------------------------------------------------------------------------------------------ two passes


def audit(workload: Workload, errand: Errand, device: torch.device) -> Audited:
    """With the kernels that a run of this workload would use, the deterministic mode not asked for."""
    ready = make_ready(workload, errand, device, planned_faults=plan_faults(workload, errand), deterministic=False)
    ready.stepper.rehearse(ready.batches[0])  # compiles: a first pass may run other code than a second
    return Audited(workload.name, ready.facts, _compared(lambda: _blocks(ready)), _compared(lambda: _operations(ready)))


def _compared(run: Callable[[], list[Computed]]) -> Compared:
    """Run it twice. Whatever cannot be watched says so: the other half of the audit is still worth having."""
    try:
        one, other = run(), run()
    except RuntimeError as error:  # a kernel without a rule for being watched, or too little memory; nothing of ours
        return Compared(0, 0, (), obstacle=(str(error).strip().splitlines() or [type(error).__name__])[0][:200])
    if [each.place for each in one] != [each.place for each in other]:
        return Compared(0, 0, (), obstacle="the second pass ran other operations than the first")
    same = [_equal(first, second) for first, second in zip(one, other, strict=True)]
    flags: list[list[bool]] = torch.stack(same).tolist() if same else []
    differ = [computed.place for computed, (_, made) in zip(one, flags, strict=True) if not made]
    origins = [computed.place for computed, (given, made) in zip(one, flags, strict=True) if given and not made]
    return Compared(len(one), len(differ), tuple(origins))


def _equal(one: Computed, other: Computed) -> torch.Tensor:
    """(given, made) as flags on the device."""
    pairs = ((one.given, other.given), (one.made, other.made))
    return torch.stack([(a == b).all() if a.shape == b.shape else torch.zeros_like(a.any()) for a, b in pairs])


def _again(ready: Ready) -> None:
    stepper, batches = ready.stepper, ready.batches[STEP]
    stepper.again(STEP, batches, stepper.agree(batches))


# ------------------------------------------------------------------------------------------------------ block by block


def _blocks(ready: Ready) -> list[Computed]:
    """What goes into each block and comes out of it, in both directions, and at last all gradients."""
    model, seen = ready.stepper.model, list[Computed]()
    with contextlib.ExitStack() as closing:
        for name, block in blocks_of(model).items():
            closing.enter_context(called_by(block, _observer(name, own_call(block), seen)))
        _again(ready)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            flowed = [each.given for each in seen if each.place.phase == "backward" and _is_in(name, each.place)]
            given = torch.cat(flowed) if flowed else _digests([], parameter.device)
            place = Place("backward", name, "gradient of the weights")
            seen.append(Computed(place, given, _digests([parameter.grad], parameter.device)))
    return seen


def _is_in(parameter: str, place: Place) -> bool:
    return parameter.startswith(f"{place.module}.")


def _observer(name: str, call: Callable[..., Any], seen: list[Computed]) -> Callable[..., Any]:
    def observed(*args: Any, **named: Any) -> Any:
        output = call(*args, **named)
        if current_node() is not None:  # computed once more for its backward pass
            return output
        given, made = _floats((args, named)), _floats(output)
        device = made[0].device
        seen.append(Computed(Place("forward", name), _digests(given, device), _digests(made, device)))
        flowing: list[torch.Tensor] = []

        def before(gradient: torch.Tensor) -> None:
            flowing.append(_digests([gradient], device))

        def after(gradient: torch.Tensor) -> None:
            came = torch.cat(flowing) if flowing else _digests([], device)
            seen.append(Computed(Place("backward", name), came, _digests([gradient], device)))

        for tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(before)
        if given and given[0].requires_grad:
            given[0].register_hook(after)
        return output

    return observed


# ---------------------------------------------------------------------------------------------- operation by operation


class Watch(TorchDispatchMode):
    """Digests of what every operation reads and writes, without waiting for the device."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__()
        self.around, self.seen = around, list[Computed]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        given = _floats((args, named))
        before = _digests(given, given[0].device) if given else None
        result = func(*args, **named)
        name = str(func._schema.name).rpartition("::")[2]
        made = _floats((result, written_by(func, args, named)))
        if made and not name.startswith((*FRESH, *UNWRITTEN)):
            device = made[0].device
            read = _digests([], device) if before is None else before
            self.seen.append(Computed(self._place(func, name), read, _digests(made, device)))
        return result

    def _place(self, func: Any, name: str) -> Place:
        node = current_node()
        if node is None:
            return Place("forward", self.around.module(), f"{name.rstrip('_')} ({func})", own_line())
        module = self.around.module_of(node._sequence_nr())
        return Place("backward", module, f"{node.name().rpartition('::')[2]} ({func})", line_of(node))


def _operations(ready: Ready) -> list[Computed]:
    """Eagerly: hooks and operations inside a compiled block cannot be seen."""
    around = Surroundings(ready.stepper.model)
    watch = Watch(around)
    with contextlib.ExitStack() as closing:
        for block in blocks_of(ready.stepper.model).values():
            closing.enter_context(called_by(block, eagerly(block)))
        for name, module in ready.stepper.model.named_modules():
            closing.enter_context(_entered(name or "model", module, around))
        closing.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        closing.enter_context(without_anomaly_warning())
        closing.enter_context(watch)
        _again(ready)
    return watch.seen


@contextlib.contextmanager
def _entered(name: str, module: nn.Module, around: Surroundings) -> Iterator[None]:
    """While this lasts it is known which module the pass is in."""
    begun: list[int] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        if current_node() is None:
            around.stack.append(name)
            begun.append(sequence_number())

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if current_node() is None:
            around.stack.pop()
            around.spans.append((begun.pop(), sequence_number(), name))

    hooks = (module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _floats(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.is_floating_point() and not tensor.is_meta]


def _digests(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return digests(tensors) if tensors else torch.zeros(0, 2, dtype=torch.int64, device=device)


# ------------------------------------------------------------------------------------------------------ as a process


def main(argv: Sequence[str] | None = None) -> int:
    """Audit the training workloads of an errand and print what was found. 0: it could be done."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if len(words) != 1:
            raise LockstepError("expected one file: ERRAND.json", exit_code=ExitCode.USAGE)
        for line in run(errands.read(Path(words[0]))):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return ExitCode.DONE


def run(errand: Errand) -> Iterator[str]:
    """Line by line, workload by workload."""
    device = hardware.pick_device(errand.device, 0)
    with determinism.mode(device, deterministic=False, threads=errand.threads):
        yield f"Audit on {hardware.device_name(device)}"
        for workload in errand.workloads:
            if workload.kind == "train" and not workload.pulse_seconds:  # pauses compute nothing else
                forget_compiled()
                yield from audit(workload, errand, device).lines()
                gc.collect()


if __name__ == "__main__":
    sys.exit(main())
