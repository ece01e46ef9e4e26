"""The child process that adds chunks to a stream, one on each node, as long as the run needs more rows.

It checks the chunks that are there, makes again what is damaged and adds what is missing, until the run has its rows or
the text or `max_train_samples` ends; nothing is fetched beyond that. Of several runs on one cache one adds at a time.
It can be killed at any moment: whoever comes next goes on behind the last whole chunk. Torch-free until there is a
chunk to make.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from lockstep import rundir
from lockstep.config.load import from_dict
from lockstep.data.cache import READ_ONLY
from lockstep.data.stream import POLL_SECONDS, Chunk, check_chunk, chunk_folder, chunks_folder, read_chunk, read_head
from lockstep.engine.streaming import Maker
from lockstep.errors import DataError, ExitCode, LockstepError, OutputError
from lockstep.launch.link import dying_with
from lockstep.runtime import env

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
MOST_WARNINGS = 50  # for the screen of the run; all are in the log
SILENCE_SECONDS = 300.0  # without a sign of life of who adds chunks
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Job:
    """What a child process is to add, and for whom."""

    base: str
    config: dict[str, Any]
    rows: int  # that the run will need
    status: str  # file: how far it is, for the ranks that wait
    log: str
    parent: int
    path: list[str]  # where Python looks for modules


class Beats:
    """A small file that changes as long as its writer lives and is not stopped; worth nothing after its writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.says: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "beats": 0}
        self._lock = threading.Lock()

    def beat(self, **says: Any) -> None:
        """Alive, and what there is to say."""
        with self._lock:
            self.says = {**self.says, **says, "beats": self.says["beats"] + 1}
            temporary = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
            temporary.write_text(json.dumps(self.says), encoding="utf-8")
            temporary.replace(self.path)

    @contextlib.contextmanager
    def beating(self) -> Generator[None]:
        """By a thread, as long as the block runs: a single call may take minutes (a hash, a place in a large file)."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                with contextlib.suppress(OSError):  # the disk is full: who works meets it too
                    self.beat()

        thread = threading.Thread(target=beat, name="beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Repeating(logging.Handler):
    """Puts warnings where the run finds them, which shows them on its screen."""

    def __init__(self, status: Beats) -> None:
        super().__init__(logging.WARNING)
        self.status = status

    def emit(self, record: logging.LogRecord) -> None:
        said = self.status.says.get("warnings", [])
        if record.levelno == logging.WARNING and len(said) < MOST_WARNINGS:  # errors are told at the end
            with contextlib.suppress(OSError):
                self.status.beat(warnings=[*said, env.redact(record.getMessage())])


def read_beats(path: Path) -> dict[str, Any]:
    """What was last said; nothing if nobody said anything that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


class Silence:
    """How long a file of beats has not changed, by the clock of who looks."""

    def __init__(self, path: Path) -> None:
        self.path, self.says = path, read_beats(path)
        self._since = time.monotonic()

    def look(self) -> float:
        """Seconds."""
        if (says := read_beats(self.path)) != self.says:
            self.says, self._since = says, time.monotonic()
        return time.monotonic() - self._since

    def error(self, base: Path) -> DataError:
        pid, host = self.says.get("pid"), self.says.get("host")
        return DataError(
            f"process {pid} on {host}, which adds chunks to the stream, gave no sign of life for {SILENCE_SECONDS:g} s",
            where=str(chunks_folder(base)),
            hint=f"is it stopped? kill -CONT {pid}, or kill {pid}, and resume",
        )


def supply(job: Job, status: Beats) -> None:
    """Check the chunks that are there and add those that are missing, until the run has its rows."""
    base, maker = Path(job.base), None
    chunk = read_head(base)
    rows = chunk.rows
    with contextlib.ExitStack() as held:
        holder: Beats | None = None
        while not chunk.last and rows < job.rows:
            following = intact(base, chunk, level=logging.WARNING if holder else logging.DEBUG)
            if following is None and holder is None:
                holder = held.enter_context(holding(base, chunk))
                continue  # it may have come while we waited
            if following is None:
                assert holder is not None
                maker = maker or Maker(base, from_dict(job.config))
                following = maker.make(chunk)
                holder.beat(chunk=following.number, rows=rows + following.rows)
                logger.info("Chunk %d: %d rows, %d so far", following.number, following.rows, rows + following.rows)
            chunk = following
            rows += chunk.rows
            status.beat(ready=chunk.number + 1, rows=rows)
    status.beat(ready=chunk.number + 1, rows=rows, done=True)


def intact(base: Path, before: Chunk, *, level: int) -> Chunk | None:
    """The chunk that follows another; None if it is not there, or not as it should be."""
    try:
        found = read_chunk(base, before.number + 1)
        if found is None:
            return None
        check_chunk(base, found.number)
        if found.start != before.end:
            raise DataError("it does not follow the chunk before it", where=str(chunk_folder(base, found.number)))
    except DataError as error:
        logger.log(level, "[Cache] damaged, will be made again: %s: %s", error.where, error.what)
        return None
    return found


@contextlib.contextmanager
def holding(base: Path, before: Chunk) -> Generator[Beats]:
    """Hold the lock of a stream; whoever holds it now may work for us meanwhile. Yields where to say how far we are."""
    lock, progress = FileLock(base.with_name(f"{base.name}.stream.lock")), base.with_name(f"{base.name}.stream.json")
    silence = Silence(progress)
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            if silence.look() > SILENCE_SECONDS:
                raise silence.error(base) from None
            time.sleep(POLL_SECONDS)
    try:
        rundir.sweep(chunks_folder(base))  # what a killed one has left
        beats = Beats(progress)
        beats.beat(chunk=before.number)
        with beats.beating():
            yield beats
    finally:
        progress.unlink(missing_ok=True)
        lock.release()


def as_failure(error: Exception, base: Path) -> LockstepError:
    """What went wrong, as a user should read it."""
    if isinstance(error, LockstepError):
        return error
    if isinstance(error, OSError) and error.errno in READ_ONLY:
        return OutputError(
            f"the stream cannot be written: {error.strerror or error}",
            where=str(chunks_folder(base)),
            hint="data.cache_dir=DIR or DATASET_CACHE_DIR=DIR, a folder you can write to",
        )
    if isinstance(error, OSError):
        return rundir.io_error(error, chunks_folder(base), doing="adding to the stream")
    return LockstepError(f"adding to the stream failed: {type(error).__name__}: {error}")


def error_to_json(error: LockstepError) -> dict[str, Any]:
    told = {"what": error.what, "where": error.where, "hint": error.hint}
    return {name: env.redact(text) for name, text in told.items()} | {"code": int(error.exit_code)}


def error_from_json(said: dict[str, Any]) -> LockstepError:
    code = ExitCode(said["code"])
    return LockstepError(said["what"], where=said["where"], hint=said["hint"], exit_code=code)


def serve(job: Job) -> int:
    """The exit code of a child that does its job."""
    status = Beats(Path(job.status))
    repeating = Repeating(status)
    logging.getLogger("lockstep").addHandler(repeating)
    try:
        status.beat(ready=0)
        with status.beating():
            supply(job, status)
    except Exception as error:
        logger.error("%s", env.redact("".join(traceback.format_exception(error))))
        failure = as_failure(error, Path(job.base))
        with contextlib.suppress(OSError):  # the exit code says it too
            status.beat(error=error_to_json(failure))
        return int(failure.exit_code)
    finally:
        logging.getLogger("lockstep").removeHandler(repeating)
    return int(ExitCode.DONE)


def main() -> None:
    """The child process: its job comes through a pipe."""
    for number in IGNORED_SIGNALS:  # meant for the run, which ends this process itself
        signal.signal(number, signal.SIG_IGN)
    job = Job(**json.loads(sys.stdin.buffer.read()))
    dying_with(job.parent)()
    sys.path += [place for place in job.path if place not in sys.path]
    env.hide(job.config["data"]["hf_token"])
    logging.basicConfig(filename=job.log, format="%(asctime)s %(message)s", level=logging.INFO)
    sys.exit(serve(job))


def as_job(job: Job) -> bytes:
    return json.dumps(asdict(job)).encode()
