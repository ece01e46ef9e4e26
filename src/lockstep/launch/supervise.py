"""Starts workers, passes on what they print, watches them, and ends them all when the first one fails.

One loop, one thread. It signals only processes and groups that it has created, and knows no torch.
"""

from __future__ import annotations

import json
import math
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import ExitCode
from lockstep.launch import banner, failure, link, stacks, watchdog
from lockstep.launch.beats import Beat
from lockstep.launch.children import Child, Proc
from lockstep.launch.failure import End
from lockstep.launch.output import LogFile, Output
from lockstep.launch.records import Records
from lockstep.launch.team import STOPS, Team, prefix_of
from lockstep.runtime import env, memory_limits, scrub

__all__ = ["Outcome", "Proc", "Watch", "supervise"]

BROKEN_PIPE = 141
TICK_SECONDS = 0.5
SETTLE_SECONDS = 2.0  # how long a better candidate for the first cause is waited for
DYING_SECONDS = 2.0  # after "a peer died" there is nothing to save
HURRY_SECONDS = 0.3  # after the second Ctrl-C
READER_SECONDS = 1.0  # how long a run that was stopped waits for a reader that stands still


@dataclass(frozen=True)
class Watch:
    """How to show and judge workers."""

    prefix: Literal["bracket", "colon", "none"] = "bracket"
    show: Literal["all", "first"] = "first"
    log_folder: Path | None = None  # gpu_<id>.log per worker, and the documented words about each process
    transcript: Path | None = None  # gets all that is shown
    hang_seconds: float = 600.0
    slow_factor: float = 1.2
    grace_seconds: float = 10.0
    node: int = 0
    nodes: int = 1


@dataclass(frozen=True)
class Outcome:
    """How it ended."""

    exit_code: int
    failure: dict[str, Any] | None = None
    run: Path | None = None
    slow: tuple[str, ...] = ()  # tags of workers that took longer than the others
    leaked: tuple[str, ...] = ()  # processes that were left behind and killed
    stop: int = 0  # the signal that has asked for the end, be it too late to matter


def supervise(procs: Sequence[Proc], watch: Watch, work: Path, say: Callable[[str], None]) -> Outcome:
    """Run these processes to their end; `say` takes the launcher's own lines. Removes the work folder."""
    supervisor = _Supervisor(procs, watch, work, say)
    try:
        outcome = supervisor.run(procs)
    finally:
        supervisor.team.close()
    late = next(iter(supervisor.team.inbox.received), 0)  # while the last workers were cleared away
    return replace(outcome, stop=outcome.stop or late)


class _Supervisor:
    """What is known and decided about a team of workers."""

    def __init__(self, procs: Sequence[Proc], watch: Watch, work: Path, say: Callable[[str], None]) -> None:
        self.watch = watch
        slots = 1 + max(slot for proc in procs for slot in proc.slots)
        self.tags = [f"GPU{slot}" for slot in range(slots)]
        for proc in procs:
            if len(proc.slots) == 1:
                self.tags[proc.slots[0]] = proc.tag
        self._say = say
        self._records = Records(watch.node, watch.log_folder, self.tell)
        self._slowness = watchdog.Slowness(watch.slow_factor)
        self._weak_since = 0.0
        self._unread = False  # workers were asked to stop because nobody reads what they say
        self._tick_seconds = min(TICK_SECONDS, watch.hang_seconds / 10)
        self._ticked = time.monotonic()
        self._awake_ns = 0  # silence from before this moment does not count
        self._started = time.time()
        self._kills_before = memory_limits.kills()
        # never one that was inherited: whoever carries that is not ours
        self.team = Team(slots, work=work, run_id=secrets.token_hex(8))
        if watch.transcript is not None:
            self.team.screen.copy = LogFile(watch.transcript, self.tell)

    def tell(self, line: str) -> None:
        """One line of the launcher's own, after what workers have printed so far. It waits for no reader."""
        line, screen = env.redact(line), self.team.screen
        if screen.descriptor < 0:  # standard output is no file
            self._say(line)
        else:
            screen.put(f"{line}\n".encode("utf-8", "backslashreplace"))

    def _tell_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.tell(line)

    def run(self, procs: Sequence[Proc]) -> Outcome:
        team, scrub_bytes = self.team, scrub.bytes_scrubber()
        documented = self.watch.log_folder is not None
        self._tell_all(banner.opening(procs) if documented else ())
        for number, proc in enumerate(procs):
            shown = self.watch.show == "all" or (number == 0 and self.watch.node == 0)
            output = Output(prefix_of(proc.tag, self.watch.prefix), scrub_bytes, team.screen if shown else None)
            child = team.start(proc, output)
            self._records.open_log(child)
            self._tell_all(banner.started(child, self._records.log_of(child)) if documented else ())
        self._tell_all([banner.all_started(procs)] if documented else ())
        team.screen.begin()
        while True:
            team.wait(self._tick_seconds)
            if self._hear():
                team.end_all(HURRY_SECONDS)
                return self._finish(int(ExitCode.INTERRUPTED), reader_seconds=0)
            if team.screen.closed and team.stop is None:  # perhaps by a Ctrl-C that `| tee` has heard before us
                self._unread = True
                team.ask_to_stop(signal.SIGTERM)
            if (end := self._first_failure()) is not None:
                return self._fail(end)
            if not team.alive:
                return self._finish(self._code())
            if (hang := self._tick()) is not None:
                return self._end_hang(hang)

    def _hear(self) -> bool:
        """Pass on signals. True: all shall end at once."""
        while self.team.inbox.received:
            number = self.team.inbox.received.popleft()
            if self._unread:  # they have been asked; this is why
                self._unread, self.team.stop = False, number
                continue
            if number == signal.SIGINT and self.team.stop is not None:
                return True
            self.team.ask_to_stop(number)
        return False

    def _first_failure(self) -> End | None:
        """The worker to blame. Who only lost a peer, or left early, is it when nobody better turns up in time."""
        failed = [end for end in self.team.ends.values() if self._is_failure(end)]
        if not failed:
            return None
        if strong := next((end for end in failed if not end.weak), None):
            return strong
        self._weak_since = self._weak_since or time.monotonic()
        if not self.team.alive:
            idle = all(not beat.run and beat.step < 0 for beat in self.team.beats.read_all())
            if idle and all(end.early for end in failed) and len(failed) == len(self.team.ends):
                return None  # all left together: they had nothing to do
        elif time.monotonic() < self._weak_since + SETTLE_SECONDS:
            return None
        return min(failed, key=lambda end: end.secondary)

    def _is_failure(self, end: End) -> bool:
        """Whether it is neither done nor stopped. After a stop, to lose a peer is a part of it."""
        if end.early or not end.code:
            return end.early
        if self.team.stop is not None:
            return end.code not in STOPS.values() and not end.secondary
        return end.code not in STOPS.values() or bool(end.record)

    def _code(self) -> int:
        """All have ended and none has failed: done, or stopped by a signal, or because their reader went away."""
        if self._unread:
            return BROKEN_PIPE
        stopped = [end.code for end in self.team.ends.values() if end.code]
        if not stopped:
            return int(ExitCode.DONE)
        return int(STOPS[self.team.stop]) if self.team.stop is not None else stopped[0]

    def _tick(self) -> watchdog.Hang | None:
        """Twice a second: files, slow workers, workers that do not stop, workers that stand still."""
        now = time.monotonic()
        if now < self._ticked + self._tick_seconds:
            return None
        team, passed = self.team, now - self._ticked
        if passed > 10 * self._tick_seconds + 1:  # this process, and perhaps all, stood still
            self._awake_ns, passed = time.monotonic_ns(), 0.0
        self._ticked = now
        for child in team.alive:
            for slot in child.proc.slots:
                team.stranger(child, slot)
        beats = team.beats.read_all()
        self._records.learn_run(beats, team.children)
        self._records.write_heartbeats(beats, self.tags)
        going = [beat for beat in beats if beat.slot not in team.ends]
        self._compare_speed(going)
        if team.stop is not None and team.overdue(self.watch.grace_seconds, passed):
            self.tell("[WARNING] a worker was asked to stop and does not: all are ended")
            team.end_all(DYING_SECONDS)
            return None
        going = watchdog.counted_from(going, awake_ns=self._awake_ns, ended_ns=team.ended_ns)
        hang_seconds = self.watch.hang_seconds
        now_ns = time.monotonic_ns()
        return watchdog.find_hang(going, now_ns=now_ns, hang_seconds=hang_seconds, state_of=watchdog.process_state)

    def _compare_speed(self, beats: Sequence[Beat]) -> None:
        for slot in self._slowness.feed(beats):
            times = self._slowness.slow[slot]
            self.tell(f"[WARNING] {self.tags[slot]} is slow: its steps take {times:.2f} times as long as the others'")

    def _end_hang(self, hang: watchdog.Hang) -> Outcome:
        """Show where everybody is, then end all."""
        team = self.team
        silent = self._probe() if hang.slot is None else []
        going = [beat for beat in team.beats.read_all() if beat.slot not in team.ends]
        stacks.dump(team.work, going, send=team.send, wait=team.wait)
        self._records.keep_stacks(team.work, self.tags)
        hang = (
            hang if silent else watchdog.corrected(hang, team.beats.read_all(), link.read_stacks(team.work, team.slots))
        )
        slot = hang.slot if hang.slot is not None else 0
        kind, cause = failure.explain_hang(hang, silent)
        end = End(slot, int(ExitCode.HANG), record={"step": hang.step, "section": hang.section})
        if hang.slot is not None:
            for child in team.alive:
                if child.proc.slots == (hang.slot,):
                    child.send_group(signal.SIGKILL)  # it does not hear anything else
        return self._conclude(end, kind=kind, cause=cause)

    def _probe(self) -> list[watchdog.Silent]:
        """Which other nodes do not answer."""
        try:
            nodes = json.loads((self.team.work / "nodes.json").read_text(encoding="utf-8"))
            return watchdog.probe_nodes(nodes, own=self.watch.node)
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _fail(self, end: End) -> Outcome:
        """A worker has ended in a way it should not have."""
        team, child = self.team, self._child_of(end.slot)
        peak = child.peak_bytes if len(child.proc.slots) == 1 else 0  # an agent's own says nothing
        found = failure.explain_end(end, work=team.work, kills_before=self._kills_before, peak_bytes=peak)
        kind, cause = found.kind, found.cause
        if end.secondary and self.watch.nodes > 1 and (silent := self._probe()):
            kind, cause = "lost_peer", "; ".join(str(node) for node in silent)
        return self._conclude(replace(end, record=found.own), kind=kind, cause=cause)

    def _child_of(self, slot: int) -> Child:
        return next(child for child in self.team.children if slot in child.proc.slots)

    def _conclude(self, end: End, *, kind: str, cause: str) -> Outcome:
        """End the others, then write and show why."""
        team, stop = self.team, self.team.stop or 0  # of somebody else than us
        others = [other for other in team.ends.values() if other.slot != end.slot and other.code]
        team.end_all(min(self.watch.grace_seconds, DYING_SECONDS))
        beat = team.beats.read(end.slot)
        place = failure.Place(beat.rank, self.tags[end.slot], self.watch.node, beat.step, beat.section)
        code = 1 if end.early else end.code
        self._records.learn_run(team.beats.read_all(), team.children)
        record = failure.build(place, exit_code=code, kind=kind, cause=cause, own=end.record, run=self._records.run)
        if end.by_signal:
            self._records.keep_stacks(team.work, self.tags)
        child = self._child_of(end.slot)
        record["log"] = self._records.log_of(child)
        tail = failure.last_words(child.output.tail)
        record["trace"] = record["trace"] or tail
        record["others"] = [
            {"gpu": self.tags[other.slot], "exit_code": other.code, "secondary": other.secondary} for other in others
        ]
        if not record["log"] and not child.output.shown:  # else nobody would ever see it
            prefix = prefix_of(child.proc.tag, self.watch.prefix).decode()
            self._tell_all(prefix + line for line in tail)
        if child.output.shown and failure.is_refusal(record):  # it has said why; nothing was trained that could fail
            return replace(self._finish(code, record), stop=stop)
        if self._records.run is not None and (
            complaint := failure.store(self._records.run, record, started=self._started)
        ):
            self.tell(complaint)
        if self.watch.log_folder is not None:
            self._tell_all(banner.ended(team.children, child, record))
        if child.proc.tag or child.proc.is_agent or end.by_signal:  # a helper without a name speaks for itself
            self._tell_all(failure.block(record, nodes=self.watch.nodes))
        return replace(self._finish(code, record), stop=stop)

    def _finish(self, code: int, record: dict[str, Any] | None = None, *, reader_seconds: float = math.inf) -> Outcome:
        """Nobody is left; everything is written."""
        team = self.team
        beats = team.beats.read_all()
        self._records.learn_run(beats, team.children)
        self._records.write_heartbeats(beats, self.tags, last=True)
        if record is None:
            self._compare_speed(beats)  # the last steps of a short run
        leaked = team.clear()
        if self.watch.log_folder is not None and record is None:
            self._tell_all(banner.ended(team.children))
        for process in leaked:
            self.tell(f"[WARNING] leaked process {process.pid} of this run was killed: {process.command[:200]}")
        seconds = reader_seconds if team.stop is None else min(reader_seconds, READER_SECONDS)
        team.screen.finish(seconds, unless=lambda: team.inbox.received)  # Ctrl-C, where a pager stands still
        return Outcome(
            exit_code=code,
            failure=record,
            run=self._records.run,
            slow=tuple(self.tags[slot] for slot in self._slowness.slow),
            leaked=tuple(f"{process.pid} {process.command}" for process in leaked),
            stop=team.stop or 0,
        )
