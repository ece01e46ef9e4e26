"""Whether this machine is quiet enough for a figure to mean something. Torch-free."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from lockstep.runtime import devices

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig


def on_gpu(config: RunConfig) -> bool:
    """Whether a card does the work."""
    asked = config.system.device
    return asked == "cuda" or (asked == "auto" and bool(devices.visible_gpus()))


def cards(config: RunConfig, count: int | None = None) -> list[int]:
    """The numbers of the cards that would work: the first `count`, or the one that system.device_id names."""
    visible = [gpu.index for gpu in devices.visible_gpus()] if on_gpu(config) else []
    first = config.system.device_id
    return visible[first : first + 1] if count is None else visible[:count]


def reasons(indices: Sequence[int]) -> list[str]:
    """Why a figure of now would be worth nothing; none: all is quiet."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    found = [f"the load average is {load:.1f} on {cores} cores"] if load > cores else []
    others = [holder for index in indices for holder in devices.holders(index) if holder.pid != os.getpid()]
    return [*found, *(devices.busy_notices(indices) if others else [])]


def check_quiet(indices: Sequence[int], *, anyway: bool) -> list[str]:
    """Refuse to measure while somebody else computes here; whoever wants it anyway has the reasons in the report."""
    found = reasons(indices)
    if found and not anyway:
        raise LockstepError(
            f"this machine is busy: {'; '.join(found)}",
            where="lockstep bench",
            hint="again when it is quiet, or --anyway for figures that others have slowed down",
        )
    return found


def add_anyway(parser: ArgumentParser) -> None:
    """The flag by which a script measures all the same."""
    parser.add_argument("--anyway", action="store_true", help="although the machine is busy")


def ensure_quiet(parser: ArgumentParser, options: Namespace, indices: Sequence[int] = ()) -> list[str]:
    """The same for a script: it ends here, with exit code 1 and one error, before it measures anything."""
    try:
        return check_quiet(indices, anyway=options.anyway)
    except LockstepError as error:
        parser.exit(1, f"{error}\n")
