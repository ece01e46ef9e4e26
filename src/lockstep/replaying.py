"""The verb `replay`: from its words to what is printed. Nothing heavy is imported before."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from pathlib import Path

from lockstep.errors import DataError, NotFoundError
from lockstep.guard import say
from lockstep.home import find_run, root_of
from lockstep.rundir import expanded, read_json
from lockstep.runtime.scrub import scrubber

BUNDLE = "bundle.json"


def replay(arguments: Namespace) -> int:
    """0: the same first bad tensor again; 1: not."""
    folder = find(arguments.bundle)
    from lockstep.engine import replay as engine

    done, finding = engine.replay(folder, drop=arguments.drop_sample, device=arguments.device)
    scrub = scrubber()  # a bundle may come from anywhere
    if arguments.json:
        tried = [
            {"change": each.change.name, "finite": each.fine,
             "module": each.place.module if each.place else "", "operation": each.place.operation if each.place else ""}
            for each in done.outcomes
        ]  # fmt: skip
        told = {"reproduced": done.reproduced, "verdict": done.verdict, "tried": tried}
        say(json.dumps(told | {"place": dataclasses.asdict(finding.place) if finding.place else None}, indent=1))
    else:
        say(*(scrub(line) for line in done.lines(finding)))
    return done.exit_code


def find(name: str) -> Path:
    """A bundle by its folder, or that of a run which has failed."""
    folder = expanded(name)
    if (folder / BUNDLE).is_file():
        return folder
    hint = "RUN/workers/n0-GPU0/faults/step_000012, as RUN/failure.json names it"
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise DataError("not a bundle", where=str(folder), hint=hint)
    run = root_of(find_run(name))
    found = sorted(run.glob(f"workers/*/faults/step_*/{BUNDLE}"), key=lambda path: path.stat().st_mtime)
    named = _named_by_failure(run)
    for path in [path for path in found if path.parent.parts[-3:] == named] or found:  # else the first that was kept
        return path.parent
    raise NotFoundError("nothing was kept of a bad step in this run", where=str(run), hint=hint)


def _named_by_failure(run: Path) -> tuple[str, ...]:
    """(worker, "faults", step) of the failure that ended the run: one that went on may have kept others before."""
    try:
        record = read_json(run / "failure.json")
        return Path(record["bundle"]).parts[-3:]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
