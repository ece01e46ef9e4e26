"""lockstep logs: the workers' words, once or as they come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep import status
from lockstep.errors import NotFoundError
from tests.run_player import heartbeat, make, playing


@pytest.fixture
def runs(in_dir: Path) -> Path:
    return in_dir / "runs"


def say_into(root: Path, worker: str, text: str, name: str = "log.txt") -> Path:
    folder = root / "workers" / worker
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(text)
    return folder / name


def shown(*, gpu: int | None = None, lines: int = 50) -> list[str]:
    said: list[str] = []
    assert status.logs(Path("runs/mine"), gpu=gpu, lines=lines, say=said.append) == 0
    return said


def test_the_last_lines_of_one_worker(runs: Path) -> None:
    root = make(runs / "mine")
    say_into(root, "n0-GPU2", "".join(f"line {at}\n" for at in range(100_000)) + "no end yet")
    assert shown(gpu=2, lines=2) == ["line 99998", "line 99999", "no end yet"]
    assert len(shown(gpu=2, lines=0)) == 100_001
    assert shown(lines=1) == ["line 99999", "no end yet"], "a log of its own says whose it is"


def test_what_the_launcher_caught_comes_first(runs: Path) -> None:
    root = make(runs / "mine")
    say_into(root, "n0-GPU0", "the log\n")
    say_into(root, "n0-GPU0", "everything\n", "output.txt")
    assert shown() == ["[GPU0] everything"], "as on the screen, however many workers there are"
    assert shown(gpu=0) == ["everything"]
    say_into(root, "n0-GPU1", "more\n", "output.txt")
    assert shown() == ["[GPU0] everything", "[GPU1] more"]


def test_several_workers_are_merged_by_time_and_labelled(runs: Path) -> None:
    root = make(runs / "mine")
    say_into(root, "n0-GPU0", "2026-01-01 10:00:00 | a\nmore of a\n2026-01-01 10:00:02 | c\n")
    say_into(root, "n1-GPU0", "2026-01-01 10:00:01 | b\n")
    assert shown() == [
        "[GPU0] 2026-01-01 10:00:00 | a",
        "[GPU0] more of a",
        "[n1-GPU0] 2026-01-01 10:00:01 | b",
        "[GPU0] 2026-01-01 10:00:02 | c",
    ]
    say_into(root, "n0-GPU1", "no time at all\n")
    assert shown()[-1] == "[n1-GPU0] 2026-01-01 10:00:01 | b", "without times: worker by worker"


def test_a_terminal_is_not_obeyed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_logs")
    say_into(make(runs / "mine"), "n0-GPU0", "\x1b]0;title\x07hello \x1b[31mhf_canary_logs\n")
    assert shown() == ["hello ***"]


def test_what_is_not_there(runs: Path) -> None:
    root = make(runs / "mine")
    with pytest.raises(NotFoundError, match="no log yet"):
        shown()
    say_into(root, "n0-GPU0", "x\n")
    say_into(root, "n0-GPU3", "x\n")
    with pytest.raises(NotFoundError, match="no log of GPU 7") as caught:
        shown(gpu=7)
    assert caught.value.hint == "this run has GPU0, GPU3"
    assert shown(gpu=3) == ["x"]


def test_a_worker_that_never_comes_is_not_waited_for(runs: Path) -> None:
    with playing(runs / "mine"):
        heartbeat(runs / "mine", "n0-GPU0", section="data")
        with pytest.raises(NotFoundError, match="no log of GPU 7"):
            status.logs(runs / "mine", gpu=7, follow=True, say=print)


# ------------------------------------------------------------------------------------------------ following


@pytest.fixture
def following() -> Iterator[Callable[..., tuple[list[str], threading.Thread]]]:
    """Start `logs --follow` in a thread."""
    threads: list[threading.Thread] = []

    def begin(gpu: int | None = None) -> tuple[list[str], threading.Thread]:
        said: list[str] = []
        options = {"gpu": gpu, "follow": True, "say": said.append}
        threads.append(
            threading.Thread(target=status.logs, args=(Path("runs/mine").absolute(),), kwargs=options, daemon=True)
        )
        threads[-1].start()
        return said, threads[-1]

    yield begin
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive(), "it ends with the run"


def until(said: list[str], text: str) -> None:
    end = time.monotonic() + 10
    while text not in said and time.monotonic() < end:
        time.sleep(0.01)
    assert text in said


def test_follow_from_before_the_first_word_to_the_end(
    runs: Path, following: Callable[..., tuple[list[str], threading.Thread]]
) -> None:
    root = runs / "mine"
    with playing(root) as child:
        said, thread = following()
        time.sleep(0.3)
        log = say_into(root, "n0-GPU0", "first\n")  # the worker's folder was not there when we began
        until(said, "first")
        say_into(root, "n0-GPU0", "half")
        time.sleep(0.5)
        assert "half" not in said, "a line is shown when it is whole"
        say_into(root, "n0-GPU0", " and half\n")
        until(said, "half and half")
        log.write_text("cut\n", encoding="utf-8")
        until(said, "cut")
        log.with_name("new").write_text("another file of that name\n", encoding="utf-8")
        log.with_name("new").replace(log)
        until(said, "another file of that name")
        say_into(root, "n0-GPU1", "late\n")
        until(said, "[GPU1] late")
        say_into(root, "n0-GPU0", "last words, no line end")
        child.kill()
        child.wait()
        thread.join(timeout=10)
    assert said[-1] == "[GPU0] last words, no line end"
    assert said.count("first") == 1


def test_a_run_that_has_ended_is_not_waited_for(runs: Path) -> None:
    say_into(make(runs / "mine", {"kind": "end", "exit_code": 0}), "n0-GPU0", "done\n")
    said: list[str] = []
    assert status.logs(runs / "mine", follow=True, say=said.append) == 0
    assert said == ["done"]


def test_ctrl_c_is_a_quiet_way_out(runs: Path, in_dir: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom lockstep.status import logs\n"
        "sys.exit(logs(Path('runs/mine'), follow=True, say=lambda line: print(line, flush=True)))"
    )
    with playing(runs / "mine"):
        say_into(runs / "mine", "n0-GPU0", "hello\n")
        child = subprocess.Popen(
            [sys.executable, "-c", code], cwd=in_dir, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert child.stdout
        assert child.stdout.readline() == "hello\n"
        os.kill(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=10)
    assert child.returncode == 130
    assert errors == ""
