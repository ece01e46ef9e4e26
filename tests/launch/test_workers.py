"""The plan of workers, their link, and the slots it writes to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

from lockstep.launch import beats, children, link, processes
from lockstep.launch.workers import Meeting, plan
from lockstep.runtime import env
from lockstep.runtime.host_time import own_seconds
from tests.launch.test_faults import ROOT

MEETING = Meeting(node=1, nodes=3, address="10.0.0.1", port=29500)


def test_plan_on_gpus(tmp_path: Path) -> None:
    """Contract 46: each worker sees one device, and its label is that one."""
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    module = ("lockstep", "train", "llama")
    first, second = plan(module, [0, 2], cpu=False, environ=environ, work=tmp_path, meeting=MEETING)
    assert second.command == (sys.executable, "-m", "lockstep", "train", "llama")
    assert (first.tag, second.tag, second.slots) == ("GPU0", "GPU2", (1,))
    expected = {
        "RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2",
        "GPU_RANK": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3",
        "LOCKSTEP_WORK": str(tmp_path),
    }  # fmt: skip
    assert expected.items() <= second.environ.items()
    place = env.detect(second.environ)
    assert (place.rank, place.world, place.local_rank, place.node, place.nodes) == (3, 6, 1, 1, 3)
    assert (place.tag, place.launcher) == ("GPU2", "lockstep")


def test_plan_on_the_cpu(tmp_path: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    procs = plan(("lockstep",), range(4), cpu=True, environ=environ, work=tmp_path, meeting=Meeting())
    assert [proc.environ["GPU_RANK"] for proc in procs] == ["0", "1", "2", "3"]
    assert all("CUDA_VISIBLE_DEVICES" not in proc.environ for proc in procs)
    assert procs[0].environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 4))


def test_marks_are_cheap_and_read_back(tmp_path: Path) -> None:
    reader = beats.create(tmp_path, 2)
    assert stat.S_IMODE((tmp_path / beats.FILE).stat().st_mode) == 0o600
    worker = link.Link(tmp_path, 1)
    worker.marks.attach(4242, rank=5, tag="GPU7", dumps=True)
    worker.tell_run(tmp_path / "Läufe")
    for step in range(100):
        worker.enter("forward", step)
        worker.busy(step, step / 100)
    worker.enter("communication")
    found = reader.read(1)
    assert (found.pid, found.rank, found.tag, found.section, found.step) == (4242, 5, "GPU7", "communication", 99)
    assert (found.run, found.dumps, found.busy_count) == (str(tmp_path / "Läufe"), True, 100)
    assert found.busy == tuple(step / 100 for step in range(36, 100))
    assert found.age(time.monotonic_ns()) < 5
    assert reader.read(0).pid == 0
    begin = own_seconds()
    for step in range(20_000):
        worker.enter("forward", step)
    assert (own_seconds() - begin) / 20_000 < 10e-6, "about 1 us, with room for a busy machine"
    worker.close()
    assert reader.read(1).section == "done"
    reader.close()


def test_torn_readings_are_harmless(tmp_path: Path) -> None:
    """No section is ever paired with a mark that is older than it: that would look like a hang."""
    reader, worker = beats.create(tmp_path, 1), link.Link(tmp_path, 0)
    done = threading.Event()

    def write() -> None:
        for step in range(30_000):
            worker.enter("prepare" if step % 2 else "forward", step)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    last = 0
    while not done.is_set():
        beat = reader.read(0)
        assert beat.mark_ns >= last
        last = beat.mark_ns
    thread.join()
    reader.close()


def test_a_process_alone_has_a_link_that_nobody_reads(monkeypatch: object) -> None:
    quiet = link.Link()
    quiet.enter("forward", 3)
    quiet.busy(3, 0.1)
    quiet.tell_run(Path("runs/x"))
    quiet.tell_nodes([])
    quiet.fail({"cause": "x"})
    quiet.close()
    assert (quiet.failed, quiet.section) == (True, "done")


def test_first_record_is_kept(tmp_path: Path) -> None:
    worker = link.Link(tmp_path, 0) if beats.create(tmp_path, 1) else None
    assert worker is not None
    worker.fail({"cause": "first"})
    worker.fail({"cause": "second"})
    assert "first" in link.failure_path(tmp_path, 0).read_text()


def test_worker_start_is_cheap() -> None:
    """What attaches a worker imports no torch, and neither does what launches it."""
    code = (
        "import sys; import lockstep.launch.link, lockstep.launch.supervise, lockstep.launch.workers; "
        "print([name for name in ('torch', 'numpy', 'pydantic', 'rich', 'psutil') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert answer.stdout == "[]\n", answer.stdout + answer.stderr


def test_how_a_stranger_ended() -> None:
    """The status of a process that its parent has not yet waited for."""
    child = subprocess.Popen([sys.executable, "-c", "import os; os._exit(7)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    status = processes.ended_status(child.pid)
    assert status is not None
    assert processes.exit_code(status) == 7
    child.wait()
    assert processes.ended_status(child.pid) is None
    assert processes.ended_status(os.getpid()) is None


def test_how_a_stranger_ended_whose_parent_was_quicker() -> None:
    """torchrun may have waited for a worker before the guardian looks: the kernel still knows, from 6.15 on."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stranger = children.Stranger(0, child.pid)
    assert processes.forgotten_status(stranger.handle) is None, "it lives"
    child.kill()
    child.wait()
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    known = (137, 9) if release >= (6, 15) else (children.Stranger.UNKNOWN, 0)
    assert (stranger.look(), stranger.by_signal) == known
