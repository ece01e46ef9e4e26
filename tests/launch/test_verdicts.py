"""What stacks, last words and limits add to a verdict about workers that failed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lockstep.launch import beats as signs
from lockstep.launch import failure
from lockstep.launch.beats import Beat
from lockstep.launch.link import Link
from lockstep.launch.watchdog import Hang, corrected
from lockstep.runtime import memory_limits

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
    monkeypatch.setattr(memory_limits, "group_files", lambda: [tmp_path / events])
    assert memory_limits.of_group() is None
    for name, value in files.items():
        (tmp_path / name).write_text(f"{value}\n")
    assert memory_limits.of_group() == (999_000, 1_000_000)
    assert memory_limits.of_machine(5) == memory_limits.Bounds(999_000, 1_000_000, "its cgroup allows", shared=True)
    limit, peak = files
    (tmp_path / peak).unlink()
    assert memory_limits.of_machine(5).peak == 5, "a kernel too old to tell: the worker's own"
    (tmp_path / limit).write_text(f"{(1 << 63) - 4096}\n")  # how version 1 says "no limit"
    assert memory_limits.of_group() is None
    assert memory_limits.of_machine(5).words == "the machine has"


def test_the_limit_of_a_group_around_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a batch job has none of its own; its job has."""
    step = tmp_path / "job" / "step"
    step.mkdir(parents=True)
    for folder, limit in ((tmp_path / "job", "1000"), (step, "max")):
        (folder / "memory.max").write_text(limit)
    monkeypatch.setattr(memory_limits, "group_files", lambda: [step / "memory.events"])
    assert memory_limits.of_group() is None, "outside of what is mounted nobody looks"
    monkeypatch.setattr(memory_limits, "CGROUPS", tmp_path)
    assert memory_limits.of_group() == (0, 1000)


def kill(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, counted: int) -> failure.Verdict:
    monkeypatch.setattr(memory_limits, "kills", lambda: 2 + counted)
    monkeypatch.setattr(memory_limits, "of_group", lambda: (3 << 29, 1 << 31))
    end = failure.End(1, 128 + number, by_signal=number)
    return failure.explain_end(end, work=tmp_path, kills_before=2, peak_bytes=1 << 30)


def test_a_kill_for_want_of_memory_has_numbers_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 7: what the worker has foreseen, since it can say nothing any more."""
    signs.create(tmp_path, 2).close()
    link = Link(tmp_path, 1)
    remedy = {"flags": "--training.batch-size 2 --training.grad-accum-nums 2", "words": "half", "exact": False}
    link.tell_remedy({"estimated_bytes": 77, "remedy": remedy})
    found = kill(signal.SIGKILL, tmp_path, monkeypatch, counted=1)
    assert found.kind == "memory"
    assert found.cause == (
        "killed by SIGKILL (out of memory): peak 1.50 GiB, its cgroup allows 2.00 GiB; signal 9, "
        "the kernel's oom_kill count went from 2 to 3"
    )
    place = failure.Place(1, "GPU1", 0, 7, "forward")
    record = failure.build(place, exit_code=137, kind=found.kind, cause=found.cause, own=found.own, run=None)
    figures = {name: record[name] for name in failure.FIGURES}
    assert figures == {
        "requested_bytes": None, "peak_bytes": 3 << 29, "limit_bytes": 1 << 31, "estimated_bytes": 77,
    }  # fmt: skip
    assert record["next"] == f"the same command with {remedy['flags']} (half)"
    (tmp_path / "run" / "checkpoints" / "step_00000003").mkdir(parents=True)
    saved = failure.build(place, exit_code=137, kind="memory", cause="", own=found.own, run=tmp_path / "run")
    assert saved["next"] == (
        f"lockstep resume {tmp_path}/run {remedy['flags']} --checkpoint.allow-mismatch true (half)"
    )
    other = kill(signal.SIGKILL, tmp_path, monkeypatch, counted=0)  # the control: somebody else's kill
    assert (other.kind, "out of memory?" in other.cause) == ("signal", True)
    assert not set(failure.FIGURES) & set(other.own)


CRASHED = """Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "/x/lockstep/launch/link.py", line 161 in wait

Current thread 0x2 (most recent call first):
  File "/x/torch/nn/functional.py", line 9 in linear
  File "/home/lockstep/src/lockstep/models/llama.py", line 120 in forward
  File "/home/lockstep/src/lockstep/engine/step.py", line 3 in launch
"""


def test_a_crash_names_our_line_of_the_thread_that_met_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 12: not the line of another thread, not the one above ours in a library."""
    (tmp_path / "stacks.1.txt").write_text("Thread 0x9 of an earlier look\n" + CRASHED)
    found = kill(signal.SIGSEGV, tmp_path, monkeypatch, counted=1)
    assert found.cause == "killed by SIGSEGV (segmentation fault): signal 11, in models/llama.py:120 forward"
    assert found.own["trace"][0] == "Fatal Python error: Segmentation fault"
    assert found.own["trace"][1].startswith("Current thread")
    assert failure.crash_signal(found.own["trace"]) == signal.SIGSEGV
    (tmp_path / "stacks.1.txt").write_text("Current thread 0x9 (most recent call first):\n")
    silent = kill(signal.SIGBUS, tmp_path, monkeypatch, counted=1)
    assert silent.cause == "killed by SIGBUS (bus error): signal 7", "no crash was written: none is invented"
    assert (silent.own["trace"], failure.crash_signal(silent.own["trace"])) == ([], 0)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.0 MiB"), (1 << 20, "1.0 MiB"), (1 << 30, "1.00 GiB"), (80 << 30, "80.0 GiB"), (1 << 50, "1,048,576.0 GiB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert failure.size_text(count) == text
