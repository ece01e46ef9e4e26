"""Errors a user can act on, and the one table of exit codes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any


class ExitCode(IntEnum):
    """What `lockstep` returns to the shell. Workers' own codes pass through unchanged."""

    DONE = 0
    FAILED = 1  # missing package, failed check-up, out of memory, a worker that ended too early
    USAGE = 2  # command line or configuration
    BAD_DEVICE = 3  # a GPU that fails the check, replicas or ranks whose bits differ
    DATA = 65  # data, cache or checkpoint content
    NOT_FOUND = 66  # file, model or dataset that is not there, or a hub that does not give it
    NON_FINITE = 71  # NaN or Inf in loss, gradient or weight
    CANNOT_CREATE = 73  # output folder cannot be written
    IO = 74  # read or write failed, disk full
    PREEMPTED = 75  # asked to stop by SIGUSR1 or SIGUSR2: resume me
    HANG = 124  # a worker gave no sign of life
    INTERRUPTED = 130  # SIGINT
    TERMINATED = 143  # SIGTERM


# Before the first step: a mistake in what was asked for, and no failure.
REFUSALS = (ExitCode.USAGE, ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.CANNOT_CREATE)


class LockstepError(Exception):
    """A failure explained: what happened, where, and the next thing to try."""

    exit_code: ExitCode = ExitCode.FAILED
    secondary = False  # of a worker that ends because another one did

    def __init__(self, what: str, *, where: str = "", hint: str = "", exit_code: ExitCode | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code

    @property
    def cause(self) -> str:
        """All but the hint."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        return "\n".join([self.cause, *([f"  try: {self.hint}"] if self.hint else [])])


def cause_of(error: BaseException) -> str:
    """Why, on one line: all that we say, and the first line of others, who may go on for pages."""
    lines = error.cause.splitlines() if isinstance(error, LockstepError) else str(error).splitlines()[:1]
    return " ".join(line.strip() for line in lines)


class ConfigError(LockstepError):
    """The command line or a configuration file asks for something that cannot be."""

    exit_code = ExitCode.USAGE


class DataError(LockstepError):
    """Data, a cache or a checkpoint holds something unusable."""

    exit_code = ExitCode.DATA


class NotFoundError(LockstepError):
    """A named file, model or dataset is not there."""

    exit_code = ExitCode.NOT_FOUND


class OutputError(LockstepError):
    """A place to write to cannot be created or written."""

    exit_code = ExitCode.CANNOT_CREATE


class NonFiniteError(LockstepError):
    """The loss, a gradient or a weight is NaN or Inf."""

    exit_code = ExitCode.NON_FINITE
    elsewhere = False  # whether it began on another worker, which says the same
    kept = False  # whether the state before the step is saved already
    finding: Mapping[str, Any] = MappingProxyType({})  # where it began, as health/finding.py has it


class MemoryShortageError(LockstepError):
    """The device or the machine has no more memory to give."""

    figures: Mapping[str, int | None] = MappingProxyType({})  # bytes: requested, peak, limit, estimated
    remedy: Any = None  # what would need less, as engine/shortage.py has it


class Stopped(LockstepError):
    """The run was asked to end by a signal and has saved its state."""
