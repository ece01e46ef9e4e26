"""The folder of a run: found or made, begun, owned by one process at a time, tidied, and gone on in by later rounds."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from lockstep import rundir
from lockstep.config.load import Loaded, identity, to_dict
from lockstep.contracts import Sink
from lockstep.engine import evidence, results, resume
from lockstep.engine.build import Plan, versions
from lockstep.errors import ConfigError, OutputError
from lockstep.launch import between_rounds, failure
from lockstep.rundir import RunDir
from lockstep.runtime import env, owner, rounds
from lockstep.runtime.group import Group

logger = logging.getLogger(__name__)

FILES_LOCK = ".lockstep.lock"  # in a folder of documented files: held by the run that writes them, and gone with it


def choose_run(
    group: Group, planned: Plan, loaded: Loaded, closing: contextlib.ExitStack
) -> tuple[RunDir, resume.ResumePoint | None]:
    """The run folder, owned until `closing`, and where to go on from: the first worker decides, the others follow."""

    checkpoint_dir = planned.config.training.checkpoint_dir

    def decide() -> dict[str, str | None]:
        if planned.config.report.results_dir:
            results.probe(Path(planned.config.report.results_dir), planned.config.family)
        point = _of_its_own(resume.find(planned.config, loaded.asked), loaded)
        if point:
            allow = planned.config.checkpoint.allow_mismatch
            resume.check_early(point, identity(planned.config), allow=allow)
        earlier = between_rounds.kept_run()
        run = RunDir(earlier) if earlier else point.run if point and point.run else new_run(planned, loaded)
        run.root.mkdir(parents=True, exist_ok=True)  # an earlier round may have ended right before
        closing.enter_context(owned(run))
        for key, place in (("run.out", run.checkpoints), ("training.checkpoint_dir", checkpoint_dir)):
            if place:  # also of a run that goes on
                rundir.probe(Path(place), key=key)
        if resume.has_saved(run):  # whoever had the run until now may have saved more
            point = resume.point_of_run(run.root)
        else:
            begin_run(run, planned, loaded, again=bool(earlier))
        return {"run": str(run.root), "checkpoint": str(point.checkpoint) if point else None}

    decided = group.together(decide)
    run = RunDir(Path(str(decided["run"])))
    between_rounds.keep_run(run.root)  # each of them: torchrun may make another worker the first one of its next round
    checkpoint = decided["checkpoint"]
    return run, resume.ResumePoint(Path(checkpoint), run) if checkpoint else None


def _of_its_own(point: resume.ResumePoint | None, loaded: Loaded) -> resume.ResumePoint | None:
    """Where to go on from; not in that run, where a flag names another run or folder of runs."""
    if point is None or point.run is None or loaded.config.checkpoint.resume == "auto":
        return point
    root, flags = point.run.root.resolve(), {key for key, origin in loaded.origins.items() if origin.layer == "flag"}
    named = "run.name" in flags and loaded.config.run.name != root.name
    moved = "run.out" in flags and Path(loaded.config.run.out).resolve() != root.parent
    return replace(point, run=None) if named or moved else point


def go_on(loaded: Loaded) -> Loaded:
    """The same, told to go on with the run of an earlier round of this start, where that has saved something."""
    earlier = between_rounds.kept_run()
    if earlier is None or not resume.has_saved(RunDir(earlier)):
        return loaded
    checkpoint = loaded.config.checkpoint.model_copy(update={"resume": str(earlier)})
    return replace(loaded, config=loaded.config.model_copy(update={"checkpoint": checkpoint}))


def tell_restart(run: RunDir, sinks: Sequence[Sink]) -> None:
    """That this round is not the first of its start, and after which failure. Call it once that is set aside."""
    now = rounds.current()
    if now.number:
        newest = max(run.failures.glob("*.json"), default=None)
        record = failure.read_record(newest) if newest else {}
        told = {"failure": record.get("kind"), "exit_code": record.get("exit_code"), "cause": record.get("cause")}
        if not env.launcher_pid():  # our own has said so
            logger.warning("[RESTART] %d of %d after: %s", now.number, now.most, told["cause"] or "no word")
        for sink in sinks:
            sink.event("restart", {"number": now.number, "most": now.most, **told})


def tidy(run: RunDir) -> None:
    """What an earlier attempt left that this one makes good, and who trains here now."""
    for name in rundir.sweep(run.checkpoints):
        logger.info("Removed an unfinished save: %s", name)
    rundir.set_aside(run)
    evidence.forget(run.root)
    for beat in run.root.glob("workers/*/heartbeat"):  # also of workers that there are no more
        beat.unlink(missing_ok=True)
    owner.write(run.root, sys.argv, pid=env.launcher_pid() or None)


def new_run(planned: Plan, loaded: Loaded) -> RunDir:
    """A fresh run folder; fails before anything is loaded if it cannot be written.

    Of who wants to go on, also one of this name that has saved nothing yet: it is begun anew.
    """
    config, out = planned.config, Path(planned.config.run.out)
    own = out / (config.run.name or "")
    wanted = {
        "training.checkpoint_dir": config.training.checkpoint_dir,
        "system.output_dir": config.system.output_dir,
        "run.out": config.run.out,
    }
    for key, folder in wanted.items():
        if folder and Path(folder) != own:
            rundir.probe(Path(folder), key=key)
    if config.run.name and config.checkpoint.resume and resume.can_begin(RunDir(own)):
        return RunDir(own)
    name = config.run.name or f"{config.family}-{loaded.name or 'custom'}-{rundir.timestamp()}"
    if config.run.name is None and (out / name).exists():  # two in one second
        name = f"{name}-{time.time_ns() % 1_000_000:06d}"
    return rundir.create_run(out, name, before=between_rounds.keep_run)


def begin_run(run: RunDir, planned: Plan, loaded: Loaded, *, again: bool) -> None:
    """The configuration of a run that begins, in its folder; what an attempt before it has told goes.

    Of an earlier round of the same start the story stays: that it began, and how it failed.
    """
    config = planned.config
    if not again:
        run.events.unlink(missing_ok=True)
    shutil.rmtree(run.tensorboard, ignore_errors=True)
    saved = {
        "family": config.family,
        "preset": loaded.preset,
        "created": time.time(),
        "identity_hash": planned.identity_hash,
        "asked": dict(loaded.asked),
        "config": to_dict(config),
        "origins": {key: f"{origin.layer} {origin.where}".strip() for key, origin in loaded.origins.items()},
    }
    about_place = {"variables": env.saved(), "versions": versions(), "argv": [env.redact(word) for word in sys.argv]}
    try:
        rundir.write_json(run.env, about_place)
        rundir.write_json(run.config, saved)
        if config.system.output_dir:
            path = Path(config.system.output_dir) / f"{config.run.experiment_name}_config.json"
            rundir.write_json(path, saved["config"])
            logger.info("Configuration saved to %s", path)
    except OSError as error:
        raise rundir.io_error(error, run.root, doing="writing the configuration") from error


def with_own_files(group: Group, planned: Plan, run: RunDir, closing: contextlib.ExitStack) -> Plan:
    """The plan with a folder for documented files that no other live run writes to, until `closing`.

    The first worker decides, the others follow.
    """
    asked = planned.config.training.checkpoint_dir
    if not asked:
        return planned
    place = group.together(lambda: _own_place(asked, run, closing))
    training = planned.config.training.model_copy(update={"checkpoint_dir": place})
    return replace(planned, config=planned.config.model_copy(update={"training": training}))


def _own_place(asked: str, run: RunDir, closing: contextlib.ExitStack) -> str:
    """The folder that was asked for; if another run has it, one in it of this run's name, which then stays its own."""
    key, own = "training.checkpoint_dir", str(Path(asked, run.root.name))
    begun = any(Path(own).glob("*.pt"))
    for place in [own] if begun else [asked, own]:
        rundir.probe(Path(place), key=key)
        lock = FileLock(Path(place, FILES_LOCK), timeout=0)
        try:
            lock.acquire()
        except (Timeout, PermissionError):  # another run has it, perhaps another user's
            continue
        except OSError as error:  # one can write here, as was just seen; but nothing keeps others from it
            logger.warning("Another run may write .pt files to %s, too: %s", place, error.strerror or error)
        else:
            closing.callback(_give_back, lock)
            for left in Path(place).glob("step_*.pt.tmp-*"):  # by a run that was killed
                left.unlink(missing_ok=True)
        if place == own:
            why = "as before" if begun else f"another run is writing to {asked} now"
            logger.warning("The .pt files of this run go to %s (%s)", place, why)
        return place
    what = "another run of this name is writing .pt files here"
    raise ConfigError(what, where=own, hint=f"{key}=DIR, another folder; or --name NEW")


def _give_back(lock: BaseFileLock) -> None:
    """Release a lock of which nothing is to stay in a folder of the user's."""
    with contextlib.suppress(OSError):
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is held: who has opened it by now sees that it is gone
    lock.release()


@contextlib.contextmanager
def owned(run: RunDir) -> Iterator[None]:
    """One process at a time trains in a run folder."""
    try:
        lock = FileLock(run.root / "lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise ConfigError(
            "another process is training in this run",
            where=str(run.root),
            hint=f"lockstep stop {shlex.quote(str(run.root))} lets it save and end; or --name NEW",
        ) from None
    except OSError as error:
        raise OutputError(
            f"cannot write to the run: {error.strerror or error}",
            where=str(run.root),
            hint=f"lockstep resume {shlex.quote(str(run.root))} --out DIR goes on in a folder you can write to",
        ) from error
    try:
        yield
    finally:
        lock.release()
