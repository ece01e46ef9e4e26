"""How programs end: closed and full streams, second Ctrl-Cs, crashes; for `lockstep` and for the documented scripts."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import cli, compat, guard
from lockstep.errors import ExitCode, LockstepError, Stopped
from lockstep.report.logs import close_logging
from lockstep.runtime.env import Env

Program = Callable[[], int]
MAINS: dict[str, Callable[[list[str]], int]] = {
    "cli": cli.main,
    "compat": lambda words: compat.main("pretrain_main.py", words),
}


@pytest.fixture
def sigint() -> Iterator[Callable[[], None]]:
    """A function that presses Ctrl-C; the handler of this process is put back at the end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def raising(error: BaseException) -> Program:
    def program() -> int:
        raise error

    return program


# ------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("main", MAINS.values(), ids=MAINS)
@pytest.mark.parametrize("words", [["--help"], ["--preset", "nonsense"]])
def test_closed_streams_lead_nowhere(
    main: Callable[[list[str]], int], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lockstep --help >&- 2>&-`: Python then has None for both."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    code = main(words)
    opened = [sys.stdout, sys.stderr]
    try:
        assert code == (0 if words == ["--help"] else 2)
        assert [stream.name for stream in opened] == [os.devnull] * 2
    finally:
        for stream in opened:
            stream.close()


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """Without any stream the next files opened would be 0, 1 and 2, and a library's warnings would land in them."""
    ask = "import os; from lockstep import guard; guard.run(lambda: 0, []); mine = open('mine', 'w')"
    ask += "; print(mine.fileno() > 2, *[os.readlink(f'/proc/self/fd/{each}') for each in range(3)], file=mine)"
    subprocess.run(["bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, ask], cwd=tmp_path, check=True)
    assert (tmp_path / "mine").read_text().split() == ["True", os.devnull, os.devnull, os.devnull]


def test_a_folder_that_is_gone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone").mkdir()
    here = Path.cwd()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        assert cli.main(["families"]) == 66
    finally:
        os.chdir(here)
    assert (
        capfd.readouterr().err
        == "lockstep: error: the folder this was started in is gone\n  try: cd to one that is there\n"
    )


@pytest.mark.parametrize("words", [["--help"], ["config", "show", "llama", "tiny"], ["config", "schema"]])
def test_a_full_disk_is_one_line_and_exit_74(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The schema is longer than a buffer, the help shorter: one fails while it is written, one when it is flushed."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(words) == 74
    assert capfd.readouterr().err == "lockstep: error: standard output: cannot write: No space left on device\n"


def test_help_of_argparse_is_noticed_too(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for main in MAINS.values():
        with Path("/dev/full").open("w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert main(["train", "--help"] if main is cli.main else ["--help"]) == 74
    assert capfd.readouterr().err.count("No space left on device") == 2


def test_an_error_stream_that_takes_nothing_changes_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert cli.main(["nonsense"]) == 2


def test_a_launcher_goes_on_where_its_lines_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart is made although `[RESTART]` finds no place; said once. A reader that went away is another matter."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        guard.mention("one line")
        guard.mention("another")
    assert capsys.readouterr().err == (
        "lockstep: standard output: cannot write: No space left on device. Training goes on without it\n"
    )
    monkeypatch.setattr(guard, "say", raising(BrokenPipeError()))
    with pytest.raises(BrokenPipeError):
        guard.mention()


def test_variables_that_were_left_over_make_no_worker_of_a_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` in a shell where RANK was exported: its error alone, and no guardian beside it."""
    monkeypatch.setattr("lockstep.launch.link.attach", lambda _place: pytest.fail("became a worker"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["status", "nosuch"]) == ExitCode.NOT_FOUND
    assert "nosuch" in capsys.readouterr().err


def test_as_a_process_with_no_or_a_full_standard_output() -> None:
    """The end of the interpreter flushes once more: nothing may be left then."""
    for words, redirect, code, said in (
        ("--help", ">&-", 0, ""),
        ("config list", ">/dev/full", 74, "lockstep: error: standard output: cannot write: No space left on device\n"),
    ):
        command = f'"{sys.executable}" -m lockstep {words} {redirect}'
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (answer.returncode, answer.stderr) == (code, said)


# ------------------------------------------------------------------------------------------------ Ctrl-C


def test_a_second_ctrl_c_does_not_change_how_a_stop_ends(sigint: Callable[[], None]) -> None:
    told: list[str] = []

    def tell(text: str, _: guard.Kind) -> None:
        sigint()
        told.append(text)

    stopped = Stopped(
        "stopped by SIGTERM", where="runs/x", hint="lockstep resume runs/x", exit_code=ExitCode.TERMINATED
    )
    assert guard.run(raising(stopped), (), tell) == 143
    assert told == ["stopped by SIGTERM (runs/x)\n  try: lockstep resume runs/x"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "a caller keeps its Ctrl-C"
    with pytest.raises(KeyboardInterrupt):  # the fault is real: without the guard this is what happens
        tell("", "stopped")


def test_nothing_changes_the_code_once_the_program_is_over(sigint: Callable[[], None]) -> None:
    with pytest.raises(SystemExit) as left:
        guard.leave(lambda: 143)
    sigint()
    assert left.value.code == 143
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as left:
        guard.leave(raising(KeyboardInterrupt()))
    assert left.value.code == 130


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    codes: list[int] = []
    worker = threading.Thread(target=lambda: codes.append(guard.run(raising(KeyboardInterrupt()), (), lambda *_: None)))
    worker.start()
    worker.join()
    assert codes == [130]


def test_the_programs_leave_through_the_guard() -> None:
    """An exit handler that presses Ctrl-C is felt after a plain `sys.exit(main())`, and not after ours."""
    late = "import atexit, os, signal, sys; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); "
    ours = "from lockstep.cli import entry; sys.argv = ['lockstep', '--version']; entry()"
    plain = "from lockstep.cli import main; sys.exit(main(['--version']))"
    guarded, bare = (
        subprocess.run([sys.executable, "-c", late + end], capture_output=True).stderr for end in (ours, plain)
    )
    assert guarded == b""
    assert b"KeyboardInterrupt" in bare, "the test can tell them apart"


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("error", "code", "kind", "said"),
    [
        (LockstepError("what", where="w", hint="h"), 1, "error", "w: what\n  try: h"),
        (Stopped("stopped by SIGINT", exit_code=ExitCode.INTERRUPTED), 130, "stopped", "stopped by SIGINT"),
        (KeyboardInterrupt(), 130, "stopped", "interrupted"),
        (ModuleNotFoundError("x", name="h5py.sub"), 1, "error", f"{sys.executable} has no package 'h5py.sub'"),
        (ModuleNotFoundError("x", name="lockstep.gone"), 1, "crash", "unexpected ModuleNotFoundError: x"),
        (ZeroDivisionError("x"), 1, "crash", "unexpected ZeroDivisionError: x"),
    ],
)
def test_every_way_out(
    error: BaseException, code: int, kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told: list[tuple[str, str]] = []
    assert guard.run(raising(error), (), lambda text, how: told.append((text, how))) == code
    ((text, how),) = told
    assert how == kind
    assert text.startswith(said)


def test_the_launcher_hears_all_of_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Mapping[str, Any]] = []
    monkeypatch.setattr(guard, "_place", lambda: Env(launcher="torchrun"))
    monkeypatch.setattr("lockstep.launch.link.attach", lambda _: SimpleNamespace(fail=told.append))
    for error in (LockstepError("two\n    lines", where="w", hint="h"), ValueError("one\nof many"), ValueError()):
        guard.run(raising(error), (), lambda *_: None)
    assert [record["cause"] for record in told] == ["w: two lines", "one", "ValueError"]


def test_a_broken_pipe_is_silent() -> None:
    assert guard.run(raising(BrokenPipeError()), (), lambda *_: pytest.fail("said something")) == 141


def test_what_is_no_ending_passes_through() -> None:
    with pytest.raises(GeneratorExit):
        guard.run(raising(GeneratorExit()), ())


@pytest.mark.parametrize("main", MAINS.values(), ids=MAINS)
def test_a_crash_report_lies_in_the_run(
    main: Callable[[list[str]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from lockstep.engine import train as engine

    (run := tmp_path / "run").mkdir()
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    error: Any = RuntimeError("boom")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(engine, "train", fail)
    words = ["--preset", "tiny", "--device", "cpu"]
    words = ["train", "llama", *words] if main is cli.main else words
    close_logging()
    error.run = run
    assert main(words) == 1
    (report,) = run.iterdir()
    said = capfd.readouterr().err
    assert f"full traceback: {report}" in said
    assert "Traceback" not in said
    assert "RuntimeError: boom" in report.read_text()
    error.run = tmp_path / "gone"
    assert main([*words, "--debug"]) == 1
    (report,) = temporary.iterdir()
    said = capfd.readouterr().err
    assert str(report) in said
    assert "Traceback" in said


def test_say_flushes_and_counts_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    guard.say("one", "two\nthree")
    assert stream.getvalue() == "one\ntwo\nthree\n"
