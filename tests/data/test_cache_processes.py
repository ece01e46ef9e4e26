"""The cache between processes: one builds, the others wait; builders that die; users who may not write."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lockstep.data import builders
from lockstep.data.cache import check, clean, key_of, open_or_build
from tests.data.small_cache import KEY, content, fill, never

TOP = Path(__file__).parents[2]  # where the processes find this folder

AS_NOBODY = """
import mmap, os, sys  # mmap now: later this user may not even read Python
from pathlib import Path
from lockstep.data.cache import clean, open_or_build
from lockstep.errors import LockstepError
from tests.data.small_cache import fill
if os.geteuid() == 0:  # root ignores modes
    os.setgid(65534); os.setuid(65534)
try:
    root, key = Path(sys.argv[1]), sys.argv[2]
    print(clean(root) if key == "clean" else open_or_build(key, [root], fill)[1])
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
        kept = subprocess.run([*command, "clean"], capture_output=True, text=True, check=True, cwd=TOP)
        assert (root / KEY).is_dir()
        root.chmod(0o755)
        Path(top).chmod(0o700)
        hidden = subprocess.run([*command, KEY], capture_output=True, text=True, check=True, cwd=TOP)
    assert opened.stdout == "False\n"
    assert refused.stdout.startswith(f"73 {root}: ")
    assert "DATASET_CACHE_DIR" in refused.stdout
    assert kept.stdout.startswith(f"73 {root}: the dataset cache cannot be removed")
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
    end = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < end and not Path(sys.argv[1], "enough").exists():
        time.sleep(0.05)
print("built" if open_or_build(sys.argv[2], [Path(sys.argv[1])], fill)[1] else "opened", flush=True)
"""


def start(root: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(root), KEY, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TOP)


def test_one_builds_and_the_other_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items 36 and 39 and faults row 29: who waits hears for whom and for how long; one that is stopped is alive."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(builders, "WAIT_MESSAGE_SECONDS", 0.5)
    builder = start(tmp_path, 120.0)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    builder.send_signal(signal.SIGSTOP)
    opened: list[bool] = []
    waiter = threading.Thread(target=lambda: opened.append(open_or_build(KEY, [tmp_path], never)[1]))
    waiter.start()
    end = time.monotonic() + 60
    while "for 1 s" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    builder.send_signal(signal.SIGCONT)
    (tmp_path / "enough").touch()
    waiter.join(60)
    assert builder.communicate(timeout=60)[0] == "built\n"
    who = f"[Cache] waiting for process {builder.pid} on {socket.gethostname()}, who is building {tmp_path / KEY}"
    assert who in caplog.messages
    assert f"{who}, for 1 s" in caplog.messages
    assert opened == [False]


def test_a_killed_builder_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items 37 and 39: no half cache, the lock is free at once, the leftovers are swept."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(builders, "WAIT_MESSAGE_SECONDS", 0.0)
    builder = start(tmp_path, 60.0)
    assert builder.stdout is not None
    builder.stdout.readline()
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    assert list(tmp_path.glob(f"{KEY}.tmp-*"))
    assert not (tmp_path / KEY).exists()
    folder, built = open_or_build(KEY, [tmp_path], fill)
    assert built
    assert "waiting for" not in caplog.text
    assert not list(tmp_path.glob("*.tmp-*"))
    check(folder)


def eight_at_once(root: Path, expected: dict[str, bytes]) -> None:
    """Item 36 and faults row 29: one build, eight successes, the same bytes."""
    processes = [start(root, 0.1) for _ in range(8)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert sorted(out.splitlines()[-1] for out in outputs) == ["built", *["opened"] * 7]
    assert sum(out.count("building\n") for out in outputs) == 1
    assert content(root / KEY) == expected
    assert sorted(path.name for path in root.iterdir()) == [KEY, f"{KEY}.lock"]


def built_alone(root: Path) -> dict[str, bytes]:
    return content(open_or_build(KEY, [root], fill)[0])


@pytest.mark.slow
def test_eight_at_once(tmp_path: Path) -> None:
    expected = built_alone(tmp_path / "alone")
    for attempt in range(100):
        eight_at_once(tmp_path / str(attempt), expected)


def test_eight_at_once_the_first_time(tmp_path: Path) -> None:
    eight_at_once(tmp_path / "root", built_alone(tmp_path / "alone"))


def killed_while_building(root: Path, expected: dict[str, bytes], *, waiting: int) -> int:
    """Whoever builds is killed at a random moment, somebody else builds, none hangs; how many were killed in time."""
    processes = {process.pid: process for process in (start(root, 0.4) for _ in range(1 + waiting))}
    while not (root / f"{KEY}.builder").exists():
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.4))
    victim, published, killed = 0, False, 0
    with contextlib.suppress(FileNotFoundError):
        victim = json.loads((root / f"{KEY}.builder").read_text(encoding="utf-8"))["pid"]
        processes[victim].send_signal(signal.SIGKILL)
        killed = int(processes[victim].wait() == -signal.SIGKILL)
        published = (root / KEY).exists()
    outputs = {pid: process.communicate(timeout=60)[0] for pid, process in processes.items()}
    last = outputs.pop(victim, "")
    assert all(out.endswith(("built\n", "opened\n")) for out in outputs.values())
    if waiting:
        unsaid = published and last.endswith("building\n")  # killed between publishing and saying so
        assert sum(out.endswith("built\n") for out in [last, *outputs.values()]) == (0 if unsaid else 1)
    folder, _ = open_or_build(KEY, [root], fill)
    assert content(folder) == expected
    assert not list(root.glob("*.tmp-*"))
    return killed


@pytest.mark.slow
@pytest.mark.parametrize(("waiting", "times"), [(7, 12), (1, 50)])
def test_builders_killed_at_random(tmp_path: Path, waiting: int, times: int) -> None:
    """Faults row 29: the next takes over, and the bytes are those of a build that nobody disturbed."""
    random.seed(1)
    expected = built_alone(tmp_path / "alone")
    kills = 0
    for attempt in range(4 * times):  # some are done before they are hit: those do not count
        if kills < times:
            kills += killed_while_building(tmp_path / str(attempt), expected, waiting=waiting)
    assert kills == times


def test_clean_leaves_what_is_being_built(tmp_path: Path) -> None:
    builder = start(tmp_path, 120.0)
    assert builder.stdout is not None
    builder.stdout.readline()
    assert clean(tmp_path) == []
    (tmp_path / "enough").touch()
    assert builder.communicate(timeout=30)[0] == "built\n"
