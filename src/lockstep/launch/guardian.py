"""Supervision where torchrun, accelerate or srun started the workers: a small process beside them, one per node.

It sees a worker that hangs, vanishes or has lost its launcher, ends the others, and has the last word on the screen.
A healthy run does not need it: nothing waits for it, and without it the workers still die with their launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import ExitCode
from lockstep.launch import beats, common_folder, failure, link, processes, stacks, watchdog
from lockstep.launch.children import Stranger
from lockstep.rundir import RunDir
from lockstep.runtime import env as environment
from lockstep.runtime import memory_limits, rounds
from lockstep.runtime.env import Env

LOOK_SECONDS = 0.25
UNKNOWN = -1  # the exit code of a worker whose launcher was quicker to ask
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
FIRST_CAUSE_SECONDS = 2.0  # how long a consequence waits for its cause
AGENT_SECONDS = 60.0  # how long the last word waits for the launcher's own
LONELY_SECONDS = 15.0  # how long a launcher of several nodes may stay without workers after a failure
STACKS_SECONDS = 0.5
HANG_SECONDS = 600.0  # until the run's configuration is there to be read
STOPS = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
JOB_NAMES = (
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip
ELASTIC, TASK = "TORCHELASTIC_RUN_ID", "SLURM_PROCID"  # what torchrun or srun give to those they start


def enlist(env: Env) -> Path:
    """The work folder that the workers of one launcher share on this node. The first one here starts the guardian."""
    agent = find_agent(TASK if env.launcher == "slurm" else ELASTIC)
    if environment.get(ELASTIC) and not _is_python(agent):  # an heir: PID 1, or another that adopts orphans
        with contextlib.suppress(OSError):
            os.write(
                2,
                f"lockstep: the launcher of rank {env.rank} is gone: nothing was begun\n"
                f"  try: unset {ELASTIC} RANK WORLD_SIZE\n".encode(),
            )
        os._exit(int(ExitCode.TERMINATED))
    common_folder.sweep()
    key = " ".join([started(agent), *[environment.get(name) for name in JOB_NAMES]])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}-{agent}-{digest}"
    if _is_by_hand(env.launcher):
        common_folder.discard(folder)  # of workers that are gone: the next ones of this shell are as new
    common_folder.hold(folder)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / beats.FILE).exists():
            beats.create(folder, env.local_world).close()
            _start(folder, agent, env)
    finally:
        os.close(lock)
    return folder


def _is_by_hand(launcher: str) -> bool:
    """Whether a person or a script has started the workers: what is above them is a shell, and no launcher."""
    return launcher != "slurm" and not environment.get(ELASTIC)


def find_agent(mark: str) -> int:
    """The launcher: the nearest ancestor that was not started with this variable. Shells in between have it too."""
    wanted = f"{mark}={environment.get(mark)}".encode()
    family = processes.ancestors()
    return next((pid for pid in family if not processes.has(pid, wanted)), os.getppid())


def _is_python(pid: int) -> bool:
    """Whether it can be an agent of torch's: by the program it runs, whatever it calls itself."""
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except PermissionError:  # another user's
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return False


def _start(folder: Path, parent: int, env: Env) -> None:
    """The guardian, in a session of its own: signals to the workers' groups are not for it."""
    words = [str(folder), str(env.local_world), str(parent), str(env.node), str(env.nodes), env.launcher]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "lockstep.launch.guardian", *words],
        environment.without(),
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,
    )


def started(pid: int) -> str:
    """When a process began: with its pid, its name for ever."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class Guardian:
    """Watches the workers of one launcher on one node, from their first sign of life to the launcher's end."""

    def __init__(self, folder: Path, count: int, agent: int, *, node: int, nodes: int, launcher: str) -> None:
        self.folder = folder
        self.node = node
        self.nodes = nodes
        self.by_srun = launcher == "slurm"
        self.by_hand = _is_by_hand(launcher)
        self.deaf = False  # nohup: the workers stay when the shell ends
        self.beats = beats.Beats(folder, count)
        self.met: set[int] = set()
        self.workers: dict[int, Stranger] = {}
        self.agent: Stranger | None = Stranger(-1, agent)
        self.started = time.time()
        self.memory_kills = memory_limits.kills()
        self.ends: list[failure.End] = []
        self.stopped = False  # a worker has ended as it was told to
        self.ended_ns = 0
        self.looked_ns = self.awake_ns = time.monotonic_ns()  # silence from before does not count
        self.record: dict[str, Any] | None = None
        self.kill_at = float("inf")
        self.judge_at = float("inf")
        self.screen = self._open_screen(agent)

    def _open_screen(self, agent: int) -> int:
        """What the launcher writes to: a worker's own output may go to a file. srun's is that of its tasks.

        Before another round it is the workers' own: the launcher would write over what is added to a file there.
        """
        if not self.by_srun and rounds.current().is_last:
            with contextlib.suppress(OSError):
                return os.open(f"/proc/{agent}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY)
        return 2

    @property
    def alive(self) -> list[Stranger]:
        return [worker for worker in self.workers.values() if worker.code is None]

    @property
    def over(self) -> bool:
        met_all = len(self.met) == self.beats.count or self.agent is None
        return (met_all or (self.by_hand and bool(self.met))) and not self.alive

    def watch(self) -> None:
        """Until every worker has ended; then the last word."""
        while not self.over:
            self._meet()
            for slot in sorted(self._wait(LOOK_SECONDS), key=self._is_secondary):  # at once: the stop was first
                self._note_end(slot)
            if self.agent is None and self.kill_at == float("inf") and not (self.by_hand and self.deaf):
                self._end_all(signal.SIGTERM)
            now = time.monotonic()
            if now > self.judge_at:
                self._blame_first()
            if now > self.kill_at:
                self._end_all(signal.SIGKILL)
            if self.record is None:
                self._look_for_hang()
        if self.record is None and self.judge_at != float("inf"):
            self._blame_first()
        if self.record is not None:
            self._say()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _meet(self) -> None:
        """Open a handle on each worker that has attached since."""
        for beat in self.beats.read_all():
            if beat.pid and beat.slot not in self.met:
                self.met.add(beat.slot)
                try:
                    self.workers[beat.slot] = Stranger(beat.slot, beat.pid)
                except OSError:  # it came and went between two looks
                    self._add_end(beat.slot, UNKNOWN, 0)

    def _wait(self, seconds: float) -> list[int]:
        """Slots whose worker ends within this time. A launcher that ends is forgotten."""
        poll = select.poll()
        slots = {worker.handle: slot for slot, worker in self.workers.items() if worker.code is None}
        for handle in slots:
            poll.register(handle, select.POLLIN)
        if self.agent is not None:
            poll.register(self.agent.handle, select.POLLIN)
        ready = [handle for handle, _event in poll.poll(seconds * 1000)]
        if self.agent is not None and self.agent.handle in ready:
            self.agent.look()
            self.agent = None
        return [slots[handle] for handle in ready if handle in slots]

    def _note_end(self, slot: int) -> None:
        worker = self.workers[slot]
        self._add_end(slot, worker.look(), worker.by_signal)

    def _is_secondary(self, slot: int) -> bool:
        return bool(failure.read_record(link.failure_path(self.folder, slot)).get("secondary"))

    def _add_end(self, slot: int, code: int, by_signal: int) -> None:
        """One more worker has ended: in peace, as told, or as the cause or the consequence of a failure."""
        self.ended_ns = time.monotonic_ns()
        done = self.beats.read(slot).section == "done"
        record, stopped = failure.read_word(link.failure_path(self.folder, slot))
        if code == UNKNOWN and stopped is not None:
            code = stopped
        if code == UNKNOWN:
            code = int(record.get("exit_code", 0 if done else 1))
            record = record or {"cause": "ended without a word; its launcher's own lines say how", "kind": "exit"}
            if done:
                return
            if number := failure.crash_signal(failure.crash_of(self.folder, slot)):
                code, by_signal = 128 + number, number
        elif not record and (code in STOPS or (done and code == 0)):
            if code in STOPS and not self.ends:  # else the launcher has ended it because another failed
                self.stopped = True
            return
        self.ends.append(failure.End(slot, code, by_signal=by_signal, early=code == 0, record=record))
        now = time.monotonic()
        wait = FIRST_CAUSE_SECONDS if all(end.weak for end in self.ends) else 0.0
        self.judge_at = min(self.judge_at, now + wait) if self.record is None else self.judge_at

    def _blame_first(self) -> None:
        """Who failed first: the earliest that is no mere consequence. After a stop, to lose a peer is a part of it."""
        self.judge_at = float("inf")
        failed = [end for end in self.ends if not (self.stopped and end.secondary)]
        if self.record is not None or not failed:
            return
        end = min(failed, key=lambda end: end.weak)
        found = failure.explain_end(end, work=self.folder, kills_before=self.memory_kills)
        kind, cause = found.kind, found.cause
        silent = self._silent_nodes() if end.secondary else []
        if silent:
            kind, cause = "lost_peer", f"{cause}; {'; '.join(str(node) for node in silent)}"
        code = int(end.code) or int(ExitCode.FAILED)
        beat = self.beats.read(end.slot)
        if end.by_signal:
            self._keep_stacks([beat])
        self._keep(beat, exit_code=code, kind=kind, cause=cause, own=found.own)
        self._end_all(signal.SIGTERM)

    def _look_for_hang(self) -> None:
        if not self._is_awake():
            return
        alive = {worker.slot: worker for worker in self.alive}
        readings = [beat for beat in self.beats.read_all() if beat.slot in alive]
        readings = watchdog.counted_from(readings, awake_ns=self.awake_ns, ended_ns=self.ended_ns)
        limit = self._hang_seconds(readings)
        hang = watchdog.find_hang(
            readings, now_ns=time.monotonic_ns(), hang_seconds=limit, state_of=watchdog.process_state
        )
        if hang is None:
            return
        self._dump_stacks(readings)
        silent = self._silent_nodes() if hang.slot is None else []
        if not silent:
            hang = watchdog.corrected(hang, readings, link.read_stacks(self.folder, len(self.workers)))
        kind, cause = failure.explain_hang(hang, silent)
        culprit = next((beat for beat in readings if beat.slot == hang.slot), readings[0])
        own = {"step": hang.step, "section": hang.section, "trace": self._stack_of(culprit.slot)}
        self._keep(culprit, exit_code=int(ExitCode.HANG), kind=kind, cause=cause, own=own)
        self._end_all(signal.SIGKILL)

    def _is_awake(self) -> bool:
        """Whether silence counts: not that of a launcher in the background (Ctrl-Z), nor our own standing still."""
        now_ns = time.monotonic_ns()
        stood_still = now_ns > self.looked_ns + 1e9 * (1 + 10 * LOOK_SECONDS)
        self.looked_ns = now_ns
        asleep = self.agent is not None and watchdog.process_state(self.agent.pid) == "T"
        if asleep or stood_still:
            self.awake_ns = now_ns
        return not asleep

    def _hang_seconds(self, readings: Sequence[beats.Beat]) -> float:
        with contextlib.suppress(OSError, ValueError):
            return float((self.folder / link.LIMIT).read_text(encoding="utf-8"))
        run = next((beat.run for beat in readings if beat.run), "")
        if not run:
            return HANG_SECONDS
        try:
            return float(json.loads(RunDir(Path(run)).config.read_text())["config"]["system"]["hang_seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            return HANG_SECONDS

    def _silent_nodes(self) -> list[watchdog.Silent]:
        try:
            nodes = json.loads((self.folder / "nodes.json").read_text())
            return watchdog.probe_nodes(nodes, own=self.node)
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _dump_stacks(self, readings: Sequence[beats.Beat]) -> None:
        """Every worker writes down where it is."""

        def send(slot: int, number: int) -> None:
            self.workers[slot].send(number)

        stacks.dump(self.folder, readings, send=send, wait=time.sleep, seconds=STACKS_SECONDS)
        self._keep_stacks(readings)

    def _keep_stacks(self, readings: Sequence[beats.Beat]) -> None:
        """What workers have written of where they are, or of their crash, into the run folder."""
        for beat in readings:
            if beat.run:
                place = RunDir(Path(beat.run)).worker(beat.tag, self.node)
                with contextlib.suppress(OSError):
                    place.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(link.stacks_path(self.folder, beat.slot), place / "stacks.txt")

    def _stack_of(self, slot: int) -> list[str]:
        try:
            return link.stacks_path(self.folder, slot).read_text(errors="replace").splitlines()[: failure.TRACE_LINES]
        except OSError:
            return []

    def _keep(self, beat: beats.Beat, *, exit_code: int, kind: str, cause: str, own: Any) -> None:
        """The record, for the screen and for failure.json."""
        run = next((Path(other.run) for other in self.beats.read_all() if other.run), None)
        place = failure.Place(beat.rank, beat.tag, self.node, beat.step, beat.section)
        self.record = failure.build(place, exit_code=exit_code, kind=kind, cause=cause, own=own, run=run)
        if run is not None:
            log = RunDir(run).worker(beat.tag, self.node) / "log.txt"
            self.record["log"] = str(log) if log.exists() else ""
            failure.store(run, self.record, started=self.started)

    def _end_all(self, number: int) -> None:
        for worker in self.alive:
            worker.send(number)
        self.kill_at = float("inf") if number == signal.SIGKILL else time.monotonic() + GRACE_SECONDS

    def _say(self) -> None:
        """The last lines on screen: after torchrun's own summary; at once where it goes on with another round, under
        srun, which ends us with its tasks, and where a person or a script of theirs has started the workers: their
        shell says nothing in the end, and is nobody's to be ended."""
        assert self.record is not None
        if not self.by_hand and not self.by_srun and rounds.current().is_last:
            self._outlast_agent()
        text = "\n".join(failure.block(self.record, nodes=self.nodes)) + "\n"
        with contextlib.suppress(OSError):
            os.write(self.screen, text.encode("utf-8", "backslashreplace"))

    def _outlast_agent(self) -> None:
        """Wait for the launcher. Cut off from the other nodes it would wait for ever, without workers: it is ended."""
        if self.nodes == 1:
            self._await_agent(AGENT_SECONDS)
            return
        self._await_agent(LONELY_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.agent is not None and not _has_children(self.agent.pid):
                self.agent.send(number)
                self._await_agent(GRACE_SECONDS)

    def _await_agent(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.agent is not None and (left := deadline - time.monotonic()) > 0:
            self._wait(left)


def _has_children(pid: int) -> bool:
    """Whether a child of its main thread runs. Ended ones stay listed while it is too busy waiting to notice."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return False
    return any(watchdog.process_state(int(child)) not in ("", "Z", "X") for child in children)


def main(words: Sequence[str]) -> None:
    """`python -m lockstep.launch.guardian FOLDER COUNT AGENT NODE NODES LAUNCHER`."""
    deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends with the workers; SLURM signals every process of a step
    folder, count, agent, node, nodes, launcher = words
    try:
        common_folder.keep(Path(folder))
        guardian = Guardian(Path(folder), int(count), int(agent), node=int(node), nodes=int(nodes), launcher=launcher)
    except OSError:  # the launcher is gone already, and its workers with it
        return
    guardian.deaf = deaf
    guardian.watch()


if __name__ == "__main__":
    main(sys.argv[1:])
