"""Where to go on from: which run, which checkpoint, and whether it belongs to this configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import rundir
from lockstep.config.load import identity_diff
from lockstep.config.schema import RunConfig
from lockstep.engine.checkpoint import RUN, Checkpointer
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.rundir import RunDir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint folder or documented .pt file; `run` is the run to go on in, None for a new one."""

    checkpoint: Path
    run: RunDir | None


def find(config: RunConfig, identity_hash: str) -> ResumePoint | None:
    """What checkpoint.resume asks for; None: start anew."""
    asked = config.checkpoint.resume
    if asked is None:
        return None
    if asked == "auto":
        return _newest_alike(Path(config.run.out), config.family, identity_hash)
    path = Path(asked)
    if path.suffix == ".pt":
        return ResumePoint(path, None)
    if (path / rundir.MANIFEST).is_file():  # one checkpoint: an older one than the newest starts a run of its own
        run = RunDir(path.resolve().parents[1])
        newest = Checkpointer(run.checkpoints, keep_last=2).found()[-1:]
        return ResumePoint(path, run if [path.resolve()] == [item.resolve() for item in newest] else None)
    return point_of_run(path)


def point_of_run(path: Path) -> ResumePoint:
    """The newest good checkpoint of a run folder."""
    run = RunDir(path.resolve())
    if not run.config.is_file():
        raise NotFoundError("no run here", where=str(path), hint="ls runs/, or --resume auto")
    checkpointer = Checkpointer(run.checkpoints, keep_last=2)
    newest = checkpointer.latest()
    if newest is None:
        damaged = checkpointer.found()
        if damaged:
            raise DataError(f"none of the {len(damaged)} checkpoints can be trusted", where=str(run.checkpoints))
        raise NotFoundError("the run has saved no checkpoint", where=str(path), hint="start it anew without --resume")
    return ResumePoint(newest, run)


def _newest_alike(out: Path, family: str, identity_hash: str) -> ResumePoint | None:
    candidates: list[tuple[float, Path]] = []
    for config_file in out.glob("*/config.json"):
        if config_file.parent.is_symlink():
            continue
        try:
            saved = json.loads(config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if saved.get("family") == family and saved.get("identity_hash") == identity_hash:
            candidates.append((float(saved.get("created", 0)), config_file.parent))
    for _, folder in sorted(candidates, reverse=True):
        run = RunDir(folder.resolve())
        newest = Checkpointer(run.checkpoints, keep_last=2).latest()
        if newest:
            return ResumePoint(newest, run)
    logger.info("Nothing to resume in %s: starting anew", out)
    return None


def check_belongs(about: Mapping[str, Any], current: Mapping[str, Any], *, checkpoint: Path, allow: bool) -> None:
    """Refuse, with the differences, a state of another configuration, model or dataset."""
    differences = identity_diff(about["identity"], current["identity"])
    if about["data_key"] != current["data_key"]:
        differences.append(f"prepared data: {about['data_key'][:12]} in the checkpoint, {current['data_key'][:12]} now")
    if about["threads"] != current["threads"] or about["device_name"] != current["device_name"]:
        logger.warning(
            "Resuming on %s with %d threads; saved on %s with %d: the last bits may differ",
            current["device_name"], current["threads"], about["device_name"], about["threads"],
        )  # fmt: skip
    if not differences:
        return
    text = "\n".join(f"    {line}" for line in differences)
    if not allow:
        raise ConfigError(
            f"the checkpoint belongs to another configuration:\n{text}",
            where=str(checkpoint),
            hint="the saved settings (lockstep resume RUN), or --checkpoint.allow-mismatch true",
        )
    logger.warning("Resuming although the configuration differs:\n%s", text)


def read_about(checkpoint: Path) -> Mapping[str, Any]:
    """What a checkpoint folder says it belongs to."""
    return json.loads((checkpoint / RUN).read_text(encoding="utf-8"))["about"]
