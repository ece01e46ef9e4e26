"""How a program ends: every way out becomes an exit code, and words the user can act on. Shared by all commands."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Literal, NoReturn, TextIO

from lockstep import __version__
from lockstep.errors import ExitCode, LockstepError, NotFoundError, Stopped, cause_of
from lockstep.runtime import env
from lockstep.runtime.signals import UNSTOPPABLE

BROKEN_PIPE = 141  # what a shell reports for a command whose reader went away
# Commands that are never one of several workers, whatever variables were left over.
ALONE = frozenset(
    {"status", "logs", "stop", "bench", "diff", "doctor", "script", "export", "config", "init", "families"}
)
Kind = Literal["error", "stopped", "crash"]
Tell = Callable[[str, Kind], None]


def say(*lines: str) -> None:
    """Print lines, now: a reader that went away and a full disk are noticed here and not at the very end."""
    try:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    except OSError as error:
        _drop(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        if error.errno == errno.EIO:  # the terminal was closed: nobody is there to be told
            return
        what = f"cannot write: {error.strerror or error}"
        raise LockstepError(what, where="standard output", exit_code=ExitCode.IO) from error


def mention(*lines: str) -> None:
    """As say, by who goes on where they cannot be written: it is told once, the stream is silent afterwards."""
    try:
        say(*lines)
    except LockstepError as error:
        complain(f"{error}. Training goes on without it", "stopped")


def complain(text: str, kind: Kind = "error") -> None:
    """To the error stream; where that takes nothing more, there is nobody to tell."""
    try:
        sys.stderr.write(env.redact(f"lockstep: {'error: ' if kind == 'error' else ''}{text}\n"))
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def complain_plainly(text: str) -> None:
    """The same for a text that is documented as it stands."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def run(program: Callable[[], int], words: Sequence[str], tell: Tell = complain) -> int:
    """The exit code of a program with these words on its command line; whatever it raises is told."""
    _open_streams()
    _hide_tokens(words)
    try:
        _check_place()
        code = _finish(program)
        say()  # what argparse and the log have left in the stream
        return code
    except BaseException as error:
        with _deaf():  # another Ctrl-C must not cut the explanation short
            code = int(_explain(error, words, tell))
            if not ALONE.intersection(words[:1]):
                _tell_launcher(error, code)
            return code


def leave(main: Callable[[], int]) -> NoReturn:
    """Run a main function as the whole process: preemption counts from the first moment, Ctrl-C not after the end."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # until training listens itself
        signal.signal(number, _preempted)
    try:
        code = main()
    except KeyboardInterrupt:  # in the instant between two handlers
        code = int(ExitCode.INTERRUPTED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    busy = any(thread.name == UNSTOPPABLE for thread in threading.enumerate())
    if busy or _place().world > 1:  # what is left of the exchange with a dead peer must not keep this process
        if compiler := sys.modules.get("torch._inductor.async_compile"):
            with contextlib.suppress(Exception):  # its helpers end when asked, and later by themselves
                compiler.shutdown_compile_workers()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _place() -> env.Env:
    """Which worker this is; variables that make no sense have been complained of, and make it none."""
    try:
        return env.detect()
    except LockstepError:
        return env.Env()


def _tell_launcher(error: BaseException, code: int) -> None:
    """A worker's own account of its end, for whoever watches it; one that the run has written already stays."""
    place = _place()
    if place.launcher == "none":
        return
    from lockstep.launch.link import attach

    if not isinstance(error, Stopped):
        cause = cause_of(error) or type(error).__name__
        record = {"exit_code": code, "rank": place.rank, "gpu": place.tag, "node": place.node, "kind": "exception"}
        more = {"secondary": getattr(error, "secondary", False), "next": getattr(error, "hint", "")}
        attach(place).fail(record | more | {"cause": env.redact(cause)})


def _preempted(_number: int, _frame: object) -> NoReturn:
    sys.exit(int(ExitCode.PREEMPTED))


def _finish(program: Callable[[], int]) -> int:
    try:
        return int(program())
    except SystemExit as done:  # argparse has shown its help
        return done.code if isinstance(done.code, int) else int(ExitCode.DONE)


def _explain(error: BaseException, words: Sequence[str], tell: Tell) -> int:
    match error:
        case Stopped():
            place = f" ({error.where})" if error.where else ""
            tell(str(Stopped(error.what + place, hint=error.hint)), "stopped")
            return error.exit_code
        case LockstepError():
            tell(str(error), "error")
            return error.exit_code
        case KeyboardInterrupt():
            tell("interrupted", "stopped")
            return ExitCode.INTERRUPTED
        case BrokenPipeError():
            return BROKEN_PIPE
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] != "lockstep":
            tell(f"{sys.executable} has no package {name!r}\n  try: {_install_command()}", "error")
            return ExitCode.FAILED
        case Exception():
            tell(_crash_report(error, words), "crash")
            return ExitCode.FAILED
        case _:
            raise error


def _crash_report(error: Exception, words: Sequence[str]) -> str:
    """An error nobody foresaw: a short block for the user, the traceback in a file for whoever mends it."""
    import traceback

    text = env.redact("".join(traceback.format_exception(error)))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    report = _write_report(
        f"lockstep {__version__}, Python {sys.version}\n{env.redact(' '.join(words))}\n\n{text}",
        folders=(getattr(error, "run", None), None),
    )
    lines = [
        f"unexpected {type(error).__name__}: {str(error)[:300]}",
        f"  at {frame.filename}:{frame.lineno} ({frame.name})",
        f"  full traceback: {report}" if report else "  LOCKSTEP_TRACEBACK=1 shows the full traceback",
        "  this is a fault of lockstep, not of your settings: please report it with that traceback",
    ]
    run = getattr(error, "run", None)
    if run and _place().launcher == "none":  # else the launcher has the last word
        from lockstep.launch.failure import next_command

        lines.append(f"  try: {next_command(run)}")
    if "--debug" in words or env.get("LOCKSTEP_TRACEBACK") == "1":
        lines.append(text.rstrip())
    return "\n".join(lines)


def _write_report(text: str, *, folders: Sequence[Path | None]) -> str:
    """Into the first folder that takes it (None: the one for temporary files); where it is, or ''."""
    import tempfile

    for folder in folders:
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="lockstep-crash-", suffix=".txt", dir=folder)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return path
    return ""


def _install_command() -> str:
    """How to give this interpreter what it lacks."""
    lock = Path(__file__).parents[2] / "requirements.lock"
    return f"{sys.executable} -m pip install {f'-r {lock}' if lock.is_file() else 'lockstep-train'}"


def _check_place() -> None:
    """Libraries fail in odd ways in a folder that was removed (MKL: it cannot load torch)."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise NotFoundError("the folder this was started in is gone", hint="cd to one that is there") from error


def _open_streams() -> None:
    """Streams that can be written to, in UTF-8 whatever LANG says; one that was closed (`>&-`) leads nowhere."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a file of the run's would be taken for a stream
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _drop(stream: TextIO) -> None:
    """Let what a broken stream still holds vanish, or Python complains once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextlib.contextmanager
def _deaf() -> Generator[None]:
    """Ctrl-C means nothing until the block ends (only the main thread may say so)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _hide_tokens(words: Sequence[str]) -> None:
    """A token on the command line is a secret from the first moment."""
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name.lstrip("-").replace("-", "_").rpartition(".")[2] == "hf_token":
            env.hide(text if equals else "".join(words[index + 1 : index + 2]))
