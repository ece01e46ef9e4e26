"""The processes of a check: each lives and dies for itself, is watched by what it writes, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from lockstep.errors import Stopped
from lockstep.health import records
from lockstep.launch import failure, link, processes
from lockstep.launch.children import Child, Inbox, Proc
from lockstep.launch.failure import End
from lockstep.launch.output import LogFile, Output
from lockstep.launch.reaper import Reaper
from lockstep.runtime import memory_limits, scrub
from lockstep.runtime.signals import EXIT_CODES

LOG = "log.txt"
TICK_SECONDS = 0.2
DYING_SECONDS = 10.0  # after SIGKILL; a process that cannot die then hangs inside the driver, and is left behind
SLEPT_SECONDS = 30.0  # between two looks: the whole machine stood still, and nobody is to blame for it


@dataclass(frozen=True)
class Task:
    """A process to run. `record`: the file whose growth is its sign of life; None: it is not watched."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path  # its log.txt is kept here
    record: Path | None = None


@dataclass(frozen=True)
class Place:
    """How far a replica has come, as its record says."""

    workload: str = ""
    step: int = -1
    done: int = 0  # workloads

    def __str__(self) -> str:
        if not self.workload:
            return "before its first workload"
        return f"in {self.workload} at step {self.step + 1}"


@dataclass(frozen=True)
class Ending:
    """How a process has ended. `error`: in words, where it did not end by itself with code 0."""

    code: int | None
    error: str = ""
    tail: tuple[str, ...] = ()  # its last lines


class Member:
    """One process of the crew, and what its record says of it."""

    def __init__(self, task: Task, child: Child) -> None:
        self.task, self.child = task, child
        self.place = Place()
        self.grew = time.monotonic()
        self.silent_seconds = 0.0  # > 0: it was ended for that
        self._kills = memory_limits.kills()
        self._killed = 0.0
        self._read_bytes = 0

    @property
    def going(self) -> bool:
        """Whether one should wait for it."""
        return self.child.alive and not (self._killed and time.monotonic() > self._killed + DYING_SECONDS)

    def follow(self) -> None:
        """Read what it has written since the last look."""
        if self.task.record is None:
            return
        with contextlib.suppress(OSError), self.task.record.open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read_bytes += len(whole) + 1
                told = [content for piece in whole.split(b"\n") if (content := records.content_of(piece))]
                if told:  # who writes nothing but rubbish gives no sign of life
                    self.grew = time.monotonic()
                for content in told:
                    self._note(content)

    def _note(self, content: Mapping[str, object]) -> None:
        match content:
            case {"kind": "begin" | "workload", "workload": str(name)}:
                self.place = Place(name, -1, self.place.done)
            case {"kind": "step", "step": int(step)}:
                self.place = Place(self.place.workload, step, self.place.done)
            case {"kind": "done"}:
                self.place = Place(self.place.workload, self.place.step, self.place.done + 1)
            case _:
                pass

    def kill(self, *, silent_seconds: float = 0.0) -> None:
        if not self._killed:
            self._killed, self.silent_seconds = time.monotonic(), silent_seconds
        self.child.send_group(signal.SIGKILL)

    def ending(self) -> Ending:
        tail = tuple(failure.last_words(self.child.output.tail))
        if self.silent_seconds:
            stuck = "" if not self.child.alive else ", and cannot be killed: it is stuck inside the driver"
            return Ending(self.child.code, f"hangs {self.place}: nothing for {self.silent_seconds:.0f} s{stuck}", tail)
        if self.child.code == 0:
            return Ending(0, "", tail)
        if self.child.code is None:
            return Ending(None, "cannot be killed: it is stuck inside the driver", tail)
        end = End(0, self.child.code, self.child.by_signal)
        found = failure.explain_end(end, work=self.task.folder, kills_before=self._kills)
        said = f" ({tail[-1].strip()[:200]})" if tail and not self.child.by_signal else ""
        return Ending(self.child.code, f"{found.cause}{said}", tail)


class Crew:
    """Starts processes and waits for them, in one loop of one thread. A signal to us ends all of them."""

    def __init__(self) -> None:
        self.work = Path(tempfile.mkdtemp(prefix="lockstep-check-"))
        self._run_id = secrets.token_hex(8)
        self._reaper = Reaper(self.work, self._run_id)  # first, while there is one thread
        self._inbox = Inbox()
        self._scrub = scrub.bytes_scrubber()
        self._members: list[Member] = []
        self._selector = selectors.PollSelector()
        self._selector.register(self._inbox.descriptor, selectors.EVENT_READ, self._inbox.drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, task: Task) -> Member:
        """Start a process; `run` or `wait` listen to it."""
        task.folder.mkdir(parents=True, exist_ok=True)
        own = {"LOCKSTEP_LAUNCHER_PID": str(os.getpid()), processes.RUN_ID: self._run_id}
        own |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}  # its last words, even those of a crash
        output = Output(b"", self._scrub, None)
        output.add_file(LogFile(task.folder / LOG, lambda _: None), last=True)
        proc = Proc(task.name, (0,), task.command, {**task.environ, **own})
        child = Child(proc, output, arm=link.dying_with(os.getpid()), reaper=self._reaper)
        member = Member(task, child)
        self._members.append(member)
        self._selector.register(child.pipe, selectors.EVENT_READ, lambda: self._read(child))
        self._selector.register(child.handle, selectors.EVENT_READ, lambda: self._look(child))
        return member

    def run(
        self, tasks: Sequence[Task], *, patience_seconds: float, tell: Callable[[Sequence[Member]], None]
    ) -> list[Ending]:
        """All of them at once, to their end. Who writes nothing for so long is ended; the others go on."""
        members = [self.start(task) for task in tasks]
        looked = time.monotonic()
        while any(member.going for member in members):
            self.wait(TICK_SECONDS)
            now, passed = time.monotonic(), time.monotonic() - looked
            looked = now
            for member in members:
                member.follow()
                if passed > SLEPT_SECONDS:
                    member.grew = now
                if member.child.alive and member.task.record and now - member.grew > patience_seconds:
                    member.kill(silent_seconds=now - member.grew)
            tell(members)
        return [member.ending() for member in members]

    def wait(self, seconds: float) -> None:
        """Until something happens, at most so long. A signal that was sent to us is raised here."""
        for key, _ in self._selector.select(seconds):
            if key.fd in self._selector.get_map():
                key.data()
        if self._inbox.received:
            number = signal.Signals(self._inbox.received.popleft())
            raise Stopped(f"stopped by {number.name}", exit_code=EXIT_CODES[number])

    def close(self) -> None:
        """Nobody is left, whatever has happened."""
        for member in self._members:
            member.kill()
        deadline = time.monotonic() + DYING_SECONDS
        while any(member.child.alive for member in self._members) and time.monotonic() < deadline:
            with contextlib.suppress(Stopped):  # we are at it
                self.wait(TICK_SECONDS)
        processes.kill_leaked(self._run_id, [member.child.pid for member in self._members])
        for member in self._members:
            member.child.close_pipe()
            member.child.output.close()
        self._selector.close()
        shutil.rmtree(self.work, ignore_errors=True)
        self._reaper.close()
        self._inbox.close()  # last: a signal must not cut the clearing up short

    def _read(self, child: Child) -> None:
        pipe = child.pipe
        if not child.read():
            self._selector.unregister(pipe)

    def _look(self, child: Child) -> None:
        handle = child.handle
        if child.look():
            self._selector.unregister(handle)
            if child.pipe_open:  # its last words
                self._read(child)
