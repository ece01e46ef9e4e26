"""Checkpoints that cannot be torn: a folder per save, a manifest with SHA-256 written last, one rename.

A model in shards is saved by all ranks at once, each its pieces into the common temporary folder; rank 0 adds the index
and the manifest. All ranks call `save` and have the same outcome: a path, or the same error. Weights that are not
finite are marked, so that no run goes on from them, and no good ones are forgotten for them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lockstep import rundir
from lockstep.engine.shards import Stored, index_of, make_index, piece_file, read_index, write_pieces
from lockstep.errors import DataError, ExitCode, LockstepError, OutputError
from lockstep.runtime.group import Group
from lockstep.runtime.marks import Marks, NoMarks
from lockstep.runtime.parallel import local

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, RUN = "model.safetensors", "optimizer.safetensors", "run.json"
KINDS = (MODEL, OPTIMIZER)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
REST_BYTES = 1 << 20  # of a checkpoint beside its tensors: headers, manifest, run.json, the ends of blocks
SEEN_SECONDS = 5.0  # a file on a network disk may show up late elsewhere


@dataclass(frozen=True)
class State:
    """All that a run needs to go on: tensors by name (in shards: DTensors), and plain values."""

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    run: Mapping[str, Any]


class Checkpointer:
    """Saves into, and finds in, the checkpoints folder of one run."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        extra_files: Mapping[str, bytes] | None = None,
        group: Group | None = None,
        sharded: bool = False,
        writes: bool = True,
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.extra_files = extra_files or {}  # held in memory: what they came from may be gone when it is time to save
        self.group = group or Group()
        self.sharded, self.writes = sharded, writes
        self.link: Marks = NoMarks()  # who is to know that a save goes on
        self.need_bytes = 0  # of the checkpoint that is saved, by all ranks
        self.writers = [0]
        self.passed_over = set[Path]()  # they lie there, and count for nothing
        if sharded:
            check_common(folder, self.group)
            self.writers = [rank for rank, writing in enumerate(self.group.gather(writes)) if writing]

    def save(self, step: int, state: State) -> Path:
        """Publish the state after `step` finished steps; only then forget the oldest. All ranks must call it."""
        final = self.folder / f"step_{step:08d}"
        self.need_bytes = self._bytes_of(state)
        if self.sharded:
            self._save_pieces(final, state)
        else:
            self.group.together(lambda: self._save_whole(final, state))
        return final

    def go_on(self, step: int) -> None:
        """After `step` steps: later checkpoints were found damaged or spoilt, and no good one is forgotten for them."""
        self.passed_over = {path for path in self.found() if _number(path) > step}

    def check_free(self, state: State) -> None:
        """Before the first step: refuse a disk that cannot hold one such checkpoint. All ranks must call it."""
        self.need_bytes = self._bytes_of(state)
        self.group.together(lambda: self._check_free(self.folder))

    def _bytes_of(self, state: State) -> int:
        """Of the files that all ranks write together."""
        tensors = sum(tensor.nbytes for part in (state.model, state.optimizer) for tensor in part.values())
        return REST_BYTES + tensors + sum(map(len, self.extra_files.values()))

    def _check_free(self, final: Path) -> None:
        """Before a byte is written. Nothing is reserved: who fills the disk meanwhile makes the save fail."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(self.folder)
            if disk.total and disk.free < self.need_bytes:  # some file systems say nothing
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error, final) from error

    def _beat(self) -> None:
        """A save of many gigabytes is no hang, as long as it goes on."""
        self.link.enter("save")

    def _save_whole(self, final: Path, state: State) -> None:
        if final.is_dir() and is_good(final):
            return  # the state after N steps of a run is one state
        self._check_free(final)
        try:
            with rundir.publishing(final, self._beat) as folder:
                for file, tensors in zip(KINDS, (state.model, state.optimizer), strict=True):
                    save_file(dict(tensors), folder / file)
                    self._beat()
                self._write_rest(folder, state, finite=are_finite(state.model.values()))
        except (OSError, SafetensorError) as error:
            raise self._failed(error, final) from error
        self._forget(final)

    def _save_pieces(self, final: Path, state: State) -> None:
        if self.group.together(lambda: final.is_dir() and is_good(final)):
            return
        staged = self.group.together(lambda: self._stage(final))
        written = self.group.gather(self._write_pieces(Path(staged), final, state))
        try:
            _raise_first(written, self.group.rank)
            self.group.together(lambda: self._publish_pieces(Path(staged), final, state, written))
        finally:
            if self.group.rank == 0:
                shutil.rmtree(staged, ignore_errors=True)

    def _stage(self, final: Path) -> str:
        self._check_free(final)
        try:
            return str(rundir.stage(final))
        except OSError as error:
            raise self._failed(error, final) from error

    def _write_pieces(self, staged: Path, final: Path, state: State) -> dict[str, Any]:
        """This rank's files; returns what the index and the manifest say of them, or why it could not."""
        if not self.writes:
            return {}
        number = self.writers.index(self.group.rank) + 1
        said: dict[str, Any] = {"files": {}}
        try:
            said["finite"] = are_finite(state.model.values())
            for file, tensors in zip(KINDS, (state.model, state.optimizer), strict=True):
                path = staged / piece_file(file, number, len(self.writers))
                said[file] = write_pieces(tensors, path, first=number == 1)
                self._beat()
                said["files"][path.name] = rundir.entry(path, self._beat)
        except (OSError, SafetensorError, MemoryError) as error:
            return self._told(error, final)
        return said

    def _publish_pieces(self, staged: Path, final: Path, state: State, written: list[dict[str, Any]]) -> None:
        known = {name: entry for said in written for name, entry in said.get("files", {}).items()}
        try:
            for file in KINDS:
                index = make_index([said[file] for said in written if file in said])
                (staged / index_of(file)).write_text(json.dumps(index) + "\n", encoding="utf-8")
            self._write_rest(staged, state, finite=all(said.get("finite", True) for said in written))
            rundir.publish(staged, final, known=known, beat=self._beat)
        except OSError as error:
            raise self._failed(error, final) from error
        self._forget(final)

    def _write_rest(self, folder: Path, state: State, *, finite: bool) -> None:
        run = state.run if finite else {**state.run, rundir.SPOILT: True}
        (folder / RUN).write_text(json.dumps(run, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        for name, content in self.extra_files.items():
            (folder / name).write_bytes(content)

    def _failed(self, error: Exception, final: Path) -> LockstepError:
        """Why there is no such checkpoint, and which one there is."""
        known = error if isinstance(error, OSError) else OSError(str(error))
        failed = rundir.io_error(known, final, doing="saving a checkpoint", need_bytes=self.need_bytes)
        good = next((path for path in reversed(self.found()) if is_good(path, content=False)), None)
        failed.what += f"; the last good one is {good.name}" if good else "; there is none yet"
        return failed

    def _told(self, error: Exception, final: Path) -> dict[str, Any]:
        """The same, for the other ranks."""
        failed = self._failed(error, final)
        told = {"failed": failed.what, "where": failed.where, "hint": failed.hint, "host": socket.gethostname()}
        return {**told, "errno": getattr(error, "errno", None)}

    def _forget(self, newest: Path) -> None:
        self.passed_over.discard(newest)
        found = self.found()
        good = [path for path in found if path not in self.passed_over and is_good(path, content=False)]
        kept = good[-self.keep_last :]
        for old in found[: found.index(kept[0])] if kept else []:
            shutil.rmtree(old, ignore_errors=True)

    def found(self) -> list[Path]:
        """Published checkpoints, oldest first; whether they verify is another question. Other folders are not ours."""
        return rundir.saved_checkpoints(self.folder)

    def latest(self) -> Path | None:
        """The newest checkpoint that verifies; says which ones do not, and why."""
        return next((path for path in reversed(self.found()) if is_good(path)), None)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def load(path: Path, group: Group | None = None) -> State:
    """The state in a checkpoint folder, after every byte of it was checked: by all ranks of the group, a share each.

    Tensors are read when they are asked for, and of a tensor only the rows that are.
    """
    group = group or Group()
    said: dict[str, Any] = {}
    try:
        verify(path, share=(group.rank, group.world))
    except DataError as error:
        said = {"failed": error.what, "where": error.where, "hint": error.hint}
    _raise_first(group.gather(said), group.rank, DataError)
    try:
        run = rundir.read_json(path / RUN)
        if not isinstance(run, dict):
            raise ValueError("no state of a run")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path / RUN)) from None
    return State(Stored(path, MODEL), Stored(path, OPTIMIZER), run)


def verify(path: Path, *, content: bool = True, share: tuple[int, int] = (0, 1)) -> None:
    """Raise DataError unless the folder is a whole checkpoint, in one piece or in many."""
    in_pieces = (path / index_of(MODEL)).is_file()
    required = [index_of(file) if in_pieces else file for file in KINDS]
    rundir.verify(path, content=content, required=[*required, RUN], share=share)
    if in_pieces:  # and every piece must be a file that was verified
        files = {
            piece.file
            for file in KINDS
            for entry in read_index(path / index_of(file)).values()
            for piece in entry.pieces
        }
        rundir.verify(path, content=False, required=sorted(files))


def is_good(path: Path, *, content: bool = True) -> bool:
    """Whether a checkpoint folder is whole and its weights are finite; says why not."""
    try:
        verify(path, content=content)
        check_not_spoilt(path)
    except DataError as error:
        logger.warning("Checkpoint passed over: %s: %s", error.where, error.what)
        return False
    return True


@torch.no_grad()
def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether there is no NaN and no infinity in what lies here of them."""
    parts = [part for tensor in tensors if (part := local(tensor)).numel()]
    ends = [end.double() for part in parts for end in torch.aminmax(part)]
    return not ends or bool(torch.isfinite(torch.stack(ends)).all())


def check_not_spoilt(path: Path) -> None:
    """Refuse a state of weights that are not finite: nobody goes on from it, or has any use for its model."""
    try:
        run = rundir.read_json(path / RUN)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path / RUN)) from None
    if isinstance(run, dict) and run.get(rundir.SPOILT):
        hint = "the run itself, which goes by its newest good one, or an earlier one"
        raise DataError("its weights are not finite: kept to be looked at", where=str(path), hint=hint)


def check_common(folder: Path, group: Group) -> None:
    """Whether all ranks write into one and the same folder: rank 0 leaves a word in it that the others must find."""
    word, host = uuid.uuid4().hex, socket.gethostname()

    def leave() -> list[str]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"common.tmp-{word}").write_text(word)
        except OSError as error:
            raise OutputError(f"cannot write here: {error.strerror or error}", where=str(folder)) from error
        return [f"common.tmp-{word}", word, host]

    name, wanted, first_host = group.together(leave)
    blind = group.gather("" if _sees(folder / name, wanted) else host)
    if group.rank == 0:
        (folder / name).unlink(missing_ok=True)
    for rank, its_host in enumerate(blind):
        if its_host:
            error = OutputError(
                f"rank {rank} on {its_host} does not see the checkpoint folder of rank 0 on {first_host}",
                where=str(folder),
                hint="--out DIR, a folder that all nodes share",
            )
            error.secondary = rank != group.rank
            raise error


def _sees(path: Path, word: str) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            if path.read_text() == word:
                return True
        except OSError:
            pass  # not there, or not yet
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _raise_first(said: list[dict[str, Any]], own_rank: int, kind: type[LockstepError] = LockstepError) -> None:
    """The error of the first rank that had one, on every rank."""
    for rank, each in enumerate(said):
        if "failed" in each:
            whose = f" (rank {rank} on {each['host']})" if "host" in each else ""
            code = ExitCode.IO if kind is LockstepError else kind.exit_code
            error = kind(each["failed"] + whose, where=each["where"], hint=each["hint"], exit_code=code)
            error.secondary = rank != own_rank
            raise error from (OSError(number, each["failed"]) if (number := each.get("errno")) else None)
