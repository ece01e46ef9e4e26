"""The cache between processes: one builds, the others wait; builders that die; users who may not write."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lockstep.data.cache import check, clean, key_of, open_or_build
from tests.data.small_cache import KEY, fill

TOP = Path(__file__).parents[2]  # where the processes find this folder

AS_NOBODY = """
import mmap, os, sys  # mmap now: later this user may not even read Python
from pathlib import Path
from lockstep.data.cache import open_or_build
from lockstep.errors import LockstepError
from tests.data.small_cache import fill
if os.geteuid() == 0:  # root ignores modes
    os.setgid(65534); os.setuid(65534)
try:
    print(open_or_build(sys.argv[2], [Path(sys.argv[1])], fill)[1])
except LockstepError as error:
    print(int(error.exit_code), error)
"""


def test_read_only_places() -> None:
    """Faults row 30: a complete cache may be read-only; an incomplete one is refused at once, naming the place."""
    with tempfile.TemporaryDirectory() as top:  # pytest's own folders are closed to other users
        root = Path(top) / "root"
        open_or_build(KEY, [root], fill)
        Path(top).chmod(0o755)
        root.chmod(0o555)
        command = [sys.executable, "-c", AS_NOBODY, str(root)]
        opened = subprocess.run([*command, KEY], capture_output=True, text=True, check=True, cwd=TOP)
        refused = subprocess.run([*command, key_of({"a": 2})], capture_output=True, text=True, check=True, cwd=TOP)
        root.chmod(0o755)
        Path(top).chmod(0o700)
        hidden = subprocess.run([*command, KEY], capture_output=True, text=True, check=True, cwd=TOP)
    assert opened.stdout == "False\n"
    assert refused.stdout.startswith(f"73 {root}: ")
    assert "DATASET_CACHE_DIR" in refused.stdout
    if os.geteuid() == 0:
        assert hidden.stdout.startswith(f"73 {root}: ")


BUILDER = """
import logging, sys, time
from pathlib import Path
from lockstep.data.cache import open_or_build
from tests.data import small_cache
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
def fill(folder):
    small_cache.fill(folder)
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
print("built" if open_or_build(sys.argv[2], [Path(sys.argv[1])], fill)[1] else "opened", flush=True)
"""


def start(root: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(root), KEY, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TOP)


def test_one_builds_and_the_other_waits_for_it(tmp_path: Path) -> None:
    """Item 36 and faults row 29, with two processes."""
    builder = start(tmp_path, 1.0)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    waiter = start(tmp_path, 0.0)
    waited, _ = waiter.communicate(timeout=30)
    built, _ = builder.communicate(timeout=30)
    assert built == "built\n"
    assert f"waiting for process {builder.pid} on " in waited
    assert waited.endswith("opened\n")
    assert (builder.returncode, waiter.returncode) == (0, 0)


def test_a_killed_builder_is_replaced(tmp_path: Path) -> None:
    """Items 37 and 39: no half cache, the lock is free at once, the leftovers are swept."""
    builder = start(tmp_path, 60.0)
    assert builder.stdout is not None
    builder.stdout.readline()
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    assert list(tmp_path.glob(f"{KEY}.tmp-*"))
    assert not (tmp_path / KEY).exists()
    begun = time.perf_counter()
    folder, built = open_or_build(KEY, [tmp_path], fill)
    assert built
    assert time.perf_counter() - begun < 2
    assert not list(tmp_path.glob("*.tmp-*"))
    check(folder)


@pytest.mark.slow
def test_eight_at_once_with_kills(tmp_path: Path) -> None:
    """Faults row 29: eight start together, whoever builds is killed at a random moment, another builds, none hangs."""
    random.seed(1)
    kills = 0
    for attempt in range(12):
        root = tmp_path / str(attempt)
        processes = {process.pid: process for process in (start(root, 0.4) for _ in range(8))}
        while not (root / f"{KEY}.builder").exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.4))
        victim, published = 0, False
        with contextlib.suppress(FileNotFoundError):
            victim = json.loads((root / f"{KEY}.builder").read_text(encoding="utf-8"))["pid"]
            processes[victim].send_signal(signal.SIGKILL)
            kills += processes[victim].wait() == -signal.SIGKILL
            published = (root / KEY).exists()
        outputs = {pid: process.communicate(timeout=60)[0] for pid, process in processes.items()}
        last = outputs.pop(victim, "")
        assert all(out.endswith(("built\n", "opened\n")) for out in outputs.values())
        unsaid = published and last.endswith("building\n")  # killed between publishing and saying so
        assert sum(out.endswith("built\n") for out in [last, *outputs.values()]) == (0 if unsaid else 1)
        check(root / KEY)
        assert not list(root.glob("*.tmp-*"))
    assert kills >= 6


def test_clean_leaves_what_is_being_built(tmp_path: Path) -> None:
    builder = start(tmp_path, 0.7)
    assert builder.stdout is not None
    builder.stdout.readline()
    assert clean(tmp_path) == []
    assert builder.communicate(timeout=30)[0] == "built\n"
