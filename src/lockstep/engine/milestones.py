"""What happens between two steps: validation, the end of an epoch, saving, the result files. All ranks take part."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from lockstep.engine import agent_files, drift, legacy, results, unseen
from lockstep.engine.checkpoint import State
from lockstep.engine.evaluate import evaluate
from lockstep.engine.parts import Parts
from lockstep.engine.saving import Export
from lockstep.engine.state import capture
from lockstep.errors import ExitCode, LockstepError
from lockstep.rundir import RunDir
from lockstep.runtime import env
from lockstep.runtime.marks import Marks

logger = logging.getLogger(__name__)


def validate(parts: Parts) -> None:
    """Measure the validation batches and tell everyone."""
    parts.link.enter("evaluate")
    parts.tell("evaluating", step=parts.progress.step)
    parts.measures = evaluate(parts.stepper, parts.validation)
    parts.val_loss = parts.measures["loss"]
    parts.progress.note_validation(parts.known_val_loss)
    step = parts.progress.step
    parts.tell("eval", step=step, **{f"val_{name}": value for name, value in parts.measures.items()})
    if not math.isfinite(parts.val_loss) and parts.council.group.rank == 0 and parts.saves:
        logger.warning("Validation loss is %s at step %d. Training continues.", parts.val_loss, step)


def walk(parts: Parts) -> None:
    """Let an agent loose in tasks it has not seen, and tell everyone how it did. Other models do not walk."""
    parts.link.enter("evaluate")
    parts.outcome = unseen.in_training(parts)
    if parts.outcome:
        parts.tell("walk", step=parts.progress.step, **parts.outcome.fields())


def walks_after(parts: Parts, done: int) -> bool:
    """Whether that is to happen after `done` steps."""
    return due(done, getattr(parts.config.training, "gen_interval", 0))


def reopen(parts: Parts) -> None:
    """Before the first step, also of a run that goes on: the history is that of the whole epochs so far.

    An epoch that ended with the last step before an error was not closed then, and is closed now.
    """
    parts.epoch_began = time.perf_counter()
    if parts.epochs is None or parts.progress.step == 0:
        return
    finished = parts.epochs.finished_after(parts.progress.step)
    parts.progress.forget_after(finished)
    if finished > len(parts.progress.train_losses):
        validate(parts)
        end_epoch(parts)


def close_the_end(parts: Parts) -> None:
    """Of a run that is over: close the epoch that its last step has ended, if an error came between."""
    validate(parts)
    walk(parts)
    progress = parts.progress
    if parts.epochs is None:
        return
    finished, closed = parts.epochs.finished_after(progress.step), len(progress.train_losses)
    if finished > closed or (finished == closed and progress.epoch_targets):  # one that was cut is left unsummed
        end_epoch(parts)


def end_epoch(parts: Parts) -> None:
    """Close the epochs that have ended, or, at the end of the run, the one that was begun. After a validation."""
    epochs, progress = parts.epochs, parts.progress
    if epochs is None:
        return
    finished, closed = epochs.finished_after(progress.step), len(progress.train_losses)
    whole = finished > closed
    number = finished if whole else finished + 1
    progress.close_epochs(number, parts.known_val_loss)
    seconds = time.perf_counter() - parts.epoch_began
    for epoch in range(closed, number):
        parts.tell(
            "epoch",
            step=progress.step,
            epoch=epoch + 1,
            epochs=epochs.count,
            whole=whole,
            train_loss=progress.train_losses[epoch],
            val_loss=progress.val_losses[epoch],
            seconds=seconds,
            max_steps=epochs.steps,
            epoch_steps=epochs.epoch_steps,
        )
    if whole:
        progress.begin_epoch()


def prepare_saves(parts: Parts) -> None:
    """Before the first step: refuse a disk that cannot hold a checkpoint. All ranks call it.

    And take a GPU's memory for copies, if there will be a save that training does not wait for: all but the last.
    """
    if not parts.saves:
        return
    state, first = capture(parts.stepper, parts.progress, parts.about), parts.progress.step
    parts.checkpointer.check_free(state)
    interval, last = parts.config.training.save_interval, first + parts.steps_left(first)
    if parts.epochs or (interval and first // interval < (last - 1) // interval):
        parts.saver.make_room(state, ranks=env.detect().local_world)


def save(parts: Parts, name: str, *, plain: bool = False, aside: bool = False) -> None:
    """Publish a checkpoint, and the documented .pt file called `name` where one is wanted. All ranks call it.

    Without a name only the checkpoint; `plain`: the same layout for every family. `aside`: training goes on meanwhile,
    and `land` tells how it ended. Weights that differ from rank to rank are not saved.
    """
    if not parts.saves:
        return
    _make_way(parts, strict=aside)
    parts.link.enter("save")
    drift.check(parts)
    state = capture(parts.stepper, parts.progress, parts.about)
    room = aside and all(parts.council.group.gather(parts.saver.has_room(state, ranks=env.detect().local_world)))
    copy = room or parts.saver.snapshot.is_kept  # which a GPU fills faster than any other memory
    parts.saver.begin(parts.progress.step, state, export=_export(parts, name, plain=plain), copy=copy)
    if not room:
        land(parts, last=not aside)


def land(parts: Parts, *, last: bool = False, patience_seconds: float = math.inf) -> None:
    """Wait for the save on its way, if there is one, and tell of it; what it failed of is raised on all ranks.

    Not if only the disk was in the way of one that is not the last, and the user would rather try again at the next.
    """
    try:
        saved = parts.saver.land(parts.link, patience_seconds=patience_seconds)
        if saved:
            parts.tell("save", step=saved.step, path=str(saved.path))
            if saved.failed:
                raise saved.failed
            if saved.export:
                parts.tell("export", step=saved.step, path=str(saved.export))
    except LockstepError as error:
        if last or error.exit_code != ExitCode.IO or parts.config.checkpoint.on_full == "stop":
            raise
        if parts.council.group.rank == 0:  # whose lines are shown; the error names the rank that had it
            logger.warning("Training goes on without this checkpoint, the next save tries again: %s", str(error))
        error.__traceback__ = None  # else it holds itself, and with it the copy, until the garbage is collected


def _make_way(parts: Parts, *, strict: bool) -> None:
    """One save at a time. Not strict: should the one before have failed, the one to come may still succeed."""
    try:
        land(parts)
    except LockstepError as error:
        if strict:
            raise
        if parts.council.group.rank == 0:
            logger.error("The save before this one has failed: %s", error)


def _export(parts: Parts, name: str, *, plain: bool = False) -> Export | None:
    """The documented .pt file of the family, to be made of the state that is saved now; None: none is wanted."""
    if not parts.config.training.checkpoint_dir or not name:
        return None
    config, kept = parts.about["config"], legacy.plain_of(parts.stepper)
    folder = Path(str(parts.config.training.checkpoint_dir))
    if parts.config.family == "ad" and not plain:
        path = agent_files.file_of(folder, parts.progress.step)
        return Export(path, lambda state, link: agent_files.write(path, kept, state, config=config, link=link))
    path, epoch = folder / f"{name}.pt", parts.progress.step * parts.batch_rows // parts.rows
    keep, record = parts.config.checkpoint.keep_files, RunDir(parts.checkpointer.folder.parent).files

    def write(state: State, link: Marks) -> None:
        legacy.put(path, kept, state, epoch=epoch, config=config, link=link)
        if keep and legacy.STEP_NAME.fullmatch(path.name):
            legacy.forget_oldest(record, path, keep=keep)

    return Export(path, write)


def make_good(parts: Parts) -> None:
    """Of a run that is over: its checkpoint, should it have begun at its end, in the state of another run.

    And the documented file of its last step, should a kill have come before it.
    """
    if parts.saves and not parts.council.group.together(lambda: bool(parts.checkpointer.found())):
        save(parts, "")
    folder = parts.config.training.checkpoint_dir
    if not parts.saves or not folder or parts.config.family != "ad":
        return
    path = agent_files.file_of(Path(folder), parts.progress.step)
    if not parts.council.group.together(path.is_file):
        save(parts, "agent")  # the checkpoint itself is there, and is left as it is


def write_results(parts: Parts) -> None:
    """The documented result files, where they are wanted. All ranks call it."""
    if parts.saves and parts.config.report.results_dir:
        parts.link.enter("save")
        if place := results.write(parts):
            parts.tell("results", step=parts.progress.step, path=str(place), family=parts.config.family)
    parts.epoch_began = time.perf_counter()  # the next one has not begun before


def due(done: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `done` of them."""
    return interval > 0 and done % interval == 0
