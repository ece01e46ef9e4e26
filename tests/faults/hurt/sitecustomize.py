"""Hurts a real worker where LOCKSTEP_FAULT cannot reach: as it enters a section. Python loads it at its start.

HURT=HOW:SECTION:RANK:STEP, with the folder of this file on PYTHONPATH. Strikes once.
HURT_ORDERS=FOLDER: strikes whenever somebody puts a file there that is called by the rank and holds HOW:SECTION. An
order is gone before it strikes, so that whoever comes after it is not struck again.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

FOREVER_SECONDS = 3600
ROOM_BYTES = 64 << 20
PIECE_BYTES = 1 << 30


def stop_launcher() -> None:
    os.kill(int(os.environ["LOCKSTEP_LAUNCHER_PID"]), signal.SIGTERM)


def exceed_limit() -> None:
    """As much address space as there is now and a little more; then one piece that does not fit."""
    import torch

    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - before pathlib is there
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    torch.empty(PIECE_BYTES, dtype=torch.uint8)


def eat() -> None:
    """Memory until the kernel has enough of it."""
    held: list[bytes] = []
    while True:
        held.append(b"x" * (8 << 20))


def run_out_on_device() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of 79.1 GiB")


def run_away() -> None:
    """A child in a session of its own that is nobody's."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", f"import time; time.sleep({FOREVER_SECONDS})"])
        os._exit(0)
    os.wait()


def write_raw() -> None:
    """What a C library writes: past Python, to the descriptor."""
    os.write(1, f"NCCL INFO of rank {os.environ['RANK']}: {os.environ.get('NCCL_DEBUG')}\n".encode())


def hold_lock() -> None:
    """For ever in C, with the interpreter's lock: a mutex locked twice, which no signal interrupts."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def jump_clock() -> None:
    """The wall clock goes back by a day, as by a time server."""
    real = time.time
    time.time = lambda: real() - 86400


def fail() -> None:
    raise RuntimeError("hurt: an exception from deep inside")


HOWS: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(FOREVER_SECONDS),
    "gil": hold_lock,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "term": stop_launcher,
    "limit": exceed_limit,
    "eat": eat,
    "device": run_out_on_device,
    "daemon": run_away,
    "raw": write_raw,
    "clock": jump_clock,
    "raise": fail,
    "exit0": lambda: sys.exit(0),
    "exit7": lambda: sys.exit(7),
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
}


def hurt(text: str) -> None:
    """Strike when the worker of that rank enters that section of that step."""
    how, section, rank, step = text.split(":")
    if os.environ.get("RANK") != rank:
        return
    from lockstep.launch.link import Link

    enter = Link.enter
    at = [-1]
    struck: list[bool] = []

    def enter_hurt(self: Link, name: str, number: int = -1) -> None:
        enter(self, name, number)
        at[0] = number if number >= 0 else at[0]
        if name == section and at[0] >= int(step) and not struck:
            struck.append(True)
            HOWS[how]()

    Link.enter = enter_hurt


def obey(folder: str) -> None:
    """Strike whenever an order for this rank names the section that is entered."""
    from pathlib import Path

    from lockstep.launch.link import Link

    enter, order = Link.enter, Path(folder) / os.environ["RANK"]

    def enter_hurt(self: Link, section: str, step: int = -1) -> None:
        enter(self, section, step)
        if order.exists():
            how, _, wanted = order.read_text(encoding="ascii").partition(":")
            if section == wanted:
                order.unlink()
                HOWS[how]()

    Link.enter = enter_hurt


if "HURT_ORDERS" in os.environ and "RANK" in os.environ:
    obey(os.environ["HURT_ORDERS"])
if "HURT" in os.environ:
    hurt(os.environ["HURT"])
