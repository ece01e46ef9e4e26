"""No script measures times while somebody else computes on this machine, unless it is told to."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from lockstep.bench.conduct import busy_reasons
from lockstep.errors import LockstepError


def check_quiet(indices: Sequence[int], *, anyway: bool) -> list[str]:
    """Refuse to measure while somebody else computes here; whoever wants it anyway has the reasons in the report."""
    found = busy_reasons(indices)
    if found and not anyway:
        raise LockstepError(
            f"this machine is busy: {'; '.join(found)}",
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
