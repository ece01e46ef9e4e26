"""Where to find one worker of each node, so that a node that fell silent can be named."""

from __future__ import annotations

import socket
from typing import Any

from lockstep.runtime import env
from lockstep.runtime.env import Env
from lockstep.runtime.group import Group

BACKLOG = 64  # callers the kernel greets for us: nobody ever answers them, a greeting is all they want


class Doorbell:
    """A socket that listens while this worker lives. The kernel does the answering, also while Python is busy."""

    def __init__(self, address: str) -> None:
        self.socket = socket.create_server((address, 0), family=_family(address), backlog=BACKLOG)
        self.port: int = self.socket.getsockname()[1]

    def close(self) -> None:
        self.socket.close()


def gather(place: Env, group: Group) -> tuple[Doorbell | None, list[dict[str, Any]]]:
    """This worker's doorbell, if it is the first of its node, and how to ring at each node. Nothing on one node."""
    if place.nodes == 1:
        return None, []
    bell, mine = None, None
    if place.local_rank == 0:
        address = own_address(*env.rendezvous(place))
        bell = Doorbell(address)
        mine = {"node": place.node, "host": socket.gethostname(), "address": address, "port": bell.port}
    return bell, [each for each in group.gather(mine) if each]


def own_address(towards: str, port: int) -> str:
    """The address under which that one sees us; asks only the routing table."""
    family = _family(towards)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))
        return str(probe.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
