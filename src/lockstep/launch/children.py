"""The processes a launcher starts: each in its own session, dying with it, ended by the groups it has created."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

from lockstep.errors import LockstepError
from lockstep.launch import processes
from lockstep.launch.output import Output, read_available
from lockstep.launch.reaper import Reaper


@dataclass(frozen=True)
class Proc:
    """A process to start. `slots`: the local workers that live in it (one; a foreign launcher's agent: all)."""

    tag: str
    slots: tuple[int, ...]
    command: tuple[str, ...]
    environ: Mapping[str, str]  # complete
    is_agent: bool = False  # of a foreign launcher: the workers are its children


class Child:
    """A process that runs, or ran."""

    def __init__(self, proc: Proc, output: Output, *, arm: Callable[[], None], reaper: Reaper) -> None:
        self.proc = proc
        self.output = output
        self.code: int | None = None  # None: alive
        self.by_signal = 0
        self.peak_bytes = 0  # the most memory it had, once it has ended
        self._reaper = reaper
        try:
            self._process = subprocess.Popen(  # from the main thread: PDEATHSIG follows the thread
                proc.command,
                env=dict(proc.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=arm,  # one thread here, and one system call there
                bufsize=0,
            )
        except OSError as error:
            raise LockstepError(f"cannot start {proc.command[0]}: {error.strerror or error}") from error
        assert self._process.stdout is not None
        self.pid = self._process.pid
        reaper.add(self.pid)
        self.handle = os.pidfd_open(self.pid)
        self.pipe = self._process.stdout.fileno()
        self.pipe_open = True
        os.set_blocking(self.pipe, False)

    @property
    def alive(self) -> bool:
        return self.code is None

    def send(self, number: int) -> None:
        if self.alive:
            os.kill(self.pid, number)  # not yet waited for: the number is still its own

    def send_group(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def look(self) -> bool:
        """Whether it has ended by now. What it left in its group is killed before its number can be used again."""
        if self.code is not None:
            return False
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _pid, ended, usage = os.wait4(self.pid, 0)  # of Popen's ways to wait, none tells the memory
        status = self._process.returncode = os.waitstatus_to_exitcode(ended)
        self.peak_bytes = usage.ru_maxrss * 1024
        self.by_signal = max(0, -status)
        self.code = 128 - status if status < 0 else status
        self._reaper.remove(self.pid)
        os.close(self.handle)
        return True

    def read(self) -> bool:
        """Take what the pipe holds. False: it was closed."""
        if self.pipe_open and not read_available(self.pipe, self.output):
            self.close_pipe()
        return self.pipe_open

    def close_pipe(self) -> None:
        if self.pipe_open:
            self.pipe_open = False
            self.output.end()
            assert self._process.stdout is not None
            self._process.stdout.close()


class Stranger:
    """A worker that is not our child (an agent started it), known by the pid in its slot."""

    UNKNOWN = -1  # an exit code that nobody can say any more

    def __init__(self, slot: int, pid: int) -> None:
        self.slot = slot
        self.pid = pid
        self.handle = os.pidfd_open(pid)
        self.code: int | None = None
        self.by_signal = 0

    def send(self, number: int) -> None:
        if self.code is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.handle, number)

    def look(self) -> int:
        """How it ended: its parent may have been quicker to ask, and then only a recent kernel knows."""
        status = processes.ended_status(self.pid)
        status = processes.forgotten_status(self.handle) if status is None else status
        os.close(self.handle)
        if status is None:
            self.code = self.UNKNOWN
        else:
            self.code = processes.exit_code(status)
            self.by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return self.code


class Inbox:
    """Signals as events of a loop: remembered by a handler, announced on a descriptor."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self.received: deque[int] = deque()
        self.descriptor, self._write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write_end, False)
        self._before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            ignored = {number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN}  # nohup
            self._before = {n: signal.signal(n, self._receive) for n in self.NUMBERS if n not in ignored}

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType] - what signal.signal gave us
        os.close(self.descriptor)
        os.close(self._write_end)
