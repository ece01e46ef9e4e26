"""Row 31: a port that is taken is refused by its number and its holder, every time and at once."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lockstep.errors import ConfigError, ExitCode
from lockstep.runtime import env

KNOWN = (12355, 29500)  # the ports that launchers hard-code
TIMES = 50
HOLD = """
import socket, sys
held = []
for port in map(int, sys.argv[1:]):
    try:
        held.append(socket.create_server(("", port)))
    except OSError:
        continue
print(*(one.getsockname()[1] for one in held), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def held() -> Iterator[tuple[int, list[int]]]:
    """(another process, the ports it listens on): the known ones where they are free, and one that always is."""
    command = [sys.executable, "-S", "-c", HOLD, *map(str, KNOWN), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process.pid, [int(word) for word in process.stdout.readline().split()]
        process.communicate()


def test_a_taken_port_is_refused_fifty_times_of_fifty(held: tuple[int, list[int]]) -> None:
    pid, ports = held
    assert ports
    begin = time.monotonic()
    said: list[str] = []
    for number in range(TIMES):
        port = ports[number % len(ports)]
        with pytest.raises(ConfigError) as caught:
            env.check_port(port)
        assert caught.value.exit_code == ExitCode.USAGE
        said.append(str(caught.value))
        assert f"port {port} is taken by process {pid}" in said[-1]
        assert caught.value.hint
    assert len(said) == TIMES
    assert time.monotonic() - begin < 30, "the limit of item 99 for one, kept by fifty"


def test_a_free_port_is_never_refused(held: tuple[int, list[int]]) -> None:
    """The control: the same question about ports nobody holds; it leaves nothing behind that would hold them."""
    taken = held[1]
    for _ in range(TIMES):
        port = env.free_port()
        assert port not in taken
        env.check_port(port)
        env.check_port(port)
        socket.create_server(("127.0.0.1", port)).close()


def test_the_holder_is_named_only_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's process, or one beyond this container: the port is enough."""
    import psutil

    monkeypatch.setattr(psutil, "net_connections", lambda **_: [])
    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigError) as caught:
        env.check_port(taken.getsockname()[1])
    assert re.search(r"port \d+ is taken(?! by)", str(caught.value))
    assert str(os.getpid()) not in str(caught.value)
