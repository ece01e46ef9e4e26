"""Batches of a stream: the main thread waits for its rows where it can be seen, asked to stop, and told of failures."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from lockstep import rundir
from lockstep.config.load import to_dict
from lockstep.data.stream import POLL_SECONDS, StreamTable, chunks_folder, reading
from lockstep.engine import supply
from lockstep.engine.council import NotYet
from lockstep.engine.supply import Job, Silence, error_from_json, read_beats
from lockstep.errors import DataError, LockstepError, NotFoundError
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Batch
    from lockstep.data.loader import Loader
    from lockstep.rundir import RunDir
    from lockstep.runtime.group import Group
    from lockstep.runtime.marks import Marks
    from lockstep.runtime.signals import StopRequest

logger = logging.getLogger(__name__)

RESTARTS = 3  # of a child that is killed without having added a chunk, and whose rows are needed
PAUSE_SECONDS = 5.0  # before a child is started again whose rows are not needed yet; doubled each time
MESSAGE_SECONDS = 30.0
GONE_SECONDS = 10.0  # for a shared disk to show what another machine has written
OF_WORKERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCKSTEP_WORK", "LOCKSTEP_FAULT")  # it is none
COMMAND = "from lockstep.engine.supply import main; main()"


class Child:
    """The process that adds chunks, seen from the worker that started it; it dies with that one.

    If it ends too early there may be rows for hours: it is tried again, ever more seldom. What it failed of is raised
    only when there is nothing left to train on.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._failures, self._ready = 0, 0  # in a row, without a chunk more than ever before
        self._failure: LockstepError | None = None  # of a process that has ended and was not yet started again
        self._in_need = False  # started when there was nothing left to train on
        self._again = self._heard_at = 0.0
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self, *, needed: bool) -> None:
        """Show its warnings; start it again if it has ended too early. `needed`: raise if that is in vain."""
        if time.monotonic() - self._heard_at > supply.BEAT_SECONDS:
            self._hear()
        code = self._process.poll()
        if not code:
            return
        if self._failure is None:
            self._failure = self._explain(code)
        if needed:
            passing = code < 0 or self._failure.exit_code == NotFoundError.exit_code
            if not passing or (self._failures > RESTARTS if code < 0 else self._in_need):
                raise self._failure
        elif time.monotonic() < self._again:
            return
        self._failure, self._in_need = None, needed
        self._process = self._start()

    def close(self) -> None:
        """End it, now. What it was writing is removed, unless somebody else is adding by now."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._hear()
        base = Path(self.job.base)
        if not chunks_folder(base).is_dir():
            return
        with contextlib.suppress(Timeout, OSError), FileLock(base.with_name(f"{base.name}.stream.lock"), timeout=0):
            rundir.sweep(chunks_folder(base))
            base.with_name(f"{base.name}.stream.json").unlink(missing_ok=True)

    def _says(self) -> dict[str, Any]:
        says = read_beats(Path(self.job.status))
        return says if says.get("pid") == self.pid else {}

    def _hear(self) -> None:
        self._heard_at = time.monotonic()
        warnings = self._says().get("warnings", [])
        for line in warnings[self._heard :]:
            logger.warning("%s", line)
        self._heard = len(warnings)

    def _explain(self, code: int) -> LockstepError:
        """Why it has ended, told once; and when to try again."""
        self._hear()
        says = self._says()
        if (ready := says.get("ready", 0)) > self._ready:
            self._ready, self._failures, self._in_need = ready, 0, False
        self._failures += 1
        pause_seconds = PAUSE_SECONDS * 2.0 ** (self._failures - 1)
        self._again = time.monotonic() + pause_seconds
        if code < 0:
            name, times = signal.Signals(-code).name, f" {self._failures} times in a row" if self._failures > 1 else ""
            failure = LockstepError(
                f"the process that adds to the stream was ended by {name}{times}",
                where=self.job.log,
                hint="dmesg | tail shows whether memory ran out",
            )
        elif error := says.get("error"):
            failure = error_from_json(error)
        else:
            failure = LockstepError(f"the process that adds to the stream ended with code {code}", where=self.job.log)
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        logger.log(level, "No more rows for now, starting again in %g s or when needed: %s", pause_seconds, failure)
        return failure

    def _start(self) -> subprocess.Popen[bytes]:
        """From the thread that trains, with which it ends: it arms that itself, nothing runs between fork and exec."""
        self._heard = 0
        with contextlib.suppress(OSError):  # what the one before has said: this one has seen no chunk yet
            Path(self.job.status).unlink(missing_ok=True)
        command, environ = [sys.executable, "-c", COMMAND], env.without(*OF_WORKERS)
        with Path(self.job.log).open("ab") as log:
            process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # killed already: seen when it is looked at
            process.stdin.write(supply.as_job(self.job))
        return process


def start(  # noqa: PLR0913 - a stream and all who have a say in it, by name
    make: Callable[[], Loader],
    table: StreamTable,
    config: RunConfig,
    *,
    run: RunDir,
    group: Group,
    stop: StopRequest,
    link: Marks,
) -> Feed:
    """The batches of a stream, to which the first worker of each node lets a child process add. All ranks call it.

    How far it is stands in the run folder, for the workers of its node, which may be the only ones that see it: nodes
    hear of each other in the council. What an earlier start has left there is gone before anybody looks.
    """
    place = env.detect()
    status = run.root / "stream" / f"n{place.node}.json"
    if place.local_rank == 0:
        try:
            status.parent.mkdir(parents=True, exist_ok=True)
            status.unlink(missing_ok=True)
        except OSError as error:
            raise rundir.io_error(error, status, doing="starting the stream") from error
    group.barrier()
    table.vouched = partial(_is_vouched, status)
    loader = make()
    child, held = None, contextlib.ExitStack()
    if place.local_rank == 0:
        held.enter_context(reading(table.base))
        rows = config.training.max_steps * loader.batch_rows
        child = Child(_job(table, config, status, rows))
    return Feed(loader, child, status, stop=stop, link=link, held=held)


def _job(table: StreamTable, config: RunConfig, status: Path, rows: int) -> Job:
    tree, token = to_dict(config), config.data.hf_token
    tree["data"]["hf_token"] = token.get_secret_value() if token else None  # through a pipe, and nowhere else
    base, said, log = (str(path.absolute()) for path in (table.base, status, status.with_suffix(".log")))
    return Job(base, tree, rows, said, log, parent=os.getpid(), path=sys.path)


def _is_vouched(status: Path, number: int) -> bool:
    """Whether the child has seen this chunk intact: if it is damaged now, nobody is going to mend it."""
    says = read_beats(status)
    return bool(says.get("done") or says.get("ready", 0) > number)


class Feed:
    """The loader's batches, each as soon as the rows of its global batch are there. Close it when done."""

    def __init__(
        self,
        loader: Loader,
        child: Child | None,
        status: Path,
        *,
        stop: StopRequest,
        link: Marks,
        held: contextlib.ExitStack,
    ) -> None:
        assert isinstance(loader.table, StreamTable)
        self.loader, self.table, self.child = loader, loader.table, child
        self._status, self._stop, self._link, self._held = status, stop, link, held
        self._step = loader.start_step
        self._silence: Silence | None = None  # while it waits
        self._began = self._told = 0.0

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next step. As one of several ranks: NotYet where a process alone would wait.

        An error with `between_steps` says that there are no rows to go on with: all that was done can be saved.
        """
        last = (self._step + 1) * self.loader.batch_rows - 1
        try:
            if self.child:
                self.child.look(needed=False)
            while not self.table.is_ready(last):
                self._wait()
                if self.loader.world > 1:
                    raise NotYet
                time.sleep(POLL_SECONDS)
        except LockstepError as error:
            error.between_steps = True
            raise
        self._silence = None
        batches = next(self.loader)
        self._step += 1
        return batches

    def close(self) -> None:
        """End the child and the loader's threads."""
        if self.child:
            self.child.close()
        self.loader.close()
        self._held.close()

    def _wait(self) -> None:
        """Once while the rows are not there: raise if there is a reason not to wait, else be seen and heard."""
        if self._silence is None:
            self._silence, self._began = Silence(self._status), time.monotonic()
            self._told = self._began - MESSAGE_SECONDS + 2  # a short wait is not worth a word
        if self._stop and self.loader.world == 1:  # several agree on it
            raise self._stop.error()
        if self.child:
            self._judge(self._silence)
        self._link.enter("data")
        if time.monotonic() - self._told > MESSAGE_SECONDS:
            self._told = time.monotonic()
            logger.info(
                "Waiting for chunk %d of the stream, %.0f s so far", self.table.chunks, self._told - self._began
            )

    def _judge(self, silence: Silence) -> None:
        """Raise if the child has failed, has nothing more to add, or stands still."""
        assert self.child
        self.child.look(needed=True)
        quiet_seconds, done = silence.look(), bool(silence.says.get("done"))
        if done and quiet_seconds > GONE_SECONDS:
            raise DataError("chunks of the stream have gone", where=str(chunks_folder(self.table.base)))
        if not done and quiet_seconds > supply.SILENCE_SECONDS:
            raise silence.error(self.table.base)
