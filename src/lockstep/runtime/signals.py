"""Asked to stop: finish the step and save if training, leave at once otherwise."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from lockstep.errors import ExitCode, Stopped

EXIT_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
    signal.SIGUSR1: ExitCode.PREEMPTED,
    signal.SIGUSR2: ExitCode.PREEMPTED,
}

UNSTOPPABLE = "unstoppable"  # name of a thread inside one long call of foreign code: who leaves does not wait for it


class StopRequest:
    """Remembers the first signal. While `patient`, the loop looks at it between steps; else it raises at once.

    It raises once: who is on the way out is not disturbed any more.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.patient = False
        self.raised = False

    def __bool__(self) -> bool:
        return self.signal is not None

    def error(self) -> Stopped:
        """The end of the run, as an exception with the exit code of the signal."""
        assert self.signal is not None
        return stopped_by(self.signal)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler: the second SIGINT never waits."""
        impatient = self.signal is not None and number == signal.SIGINT
        self.signal = self.signal or signal.Signals(number)
        if (impatient or not self.patient) and not self.raised:
            self.raised = True
            raise self.error()


def stopped_by(number: int) -> Stopped:
    """The end that a signal asks for."""
    found = signal.Signals(number)
    return Stopped(f"stopped by {found.name}", exit_code=EXIT_CODES[found])


def behind(error: BaseException) -> Stopped | None:
    """The request to stop that an error came of, if it did: it is raised wherever the process is, and some wrap it."""
    chain: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and seen not in chain:  # `raise first from later` closes a ring
        if isinstance(seen, Stopped):
            return seen
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__
    return None


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """A StopRequest that hears the process's signals until the block ends (main thread only)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    ignored = {number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN}  # nohup
    previous = {number: signal.signal(number, request.receive) for number in EXIT_CODES if number not in ignored}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
