"""The workers of one node as one thing: started together, listened to in one loop, asked to stop, ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from lockstep.errors import ExitCode
from lockstep.launch import beats as signs
from lockstep.launch import failure, link, processes
from lockstep.launch.children import Child, Inbox, Proc, Stranger
from lockstep.launch.failure import End
from lockstep.launch.output import Output, Screen
from lockstep.launch.reaper import Reaper
from lockstep.launch.torchrun import exit_code_of

STEPS_TO_STOP = 3  # the wish travels one step ahead of the one that is being made, and was read a step late
STEPS_OF_PATIENCE = 3  # a worker that waits for nobody may take so long for what it is at
AT_WORK = ("save", "evaluate", "done")  # where a worker that was asked to stop may take its time
LINE_SECONDS = 0.3  # what a worker that listens to its line needs to end
LAST_SECONDS = 5.0  # after SIGKILL; a process that cannot die then is the kernel's matter
STOPS: dict[int, int] = {  # signal -> exit code of a run that it has ended
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
    signal.SIGUSR1: ExitCode.PREEMPTED,
    signal.SIGUSR2: ExitCode.PREEMPTED,
}
ASKS: dict[int, int] = {  # exit code of one worker -> the signal that tells the others
    ExitCode.INTERRUPTED: signal.SIGINT,
    ExitCode.TERMINATED: signal.SIGTERM,
    ExitCode.PREEMPTED: signal.SIGUSR1,
}


class Team:
    """Processes, their pipes, and how each worker ended. One thread, one selector."""

    def __init__(self, slots: int, *, work: Path, run_id: str) -> None:
        self.slots = slots
        self.work = work
        self.run_id = run_id
        self.beats = signs.create(work, slots)
        self.inbox = Inbox()
        self.screen = Screen(_stdout_descriptor())
        self.children: list[Child] = []
        self.ends: dict[int, End] = {}
        self.ended_ns = 0  # when the last of those that have ended did
        self.stop: int | None = None  # the signal by which a graceful end was asked for
        self._stop_steps: dict[int, int] = {}
        self._beyond: dict[int, float] = {}  # slot -> seconds in steps that it should not have begun
        self._ended_by_us = False
        self._strangers: dict[int, Stranger] = {}
        self._lines = [_open_line(link.line_path(work, slot)) for slot in range(slots)]
        self._reaper = Reaper(work, run_id)
        self._selector = selectors.PollSelector()
        self._selector.register(self.inbox.descriptor, selectors.EVENT_READ, self.inbox.drain)

    @property
    def alive(self) -> list[Child]:
        return [child for child in self.children if child.alive]

    def start(self, proc: Proc, output: Output) -> Child:
        own = {
            "LOCKSTEP_LAUNCHER_PID": str(os.getpid()),
            "LOCKSTEP_WORK": str(self.work),
            processes.RUN_ID: self.run_id,
        }
        mine = replace(proc, environ={**proc.environ, **own})
        child = Child(mine, output, arm=link.dying_with(os.getpid()), reaper=self._reaper)
        self.children.append(child)
        self._selector.register(child.pipe, selectors.EVENT_READ, lambda: self._read(child))
        self._selector.register(child.handle, selectors.EVENT_READ, lambda: self._note_child(child))
        return child

    def wait(self, seconds: float) -> None:
        """Until something happens, at most so long; and deal with it."""
        for key, _event in self._selector.select(seconds):
            if key.fd in self._selector.get_map():
                key.data()

    def ask_to_stop(self, number: int) -> None:
        """A graceful end: each worker hears the signal, saves, and ends."""
        if self.stop is None:
            self.stop = number
            self._stop_steps = {slot: self.beats.read(slot).step for slot in range(self.slots)}
        for child in self.alive:
            strangers = [stranger for slot in child.proc.slots if (stranger := self.stranger(child, slot))]
            for stranger in strangers:
                stranger.send(number)
            if not strangers:
                child.send(signal.SIGTERM if number == signal.SIGINT and self._is_starting(child) else number)

    def _is_starting(self, child: Child) -> bool:
        """Whether no worker has come to its first line: Python would answer SIGINT with a traceback and a 1."""
        named = bool(child.proc.tag) or child.proc.is_agent
        return named and not any(self.beats.read(slot).pid for slot in child.proc.slots)

    def overdue(self, grace: float, passed: float) -> bool:
        """Whether a worker that was asked to stop goes on, or stays where it is although another has ended.

        passed: seconds since the last look. A worker that waits for others inside a kernel hears no signal.
        """
        now_ns = time.monotonic_ns()
        for slot in self._stop_steps:
            beat = self.beats.read(slot)
            if slot in self.ends or beat.section in AT_WORK:
                continue
            if self._stop_steps[slot] < 0:  # it had not begun when it was asked, and may do so at any step
                self._stop_steps[slot] = beat.step
            if beat.step > self._stop_steps[slot] + STEPS_TO_STOP:
                self._beyond[slot] = self._beyond.get(slot, 0.0) + passed
            alone = (now_ns - max(self.ended_ns, beat.mark_ns)) / 1e9 if self.ends else 0.0
            patience = grace + STEPS_OF_PATIENCE * max(beat.busy, default=0.0)
            if max(alone, self._beyond.get(slot, 0.0)) > patience:
                return True
        return False

    def send(self, slot: int, number: int) -> None:
        """A signal to the worker of one slot."""
        child = next(child for child in self.children if slot in child.proc.slots)
        if stranger := self.stranger(child, slot):
            stranger.send(number)
        elif len(child.proc.slots) == 1:
            child.send(number)

    def stranger(self, child: Child, slot: int) -> Stranger | None:
        """The worker of a slot, where an agent or a shell stands between us and it."""
        pid = self.beats.read(slot).pid
        if slot in self.ends or pid in (0, child.pid):
            return None
        if slot not in self._strangers:
            try:
                stranger = Stranger(slot, pid)
            except OSError:  # gone already: its parent will tell
                return None
            self._strangers[slot] = stranger
            self._selector.register(stranger.handle, selectors.EVENT_READ, lambda: self._note_stranger(stranger))
        return self._strangers[slot]

    def end_all(self, seconds: float) -> None:
        """End every worker without saving: told by its line, then by SIGTERM; after so many seconds by SIGKILL."""
        self._ended_by_us = True
        for line in self._lines:
            with contextlib.suppress(OSError):
                os.write(line, link.PEER_DIED)
        first = min(LINE_SECONDS, seconds / 2)
        self._outlast(first)  # SIGTERM by itself would mean: save
        for child in self.alive:
            child.send_group(signal.SIGTERM)
        self._outlast(seconds - first)
        for child in self.alive:
            child.send_group(signal.SIGKILL)
        for stranger in self._strangers.values():
            stranger.send(signal.SIGKILL)
        self._outlast(LAST_SECONDS)
        for child in self.children:  # a child that ran away may hold a pipe open: what is there is all we wait for
            if child.pipe_open:
                self._read(child)
                child.close_pipe()

    def clear(self) -> list[processes.Leaked]:
        """The rest of the run's output, and its processes that nobody waited for: killed, and named."""
        leaked = processes.kill_leaked(self.run_id, [child.pid for child in self.children])
        for child in self.children:
            child.read()
            child.close_pipe()
        return leaked

    def close(self) -> None:
        """Nobody is left, whatever has happened."""
        for child in self.alive:
            child.send_group(signal.SIGKILL)
        self._outlast(LAST_SECONDS)
        for child in self.children:
            child.close_pipe()
            child.output.close()
        self._selector.close()
        for line in self._lines:
            os.close(line)
        self.beats.close()
        shutil.rmtree(self.work, ignore_errors=True)
        self._reaper.close()
        self.screen.close()
        self.inbox.close()  # last: a signal must not cut the clearing up short

    def record(self, slot: int) -> dict[str, object]:
        """What a worker has said about its failure."""
        return failure.read_word(link.failure_path(self.work, slot))[0]

    def _outlast(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive and (left := deadline - time.monotonic()) > 0:
            if self.inbox.received.count(signal.SIGINT) > 1:  # somebody has no patience
                return
            self.wait(min(left, 0.1))

    def _read(self, child: Child) -> None:
        pipe = child.pipe
        if not child.read() and pipe in self._selector.get_map():
            self._selector.unregister(pipe)

    def _note_child(self, child: Child) -> None:
        handle = child.handle
        if not child.look():
            return
        self._selector.unregister(handle)
        assert child.code is not None
        slots = [slot for slot in child.proc.slots if slot not in self.ends]
        if child.proc.is_agent and child.code:  # whose failure does it pass on?
            if not slots or any(self.ends[slot].code for slot in child.proc.slots if slot in self.ends):
                return
            told = [slot for slot in slots if self.record(slot)]
            slots = (sorted(told, key=lambda slot: bool(self.record(slot).get("secondary"))) or slots)[:1]
            if not told:
                self._note_agent(child, slots[0])
                return
        for slot in slots:
            self._note(slot, child.code, child.by_signal)

    def _note_agent(self, child: Child, slot: int) -> None:
        """An agent has failed, and no worker has said why: it was stopped itself, or its own summary tells."""
        assert child.code is not None
        if self.stop is not None:
            self._note(slot, int(STOPS[self.stop]), 0)
            return
        self._read(child)
        code = exit_code_of(child.output.tail.decode("utf-8", "backslashreplace"))
        self._note(slot, child.code if code is None else code, child.by_signal)

    def _note_stranger(self, stranger: Stranger) -> None:
        self._selector.unregister(stranger.handle)
        code = stranger.look()
        if stranger.slot not in self.ends:
            self._note(stranger.slot, code, stranger.by_signal)

    def _note(self, slot: int, code: int, by_signal: int) -> None:
        """A worker has ended."""
        section = self.beats.read(slot).section
        record, stopped = failure.read_word(link.failure_path(self.work, slot))
        if by_signal in STOPS:  # it came before the worker could listen
            code, by_signal = STOPS[by_signal], 0
        if code == Stranger.UNKNOWN:
            told = record.get("exit_code") if stopped is None else stopped
            code = told if isinstance(told, int) else int(section != "done")
        if by_signal and self._ended_by_us and self.stop is not None:  # it did not listen
            code, by_signal = STOPS[self.stop], 0
        early = code == 0 and section != "done" and self.stop is None
        self.ends[slot] = End(slot, code, by_signal, early=early, record=record)
        self.ended_ns = time.monotonic_ns()
        if code in ASKS and self.stop is None and not record and not self._is_aftermath(slot):
            self.ask_to_stop(ASKS[code])

    def _is_aftermath(self, slot: int) -> bool:
        """Whether an agent has ended this worker because another had lost a peer."""
        agents = [child.proc.slots for child in self.children if child.proc.is_agent]
        return any(
            slot in slots and self.ends[other].secondary for slots in agents for other in slots if other in self.ends
        )


def _open_line(path: Path) -> int:
    """The launcher's end of a worker's lifeline: open for both, so that it neither waits for a reader nor fails."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def _stdout_descriptor() -> int:
    try:
        descriptor = sys.stdout.fileno()
        os.fstat(descriptor)
    except (OSError, ValueError, AttributeError):  # captured, or closed (`>&-`)
        return -1
    return descriptor


def prefix_of(tag: str, style: str) -> bytes:
    """What stands before every line of a worker."""
    if not tag or style == "none":
        return b""
    return f"{tag}:".encode() if style == "colon" else f"[{tag}] ".encode()
