"""The worker's end of its supervision: it dies with its launcher, marks its progress, shows its stacks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from lockstep.errors import ExitCode
from lockstep.launch import beats
from lockstep.runtime import env as environment

PEER_DIED = b"A"
STACKS_SIGNAL = signal.SIGRTMIN + 3
FLUSH_SECONDS = 0.2
OOM_SCORE = "300"
LIMIT = "limit"
_attached: dict[int, Link] = {}  # by pid: a forked child is another worker, or none
_PR_SET_PDEATHSIG = 1


class Link:
    """What a worker tells whoever watches it. Without a work folder nobody listens, at the same small cost."""

    def __init__(self, work: Path | None = None, slot: int = 0) -> None:
        self.work = work
        self.slot = slot
        self.marks = beats.Slot(None if work is None else work / beats.FILE, slot)
        self.section = "start"
        self.step = -1  # none yet
        self.failed = False  # whether this worker has told why it ends
        self._stacks: IO[str] | None = None  # kept open: faulthandler writes to its descriptor

    def enter(self, section: str, step: int = -1) -> None:
        """Progress: the main thread begins this part of its work. -1 keeps the step."""
        self.section = section
        self.step = self.step if step < 0 else step
        self.marks.mark(beats.INDEX[section], step)

    def busy(self, step: int, seconds: float) -> None:  # noqa: ARG002 - steps come in order; the caller knows which
        """How long the own work of a finished step took, waiting for others excluded."""
        self.marks.busy(seconds)

    def tell_run(self, root: Path) -> None:
        """Where the run folder is: the launcher puts this worker's output and heartbeat there."""
        self.marks.tell_run(str(root.absolute()))

    def tell_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """How to reach one worker of each node, for finding the one that does not answer."""
        if self.work is not None:
            from lockstep import rundir

            rundir.write_json(self.work / "nodes.json", nodes)

    def tell_limit(self, hang_seconds: float) -> None:
        """How long a silence this start allows; the run's configuration may be of an earlier one."""
        if self.work is not None:
            (self.work / LIMIT).write_text(str(hang_seconds), encoding="utf-8")

    def tell_remedy(self, foreseen: Mapping[str, Any]) -> None:
        """What to say should the kernel kill this worker for want of memory: it cannot say it then."""
        if self.work is not None:
            from lockstep import rundir

            with contextlib.suppress(OSError):
                rundir.write_json(remedy_path(self.work, self.slot), foreseen)

    def fail(self, record: Mapping[str, Any]) -> None:
        """Why this worker is about to end. The first record is kept: what follows a failure is its consequence."""
        if self.failed:
            return
        self.failed = True
        if self.work is not None:
            from lockstep import rundir

            with contextlib.suppress(OSError):  # the launcher then reports the exit code alone
                rundir.write_json(failure_path(self.work, self.slot), record)

    def leave(self, exit_code: int) -> None:
        """This worker ends as it was told to; a foreign launcher may be the only one to hear its exit code."""
        self.fail({"stopped": exit_code})

    def close(self) -> None:
        """All work is done: from here an exit is no failure."""
        self.enter("done")

    def show_stacks(self) -> bool:
        """Let STACKS_SIGNAL write every thread's Python stack, even while the interpreter's lock is held; a crash too.

        To a file, not to the screen: whoever watches reads it, and says the line that matters.
        """
        if self.work is None:
            return False
        self._stacks = stacks_path(self.work, self.slot).open("a", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        faulthandler.enable(self._stacks, all_threads=True)
        return True


def attach(env: environment.Env) -> Link:
    """The first thing a worker does; asked again, the same link. A process alone is not watched."""
    if os.getpid() not in _attached:
        _attached[os.getpid()] = _attach(env)
    return _attached[os.getpid()]


def _attach(env: environment.Env) -> Link:
    folder = environment.get("LOCKSTEP_WORK")
    if not folder and env.world == 1:
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # a stream that is no file
                faulthandler.enable(all_threads=False)  # nobody else could tell where it crashed
        return Link()
    from lockstep import rundir  # noqa: F401 - loaded now: who runs out of memory can still say so

    with contextlib.suppress(OSError):  # short of memory the kernel takes a worker, not the launcher that can tell
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
    if folder:
        die_with_parent(signal.SIGKILL)
        work = Path(folder)
        _follow(work, env.local_rank)
    else:
        from lockstep.launch import guardian

        deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup, of a shell that is no launcher
        if not deaf or environment.get(guardian.ELASTIC) or env.launcher == "slurm":
            die_with_parent(signal.SIGTERM)  # time to save; the guardian ends who takes too long
        work = guardian.enlist(env)
        if line_path(work, env.local_rank).exists():
            _follow(work, env.local_rank)
    link = Link(work, env.local_rank)
    link.marks.attach(os.getpid(), rank=env.rank, tag=env.tag, dumps=link.show_stacks())
    return link


def line_path(work: Path, slot: int) -> Path:
    return work / f"line.{slot}"


def stacks_path(work: Path, slot: int) -> Path:
    return work / f"stacks.{slot}.txt"


def ask_for_stacks(pid: int) -> None:
    """To the main thread: a stopped process shows where it stands before it takes another step."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:  # a C library older than 2019
        os.kill(pid, STACKS_SIGNAL)
    else:
        tgkill(pid, pid, int(STACKS_SIGNAL))


def read_stacks(work: Path, slots: int) -> dict[int, str]:
    """What workers have written about where they are."""
    found: dict[int, str] = {}
    for slot in range(slots):
        with contextlib.suppress(OSError):
            found[slot] = stacks_path(work, slot).read_text(encoding="utf-8", errors="backslashreplace")
    return found


def remedy_path(work: Path, slot: int) -> Path:
    return work / f"remedy.{slot}.json"


def failure_path(work: Path, slot: int) -> Path:
    return work / f"failure.{slot}.json"


def dying_with(parent: int, number: int = signal.SIGKILL) -> Callable[[], None]:
    """For a child between fork and exec: a signal comes when the parent's thread ends. Loaded now, called there."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(int(ExitCode.TERMINATED))

    return arm


def die_with_parent(number: int) -> None:
    """The signal comes when the parent dies; if it is dead already, end now. Behind another launcher it is that one."""
    launcher = environment.launcher_pid()
    dying_with(os.getppid(), number)()
    if launcher and os.getppid() != launcher and not Path(f"/proc/{launcher}").exists():
        os._exit(int(ExitCode.TERMINATED))


def _follow(work: Path, slot: int) -> None:
    """A thread that waits on the launcher's FIFO: its end, or a byte, is the end of this process."""
    try:
        # without blocking: a launcher that is gone already must not be waited for
        descriptor = os.open(line_path(work, slot), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # the launcher has cleaned up, or its variables were left over
        with contextlib.suppress(OSError):
            gone = f"lockstep: the launcher of this worker is gone ({work}): nothing was begun\n"
            os.write(2, f"{gone}  try: unset LOCKSTEP_WORK RANK WORLD_SIZE\n".encode())
        _leave()
    os.set_blocking(descriptor, True)

    def wait() -> NoReturn:
        os.read(descriptor, 1)  # PEER_DIED, or nothing: the launcher is gone
        _leave()

    threading.Thread(target=wait, name="lockstep-lifeline", daemon=True).start()


def _leave() -> NoReturn:
    """End without saving. What was printed gets a moment to leave; a full pipe or a held lock does not stop us."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()

    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(FLUSH_SECONDS)
    os._exit(int(ExitCode.TERMINATED))
