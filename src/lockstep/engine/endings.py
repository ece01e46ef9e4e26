"""How a run ends: well, with a summary; badly, with the cause written down and the state kept."""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from lockstep import rundir
from lockstep.contracts import Sink
from lockstep.engine import fitting, loop, milestones, replicas, shortage
from lockstep.engine.build import Plan
from lockstep.engine.parts import Parts
from lockstep.engine.present import resume_command
from lockstep.errors import ExitCode, LockstepError, MemoryShortageError, NonFiniteError, Stopped, cause_of
from lockstep.launch import failure
from lockstep.launch.link import Link
from lockstep.rundir import RunDir
from lockstep.runtime import env
from lockstep.runtime.group import is_lost_peer

logger = logging.getLogger(__name__)

TRACE_LINES = 20
PATIENCE_SECONDS = 5.0  # with a save that shows no sign of life, and may wait for a rank that is gone
KINDS: dict[type[BaseException], str] = {NonFiniteError: "nonfinite", MemoryShortageError: "memory"}


def explain(error: BaseException, planned: Plan, *, run: RunDir, place: env.Env) -> BaseException:
    """Out of memory, or a lost peer, as a user should read it; everything else as it is."""
    if isinstance(error, SystemExit) and not error.code:  # nobody may take this for a finished run
        return LockstepError("left training with exit code 0")
    if is_lost_peer(error):
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        told = isinstance(error, LockstepError) and error.secondary  # it has said why, and is not merely gone
        lost = LockstepError(f"another worker failed: {said}" if told else f"lost contact with another worker ({said})")
        lost.secondary = True
        return lost
    if not shortage.is_shortage(error):
        return error
    return shortage.explain(error, fitting.work_of(planned, place), run=run, workers=place.local_world)


def point_to_resuming(error: BaseException, run: RunDir) -> None:
    """How to go on, where what was done is saved: after a stop, and when only room on a disk was missing."""
    if env.last_step(run.root) is not None:  # a proof: it is begun anew, and the run that it is about stands as it did
        return
    if isinstance(error, Stopped):
        error.where, error.hint = str(run.root), resume_command(run)
    elif isinstance(error, LockstepError) and _is_io(error) and failure.has_saved(run.root):
        error.hint = f"{error.hint}, then {resume_command(run)}" if error.hint else resume_command(run)


def end_badly(
    run: RunDir, error: BaseException, sinks: list[Sink], parts: Parts | None, *, place: env.Env, link: Link
) -> None:
    """Write down why the run ended, then save what is whole. Whatever fails here never hides the error itself."""
    stopped, alone = isinstance(error, Stopped), place.world == 1
    record = describe(error, place, step=parts.progress.step if parts else None)
    record["section"] = link.section
    if not stopped:
        record["step"] = (
            link.step if link.step >= 0 else record["step"]
        )  # the one that failed, not the last that is done
        with contextlib.suppress(OSError):
            if alone and sinks:
                record["next"] = record["next"] or failure.next_command(run.root)
                rundir.write_json(run.failure, record)
            link.fail(record)
    else:
        link.leave(record["exit_code"])
    told = {"failure" if key == "kind" else key: value for key, value in record.items()}  # an event has its own kind
    for sink in sinks:
        _attempt("reporting the end", sink.event, "end" if stopped else "fault", told)
    if stopped:
        label = f" [{place.tag.replace('GPU', 'GPU ')}]" if place.tag else ""
        by_user = record["exit_code"] == ExitCode.INTERRUPTED  # Ctrl-C; else a scheduler, or `lockstep stop`
        logger.warning("Training %s%s", "interrupted by user" if by_user else str(error).splitlines()[0], label)
        logger.warning("Training ended at step %s%s", record["step"] or 0, label)
    elif parts and parts.config.system.mode == "replicas" and not record["secondary"]:
        _attempt("comparing the replicas", _tell_differences, run, record["exit_code"])
    if parts:  # also of a rank whose others are gone: what was begun is worth an attempt, as long as it goes on
        patience = math.inf if alone else PATIENCE_SECONDS
        _attempt("the save on its way", milestones.land, parts, patience_seconds=patience)
    together = alone or isinstance(error, NonFiniteError)  # what strikes every worker at once: all are here to save
    if getattr(error, "kept", False) or _is_io(error):  # what could not be written now will not be in a moment
        return
    if parts and together and not stopped and not parts.stepper.updating and isinstance(error, Exception):
        saved = _attempt("the last save", loop.save, parts, "error")
        if saved and alone:  # there is something to go on from now
            if isinstance(error, MemoryShortageError):
                error.hint = record["next"] = shortage.as_command(error.remedy, run)
            elif not isinstance(error, LockstepError):
                record["next"] = failure.next_command(run.root)
            _attempt("the record", rundir.write_json, run.failure, record)


def _is_io(error: BaseException) -> bool:
    return isinstance(error, LockstepError) and error.exit_code == ExitCode.IO


def _is_no_room(error: BaseException) -> bool:
    """Whether reading or writing failed for want of room: by the system's word, or by our own count before it."""
    told = error if isinstance(error, OSError) else error.__cause__
    return not isinstance(told, OSError) or told.errno in rundir.NO_ROOM


def _tell_differences(run: RunDir, exit_code: int) -> None:
    """A worker whose bits were wrong before something failed may be the cause of it."""
    if exit_code != ExitCode.BAD_DEVICE and (said := replicas.differences_so_far(run.root)):
        logger.warning("Before this, %s", said)


def describe(error: BaseException, place: env.Env, *, step: int | None) -> dict[str, Any]:
    """A failure as failure.json and the launcher have it."""
    code = int(error.exit_code) if isinstance(error, LockstepError) else int(ExitCode.FAILED)
    shown = error.__cause__ if isinstance(error, MemoryShortageError) and error.__cause__ else error
    trace = "".join(traceback.format_exception(shown)).splitlines()[-TRACE_LINES:]
    explained = isinstance(error, LockstepError)
    cause = cause_of(error)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(ExitCode.FAILED)
        explained, cause = True, f"exited with code {code}"
    kind = "lost_peer" if getattr(error, "secondary", False) else "exit" if isinstance(error, SystemExit) else ""
    if code == ExitCode.IO and not kind:
        kind = "disk_full" if _is_no_room(error) else "io"
    kind = kind or next((name for family, name in KINDS.items() if isinstance(error, family)), "exception")
    return {
        "exit_code": code,
        "rank": place.rank,
        "gpu": place.tag,
        "node": place.node,
        "step": step,
        "kind": kind,
        "cause": env.redact(cause if explained else f"{type(error).__name__}: {cause}"),
        "exception": type(error).__name__,
        "trace": [] if isinstance(error, Stopped) else [env.redact(line) for line in trace],
        "secondary": getattr(error, "secondary", False) or getattr(error, "elsewhere", False),
        "next": error.hint if isinstance(error, LockstepError) else "",
        **(error.figures if isinstance(error, MemoryShortageError) else {}),
        **(_found(error.finding) if isinstance(error, NonFiniteError) and error.finding else {}),
    }


def _found(finding: Mapping[str, Any]) -> dict[str, Any]:
    """What a failure record says of a number that was not finite."""
    place = finding.get("place") or {}
    names = ("module", "operation", "line", "phase")
    return {name: place[name] for name in names if place.get(name)} | {
        "finding": finding["kind"],
        "ranks": finding["ranks"],
        "rows": finding["row_ids"],
        "reproduced": finding["reproduced"],
        "bundle": finding["files"].get("bundle", ""),
    }


def _attempt(what: str, action: Callable[..., object], *arguments: object, **options: object) -> bool:
    try:
        action(*arguments, **options)
    except Exception as another:
        logger.error("%s failed too: %s", what, another)
        return False
    return True
