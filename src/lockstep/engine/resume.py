"""Where to go on from: which run, which checkpoint, and whether it belongs to this configuration."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import rundir
from lockstep.config import saved
from lockstep.config.load import identity_diff
from lockstep.config.schema import RunConfig
from lockstep.engine import agent_files, epochs, predecessor
from lockstep.engine.checkpoint import RUN, Checkpointer, check_not_spoilt
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.models.build import Kernels
from lockstep.rundir import RunDir

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

KEYS_TOLD = 5  # settings in which another run differs
CHOOSING = (("system", "deterministic"), ("debug", "enabled"), ("training", "precision"))
DECIDING = ("torch", "cuda", "cudnn")  # versions that come with other kernels


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint folder or documented .pt file; `run` is the run to go on in, None for a new one."""

    checkpoint: Path
    run: RunDir | None


def find(config: RunConfig, asked: Mapping[str, Any]) -> ResumePoint | None:
    """What checkpoint.resume means; None: start anew. `asked` are the identity settings before `auto` was resolved."""
    resume = config.checkpoint.resume
    if resume is None:
        return None
    out, name = Path(config.run.out), config.run.name
    if resume == "auto" and name is not None and (point := _of_name(out / name)):
        return point
    if resume == "auto":
        return _newest_alike(out, config, asked)
    path, named = Path(resume), Path(config.run.out) / resume
    if path.suffix == ".pt":
        if not path.is_file():
            raise NotFoundError("no such checkpoint", where=str(path))
        return ResumePoint(path, None)
    if not path.exists() and named.is_dir():  # a run by its name, or `latest`
        path = named
    rundir.refuse_export(path)
    if (path / rundir.MANIFEST).is_file():  # one checkpoint: an older one than the newest starts a run of its own
        run = RunDir(path.resolve().parents[1])
        newest = Checkpointer(run.checkpoints).found()[-1:]
        return ResumePoint(path, run if [path.resolve()] == [item.resolve() for item in newest] else None)
    return point_of_run(path)


def point_of_run(path: Path) -> ResumePoint:
    """The newest good checkpoint of a run folder."""
    run = RunDir(path.resolve() if path.is_symlink() else path)
    if not run.config.is_file():
        raise NotFoundError("no run here", where=str(path), hint="lockstep shows the last runs")
    checkpointer = Checkpointer(run.checkpoints)
    newest = checkpointer.latest()
    if newest is None:
        damaged = checkpointer.found()
        if damaged:
            what = f"none of the {len(damaged)} checkpoints can be trusted"
            raise DataError(what, where=str(run.checkpoints), hint="a copy of one, or train anew: --name NEW")
        raise NotFoundError("the run has saved no checkpoint", where=str(path), hint="start it anew")
    return ResumePoint(newest, run)


def _of_name(folder: Path) -> ResumePoint | None:
    """Where the run that has this name can go on; None: it has nothing to go on from, or there is none."""
    if has_saved(RunDir(folder)):
        return point_of_run(folder)
    documented = agent_files.newest(folder)
    return ResumePoint(documented, None) if documented else None


def has_saved(run: RunDir) -> bool:
    """Whether there is a checkpoint in a run folder, good or bad."""
    return bool(Checkpointer(run.checkpoints).found())


def can_begin(run: RunDir) -> bool:
    """Whether a folder is that of a run that has saved nothing, or holds only documented files."""
    known = run.config.is_file() or agent_files.newest(run.root) is not None
    return known and not has_saved(run)


def _newest_alike(out: Path, config: RunConfig, asked: Mapping[str, Any]) -> ResumePoint | None:
    """The newest run that was asked for with these settings; where a name was given, only the one that has it."""
    name = config.run.name
    runs = [run for run in predecessor.earlier_runs(out, config.family) if name in (None, run.folder.name)]
    for run in runs:
        if not run.differences(asked) and (newest := Checkpointer(RunDir(run.folder).checkpoints).latest()):
            return ResumePoint(newest, RunDir(run.folder))
    logger.info("Nothing to resume in %s: starting anew%s", out, _why_not(runs[0], asked) if runs else "")
    return None


def _why_not(run: predecessor.EarlierRun, asked: Mapping[str, Any]) -> str:
    """Why the newest run is not the one that is meant."""
    differences = run.differences(asked)
    if not differences:
        return f". No checkpoint of {run.folder.name} is intact"
    more = [f"... and {len(differences) - KEYS_TOLD} more"] if len(differences) > KEYS_TOLD else []
    return f". {run.folder.name} has other settings:" + "".join(
        f"\n    {line}" for line in [*differences[:KEYS_TOLD], *more]
    )


def check_belongs(about: Mapping[str, Any], current: Mapping[str, Any], *, checkpoint: Path, allow: bool) -> None:
    """Refuse, with the differences, a state of another configuration, model or dataset."""
    try:
        about = _as_of_today(about, checkpoint)
        differences = identity_diff(about["identity"], current["identity"])
        if about["data_key"] != current["data_key"]:
            old, new = str(about["data_key"])[:12], current["data_key"][:12]
            differences.append(f"prepared data: {old} in the checkpoint, {new} now")
        deciding = other_bits(about, current)
        was_canonical, is_canonical = (
            each["config"]["system"]["deterministic"] == "canonical" for each in (about, current)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the checkpoint does not say what it belongs to: {error!r}", where=str(checkpoint)) from None
    if deciding:
        logger.warning("The bits may differ from here on: %s", "; ".join(deciding))
    if was_canonical and not is_canonical:
        logger.warning("Saved with canonical sums, resuming without: from here on the bits depend on the workers")
    refuse(differences, checkpoint=checkpoint, allow=allow)


def other_bits(about: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What decides the last bits and is no setting, where it is not what it was: device, threads, versions, kernels.

    An older checkpoint may not say all of it.
    """
    found = [(key, about.get(key), current.get(key)) for key in ("device_name", "attention", "compiled", "cpu_kernels")]
    old, new = about["versions"], current["versions"]
    found += [(name, old.get(name), new.get(name)) for name in DECIDING]
    told = [(key, was, now) for key, was, now in found if was is not None and now is not None and was != now]
    return [f"saved with {key} {str(was)[:80] or 'none'}, now {str(now) or 'none'}" for key, was, now in told]


def changed(point: ResumePoint, current: Mapping[str, Any]) -> list[str]:
    """The settings that decide the numbers and are not those of the checkpoint."""
    was = about_of(point).get("identity")
    return identity_diff(was, current["identity"]) if isinstance(was, dict) else []


def other_crew(point: ResumePoint, current: Mapping[str, Any]) -> list[str]:
    """Who computes and how, where that decides the bits and is not as it was; of canonical sums any workers do."""
    was = about_of(point)
    if not was:
        return []
    old, new = (each["config"]["system"] for each in (was, current))
    found = [(f"system.{key}", old.get(key), new[key]) for key in ("mode", "deterministic")]
    if not old.get("deterministic") == new["deterministic"] == "canonical":
        found.append(("world", was.get("world"), current["world"]))
    told = [f"{key}: {then} in the checkpoint, {now} now" for key, then, now in found if then not in (None, now)]
    return told + other_bits(was, current)


def refuse(differences: list[str], *, checkpoint: Path, allow: bool) -> None:
    """Nothing, if there are no differences; else an error, or a warning where that is allowed."""
    text = "\n".join(f"    {line}" for line in differences)
    if differences and not allow:
        raise ConfigError(
            f"the checkpoint belongs to another configuration:\n{text}",
            where=str(checkpoint),
            hint="leave these settings as they were; train a new run (--name NEW, no --resume); or insist: "
            "--checkpoint.allow-mismatch true",
        )
    if differences:
        logger.warning("Resuming although the configuration differs:\n%s", text)


def check_early(point: ResumePoint, identity: Mapping[str, Any], *, allow: bool) -> None:
    """Refuse a foreign configuration before the run folder is touched (a .pt file is looked at when it is read).

    Another family, and fewer steps than are done, also from who insists.
    """
    if point.run:
        rundir.check_plain(point.run.root)
    elif point.checkpoint.suffix != ".pt":  # it was named: nothing is passed over for another one
        check_not_spoilt(point.checkpoint)
    if point.checkpoint.suffix == ".pt":
        return
    was, place = read_about(point.checkpoint)["identity"], str(point.run.root if point.run else point.checkpoint)
    if (family := was.get("family", identity["family"])) != identity["family"]:  # no insisting makes them fit
        raise ConfigError(
            f"is of the family {family}, and {identity['family']} was asked for",
            where=place,
            hint=f"lockstep resume {shlex.quote(place)} goes on with it; a new run: another --name, no --resume",
        )
    rundir.refuse_streamed(point.run.root if point.run else point.checkpoint.resolve().parents[1], identity["family"])
    done, most = steps_of(point.checkpoint), identity["training.max_steps"]
    if most < done and most != was.get("training.max_steps"):
        raise ConfigError(
            f"training.max_steps {most:,}, and {done:,} steps are done",
            where=str(point.checkpoint),
            hint=f"--max-steps {done} or more; or an older checkpoint: RUN/checkpoints/step_... --name NEW",
        )
    if not allow:
        refuse(identity_diff(was, dict(identity)), checkpoint=point.checkpoint, allow=False)


def saved_rows(point: ResumePoint, config: RunConfig) -> int | None:
    """Rows of the global batch that a checkpoint was trained with, where this run is to keep them."""
    if config.checkpoint.allow_mismatch or point.checkpoint.suffix == ".pt":
        return None
    return read_about(point.checkpoint).get("batch_rows")


def read_about(checkpoint: Path, *, trains: bool = True) -> Mapping[str, Any]:
    """What a checkpoint folder says it belongs to; to train on from it, or only to use its weights."""
    try:
        return _as_of_today(rundir.read_json(checkpoint / RUN)["about"], checkpoint, trains=trains)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot be read: {error!r}", where=str(checkpoint / RUN)) from None


def _as_of_today(about: Mapping[str, Any], checkpoint: Path, *, trains: bool = True) -> Mapping[str, Any]:
    """The same with the settings of the version that saved it read as those of this one."""
    if not isinstance(about["identity"], dict) or not isinstance(about["config"], dict):
        raise TypeError("no configuration in it")
    family, where = str(about["family"]), str(checkpoint)
    settings = {
        "identity": saved.read_identity(about["identity"], family, where=where, trains=trains),
        "config": saved.read_tree(about["config"], family, where=where, trains=trains),
    }
    return {**about, **settings}


def steps_of(checkpoint: Path) -> int:
    """How many steps a checkpoint folder says it has behind it."""
    try:
        return int(rundir.read_json(checkpoint / RUN)["progress"]["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot be read: {error!r}", where=str(checkpoint / RUN)) from None


def with_saved_batch(config: RunConfig, point: ResumePoint | None, about: dict[str, Any], *, world: int) -> RunConfig:
    """Another number of workers keeps the global batch of its checkpoint; what the run is called stays as it was."""
    if point and (rows := saved_rows(point, config)):
        config = epochs.with_batch(config, rows, world=world)
        about["batch_rows"] = epochs.batch_rows(config, world)
    return config


def about_of(point: ResumePoint | None) -> Mapping[str, Any]:
    """The same of where to go on from; empty where nothing says it."""
    with contextlib.suppress(DataError):
        return read_about(point.checkpoint) if point and point.checkpoint.suffix != ".pt" else {}
    return {}


def kernels_before(point: ResumePoint | None, about: Mapping[str, Any]) -> Kernels | None:
    """The kernels of the checkpoint, which `auto` keeps where the device and the settings that choose are as then."""
    was = about_of(point)
    attention, compiled = was.get("attention"), was.get("compiled")
    if not isinstance(attention, str) or not isinstance(compiled, bool):
        return None
    then, now = (
        [each.get("device_name"), *(each["config"].get(section, {}).get(key) for section, key in CHOOSING)]
        for each in (was, about)
    )
    return Kernels(attention, compiled) if then == now else None


def check_batch(saved_rows: int | None, config: RunConfig, *, world: int, checkpoint: Path) -> None:
    """Refuse another global batch: each step would see other rows. Says what would fit."""
    micro, count = config.training.batch_size, config.training.grad_accum_nums
    rows = world * micro * count
    if saved_rows is None or saved_rows == rows:
        return
    raise ConfigError(
        f"the checkpoint has {saved_rows} rows in each global batch, this run {rows}: {world} workers x batch_size "
        f"{micro} x grad_accum_nums {count}",
        where=str(checkpoint),
        hint=f"as many workers as give workers x batch_size x grad_accum_nums = {saved_rows}",
    )
