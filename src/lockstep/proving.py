"""The verb `resume --prove`: the steps before a checkpoint once more, in a folder of their own, and the bits compared.

The run is only read, and must have ended. What is made again starts from the checkpoint before, or from the beginning,
with the settings, the number of workers and the threads that the checkpoint says it was made with. Nothing heavy is
imported before.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.arguments import Setting
from lockstep.comparing import facts_of, pairs
from lockstep.errors import ConfigError, DataError, ExitCode, NotFoundError
from lockstep.guard import say
from lockstep.home import find_run, root_of
from lockstep.rundir import MANIFEST, RunDir, refuse_streamed
from lockstep.runtime import env, owner
from lockstep.runtime.scrub import scrubber

if TYPE_CHECKING:
    from lockstep.engine.likeness import Likeness
    from lockstep.report.losses import Compared

AGAIN = "again"  # the name of the run that makes the steps again
SCRATCH = ".prove-"  # before the name of the folder of a proof
SILENT: Mapping[str, Any] = {  # cosmetic: what is shown and written beside the numbers
    "training.save_interval": 0, "training.eval_interval": 0, "training.eval_batches": 1, "training.gen_interval": 0,
    "training.gen_episodes": 0, "training.checkpoint_dir": None, "report.results_dir": None, "report.log_file": None,
    "report.tensorboard": False, "report.profile": False, "report.progress": "off", "system.output_dir": None,
    "system.log_dir": None, "debug.log_level": "WARNING",
}  # fmt: skip
SURROUNDINGS = (
    "device_name",
    "threads",
    "world",
    "determinism",
    "attention",
    "compiled",
    "cpu_kernels",
)  # of a state, beside versions


@dataclass(frozen=True)
class Task:
    """What is to be proven: the state of `target`, from that of `base`; None: from the first weights."""

    run: RunDir
    target: Path
    last: int  # steps after which it was saved
    base: Path | None
    first: int  # steps that `base` has behind it
    about: Mapping[str, Any]  # what the target says it belongs to

    @property
    def steps(self) -> int:
        return self.last - self.first


def prove(arguments: Namespace, settings: list[Setting]) -> int:
    """0: the same bits; 1: others."""
    from lockstep.api import resolve
    from lockstep.start import Start, is_child, start

    if settings:
        what = "a proof has the settings of the run, and no others"
        raise ConfigError(what, where=f"--{settings[0][0]}", hint=f"lockstep resume {arguments.run} --prove")
    if is_child():
        raise ConfigError("a proof starts its own workers", where="--prove", hint="without another launcher")
    task = find(find_run(arguments.run), arguments.steps)
    with _scratch(task.run.root) as scratch:
        family, settings_file = str(task.about["family"]), write_settings(task, scratch)
        place = {
            "run.out": str(scratch),
            "run.name": AGAIN,
        }  # as flags: a run of its own
        words = ["train", family, "--config", str(settings_file), "--out", str(scratch), "--name", AGAIN]
        asked = replace(Start.of(("lockstep",), words, arguments), told=_silent)
        say(*_heading(task))
        again = RunDir(scratch / AGAIN)
        with env.changed(env.UNTIL, f"{task.last}:{again.root}"):
            code = start(resolve(family, file=settings_file, flags=[*place.items()]), asked)
        return code if code != ExitCode.DONE else _tell(task, again)


# ------------------------------------------------------------------------------------------------ what is to be proven


def find(path: Path, steps: int | None) -> Task:
    """The newest good checkpoint of a run, or the one that was named, and where to make its last steps again from."""
    from lockstep.engine import checkpoint, resume

    run = RunDir(root_of(path))
    if (its := owner.read(run.root)) and its.is_alive():
        raise ConfigError(
            f"process {its.pid} still trains this run, and may remove the checkpoints that a proof needs",
            where=str(run.root),
            hint=f"lockstep stop {run.root}, or wait for its end",
        )
    if (path / MANIFEST).is_file():
        checkpoint.verify(path)
        target = path
    else:
        target = resume.point_of_run(path).checkpoint
    last = resume.steps_of(target)
    if steps is not None and steps > last:
        raise ConfigError(f"{steps}, the checkpoint has only {last} behind it", where="--steps", hint=f"1 to {last}")
    latest, since = last - (steps or 1), _changed_at(run, last)
    about = resume.read_about(target)
    refuse_streamed(run.root, str(about["family"]))
    others = [base for base in checkpoint.Checkpointer(run.checkpoints).found() if base.resolve() != target.resolve()]
    for base in reversed(others):
        if since <= _number(base) <= latest and checkpoint.is_good(base):
            return Task(run, target, last, base, resume.steps_of(base), about)
    if since:
        left = [_number(base) for base in others if since <= _number(base) < last]
        raise ConfigError(
            f"the settings or workers of the run were changed after step {since}, and earlier steps had others",
            where="--steps" if steps else str(run.root),
            hint=f"--steps {last - min(left)}" if left else "a run with another checkpoint",
        )
    base, first = _beginning(run)
    if first > latest:
        raise ConfigError(
            f"the run began at step {first}, and {steps or 1} before {last} would be earlier",
            where="--steps" if steps else str(run.root),
            hint=f"--steps {last - first}" if last > first else "a run with another checkpoint",
        )
    return Task(run, target, last, base, first, about)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _changed_at(run: RunDir, last: int) -> int:
    """After how many of its first `last` steps the run went on with other settings, workers or kernels.

    0: not since its beginning, which may be a state of another run.
    """
    from lockstep.report.jsonl import read_events

    events = read_events(run.events) if run.events.is_file() else []
    began, changes = next((event.get("step") for event in events if event["kind"] == "start"), 0), [0]
    for event in events:
        if event["kind"] == "resume" and isinstance(done := event.get("step"), int) and 0 < done < last:
            changes = [step for step in changes if step < done]  # it has gone back behind the others
            changes += [done] if event.get("changed") or event.get("crew") else []
    return changes[-1] if changes[-1] != began else 0


def _beginning(run: RunDir) -> tuple[Path | None, int]:
    """Where the run began: at its first weights, or from a state that another run or program has left."""
    from lockstep.report.jsonl import read_events

    events = read_events(run.events) if run.events.is_file() else []
    started = [event.get("step") for event in events if event["kind"] == "start"]
    done = started[0] if started else 0
    if not isinstance(done, int) or done == 0:
        return None, 0
    came = [event for event in events if event["kind"] == "resume" and event.get("step") == done]
    path = Path(str(came[0].get("path"))) if came else None
    if path is None or not path.exists():
        raise NotFoundError(
            f"no checkpoint before it is left, and the run began at step {done} from a state that is gone",
            where=str(path or run.root),
            hint="checkpoint.keep_last keeps more of them",
        )
    return path, done


@contextmanager
def _scratch(run: Path) -> Generator[Path]:
    """A folder for the steps that are made again: beside the run, where there is room for such a state.

    It stays where they have failed: what is said of the failure leads into it. The next proof removes that of a proof
    that was killed.
    """
    for left in run.resolve().parent.glob(f"{SCRATCH}*"):
        if (its := owner.read(left)) and its.is_here and not its.is_alive():
            shutil.rmtree(left, ignore_errors=True)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=run.resolve().parent))
    except OSError:
        scratch = Path(tempfile.mkdtemp(prefix="lockstep-prove-"))
    try:
        with suppress(OSError):
            owner.write(scratch, sys.argv)
        yield scratch
    finally:
        if RunDir(scratch / AGAIN).failure.is_file():
            owner.leave(scratch)  # nobody else removes it
            say(scrubber()(f"  left for you to look at and to remove: {scratch}"))
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def write_settings(task: Task, scratch: Path) -> Path:
    """The settings of the run as a file, but for what it shows; who computes as it was then."""
    from lockstep.config.load import from_dict
    from lockstep.engine import epochs, resume

    tree: dict[str, Any] = json.loads(json.dumps(task.about["config"]))
    about, system = task.about, tree["system"]
    for key, value in SILENT.items():
        section, _, name = key.partition(".")
        if name in tree[section]:
            tree[section][name] = value
    if "sample_prompt" in tree["report"] and tree["family"] != "ad":
        tree["report"]["sample_prompt"] = ""
    if system["mode"] == "replicas":  # each of them is the whole run
        system |= {"mode": "ddp", "deterministic": True}
    if tree["model"].get("compile") == "auto" and isinstance(compiled := about.get("compiled"), bool):
        tree["model"]["compile"] = "on" if compiled else "off"  # as then: earlier versions timed it
    world, on_cpu = int(about["world"]), bool(about["threads"])
    if on_cpu:
        system |= {"device": "cpu", "threads": int(about["threads"])}
    else:
        system["device"] = "cuda"
    listed = [part for part in str(system["gpus"]).split(",") if part.strip()]
    if on_cpu or len(listed) != world or not all(part.strip().isdecimal() for part in listed) or world == 1:
        system["gpus"] = str(world)
    rows = about.get("batch_rows")
    if task.base is None and rows and isinstance(tree["training"]["batch_size"], int):
        kept = epochs.with_batch(from_dict(tree), rows, world=world).training  # as it has done, on other workers
        tree["training"] |= {"batch_size": kept.batch_size, "grad_accum_nums": kept.grad_accum_nums}
    insists = task.base is not None and bool(
        resume.changed(resume.ResumePoint(task.base, None), about)
    )  # as it did then
    tree["checkpoint"] |= {"resume": str(task.base.absolute()) if task.base else None, "allow_mismatch": insists}
    path = scratch / "settings.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def _silent(*_: str) -> None:
    """What a launcher has to say of steps that were made before, nobody needs."""


# ------------------------------------------------------------------------------------------------ what has come of it


def _heading(task: Task) -> list[str]:
    about, scrub = task.about, scrubber()
    start = f"from {task.base.name}" if task.base else "from the beginning"
    workers = f"{about['world']} worker{'s' * (about['world'] != 1)}"
    return [
        scrub(f"{task.run.root}: {task.target.name}"),
        scrub(f"  steps {task.first} to {task.last - 1} again, {start}: {about['device_name']}, {workers}"),
        scrub(f"  the run says: {about.get('determinism', 'nothing about its bits')}"),
    ]


def _tell(task: Task, again: RunDir) -> int:
    """Compare and say."""
    from lockstep.engine import likeness, resume
    from lockstep.report import losses

    recorded = losses.steps_of(task.run.events)
    span = {step: event for step, event in recorded.items() if task.first <= step < task.last}
    compared = losses.compare(span, losses.steps_of(again.events))
    made = again.checkpoint(task.last)
    if not (made / MANIFEST).is_file():
        raise DataError(f"the steps again have ended before step {task.last}", where=str(task.run.root))
    alike = likeness.compare(task.target, made)
    changed = pairs(facts_of(task.about), facts_of(resume.read_about(made)))
    equal = alike.equal and compared.first is None
    say(*_words(task, compared, alike), *(f"  other than then: {pair.text()}" for pair in changed))
    if equal:
        say("Proven: the same bits")
    else:
        since = f"step {compared.first.step}" if compared.first else f"the state after step {task.last - 1}"
        say(f"Not proven: other bits, first in {since}")
    return ExitCode.DONE if equal else ExitCode.FAILED


def _words(task: Task, compared: Compared, alike: Likeness) -> list[str]:
    recorded = f"{compared.steps} of {task.steps} steps on record"
    said = f"first difference at {compared.first.text()}" if compared.first else "equal bits"
    return [
        f"  losses and gradient norms: {recorded}, {said if compared.steps else 'nothing to compare'}",
        f"  state after step {task.last - 1}: {alike.text()}",
    ]
