"""What stacks, last words and limits add to a verdict about workers that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.launch import failure, processes
from lockstep.launch.beats import Beat
from lockstep.launch.watchdog import Hang, corrected

LIFELINE = 'Thread 0x1 (most recent call first):\n  File "/x/lockstep/launch/link.py", line 161 in wait\n\n'
MAIN = "Current thread 0x2 (most recent call first):\n"
WAITS = (
    LIFELINE + MAIN + '  File "/x/lockstep/runtime/reduce.py", line 122 in finish\n  File "/x/step.py", line 1 in f\n'
)
IN_TORCH = LIFELINE + MAIN + '  File "/x/torch/distributed/distributed_c10d.py", line 9 in wrapper\n'
WORKS = LIFELINE + MAIN + '  File "/x/slow.py", line 3 in read\n  File "/x/lockstep/runtime/group.py", line 1 in g\n'


def beats(*sections: str) -> list[Beat]:
    return [Beat(slot, 100 + slot, 0, section=section, step=7) for slot, section in enumerate(sections)]


@pytest.mark.parametrize("section", ["communication", "save", "evaluate"])
def test_who_is_in_no_exchange_is_to_blame(section: str) -> None:
    """Rows 13, 14: marks are alike where waiting and working share a section; stacks are not."""
    hang = Hang(None if section == "communication" else 0, section, 7, 5.0)
    found = corrected(hang, beats(section, section, section), {0: WAITS, 1: WORKS, 2: IN_TORCH})
    assert (found.slot, found.section, found.step) == (1, section, 7)


def test_a_verdict_that_stacks_cannot_better_stays() -> None:
    hang, three = Hang(0, "save", 7, 5.0), beats("save", "save", "save")
    assert corrected(hang, three, {0: WAITS, 1: WAITS, 2: WAITS}) == hang, "nobody is outside"
    assert corrected(hang, three, {0: WORKS, 1: WORKS, 2: WAITS}) == hang, "two are"
    assert corrected(hang, three, {}) == hang, "nobody has shown a stack"
    assert corrected(hang, three, {0: "", 1: WAITS}) == hang
    assert corrected(hang, beats("save", "forward"), {0: WAITS, 1: WORKS}) == hang, "the other is elsewhere"
    stopped = Hang(0, "communication", 7, 5.0, stopped=True)
    assert corrected(stopped, beats("communication", "communication"), {0: WAITS, 1: WORKS}) == stopped


def test_a_crash_is_shown_from_its_beginning() -> None:
    """Row 12."""
    dump = ["Fatal Python error: Segmentation fault", "", *(f"  File {number}" for number in range(50))]
    lines = ["Step [1/9]", *dump, "Extension modules: numpy"]
    assert failure.last_words("\n".join(lines).encode()) == dump[:20]
    assert failure.last_words("\n".join(map(str, range(50))).encode()) == [str(number) for number in range(30, 50)]


@pytest.mark.parametrize(
    ("events", "files"),
    [
        ("memory.events", {"memory.max": "1000000", "memory.peak": "999000"}),
        ("memory.oom_control", {"memory.limit_in_bytes": "1000000", "memory.max_usage_in_bytes": "999000"}),
    ],
)
def test_the_limit_of_a_group_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: str, files: dict[str, str]
) -> None:
    """Row 7: the bytes used and allowed, in both versions of control groups; nothing where there is no limit."""
    monkeypatch.setattr(processes, "_memory_files", lambda: [tmp_path / events])
    assert processes.memory_bounds() == ""
    for name, value in files.items():
        (tmp_path / name).write_text(f"{value}\n")
    assert processes.memory_bounds() == "; 999,000 bytes used of 1,000,000 allowed"
    for name in files:
        (tmp_path / name).write_text(f"{(1 << 63) - 4096}\n")  # how version 1 says "no limit"
    assert processes.memory_bounds() == ""
