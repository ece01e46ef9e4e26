"""The launcher's documented words (contract 1.4): what starts, as which process, and how each of them ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import harness
from tests.launch.test_faults import LAUNCHER, ROOT

RULE = "=" * 60
FACTS = ("CUDA Device", "Environment", "Command", "Working dir", "Log file", "Process ID", "Status")


def launched(folder: Path, workers: int, **more: str) -> tuple[harness.Ended, list[str]]:
    """Stub workers with a log folder, and the launcher's own lines."""
    words = (str(workers), str(folder / "run"), f"log_folder={folder / 'logs'}")
    ended = harness.run([*LAUNCHER, *words], cwd=ROOT, **({"STUB_OPTIONS": "steps=5"} | more))
    ended.check_clean()
    return ended, [line for line in ended.out.splitlines() if not re.match(r"\[GPU\d+\] ", line)]


def facts_of(lines: list[str], number: int) -> dict[str, str]:
    """The lines below `[GPU n] Launching training process:`."""
    at = lines.index(f"[GPU {number}] Launching training process:") + 1
    pairs = [re.fullmatch(r"  ([\w ]+):\s+(.+)", line) for line in lines[at : at + len(FACTS)]]
    assert all(pairs), lines[at : at + len(FACTS)]
    assert len({match.start(2) for match in pairs if match}) == 1, "the values stand below one another"
    return {match[1]: match[2] for match in pairs if match}


@pytest.mark.parametrize("workers", [1, 3])
def test_what_starts_and_how_it_completed(tmp_path: Path, workers: int) -> None:
    ended, lines = launched(tmp_path, workers)
    assert ended.code == 0, ended.out
    named = f"{workers} CPU worker{'s' * (workers > 1)}"
    assert lines[:3] == [RULE, f"Launching training on {named}", RULE]
    pids: set[str] = set()
    for number in range(workers):
        facts = facts_of(lines, number)
        assert tuple(facts) == FACTS
        assert facts["CUDA Device"] == "none (CPU)"
        assert facts["Environment"] == f"GPU_RANK={number}"
        assert "tests.launch.stub" in facts["Command"]
        assert facts["Working dir"] == str(ROOT)
        assert facts["Log file"] == str(tmp_path / "logs" / f"gpu_{number}.log")
        assert facts["Status"] == "Started successfully"
        pids.add(facts["Process ID"])
        assert lines.count(f"[GPU {number}] Process completed successfully") == 1
    assert len(pids) == workers
    assert lines.count(f"{'All ' * (workers > 1)}{named} started. Monitoring training progress...") == 1
    assert "FAILED" not in ended.out
    assert "[FAILURE]" not in ended.out


@pytest.mark.parametrize(
    ("fault", "code", "error"),
    [("exit@rank=1,step=2,code=7", 7, "exited with code 7"), ("kill@rank=1,step=2", 137, "killed by SIGKILL")],
    ids=["exit", "kill"],
)
def test_who_failed_with_which_process(tmp_path: Path, fault: str, code: int, error: str) -> None:
    ended, lines = launched(tmp_path, 2, LOCKSTEP_FAULT=fault, STUB_OPTIONS="steps=200")
    assert ended.code == code, ended.out
    at = lines.index("[GPU 1] Process FAILED")
    told = dict(re.findall(r"^  ([\w ]+):\s+(.+)$", "\n".join(lines[at + 1 : at + 4]), re.MULTILINE))
    assert list(told) == ["PID", "Exit code", "Error"]
    assert told["PID"] == facts_of(lines, 1)["Process ID"]
    assert told["Exit code"] == str(code)
    assert told["Error"].startswith(error)
    assert ended.out.count("Process FAILED") == 1, "the first failure only"
    assert "Process completed successfully" not in ended.out
    assert lines.index("[FAILURE] Training failed on GPU 1") > at


def test_without_a_log_folder_the_launcher_is_silent(tmp_path: Path) -> None:
    ended = harness.run([*LAUNCHER, "2", str(tmp_path / "run")], cwd=ROOT, STUB_OPTIONS="steps=2")
    assert ended.code == 0, ended.out
    assert not re.search(r"Launching|Process|Monitoring", ended.out), ended.out
