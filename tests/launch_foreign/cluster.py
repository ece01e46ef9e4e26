"""A real SLURM of two nodes on this machine, all its files in one folder: nothing outside it is touched."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.runtime.env import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def why_not() -> str:
    """What keeps this machine from running it, or ''."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"NO SLURM ({', '.join(missing)} missing): items 153 and 154 are not shown with a real one; {INSTALL}"
    return "" if os.geteuid() == 0 else "NOT ROOT: SLURM's daemons cannot be started, items 153 and 154 are not shown"


@dataclass(frozen=True)
class Cluster:
    """The running one. `variables` go to every command that talks to it."""

    folder: Path
    processes: Sequence[subprocess.Popen[bytes]]

    @property
    def variables(self) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return mine | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, cwd=cwd, env=self.variables, timeout=120
        )

    def submit(self, script: str, *flags: str, cwd: Path) -> str:
        answer = self.run("sbatch", "--parsable", *flags, cwd=cwd, text=script)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        text = self.run("scontrol", "show", "job", number, cwd=self.folder).stdout
        return {word.split("=")[0]: word.split("=", 1)[1] for word in text.split() if "=" in word}

    def wait(self, number: str, states: Sequence[str] = ENDED, seconds: float = 90) -> dict[str, str]:
        """Until the job is in one of these states."""
        deadline = time.monotonic() + seconds
        while (job := self.job(number)).get("JobState") not in states:
            assert time.monotonic() < deadline, f"job {number} is {job.get('JobState')}, not {states}"
            time.sleep(0.2)
        return job

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(folder: Path) -> Cluster:
    """Two nodes with four GPUs each that are device nodes of nothing, as soon as they are idle."""
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    for number in range(4):
        os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "slurm.conf").write_text(configuration(folder))
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu Flags=nvidia_gpu_env Count=4 File={folder}/gpu[0-3]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    files = [
        f"--{name}={folder}/munge.{name.split('-')[0]}"
        for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")
    ]
    processes = [_spawn(folder, "munged", "--foreground", "--force", *files)]
    deadline = time.monotonic() + 90
    while not (folder / "munge.socket").exists():
        assert time.monotonic() < deadline, (folder / "munged.out").read_text()
        time.sleep(0.05)
    processes.append(_spawn(folder, "slurmctld", "-D", "-c"))
    processes += [_spawn(folder, "slurmd", "-D", "-N", node) for node in ("n1", "n2")]
    cluster = Cluster(folder, processes)
    while cluster.run("sinfo", "-h", "-N", "-t", "idle", cwd=folder).stdout.count("idle") < 2:
        assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
        time.sleep(0.2)
    return cluster


def _spawn(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    variables = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    with (folder / f"{command[0]}.out").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=variables, start_new_session=True)


def configuration(folder: Path) -> str:
    host, controller, first, second = socket.gethostname().split(".")[0], free_port(), free_port(), free_port()
    return f"""ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
KillWait=10
MinJobAge=600
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8 RealMemory=8000 Gres=gpu:4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8 RealMemory=8000 Gres=gpu:4 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""
