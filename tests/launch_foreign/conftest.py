"""A SLURM and hosts of its own for the whole session, where the machine can have them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch_foreign import cluster, hosts


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Cluster]:
    if reason := cluster.why_not():
        pytest.skip(reason)
    running = cluster.start(tmp_path_factory.mktemp("slurm"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[hosts.Hosts]:
    if reason := hosts.why_not():
        pytest.skip(reason)
    network = hosts.Hosts(3)
    try:
        network.up()
        yield network
    finally:
        network.down()
