"""`lockstep check` under torchrun and srun: the nodes' records are compared together, and the node is named."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.runtime.env import free_port
from tests.launch_foreign.cluster import Cluster
from tests.launch_foreign.foreign import QUIET, ROOT, start

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WORDS = (
    "-m",
    "lockstep",
    "check",
    "--device",
    "cpu",
    "--quick",
    "--workload",
    "llama",
    "--name",
    "run",
    "--slow",
    "100",
)
FLIP = "flip_grad@{},step=4,bit=3,index=5"
OURS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
SECONDS = 400  # a busy machine with two cores


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs/run/check.json").read_text())


def statuses(folder: Path) -> list[str]:
    return [card["status"] for card in told(folder)["gpus"]]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_processes_of_one_machine_share_its_cards(launcher: str, tmp_path: Path, shared_cache: Path) -> None:
    fault = OURS | {"LOCKSTEP_FAULT": FLIP.format("rank=3")}
    foreign = start(launcher, *WORDS, "--gpus", "4", cwd=tmp_path, variables=fault)
    code, output = foreign.finish(SECONDS)
    assert code == 1, "theirs, whatever we do"
    assert output.count("exitcode  : 3") == 2, output
    assert output.count("FAIL: 3 of 4 pass; worker 3 fails") == 1, "one process speaks"
    by_index = {card["index"]: card for card in told(tmp_path)["gpus"]}
    assert {index: card["status"] for index, card in by_index.items()} == {0: "PASS", 1: "PASS", 2: "PASS", 3: "FAIL"}
    difference = by_index[3]["difference"]
    assert (difference["step"], difference["elements"], difference["nature"]) == (4, 1, "persistent")
    assert not list(tmp_path.rglob("dump.safetensors"))
    assert foreign.survivors() == []


def test_all_agree_under_torchrun(tmp_path: Path, shared_cache: Path) -> None:
    foreign = start("torchrun", *WORDS, cwd=tmp_path, variables=OURS)
    code, output = foreign.finish(SECONDS)
    assert code == 0, output
    assert statuses(tmp_path) == ["PASS", "PASS"]
    assert foreign.survivors() == []


def test_a_card_of_another_node_is_named_with_it(tmp_path: Path, shared_cache: Path) -> None:
    """Two torchruns of one job, as on two machines."""
    port = free_port()
    agents: list[subprocess.Popen[str]] = []
    for node in range(2):
        flags = ("--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", *flags, *WORDS, "--gpus", "2"]
        environ = os.environ | QUIET | OURS | {"LOCKSTEP_FAULT": FLIP.format("node=1,rank=1")}
        pipe, own = subprocess.PIPE, tmp_path / f"node{node}"
        own.mkdir()
        agents.append(subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=own, env=environ))
    first, second = (agent.communicate(timeout=SECONDS)[0] for agent in agents)
    assert statuses(tmp_path / "node0") == ["PASS", "PASS", "PASS", "FAIL"], first + second
    wrong = told(tmp_path / "node0")["gpus"][3]
    assert (wrong["node"], wrong["index"], wrong["difference"]["elements"]) == (1, 1, 1)
    assert f"{wrong['name']} fails" in first
    assert "n1" in wrong["name"] or "node 1" in wrong["name"]
    assert first.count("exitcode  : 3") == second.count("exitcode  : 3") == 1, "the same code everywhere"
    assert not (tmp_path / "node1/runs").exists(), "only the first writes"


def test_a_process_that_never_comes_is_missed_by_name(tmp_path: Path, shared_cache: Path) -> None:
    """The other's conductor stands still: nobody waits for ever."""
    foreign = start("torchrun", *WORDS, "--timeout", "30", cwd=tmp_path, variables=OURS)
    begun = tmp_path / "runs/run/workers/n0-CPU0/errand.json"
    deadline = time.monotonic() + SECONDS
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    [silent] = [each for each in psutil.Process(foreign.process.pid).children() if each.environ().get("RANK") == "1"]
    silent.suspend()
    try:
        code, output = foreign.finish(SECONDS)
    finally:
        foreign.process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):  # its agent has ended it, as it should
            silent.kill()
    assert code == 1
    assert "rank 1 of 2 did not come" in output, output
    assert (tmp_path / "runs/run/unfinished").exists()
    assert foreign.survivors() == []


@pytest.mark.slurm
def test_srun_on_two_nodes(slurm: Cluster, tmp_path: Path, shared_cache: Path) -> None:
    fault = FLIP.format("node=1,rank=0")
    command = ["srun", "--nodes=2", "--ntasks=2"]
    script = tmp_path / "task.sh"
    script.write_text(
        f"#!/bin/bash\nexport LOCKSTEP_FAULT={fault!r}\nexec {sys.executable} {' '.join(WORDS)} --gpus 2\n"
    )
    script.chmod(0o755)
    answer = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=slurm.variables | OURS,
        timeout=SECONDS,
    )
    assert answer.returncode == 3, answer.stdout + answer.stderr
    assert statuses(tmp_path) == ["PASS", "PASS", "FAIL", "PASS"]
    assert [card["node"] for card in told(tmp_path)["gpus"]] == [0, 0, 1, 1]
