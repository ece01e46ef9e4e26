"""Who hangs, who is slow, which node does not answer: judged from the outside, from readings of the beats."""

from __future__ import annotations

import dataclasses
import errno
import math
import re
import select
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launch.beats import RING, Beat

START_FACTOR = 10  # importing and joining may take so many times longer than a step
UNLIMITED = ("prepare", "done")  # of one that runs; `done` only while another is not
WINDOW = 16  # steps whose median is compared
SHORTEST_WINDOW = 4  # of a short record; fewer steps say nothing
STRIDE = 8  # steps between two comparisons
STRIKES = 2  # comparisons in a row that make a worker slow
SURE = 3.0  # standard errors above which a difference is no noise
PROBE_SECONDS = 2.0
EXCHANGE = re.compile(r"/torch/distributed/|/torch/cuda/streams\.py|/lockstep/runtime/(group|reduce|parallel)\.py")


@dataclass(frozen=True)
class Hang:
    """The verdict on workers that stand still. slot None: all wait for another node."""

    slot: int | None
    section: str
    step: int
    seconds: float
    stopped: bool = False


def limit(section: str, hang_seconds: float) -> float:
    """How long a worker may stay in a section without a sign of progress."""
    if section in UNLIMITED:
        return math.inf
    return hang_seconds * (START_FACTOR if section == "start" else 1)


def counted_from(beats: Sequence[Beat], *, awake_ns: int, ended_ns: int) -> list[Beat]:
    """The same readings, without the silence that nobody is to blame for: while all stood still (until awake_ns), and
    of those that are done while they waited for others (until ended_ns).
    """
    floors = {beat.slot: max(awake_ns, ended_ns if beat.section == "done" else 0) for beat in beats}
    return [dataclasses.replace(beat, mark_ns=max(beat.mark_ns, floors[beat.slot])) for beat in beats]


def find_hang(
    beats: Sequence[Beat], *, now_ns: int, hang_seconds: float, state_of: Callable[[int], str]
) -> Hang | None:
    """Who is to blame when somebody has stood still for too long. `state_of` a pid: the letter of /proc/PID/stat.

    A stopped process first; then whoever is late in work of his own, the one furthest behind, the longest silent. Who
    only waits for others is late for as long as one of them works. Every worker waiting: the culprit is elsewhere.
    Workers that are done may wait for those that are not, and have no reason to stay when all are.
    """
    silent = [beat for beat in beats if beat.age(now_ns) > hang_seconds]
    late = [beat for beat in silent if beat.age(now_ns) > limit(beat.section, hang_seconds)]
    if len(silent) == len(beats) and all(beat.section == "done" for beat in beats):
        late = silent
    if not late and not any(beat.pid and state_of(beat.pid) == "T" for beat in silent):
        return None
    suspects = [beat for beat in beats if beat.section != "done"]
    stopped = [beat for beat in beats if beat.pid and state_of(beat.pid) == "T"]
    culprits = stopped or [beat for beat in late if beat.section != "communication"]
    if not culprits:
        if any(beat.section != "communication" for beat in suspects):
            return None
        if len({beat.step for beat in suspects}) == 1:
            oldest = min(late, key=lambda beat: beat.mark_ns)
            return Hang(None, oldest.section, oldest.step, oldest.age(now_ns))
        culprits = suspects  # they wait in different exchanges: the one behind is out of line
    culprit = min(culprits, key=lambda beat: (beat.step, beat.mark_ns))
    return Hang(culprit.slot, culprit.section, culprit.step, culprit.age(now_ns), stopped=bool(stopped))


def corrected(hang: Hang, beats: Sequence[Beat], stacks: Mapping[int, str]) -> Hang:
    """The verdict once stacks are known: of those who stand at the same place the one that is in no exchange.

    Where work and waiting share a section (communication, save, evaluate) the marks alone cannot tell them apart.
    """
    if hang.stopped:
        return hang
    alike = [beat for beat in beats if (beat.section, beat.step) == (hang.section, hang.step)]
    outside = [beat for beat in alike if beat.slot in stacks and not _waits(stacks[beat.slot])]
    if len(alike) < 2 or len(outside) != 1:
        return hang
    return dataclasses.replace(hang, slot=outside[0].slot)


def _waits(stack: str) -> bool:
    """Whether the main thread is inside an exchange. faulthandler writes it last, its innermost call first."""
    frames = stack.rpartition("(most recent call first):")[2].strip().splitlines()
    return not frames or EXCHANGE.search(frames[0]) is not None


class Slowness:
    """Compares the workers' own work per step. Each worker is named at most once.

    A worker is slow if in STRIKES comparisons, one after the other, the median of its steps is more than `factor` times
    that of the others, and further from it than SURE standard errors.
    """

    def __init__(self, factor: float) -> None:
        self.slow: dict[int, float] = {}  # slot -> how many times as long as the others
        self._factor = factor
        self._judged: dict[int, int] = {}  # slot -> finished steps at the last comparison
        self._strikes: dict[int, int] = {}

    def feed(self, beats: Sequence[Beat]) -> list[int]:
        """Slots that are found slow by this reading."""
        found: list[int] = []
        while len(beats) > 1 and all(self._next(beat) <= beat.busy_count for beat in beats):
            self._judged = {beat.slot: self._next(beat) for beat in beats}
            found += self.compare({beat.slot: _window(beat, self._judged[beat.slot]) for beat in beats})
        return found

    def _next(self, beat: Beat) -> int:
        """The finished step at which the next comparison ends. What has left the ring is passed over."""
        end = max(self._judged.get(beat.slot, 0) + STRIDE, WINDOW)
        passed = beat.busy_count - (RING - WINDOW) - end
        return end if passed <= 0 else end + math.ceil(passed / STRIDE) * STRIDE

    def compare(self, windows: Mapping[int, Sequence[float]]) -> list[int]:
        """Slots that are found slow by one more window of each."""
        found: list[int] = []
        medians = {slot: statistics.median(window) for slot, window in windows.items()}
        errors = {slot: _standard_error(window, medians[slot]) for slot, window in windows.items()}
        for slot, median in medians.items():
            others = {other: value for other, value in medians.items() if other != slot}
            usual = statistics.median(others.values())
            noise = math.hypot(errors[slot], statistics.median(errors[other] for other in others))
            slow = usual > 0 and median > self._factor * usual and median - usual > SURE * noise
            self._strikes[slot] = self._strikes.get(slot, 0) + 1 if slow else 0
            if self._strikes[slot] >= STRIKES and slot not in self.slow:
                self.slow[slot] = median / usual
                found.append(slot)
        return found


def slow_ones(times: Mapping[int, Sequence[float]], *, factor: float) -> dict[int, float]:
    """By the same rule in whole records, window after window: slot -> how many times as long as the others."""
    steps = min(map(len, times.values()), default=0)
    slowness, window = Slowness(factor), steps // max(STRIKES, steps // WINDOW)
    if len(times) > 1 and window >= SHORTEST_WINDOW:
        for end in range(window, steps + 1, window):
            slowness.compare({slot: seconds[end - window : end] for slot, seconds in times.items()})
    return slowness.slow


def _window(beat: Beat, end: int) -> Sequence[float]:
    """The WINDOW steps before step `end`, or what the ring still has of them."""
    first = beat.busy_count - len(beat.busy)
    return beat.busy[max(0, end - WINDOW - first) : max(1, end - first)]


def _standard_error(window: Sequence[float], median: float) -> float:
    """Of the median, from the median deviation: outliers do not count."""
    deviation = 1.4826 * statistics.median(abs(value - median) for value in window)
    return 1.2533 * deviation / math.sqrt(len(window))


@dataclass(frozen=True)
class Silent:
    """A node that cannot be reached, or whose workers are gone."""

    node: int
    host: str
    address: str
    refused: bool

    def __str__(self) -> str:
        if self.refused:
            return f"the workers of node {self.node} ({self.host}, {self.address}) have ended"
        return f"node {self.node} ({self.host}, {self.address}) does not answer"


def probe_nodes(nodes: Sequence[Mapping[str, Any]], *, own: int, seconds: float = PROBE_SECONDS) -> list[Silent]:
    """Knock at one worker of every other node, all at once; who does not open the door."""
    waiting: dict[int, tuple[socket.socket, Mapping[str, Any]]] = {}
    silent: list[Silent] = []
    poll = select.poll()
    for node in nodes:
        if node["node"] == own:
            continue
        knock = socket.socket(socket.AF_INET6 if ":" in str(node["address"]) else socket.AF_INET)
        knock.setblocking(False)
        code = knock.connect_ex((str(node["address"]), int(node["port"])))
        if code in (0, errno.EINPROGRESS):
            waiting[knock.fileno()] = (knock, node)
            poll.register(knock, select.POLLOUT)
        else:
            silent.append(_silent(node, code))
            knock.close()
    deadline = time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _event in poll.poll(left * 1000):
            knock, node = waiting.pop(descriptor)
            poll.unregister(descriptor)
            if code := knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                silent.append(_silent(node, code))
            knock.close()
    for knock, node in waiting.values():
        silent.append(_silent(node, errno.ETIMEDOUT))
        knock.close()
    return sorted(silent, key=lambda found: (found.refused, found.node))


def _silent(node: Mapping[str, Any], code: int) -> Silent:
    return Silent(int(node["node"]), str(node["host"]), str(node["address"]), refused=code == errno.ECONNREFUSED)


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat: T is stopped, Z ended, '' gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
