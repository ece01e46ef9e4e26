"""Hosts with addresses of their own: several nodes train as one, and a cut cable ends them all and is named."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.launch import processes
from tests.launch_foreign.foreign import ROOT, last_block
from tests.launch_foreign.hosts import Hosts, finish

pytestmark = pytest.mark.ranks

WORDS = ("lockstep", "train", "llama", "tiny", "--device", "cpu", "--name", "many", "--system.hang_seconds", "5")


def ours(hosts: Hosts, number: int, nodes: int, gpus: int) -> list[str]:
    place = ["--nodes", str(nodes), "--node-rank", str(number), "--master-addr", hosts.address(0)]
    return ["-m", *WORDS, "--gpus", str(gpus), *place, "--master-port", "29400"]


def torchrun(hosts: Hosts, number: int, nodes: int, gpus: int) -> list[str]:
    agent = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc_per_node={gpus}", "--rdzv_backend=c10d"]
    return [*agent, f"--rdzv_endpoint={hosts.address(0)}:29400", "-m", *WORDS]


STARTS = {"ours": ours, "torchrun": torchrun}


def begin(kind: str, hosts: Hosts, folder: Path, *, nodes: int, gpus: int, steps: int) -> list[subprocess.Popen[str]]:
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [
        hosts.start(
            number,
            *STARTS[kind](hosts, number, nodes, gpus),
            "--training.max_steps",
            str(steps),
            cwd=folder,
            variables=variables | {processes.RUN_ID: f"{folder.name}-{number}"},  # a launcher's own mark
        )
        for number in range(nodes)
    ]


def steps_of(folder: Path) -> list[int]:
    path = folder / "runs/many/events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event["step"] for event in events if event["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "nodes", "gpus"), [("ours", 3, 1), ("ours", 2, 2), ("torchrun", 3, 1), ("torchrun", 2, 2)]
)
def test_nodes_train_as_one(
    kind: str, nodes: int, gpus: int, three_hosts: Hosts, tmp_path: Path, shared_cache: Path
) -> None:
    ended = finish(begin(kind, three_hosts, tmp_path, nodes=nodes, gpus=gpus, steps=10), 90)
    assert [code for code, _ in ended] == [0] * nodes, "\n".join(output for _, output in ended)
    assert steps_of(tmp_path) == list(range(10))
    assert sum(output.count("Starting experiment") for _, output in ended) == 1


@pytest.mark.parametrize("kind", ["ours", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_cut_cable_ends_every_node_and_is_named(
    kind: str, three_hosts: Hosts, tmp_path: Path, shared_cache: Path
) -> None:
    running = begin(kind, three_hosts, tmp_path, nodes=2, gpus=1, steps=100_000)
    deadline = time.monotonic() + 60
    while len(steps_of(tmp_path)) < 5:
        assert time.monotonic() < deadline, finish(running, 1)
        time.sleep(0.1)
    three_hosts.cut(1)
    try:
        begun = time.monotonic()
        ended = finish(running, 90)
        took = time.monotonic() - begun
    finally:
        three_hosts.join(1)
    assert all(code not in (0, -9) or kind == "torchrun" for code, _ in ended), ended
    assert took < (35 if kind == "ours" else 60), "the time-out and the launcher's own patience"
    texts = [" ".join(last_block(output)) for _, output in ended]
    assert "node 1 (" in texts[0], ended[0][1]
    assert f"{three_hosts.address(1)}) does not answer" in texts[0]
    assert f"{three_hosts.address(0)}) does not answer" in texts[1]
    assert [processes.of_run(f"{tmp_path.name}-{number}") for number in range(2)] == [[], []]
