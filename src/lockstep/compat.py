"""The documented scripts of each family: their flags, defaults and file names, translated to the native words.

doors/<family>/ holds the scripts, this file what they mean. Torch-free at import. The shell scripts run
`python -m lockstep.compat SCRIPT ...`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import compat_ad, compat_llada, compat_mlm, compat_mlm_scripts, guard
from lockstep.compat_door import Door, parse, resolve
from lockstep.errors import ExitCode, OutputError
from lockstep.families import families_table, init
from lockstep.guard import say

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.start import Start

__all__ = ["DOORS", "configurations", "entry", "families_table", "init", "main", "parse", "resolve"]
logger = logging.getLogger("lockstep.compat")  # also when run with -m

LOG_ROOT = Path("/tmp")  # the documented place, whatever TMPDIR says
RULE = "=" * 60

DOORS = {
    door.script: door
    for door in (
        Door("pretrain_main.py", "Train a LLaMA in one process."),
        Door("run.sh", "Prepare the data, then train a LLaMA.", log_prefix="bracket", launcher=True),
        Door("run_training.sh", "Prepare the data, then train a LLaMA.", launcher=True),
        Door("prepare_dataset.py", "Prepare the dataset of a configuration, without training.", prepares=True),
        compat_mlm.DOOR,
        compat_llada.DOOR,
        compat_ad.TRAIN,
    )
}
PROGRAMS = {
    **compat_mlm_scripts.PROGRAMS,
    **compat_llada.PROGRAMS,
    **compat_ad.PROGRAMS,
}  # that start a trainer, or none


def main(script: str, argv: Sequence[str]) -> int:
    """Run a documented script with its arguments; returns the exit code."""
    program = PROGRAMS.get(script)
    return guard.run(lambda: program(argv) if program else _run(DOORS[script], argv), argv, tell=_tell)


def entry(script: str, argv: Sequence[str]) -> None:
    """The same as a whole program."""
    guard.leave(lambda: main(script, argv))


def configurations(source: str, argv: Sequence[str]) -> None:
    """multi_gpu_configs.py as a whole program; `source` is the file of it that the user may have added to."""
    guard.leave(lambda: guard.run(lambda: compat_mlm_scripts.configurations(argv, source), argv))


def _run(door: Door, argv: Sequence[str]) -> int:
    from lockstep.planning import show_plan
    from lockstep.runtime.devices import check_asked
    from lockstep.start import Start, is_child, start

    argv = door.complete(argv)
    asked, settings = parse(door, argv)
    loaded = resolve(door, asked, settings)
    if door.prepares and not asked.dry_run:
        return _prepare(loaded)
    check_asked(loaded.config.system)
    begin = replace(Start.of(("lockstep.compat", door.script), argv, asked), single=not door.launcher)
    if asked.dry_run:
        return show_plan(loaded, None if door.prepares else begin)
    begin = replace(begin, opening=door.opening, listeners=door.listeners)
    door.ready(asked, loaded)
    if door.launcher and not is_child():
        return _launch(loaded, begin, argv)
    return start(loaded, begin)


def _free_log_folder() -> Path:
    """The documented place of the logs: a name that nothing has yet, also no link that somebody has laid there."""
    second = int(time.time())
    while os.path.lexists(folder := LOG_ROOT / f"model_check_logs_{os.getpid()}_{second}"):
        second += 1
    return folder


def _launch(loaded: Loaded, begin: Start, argv: Sequence[str]) -> int:
    """As the documented launcher: every line labelled, logs in the documented folder, a verdict at the end."""
    from lockstep.start import start

    folder = _free_log_folder()
    try:
        folder.mkdir()
    except OSError as error:
        raise OutputError(f"cannot create the log folder: {error.strerror or error}", where=str(folder)) from error
    begin = replace(begin, log_folder=folder, how="workers" if begin.how == "auto" else begin.how)
    code = guard.run(lambda: start(loaded, begin), argv)
    if not folder.is_dir():  # somebody tidied up meanwhile
        return code
    if not any(folder.iterdir()):  # refused before anything could be logged
        folder.rmdir()
        return code
    begin.told(f"Log directory: {folder}")
    if code == ExitCode.DONE:
        begin.told("[SUCCESS] All GPU training completed successfully")
    return code


def _prepare(loaded: Loaded) -> int:
    """Build or find the dataset of a configuration; `prepare` says which."""
    from lockstep.preparing import prepare_data
    from lockstep.report.logs import setup_logging

    config = loaded.config
    log_files = [Path(config.report.log_file)] if config.report.log_file else []
    setup_logging(level=config.debug.log_level, log_files=log_files)
    for notice in loaded.notices:
        logger.info("%s", notice)
    logger.info("%s\nModel: %s", RULE, config.model.model_path)
    return prepare_data(loaded)


def _tell(text: str, kind: guard.Kind) -> None:
    """To the log, once there is one, so that the line carries its label; else to the error stream."""
    from lockstep.report.logs import console_handler

    if (console := console_handler()) is not None:
        if kind == "error" and not console.labels:  # nothing else would say that this line is one
            text = f"lockstep: error: {text}"
        logger.log(logging.WARNING if kind == "stopped" else logging.ERROR, "%s", text)
    else:
        guard.complain(text, kind)


def _print_idlest_gpu() -> int:
    from lockstep.runtime.devices import idlest_gpu

    say(str(idlest_gpu()))
    return ExitCode.DONE


if __name__ == "__main__":
    if sys.argv[1:] == ["idlest_gpu"]:
        guard.leave(lambda: guard.run(_print_idlest_gpu, ()))
    entry(sys.argv[1], sys.argv[2:])
