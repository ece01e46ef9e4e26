"""Workers of the real trainer that die: rows 1, 2, 7-12, 39, 44-46 of the fault matrix."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from lockstep import rundir
from lockstep.launch import failure
from tests.faults import trainer
from tests.faults.trainer import trials
from tests.launch import harness

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("cache")]
PACE = "hang@seconds=0.05"  # every step takes a little longer: a moment in between can be met
CGROUP = Path("/sys/fs/cgroup/memory")
USER_WAYS = ("direct", "script", "tee", "nohup")


@pytest.mark.parametrize(("way", "trial"), trials(*USER_WAYS, default=["tee"]))
def test_a_killed_worker(tmp_path: Path, way: str, trial: int) -> None:
    """Rows 1, 39; items 52, 56: the others end, the cause is named, a bystander of the same words and a folder whose
    name is a command come to no harm."""
    rank, endless = trial % 2, ("--max-steps", "2000", "training.save_interval=0")  # however late the kill comes
    bystander = harness.start([sys.executable, "-c", "import time; time.sleep(600)", "pretrain_main.py", "lockstep"])

    def one(number: int) -> float:
        cwd = tmp_path / f"{number} $(touch x) b"
        job = trainer.start(cwd, *endless, way=way, LOCKSTEP_FAULT=PACE)
        victim = trainer.worker(job, rank)
        trainer.wait_for_step(job, random.Random(trial).randrange(2, 8))
        job.send(signal.SIGKILL, victim)
        ended = job.finish(60)
        run = trainer.run_folder(cwd)
        record = harness.check_failure(ended, run, code=137, rank=rank, cause="killed by SIGKILL (out of memory?)")
        assert f"[FAILURE] Training failed on GPU {rank}" in ended.block[0]
        assert (record["kind"], record["gpu"], "signal 9" in record["cause"]) == ("signal", f"GPU{rank}", True)
        assert bystander.process.poll() is None
        assert Path(shlex.split(record["next"])[-1]) == run, "what is shown can be pasted"
        return ended.seconds

    try:
        harness.in_time(1, one, 3.0)
    finally:
        bystander.end()
    assert not list(tmp_path.rglob("x"))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "trial"), trials(*USER_WAYS, "setsid"))
def test_a_killed_launcher(tmp_path: Path, way: str, trial: int) -> None:
    """Row 2, item 58: everybody dies with it, before and after the first step."""
    job = trainer.start(tmp_path, way=way, LOCKSTEP_FAULT=PACE)
    if trial % 2:
        trainer.wait_for_step(job, trial)
    else:
        trainer.workers(job, 2)
        time.sleep(random.Random(trial).uniform(0, 2))
    launcher, workers = trainer.launcher(job), trainer.workers(job, 2)
    job.send(signal.SIGKILL, launcher)
    begin = time.monotonic()
    while any(Path(f"/proc/{pid}/cmdline").exists() and harness.command_line(pid) for pid in workers):
        assert time.monotonic() < begin + 2, "workers without a launcher"
        time.sleep(0.005)
    job.finish(10).check_clean()


CODES = {
    "exit@rank=1,step=4,code=7": (7, "exited with code 7"),  # row 11, item 51
    "exit@rank=1,step=4,code=0": (1, "left training with exit code 0"),  # row 10
    "kill@rank=1,step=4,signal=11": (139, "killed by SIGSEGV (segmentation fault): signal 11"),  # row 12
    "kill@rank=1,step=4,signal=6": (134, "killed by SIGABRT (aborted): signal 6"),  # row 12
    "exit@rank=0,step=4,code=9": (9, "exited with code 9"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "trial"), trials(*CODES))
def test_codes(tmp_path: Path, text: str, trial: int) -> None:
    """Rows 10, 11, 12, item 51: the code of the first failing worker, and where a crash was."""
    code, cause = CODES[text]
    way = USER_WAYS[trial % len(USER_WAYS)]
    rank = int(text.partition("rank=")[2][0])
    ended = trainer.run(tmp_path, way=way, LOCKSTEP_FAULT=text)
    record = harness.check_failure(ended, trainer.run_folder(tmp_path), code=code, rank=rank, cause=cause)
    assert (record["step"], record["section"]) == (4, "forward")
    if code > 128:
        assert record["trace"][0].startswith("Fatal Python error")
        assert record["trace"][1].startswith("Current thread"), "the one that crashed, not the one that was first"
        assert re.search(r", in runtime/faults\.py:\d+ _kill$", record["cause"]), record["cause"]
        assert "Fatal Python error" not in ended.out, "five lines on the screen; the rest is in files"
        assert "Current thread" in (trainer.run_folder(tmp_path) / f"workers/n0-GPU{rank}/stacks.txt").read_text()


RAISES = {"forward": "forward", "backward": "backward", "optimizer": "backward", "loader": "data"}


@pytest.mark.parametrize(
    ("where", "rank", "trial"),
    trials(*((where, rank) for where in RAISES for rank in (0, 1)), default=[("loader", 1)]),
)
def test_an_exception(tmp_path: Path, where: str, rank: int, trial: int) -> None:
    """Row 9, item 53: the first rank is named with its own error; whoever lost it is folded away."""
    text = f"raise@rank={rank},step=6,where={where}"
    ended = trainer.run(tmp_path, way=USER_WAYS[trial % len(USER_WAYS)], LOCKSTEP_FAULT=text)
    cause = f"InjectedFault: injected fault raise at step 6, {where}"
    record = harness.check_failure(ended, trainer.run_folder(tmp_path), code=1, rank=rank, cause=cause)
    assert (record["kind"], record["step"], record["section"]) == ("exception", 6, RAISES[where])
    assert record["trace"][-1].startswith("lockstep.runtime.faults.InjectedFault")
    assert all(other["secondary"] for other in record["others"]), record
    assert ended.out.count("[FAILURE]") == 1
    assert "onnection closed" not in "\n".join(ended.block)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "trial"), trials("limit", "eat"))
def test_out_of_memory(tmp_path: Path, how: str, trial: int) -> None:
    """Row 7: named as memory, with the bytes that were asked for or used, those allowed, and what needs less."""
    rank = trial % 2
    if how == "limit":
        ended = trainer.run(tmp_path, HURT=f"limit:forward:{rank}:3")
        record = harness.check_failure(ended, trainer.run_folder(tmp_path), code=1, rank=rank, cause="out of memory")
        assert record["requested_bytes"] == 1 << 30
        assert "1.00 GiB asked for" in record["cause"]
        assert f" {failure.size_text(record['limit_bytes'])}; estimated were" in record["cause"]
        assert f"peak {failure.size_text(record['peak_bytes'])}" in record["cause"]
        trainer.check_remedy(record, ended)
        return
    if not os.access(CGROUP, os.W_OK):
        pytest.skip(
            "NO MEMORY CGROUP (VERSION 1) TO WRITE TO: row 7's kill by the kernel is not shown, its RLIMIT half is"
        )
    place = CGROUP / f"lockstep-faults-{os.getpid()}-{trial}"
    place.mkdir()
    limit = 1500 << 20
    try:
        (place / "memory.limit_in_bytes").write_text(str(limit))
        words = ("--device", "cpu", "--gpus", "2", "--name", "run", *trainer.QUIET)
        shell = f"echo $$ > {place}/cgroup.procs; {trainer.WAYS['direct'].format(shlex.join(words))}"
        ended = harness.run(
            ["bash", "-c", shell],
            cwd=tmp_path,
            seconds=trainer.END_SECONDS,
            **trainer.hurt({"HURT": f"eat:forward:{rank}:3"}),
        )
        cause = "killed by SIGKILL (out of memory)"
        record = harness.check_failure(ended, trainer.run_folder(tmp_path), code=137, rank=rank, cause=cause)
        assert (record["requested_bytes"], record["limit_bytes"]) == (None, limit)
        assert 0.9 * limit < record["peak_bytes"] <= limit
        assert f"its cgroup allows {failure.size_text(limit)}" in record["cause"]
        trainer.check_remedy(record, ended)
    finally:
        remove_group(place)


def remove_group(place: Path) -> None:
    for _ in range(100):
        try:
            place.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "trial"), trials("", "kill@rank=1,step=12"))
def test_a_runaway_child(tmp_path: Path, fault: str, trial: int) -> None:
    """Row 46: named as leaked and killed, after a good end and after a bad one."""
    ended = trainer.run(tmp_path, HURT=f"daemon:forward:{trial % 2}:5", LOCKSTEP_FAULT=fault)
    assert ended.code == (137 if fault else 0), ended.out
    assert ended.out.count("[WARNING] leaked process") == 1
    ended.check_clean(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(5))
def test_hardly_any_shared_memory(tmp_path: Path, trial: int) -> None:
    """Row 44: loaders are threads, rows are memory-mapped: 64 KB of /dev/shm are enough, and no process can be lost."""
    if os.geteuid():
        pytest.skip("NOT ROOT: a /dev/shm of 64 KB cannot be mounted, row 44 is not shown")
    words = ("--device", "cpu", "--gpus", "2", "--name", "run", "data.num_workers=2", *trainer.QUIET)
    small = "mount -t tmpfs -o size=64k small /dev/shm && "
    shell = small + trainer.WAYS["direct"].format(shlex.join(words))
    job = harness.start(["unshare", "-m", "bash", "-c", shell], cwd=tmp_path)
    trainer.wait_for_step(job, trial)
    children = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in trainer.workers(job, 2)]
    ended = job.finish(60)
    assert (ended.code, children) == (0, [[], []]), ended.out
    ended.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(5))
def test_a_clock_that_jumps(tmp_path: Path, trial: int) -> None:
    """Row 45: the wall clock goes back by a day and nobody is taken for stuck; the newest checkpoint is the one whose
    manifest has the highest step, whatever the dates of the files say."""
    rank = trial % 2
    ended = trainer.run(tmp_path, "system.hang_seconds=5", HURT=f"clock:forward:{rank}:12", LOCKSTEP_FAULT=PACE)
    assert ended.code == 0, ended.out
    folders = sorted((tmp_path / "runs" / "run" / "checkpoints").iterdir())
    assert len(folders) >= 2
    for age, folder in enumerate(folders):
        for path in (folder, *folder.iterdir()):
            os.utime(path, (1e9 - 1e6 * age, 1e9 - 1e6 * age))
    again = trainer.resume(tmp_path)
    assert again.code == 0, again.out
    (resumed,) = trainer.events(trainer.run_folder(tmp_path), "resume")
    assert (resumed["step"], Path(resumed["path"]).name) == (trainer.STEPS, folders[-1].name)
    assert (folders[-1] / rundir.MANIFEST).is_file()
