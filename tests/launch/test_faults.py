"""The fault matrix with stub workers under the real supervisor: who failed, which code, nobody left."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launch import harness

ROOT = Path(__file__).parents[2]
LAUNCHER = (sys.executable, "-m", "tests.launch.launcher")
HANG_SECONDS = 1.0
SLOW = pytest.mark.slow


def times(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("trials", [few, pytest.param(many, marks=SLOW)])


def start(run: Path, *watch: str, workers: int = 2, fault: str = "", options: str = "steps=500") -> harness.Job:
    command = (*LAUNCHER, str(workers), str(run), *watch)
    return harness.start(command, cwd=ROOT, LOCKSTEP_FAULT=fault, STUB_OPTIONS=options)


def fault(run: Path, text: str, *watch: str, options: str = "steps=500") -> harness.Ended:
    return start(run, *watch, fault=text, options=options).finish(40)


@times(2, 100)
def test_killed_worker(tmp_path: Path, trials: int) -> None:
    """Row 1: others are stopped without saving, the cause is named, teardown at most 3 s."""

    def one(number: int) -> float:
        run, rank = tmp_path / str(number), number % 2
        chance = random.Random(number)
        if number % 4 < 2:
            job = start(run, fault=f"kill@rank={rank},step={chance.randrange(3, 12)}")
            job.wait_for(f"[GPU{rank}] Step [1]")
            while job.members(f"RANK={rank}"):
                time.sleep(0.005)
            begin = time.monotonic()
        else:
            job = start(run)
            job.wait_for(f"[GPU{rank}] Step [1]")
            time.sleep(chance.uniform(0, 0.3))
            begin = time.monotonic()
            job.send(signal.SIGKILL, job.members(f"RANK={rank}")[0])
        ended = job.finish(30)
        record = harness.check_failure(ended, run, code=137, rank=rank, cause="killed by SIGKILL (out of memory?)")
        assert record["kind"] == "signal"
        assert "signal 9" in record["cause"]
        assert not list(run.glob("saved.*")), "a state without the lost peer's part must not be kept"
        return ended.ended_at - begin

    harness.in_time(trials, one, 3.0)


WAYS = {
    "direct": "exec {}",
    "script": "{}",  # a shell that waits: not exec
    "tee": "{} | tee out.txt",
    "nohup": "nohup {} > out.txt",
    "setsid": "setsid -w {}",
}


def launcher_of(job: harness.Job) -> int:
    """The launcher itself, behind whatever shells."""
    found = [
        pid
        for pid in job.members()
        if "tests.launch.launcher" in (line := harness.command_line(pid)) and "python" in line.split()[0]
    ]
    workers = set(job.members("LOCAL_WORLD_SIZE=2"))
    sessions = {pid: os.getsid(pid) for pid in found if pid not in workers}
    return min(sessions, key=lambda pid: pid)


@times(5, 200)
def test_killed_launcher(tmp_path: Path, trials: int) -> None:
    """Row 2: all workers and what they have started die with it, within half a second."""

    def one(number: int) -> float:
        way = list(WAYS.values())[number % len(WAYS)]
        run = tmp_path / str(number)
        command = f"{' '.join(LAUNCHER)} 2 {run}"
        options = "steps=5000,child" if number % 2 else "steps=5000"
        run.mkdir()
        shell = f"cd {ROOT}; " + way.format(command).replace("out.txt", str(run / "out.txt"))
        job = harness.start(["bash", "-c", f"{shell}; true" if "exec" not in shell else shell], STUB_OPTIONS=options)
        deadline = time.monotonic() + 20
        while len(job.members("LOCAL_WORLD_SIZE=2")) < 2 + 2 * (number % 2):
            assert time.monotonic() < deadline, job.out
            time.sleep(0.01)
        time.sleep(random.Random(number).uniform(0, 0.3))
        workers = job.members("LOCAL_WORLD_SIZE=2")
        os.kill(launcher_of(job), signal.SIGKILL)
        begin = time.monotonic()
        while left := [pid for pid in workers if Path(f"/proc/{pid}").exists() and harness_alive(pid)]:
            assert time.monotonic() < begin + 2, [harness.command_line(pid) for pid in left]
            time.sleep(0.002)
        seconds = time.monotonic() - begin
        job.finish(5).check_clean()
        return seconds

    slowest = sorted(harness.many(trials, one, at_once=2))
    assert slowest[int(0.99 * len(slowest)) - 1] <= 0.5


def harness_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_unprotected_workers_are_found(tmp_path: Path) -> None:
    """Negative control: without PDEATHSIG, lifeline and reaper the scan finds orphans."""
    command = (*LAUNCHER, "2", str(tmp_path / "run"), "no_reaper=1")
    job = harness.start(command, cwd=ROOT, STUB_OPTIONS="steps=5000,unprotected", TMPDIR=str(tmp_path))
    job.wait_for("[GPU1] Step [1]")
    job.send(signal.SIGKILL)
    ended = job.finish(5)
    with pytest.raises(AssertionError, match=r"alive \d+\.\d s after the end"):
        ended.check_clean()
    assert not harness.survivors(ended.stamp), "and the harness leaves nobody"


@times(1, 20)
@pytest.mark.parametrize("limited", [True, False], ids=["rlimit", "cgroup"])
def test_out_of_memory(tmp_path: Path, trials: int, limited: bool) -> None:
    """Row 7: named as memory, by the exception or by the kernel's count."""
    group = Path("/sys/fs/cgroup/memory/lockstep-test")
    if not limited and not os.access(group.parent, os.W_OK):
        pytest.skip(
            "NO MEMORY CGROUP (VERSION 1) TO WRITE TO: row 7's kill by the kernel is not shown, its RLIMIT half is"
        )

    def one(number: int) -> None:
        run = tmp_path / str(number)
        if limited:
            ended = fault(run, "", options="steps=500,allocate")
            harness.check_failure(ended, run, code=1, rank=1, cause="MemoryError")
            return
        place = Path(f"{group}-{os.getpid()}-{number}")
        place.mkdir()
        try:
            (place / "memory.limit_in_bytes").write_text(str(150 << 20))
            shell = f"echo $$ > {place}/cgroup.procs; exec {' '.join(LAUNCHER)} 2 {run}"
            ended = harness.run(["bash", "-c", shell], cwd=ROOT, STUB_OPTIONS="steps=500,eat")
            rank = harness.failure(run)["rank"]  # whom the kernel kills, and whether one is enough, is its own choice
            record = harness.check_failure(ended, run, code=137, rank=rank, cause="killed by SIGKILL (out of memory)")
            assert record["kind"] == "memory"
        finally:
            harness_remove(place)

    harness.many(trials, one, at_once=2)


def harness_remove(place: Path) -> None:
    for _ in range(100):
        try:
            place.rmdir()
            return
        except OSError:
            time.sleep(0.02)


@times(1, 20)
@pytest.mark.parametrize(
    "where", ["forward", *(pytest.param(w, marks=SLOW) for w in ("backward", "optimizer", "loader"))]
)
def test_first_of_two_exceptions(tmp_path: Path, trials: int, where: str) -> None:
    """Row 9: a worker that only lost its peer is not blamed, although it ended first."""

    def one(number: int) -> None:
        run = tmp_path / str(number)
        text = f"raise@rank=0,step=3;raise@rank=1,step=6,where={where}"
        ended = fault(run, text, options="steps=500,secondary")
        record = harness.check_failure(ended, run, code=1, rank=1, cause=f"injected fault raise at step 6, {where}")
        assert record["others"] == [{"gpu": "GPU0", "exit_code": 1, "secondary": True}]
        assert record["trace"][-1].startswith("lockstep.runtime.faults.InjectedFault")
        assert ended.out.count("[FAILURE]") == 1

    harness.many(trials, one)


def test_everyone_secondary(tmp_path: Path) -> None:
    """Nobody better turned up: the first of them is named, and the run still fails."""
    ended = start(tmp_path / "run", fault="raise@rank=0,step=3", options="steps=500,secondary").finish(20)
    harness.check_failure(ended, tmp_path / "run", code=1, rank=0)


@times(1, 20)
@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        ("exit@rank=1,step=4,code=7", 7, "exited with code 7"),
        ("kill@rank=1,step=4,signal=11", 139, "killed by SIGSEGV (segmentation fault): signal 11"),
        pytest.param("kill@rank=1,step=4,signal=6", 134, "killed by SIGABRT (aborted): signal 6", marks=SLOW),
        ("exit@rank=1,step=4,code=0", 1, "exited before the others were done"),
    ],
)
def test_codes(tmp_path: Path, trials: int, text: str, code: int, cause: str) -> None:
    """Rows 10, 11, 12: the code of the first failing worker; a crash shows where it was."""

    def one(number: int) -> None:
        run = tmp_path / str(number)
        record = harness.check_failure(fault(run, text), run, code=code, rank=1, cause=cause)
        assert record["step"] == 4
        if code > 128:
            assert "Fatal Python error" in "\n".join(record["trace"])

    harness.many(trials, one)


HANGS = {
    "hang@rank=1,step=4": ("forward", "hangs"),
    "hang@rank=0,step=4,where=loader": ("data", "hangs"),
    "hang@rank=1,step=4,where=backward": ("backward", "hangs"),
    "kill@rank=1,step=4,signal=19": ("forward", "is stopped (SIGSTOP)"),
}


@times(5, 250)
def test_hangs(tmp_path: Path, trials: int) -> None:
    """Rows 13, 14: named with its section within the time-out + 2 s, with everyone's stack, although others wait."""

    def one(number: int) -> float:
        text, (section, how) = list(HANGS.items())[number % len(HANGS)]
        rank = int(text.partition("rank=")[2][0])
        run = tmp_path / str(number)
        job = start(run, f"hang_seconds={HANG_SECONDS}", fault=text, options="steps=500,meet")
        job.wait_for(f"[GPU{rank}] Step [3]")
        begin = time.monotonic()
        ended = job.finish(30)
        record = harness.check_failure(ended, run, code=124, rank=rank, cause=how)
        assert (record["kind"], record["section"], record["step"]) == ("hang", section, 4)
        for tag in ("GPU0", "GPU1"):
            assert "stub.py" in (run / "workers" / f"n0-{tag}" / "stacks.txt").read_text()
        return ended.ended_at - begin

    harness.in_time(trials, one, HANG_SECONDS + 2, at_once=4)


@times(1, 20)
def test_killed_helper(tmp_path: Path, trials: int) -> None:
    """Row 44: a worker whose own child was killed fails within 5 s, and the other children are gone."""

    def one(number: int) -> None:
        run = tmp_path / str(number)
        job = start(run, options="steps=500,helper")
        job.wait_for("[GPU1] Step [2]")
        helper = next(pid for pid in job.members("RANK=1") if "time.sleep" in harness.command_line(pid))
        job.send(signal.SIGKILL, helper)
        ended = job.finish(20)
        harness.check_failure(ended, run, code=1, rank=1, cause=f"loader worker {helper} was killed")
        assert ended.seconds <= 5

    harness.many(trials, one)


@times(1, 20)
@pytest.mark.parametrize("text", ["", "kill@rank=1,step=4"])
def test_runaway_is_found(tmp_path: Path, trials: int, text: str) -> None:
    """Row 46: a daemonised child is named as leaked and killed by its pid, after a good end and a bad one."""

    def one(number: int) -> None:
        run = tmp_path / str(number)
        ended = fault(run, text, options="steps=8,daemon,meet")  # nobody is killed before the daemon is there
        assert ended.code == (137 if text else 0), ended.out
        assert "[WARNING] leaked process" in ended.out
        assert "leaked 1" in ended.out
        ended.check_clean(0.5)

    harness.many(trials, one)


def test_a_stranger_with_the_same_words_survives(tmp_path: Path) -> None:
    """Contract 56: only what the launcher has created is ended."""
    sleep = "import time; time.sleep(30)"
    stranger = harness.start([sys.executable, "-c", sleep, "tests.launch.stub", "pretrain_main.py"])
    try:
        harness.check_failure(fault(tmp_path / "run", "kill@rank=0,step=2"), tmp_path / "run", code=137, rank=0)
        assert stranger.process.poll() is None
    finally:
        stranger.end()


def test_a_worker_that_ignores_sigterm(tmp_path: Path) -> None:
    """Contract 55: it ends all the same when a peer has died, with its children."""
    run = tmp_path / "run"
    job = start(run, fault="exit@rank=1,step=3,code=9", options="steps=500,ignore_term,child,unprotected")
    harness.check_failure(job.finish(20), run, code=9, rank=1)


def test_nothing_wrong_is_nothing_found(tmp_path: Path) -> None:
    """Negative control of every detector: a quiet run ends with 0, nobody slow, nobody leaked, no record."""
    job = start(tmp_path / "run", f"hang_seconds={HANG_SECONDS}", options="steps=120,rate=60,child")
    ended = job.finish(30)
    assert (ended.code, ended.block) == (0, [])
    assert "outcome: code 0, slow [], leaked 0" in ended.out
    assert not (tmp_path / "run" / "failure.json").exists()
    ended.check_clean()
