"""Faults on purpose: LOCKSTEP_FAULT makes a worker die, hang or compute wrongly at a chosen step. Inert without it.

`kind@key=value,key=value`, several separated by `;`. Keys of every kind: `rank` (worker index; absent: every worker)
and `step` (optimizer step from 0; absent: every step). In `lockstep check` the rank is the number of the card, and
three more keys choose: `slot` (which process drives it), `round` (0: the first run, 1 and on: when a suspect is run
again; in training: after so many restarts) and `node`; and `workload` names the one it strikes in. The other keys of
each kind stand in KINDS.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.registry import suggest
from lockstep.runtime import env, rounds

if TYPE_CHECKING:
    import torch
    from torch import nn

VARIABLE = "LOCKSTEP_FAULT"
REPLICA = "LOCKSTEP_REPLICA"  # of a replica of `lockstep check`: rank=3,slot=1,round=0,node=0
WHO = ("rank", "slot", "round", "node")
PLACES = ("loader", "forward", "backward", "optimizer")
FOREVER_SECONDS = 3600.0
KINDS: dict[str, tuple[str, ...]] = {
    "exit": ("where", "code"),
    "kill": ("where", "signal"),
    "hang": ("where", "seconds"),
    "slow": ("where", "factor"),
    "oom": ("where",),
    "raise": ("where",),
    "nan_loss": ("once",),
    "inf_loss": ("once",),
    "nan_grad": ("tensor", "index", "once"),
    "inf_grad": ("tensor", "index", "once"),
    "flip_grad": ("tensor", "index", "bit"),
    "nan_weight": ("tensor", "index"),
    "inf_weight": ("tensor", "index"),
    "flip_weight": ("tensor", "index", "bit"),
    "nan_act": ("module", "index", "once"),
    "inf_act": ("module", "index", "once"),
}
ACTIVATIONS = ("nan_act", "inf_act")


class InjectedFault(RuntimeError):
    """What `raise@` raises: an error like any other that comes from deep inside."""


@dataclass(frozen=True)
class Fault:
    """One fault and when it strikes."""

    kind: str
    rank: int | None = None
    slot: int | None = None
    round: int | None = None
    node: int | None = None
    workload: str = ""  # "": any
    step: int | None = None
    where: str = "forward"
    code: int = 1
    signal: int = signal.SIGKILL
    seconds: float = FOREVER_SECONDS
    factor: float = 1.3
    tensor: str = ""  # "": the first
    module: str = ""  # "": the first without children
    index: int | None = None  # None: every element; a flip takes element 0
    bit: int | None = None
    once: int = 0  # 1: when the step is run again it does not strike, as a bit that flipped by itself would not

    def __str__(self) -> str:
        return f"injected fault {self.kind} at step {self.step}, {self.where}"


def parse(text: str) -> tuple[Fault, ...]:
    """The faults a text describes."""
    return tuple(_parse_one(part.strip()) for part in text.split(";") if part.strip())


def _parse_one(text: str) -> Fault:
    kind, at, rest = text.partition("@")
    if kind not in KINDS:
        raise ConfigError(f"unknown fault {kind!r}", where=VARIABLE, hint=suggest(kind, list(KINDS)))
    if not at:
        raise ConfigError(f"fault {text!r} has no '@'", where=VARIABLE, hint=f"{kind}@rank=0,step=3")
    allowed = (*WHO, "workload", "step", *KINDS[kind])
    values: dict[str, Any] = {}
    for pair in filter(None, (pair.strip() for pair in rest.split(","))):
        key, equals, value = pair.partition("=")
        if key not in allowed or not equals or key in values:
            raise ConfigError(f"{pair!r} in fault {text!r}", where=VARIABLE, hint=suggest(key, list(allowed)))
        values[key] = _value(key, value, text)
    fault = Fault(kind, **values)
    if kind.startswith("flip_") and fault.bit is None:
        raise ConfigError(f"fault {text!r} flips no bit", where=VARIABLE, hint=f"{text},bit=3")
    return fault


_READ: dict[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
    **{key: (int, lambda value: value >= 0, "a whole number from 0") for key in WHO},
    "step": (int, lambda value: value >= 0, "a whole number from 0"),
    "index": (int, lambda value: value >= 0, "a whole number from 0"),
    "bit": (int, lambda value: 0 <= value < 64, "0 to 63"),
    "once": (int, lambda value: value in (0, 1), "0 or 1"),
    "code": (int, lambda value: 0 <= value < 256, "0 to 255"),
    "signal": (int, lambda value: 0 < value < signal.NSIG, "the number of a signal"),
    "seconds": (float, lambda value: 0 <= value < 1e9, "seconds from 0"),
    "factor": (float, lambda value: 1 <= value < 1e6, "a number from 1"),
    "where": (str, lambda value: value in PLACES, "one of " + ", ".join(PLACES)),
}


def _value(key: str, text: str, fault: str) -> Any:
    read, allowed, expected = _READ.get(key, (str, bool, "a name"))
    try:
        value = read(text)
    except ValueError:
        value = None
    if value is None or not allowed(value):
        raise ConfigError(f"{key}={text!r} in fault {fault!r}", where=VARIABLE, hint=f"{key} must be {expected}")
    return value


class Plan:
    """The faults of one worker. The engine asks `if plan.armed:` and calls it at fixed points of a step."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self.faults = faults
        self.armed = bool(faults)
        self._step = -1
        self._work_seconds = 0.0  # of a step, without what was slept in it
        self._slept_seconds: dict[int, float] = {}  # by step: a GPU is some steps behind its host
        self._spent: set[Fault] = set()  # of those that strike once: what has struck in an earlier pass
        self._struck: set[Fault] = set()

    @property
    def needs_hooks(self) -> bool:
        """Whether attach() registers hooks: compiled blocks skip those, so run such a plan without torch.compile."""
        return any(fault.kind in ACTIVATIONS for fault in self.faults)

    @property
    def spoil_gradients(self) -> bool:
        """Whether gradients() will strike: then they must not be exchanged before."""
        return any(fault.kind.endswith("_grad") for fault in self.faults)

    def attach(self, model: nn.Module) -> None:
        """Put NaN-makers behind the named modules, if any is planned."""
        for fault in self.faults:
            if fault.kind in ACTIVATIONS:
                leaves_first = sorted(model.named_modules(), key=lambda entry: any(entry[1].children()))
                _pick(fault.module, dict(leaves_first), "module").register_forward_hook(self._poison(fault))

    def at(self, where: str, step: int, *, step_seconds: float = 0.0, of: int | None = None) -> None:
        """Once per step and place. `step_seconds` is how long step `of` took, by default the one before.

        One place may tell it for all.
        """
        if step_seconds:
            slept = self._slept_seconds.get(self._step if of is None else of, 0.0)
            self._work_seconds = max(0.0, step_seconds - slept)
        self._step = step
        for fault in self._due(step, where=where):
            if fault.kind == "slow":
                self._slept_seconds[step] = (fault.factor - 1) * self._work_seconds
                _delay(self._slept_seconds[step])
            elif fault.kind in STRIKES:
                STRIKES[fault.kind](fault)

    def again(self, step: int) -> None:
        """The same step is run once more: what spoils numbers strikes as before, unless it strikes once."""
        self._step = step
        self._spent |= self._struck

    def loss(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        """The loss, or a bad one. Its gradient stays good: whoever looks at gradients only must not be enough."""
        for fault in self._due(step, kinds=("nan_loss", "inf_loss")):
            loss = loss + (float("nan") if fault.kind == "nan_loss" else float("inf"))
        return loss

    def gradients(self, parameters: Iterable[tuple[str, torch.Tensor]], step: int) -> None:
        """Spoil gradients, before they are judged or hashed."""
        if faults := self._due(step, kinds=("nan_grad", "inf_grad", "flip_grad")):
            _spoil(faults, {name: tensor.grad for name, tensor in parameters if tensor.grad is not None})

    def weights(self, parameters: Iterable[tuple[str, torch.Tensor]], step: int) -> None:
        """Spoil weights."""
        if faults := self._due(step, kinds=("nan_weight", "inf_weight", "flip_weight")):
            _spoil(faults, dict(parameters))

    def _due(self, step: int, *, kinds: tuple[str, ...] | None = None, where: str | None = None) -> list[Fault]:
        due = [
            fault
            for fault in self.faults
            if (kinds is None or fault.kind in kinds)
            and (where is None or fault.where == where)
            and fault.step in (None, step)
            and fault not in self._spent
        ]
        if kinds is not None:
            self._struck |= {fault for fault in due if fault.once}
        return due

    def _poison(self, fault: Fault) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            if fault.step not in (None, self._step) or fault in self._spent:
                return None
            if fault.once:
                self._struck.add(fault)
            value = float("nan") if fault.kind == "nan_act" else float("inf")
            if isinstance(output, tuple):
                return (_with_value(output[0], fault.index or 0, value), *output[1:])
            return _with_value(output, fault.index or 0, value)

        return hook


def plan(text: str | None = None, rank: int = 0, *, workload: str = "") -> Plan:
    """The faults of this worker, by default those of LOCKSTEP_FAULT. Ask once per run."""
    faults = parse(env.get(VARIABLE) if text is None else text)
    place = dict.fromkeys(WHO, 0) | {"rank": rank, "round": rounds.current().number}
    for pair in filter(None, env.get(REPLICA).split(",")):
        key, _, number = pair.partition("=")
        place[key] = int(number)
    here = (fault for fault in faults if fault.workload in ("", workload))
    return Plan(tuple(fault for fault in here if all(getattr(fault, key) in (None, place[key]) for key in WHO)))


def _exit(fault: Fault) -> None:
    sys.exit(fault.code)


def _kill(fault: Fault) -> None:
    signal.raise_signal(fault.signal)


def _delay(seconds: float) -> None:
    """Be slow. A GPU works off a queue that the host fills ahead of it: there only the GPU's own time counts."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * _cycles_per_second()))


@cache
def _cycles_per_second() -> float:
    import torch

    spin: Any = getattr(torch.cuda, "_sleep")  # noqa: B009 - a private name, for want of another
    marks, cycles = [torch.cuda.Event(enable_timing=True) for _ in range(2)], 50_000_000
    spin(cycles)  # wakes the clocks
    marks[0].record()
    spin(cycles)
    marks[1].record()
    marks[1].synchronize()
    return cycles / marks[0].elapsed_time(marks[1]) * 1e3


def _hang(fault: Fault) -> None:
    time.sleep(fault.seconds)


def _oom(_fault: Fault) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # raises the real torch.OutOfMemoryError
    bytearray(1 << 62)  # raises MemoryError


def _raise(fault: Fault) -> None:
    raise InjectedFault(str(fault))


STRIKES: dict[str, Callable[[Fault], None]] = {
    "exit": _exit,
    "kill": _kill,
    "hang": _hang,
    "oom": _oom,
    "raise": _raise,
}


def _spoil(faults: list[Fault], tensors: dict[str, torch.Tensor]) -> None:
    from lockstep.runtime.parallel import local

    for fault in faults:
        tensor = local(_pick(fault.tensor, tensors, "tensor").detach())
        if fault.kind.startswith("flip_"):
            assert fault.bit is not None
            flip(tensor, fault.index or 0, bits=1 << fault.bit)
            continue
        value = float("inf") if fault.kind.startswith("inf_") else float("nan")
        target = tensor if fault.index is None else element(tensor, fault.index)
        target.fill_(value)


def element(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A view of one element, by flat index, whatever the strides."""
    if index >= tensor.numel():
        raise ConfigError(f"index={index}, the tensor has {tensor.numel()} elements", where=VARIABLE)
    place: list[int] = []
    for size in reversed(tensor.shape):
        index, rest = divmod(index, size)
        place.insert(0, rest)
    return tensor[tuple(place)]


def flip(tensor: torch.Tensor, index: int, *, bits: int) -> None:
    """Flip real bits of one element in place."""
    import torch

    width = 8 * tensor.element_size()
    if bits >> width:
        raise ConfigError(f"bit mask {bits:#x} is wider than the {width} bits of {tensor.dtype}", where=VARIABLE)
    integer = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    signed = bits - (1 << width) if bits >> (width - 1) else bits
    element(tensor, index).view(integer).bitwise_xor_(signed)


def _with_value(output: torch.Tensor, index: int, value: float) -> torch.Tensor:
    spoilt = output.clone()
    element(spoilt, index).fill_(value)
    return spoilt


def _pick(name: str, table: dict[str, Any], what: str) -> Any:
    """The thing of that name, or the first one."""
    name = name or next(iter(table), "")
    if name not in table:
        raise ConfigError(f"no {what} is called {name!r}", where=VARIABLE, hint=suggest(name, list(table)))
    return table[name]
