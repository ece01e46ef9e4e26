"""Hosts with addresses of their own: several nodes train as one, and a cut cable ends them all and is named."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache as once
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
OneNode = Callable[[int], dict[int, tuple[str, str]]]


SELDOM = ("training.eval_interval=100000", "training.save_interval=100000")


def begin(
    kind: str, hosts: Hosts, folder: Path, *words: str, nodes: int, gpus: int, steps: int
) -> list[subprocess.Popen[str]]:
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [
        hosts.start(
            number,
            *STARTS[kind](hosts, number, nodes, gpus),
            *words,
            "--training.max_steps",
            str(steps),
            cwd=folder,
            variables=variables | {processes.RUN_ID: f"{folder.name}-{number}"},  # a launcher's own mark
        )
        for number in range(nodes)
    ]


def losses_of(folder: Path) -> dict[int, tuple[str, str]]:
    """Step -> (loss, gradient norm), to the bit."""
    path = folder / "runs/many/events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {event["step"]: (event["loss_hex"], event["grad_norm_hex"]) for event in events if event["kind"] == "step"}


@pytest.fixture(scope="module")
def one_node(three_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> OneNode:
    """World size -> the losses of so many workers on a single machine; each is run once."""

    @once
    def run(world: int) -> dict[int, tuple[str, str]]:
        folder = tmp_path_factory.mktemp(f"world{world}")
        ((code, output),) = finish(begin("ours", three_hosts, folder, nodes=1, gpus=world, steps=10), 90)
        assert code == 0, output
        return losses_of(folder)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "nodes", "gpus"), [("ours", 3, 1), ("ours", 2, 2), ("torchrun", 3, 1), ("torchrun", 2, 2)]
)
def test_nodes_train_as_one(
    kind: str, nodes: int, gpus: int, three_hosts: Hosts, tmp_path: Path, shared_cache: Path, one_node: OneNode
) -> None:
    """To the bit what one machine with as many workers does."""
    ended = finish(begin(kind, three_hosts, tmp_path, nodes=nodes, gpus=gpus, steps=10), 90)
    assert [code for code, _ in ended] == [0] * nodes, "\n".join(output for _, output in ended)
    assert sorted(losses_of(tmp_path)) == list(range(10))
    assert losses_of(tmp_path) == one_node(nodes * gpus)
    assert sum(output.count("Starting experiment") for _, output in ended) == 1


def check_codes(kind: str, ended: list[tuple[int, str]], lost: int) -> None:
    """Ours says what it was. torchrun makes 1 of every code where it reaches its store, which is on node 0; where it
    does not it waits for ever, and is ended when its workers are gone."""
    for number, (code, output) in enumerate(ended):
        reaches = number == 0 or lost not in (0, number)
        allowed = {124} if kind == "ours" else {1} if reaches else {1, -signal.SIGTERM, -signal.SIGKILL}
        assert code in allowed, f"node {number}: exit code {code}\n{output}"


def cut_while_training(
    kind: str, hosts: Hosts, folder: Path, *words: str, nodes: int, lost: int
) -> list[tuple[int, str]]:
    """Pull the cable of one of several nodes; all end in time and leave nobody. Their exit codes and outputs."""
    running = begin(kind, hosts, folder, *words, nodes=nodes, gpus=1, steps=100_000)
    deadline = time.monotonic() + 90
    while len(losses_of(folder)) < 5:
        assert time.monotonic() < deadline, finish(running, 1)
        time.sleep(0.1)
    hosts.cut(lost)
    try:
        begun = time.monotonic()
        ended = finish(running, 90)
        took = time.monotonic() - begun
    finally:
        hosts.join(lost)
    print(f"\n{kind}, {nodes} nodes: {took:.1f} s, exit codes {[code for code, _ in ended]}")
    assert took < (35 if kind == "ours" else 60), "the time-out and the launcher's own patience"
    assert [processes.of_run(f"{folder.name}-{number}") for number in range(nodes)] == [[]] * nodes
    return ended


@pytest.mark.slow  # by default with stubs: tests/launch/test_agents.py
@pytest.mark.parametrize("kind", ["ours", "torchrun"])
def test_a_cut_cable_ends_every_node_and_is_named(
    kind: str, three_hosts: Hosts, tmp_path: Path, shared_cache: Path
) -> None:
    ended = cut_while_training(kind, three_hosts, tmp_path, *SELDOM, nodes=2, lost=1)
    check_codes(kind, ended, 1)
    texts = [" ".join(last_block(output)) for _, output in ended]
    assert f"node 1 ({three_hosts.name(1)}" in texts[0], ended[0][1]
    assert f"{three_hosts.address(1)}) does not answer" in texts[0]
    assert f"{three_hosts.address(0)}) does not answer" in texts[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", list(STARTS))
@pytest.mark.parametrize("lost", [2, 1, 0])
def test_one_of_three_is_cut_off(kind: str, lost: int, three_hosts: Hosts, tmp_path: Path, shared_cache: Path) -> None:
    """The two that are left name the third, and not each other; the third misses the others."""
    ended = cut_while_training(kind, three_hosts, tmp_path, *SELDOM, nodes=3, lost=lost)
    check_codes(kind, ended, lost)
    for number, (_, output) in enumerate(ended):
        told = " ".join(last_block(output))
        silent = {other for other in range(3) if f"{three_hosts.address(other)}) does not answer" in told}
        others = set(range(3)) - {number}
        assert silent, output
        assert silent <= ({lost} if number != lost else others), f"node {number}: {told}"
        assert all(f"node {other} ({three_hosts.name(other)}" in told for other in silent)


OFTEN = {
    "evaluate": ("training.eval_interval=1", "training.eval_batches=20", "training.save_interval=100000"),
    "save": ("training.save_interval=1", "training.eval_interval=100000"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(STARTS))
@pytest.mark.parametrize("section", list(OFTEN))
def test_the_missing_node_is_named_whatever_it_was_waited_for_in(
    kind: str, section: str, three_hosts: Hosts, tmp_path: Path, shared_cache: Path
) -> None:
    """Nodes wait for each other while they validate and save too."""
    ended = cut_while_training(kind, three_hosts, tmp_path, *OFTEN[section], nodes=2, lost=1)
    check_codes(kind, ended, 1)
    for number, (_, output) in enumerate(ended):
        told = " ".join(last_block(output))
        assert f"{three_hosts.address(1 - number)}) does not answer" in told, output
