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
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from lockstep import rundir
from lockstep.config.load import to_dict
from lockstep.data.stream import ENDLESS_ROWS, POLL_SECONDS, StreamTable, chunks_folder
from lockstep.engine import supply
from lockstep.engine.supply import Job, Silence, error_from_json, error_to_json, read_beats
from lockstep.errors import DataError, LockstepError
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

RESTARTS = 3  # of a child that is killed without having added a chunk
MESSAGE_SECONDS = 30.0
LEAVING = "leaving.json"  # file: why a rank that waited for rows waits no more, for all who wait
GONE_SECONDS = 10.0  # for a shared disk to show what another machine has written
OF_WORKERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCKSTEP_WORK", "LOCKSTEP_FAULT")  # it is none
COMMAND = "from lockstep.engine.supply import main; main()"


class Child:
    """The process that adds chunks, seen from the worker that started it; it dies with that one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._restarts, self._ready = 0, 0
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> None:
        """Start it again if it was killed; raise what it failed of."""
        code = self._process.poll()
        if code is None or code == 0:
            return
        says = read_beats(Path(self.job.status))
        if code > 0:
            if error := says.get("error"):
                raise error_from_json(error)
            raise LockstepError(f"the process that adds to the stream ended with code {code}", where=self.job.log)
        self._restarts = self._restarts + 1 if says.get("ready", 0) <= self._ready else 1
        self._ready = says.get("ready", 0)
        name = signal.Signals(-code).name
        if self._restarts > RESTARTS:
            raise LockstepError(
                f"the process that adds to the stream was ended by {name} {self._restarts} times in a row",
                where=self.job.log,
                hint="dmesg | tail shows whether memory ran out; resume later",
            )
        logger.warning("The process that adds to the stream was ended by %s: starting it again", name)
        self._process = self._start()

    def close(self) -> None:
        """End it, now. What it was writing is removed, unless somebody else is adding by now."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        base = Path(self.job.base)
        if not chunks_folder(base).is_dir():
            return
        with contextlib.suppress(Timeout, OSError), FileLock(base.with_name(f"{base.name}.stream.lock"), timeout=0):
            rundir.sweep(chunks_folder(base))
            base.with_name(f"{base.name}.stream.json").unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        """From the thread that trains, with which it ends: it arms that itself, nothing runs between fork and exec."""
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

    How far each child is stands in the run folder, so that every node sees how far the others are; what an earlier
    start has left there is gone before anybody looks.
    """
    place = env.detect()
    status = run.root / "stream" / f"n{place.node}.json"
    if place.local_rank == 0:
        try:
            status.parent.mkdir(parents=True, exist_ok=True)
            for left in (status, status.with_name(LEAVING)):
                left.unlink(missing_ok=True)
        except OSError as error:
            raise rundir.io_error(error, status, doing="starting the stream") from error
    group.barrier()
    table.vouched = partial(_is_vouched, status)
    loader = make()
    child = None
    if place.local_rank == 0:
        rows = config.training.max_steps * loader.batch_rows
        child = Child(_job(table, config, status, rows))
    return Feed(loader, child, status, stop=stop, link=link)


def _job(table: StreamTable, config: RunConfig, status: Path, rows: int) -> Job:
    tree, token = to_dict(config), config.data.hf_token
    tree["data"]["hf_token"] = token.get_secret_value() if token else None  # through a pipe, and nowhere else
    base, said, log = (str(path.absolute()) for path in (table.base, status, status.with_suffix(".log")))
    return Job(base, tree, rows, said, log, parent=os.getpid(), path=sys.path)


def _is_vouched(status: Path, number: int) -> bool:
    """Whether the child has seen this chunk intact: if it is damaged now, nobody is going to mend it."""
    says = read_beats(status)
    return bool(says.get("done") or says.get("error") or says.get("ready", 0) > number)


class Feed:
    """The loader's batches, each as soon as the rows of its global batch are there. Close it when done."""

    def __init__(self, loader: Loader, child: Child | None, status: Path, *, stop: StopRequest, link: Marks) -> None:
        assert isinstance(loader.table, StreamTable)
        self.loader, self.table, self.child = loader, loader.table, child
        self._status, self._stop, self._link = status, stop, link
        self._step = loader.start_step
        self._others = [status.with_name(f"n{node}.json") for node in range(env.detect().nodes)]
        self._others.remove(status)
        self._everywhere = self.table.span(0)[1]  # rows that all nodes have

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next step.

        An error with `between_steps` says that there are no rows to go on with: all that was done can be saved.
        """
        last = (self._step + 1) * self.loader.batch_rows - 1
        try:
            if self.child:
                self.child.look()
            if not self._is_ready(last):
                self._wait(last)
        except LockstepError as error:
            error.between_steps = True
            self._tell(error)
            raise
        batches = next(self.loader)
        self._step += 1
        return batches

    def close(self) -> None:
        """End the child and the loader's threads."""
        if self.child:
            self.child.close()
        self.loader.close()

    def _is_ready(self, position: int) -> bool:
        """Whether this node has its rows, and the others too: nobody begins a step in which another one would wait."""
        if not self.table.is_ready(position):
            return False
        if self._others and position >= self._everywhere:
            said = [read_beats(other) for other in self._others]
            self._everywhere = min(ENDLESS_ROWS if says.get("done") else says.get("rows", 0) for says in said)
            return position < self._everywhere
        return True

    def _wait(self, position: int) -> None:
        silence, began = Silence(self._status), time.monotonic()
        told = began - MESSAGE_SECONDS + 2  # a short wait is not worth a word
        while not self._is_ready(position):
            if self._stop:
                raise self._stop.error()
            self._listen()
            if self.child:
                self._judge(silence)
            self._link.enter("data")
            if time.monotonic() - told > MESSAGE_SECONDS:
                told = time.monotonic()
                logger.info("Waiting for chunk %d of the stream, %.0f s so far", self.table.chunks, told - began)
            time.sleep(POLL_SECONDS)

    def _judge(self, silence: Silence) -> None:
        """Raise if the child has failed, has nothing more to add, or stands still."""
        assert self.child
        self.child.look()
        quiet_seconds, done = silence.look(), bool(silence.says.get("done"))
        if done and not self._others and quiet_seconds > GONE_SECONDS:
            raise DataError("chunks of the stream have gone", where=str(chunks_folder(self.table.base)))
        if not done and quiet_seconds > supply.SILENCE_SECONDS:
            raise silence.error(self.table.base)

    def _tell(self, error: LockstepError) -> None:
        """Let every rank that waits leave too. Who has its rows hears it from the council (engine/council.py)."""
        path = self._status.with_name(LEAVING)
        said = {"signal": self._stop.signal.name} if self._stop.signal else {"error": error_to_json(error)}
        if not path.exists():
            with contextlib.suppress(OSError):  # the others then leave when their rows come
                rundir.write_json(path, said)

    def _listen(self) -> None:
        """Raise if another rank that waited does so no more."""
        said = read_beats(self._status.with_name(LEAVING))
        if name := said.get("signal"):
            self._stop.signal = signal.Signals[name]
            raise self._stop.error()
        if error := said.get("error"):
            failure = error_from_json(error)
            failure.secondary = True  # it is told where it happened
            raise failure
