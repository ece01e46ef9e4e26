"""The documented scripts of each family: their flags, defaults and file names, translated to the native words.

doors/<family>/ holds the scripts, this file what they mean. Torch-free at import. The shell scripts run
`python -m lockstep.compat SCRIPT ...`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep import api, guard
from lockstep.arguments import Parser, Setting, understand
from lockstep.errors import ExitCode, OutputError
from lockstep.families import doors_folder, families_table, init
from lockstep.guard import say

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.start import Start

__all__ = ["DOORS", "entry", "families_table", "init", "main", "parse", "resolve"]
logger = logging.getLogger("lockstep.compat")  # also when run with -m

LOG_ROOT = Path("/tmp")  # the documented place, whatever TMPDIR says
RULE = "=" * 60


@dataclass(frozen=True)
class Door:
    """A documented script: what it is for and what it sets where the user has not."""

    script: str
    summary: str
    log_prefix: Literal["bracket", "colon"] = "colon"
    launcher: bool = False  # writes /tmp/model_check_logs_*, labels every line
    prepares: bool = False  # only prepares the dataset

    def parser(self) -> Parser:
        """The flags of the script; with those of every setting."""
        parser = Parser("", self.summary)
        parser.prog = f"bash {self.script}" if self.script.endswith(".sh") else f"python3 {self.script}"
        parser.flag("--config", "a .json or .yaml file over the preset", metavar="FILE")
        parser.flag("--preset", "settings to start from (production; demo where there is no GPU)", metavar="NAME")
        parser.flag("--debug", "the debug preset, or debug output for another one")
        parser.flag("--dry-run", "show the resolved configuration, and stop")
        parser.add_shorts()
        parser.add_launch()
        return parser

    def defaults(self) -> dict[str, str]:
        """Settings of the script itself: over the preset, under the file and the flags."""
        places = {"training.checkpoint_dir": "./.checkpoints", "system.output_dir": "./.outputs"}
        every = {"report.log_all_ranks": "true"} if self.launcher else {}
        return places | every | {"report.log_prefix": self.log_prefix}


DOORS = {
    door.script: door
    for door in (
        Door("pretrain_main.py", "Train a LLaMA in one process."),
        Door("run.sh", "Prepare the data, then train a LLaMA.", log_prefix="bracket", launcher=True),
        Door("run_training.sh", "Prepare the data, then train a LLaMA.", launcher=True),
        Door("prepare_dataset.py", "Prepare the dataset of a configuration, without training.", prepares=True),
    )
}


def main(script: str, argv: Sequence[str]) -> int:
    """Run a documented script with its arguments; returns the exit code."""
    return guard.run(lambda: _run(DOORS[script], argv), argv, tell=_tell)


def entry(script: str, argv: Sequence[str]) -> None:
    """The same as a whole program."""
    guard.leave(lambda: main(script, argv))


def _run(door: Door, argv: Sequence[str]) -> int:
    from lockstep.runtime.devices import check_asked
    from lockstep.start import Start, is_child, start

    asked, settings = parse(door, argv)
    loaded = resolve(door, asked, settings)
    if door.prepares and not asked.dry_run:
        return _prepare(loaded)
    check_asked(loaded.config.system)
    if asked.dry_run:
        from lockstep.config.show import show

        say(show(loaded, only_set=True), "", api.sizes(loaded))
        return ExitCode.DONE
    begin = replace(Start.of(("lockstep.compat", door.script), argv, asked), single=not door.launcher)
    if door.launcher and not is_child():
        return _launch(loaded, begin, argv)
    return start(loaded, begin)


def parse(door: Door, argv: Sequence[str]) -> tuple[Namespace, list[Setting]]:
    """The script's own flags, and the settings: `--section.key value`, `section.key=value`, or a short word."""
    return understand(door.parser(), argv, api.setting_words)


def resolve(door: Door, asked: Namespace, settings: Sequence[Setting]) -> Loaded:
    """The configuration of a command line: preset < the script's own defaults < file < flags."""
    from lockstep.config.load import Origin

    preset, flags = api.with_debug(asked.preset, settings) if asked.debug else (asked.preset, [*settings])
    file, notices = _find_config(asked.config)
    first = api.resolve("llama", preset=preset, file=file, flags=flags)
    taken = {key for key, origin in first.origins.items() if origin.layer in ("file", "flag")}
    own = {key: value for key, value in door.defaults().items() if key not in taken}
    loaded = api.resolve("llama", preset=first.preset, file=file, flags=[*own.items(), *flags])
    origins = {**loaded.origins, **{key: Origin("script", door.script) for key in own if key in loaded.origins}}
    return replace(loaded, origins=origins, notices=(*notices, *first.notices))


def _find_config(name: str | None) -> tuple[Path | None, tuple[str, ...]]:
    """The file of --config: as given, else the example of that name that lies beside the documented scripts."""
    if name is None:
        return None, ()
    examples = doors_folder() / "model_check"
    if name in {path.name for path in examples.glob("*.json")} and not Path(name).exists():
        return examples / name, (f"No {name} in this folder: using the example {examples / name}",)
    return Path(name), ()


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
    where = f"Log directory: {folder}"
    try:
        folder.mkdir()
    except OSError as error:
        raise OutputError(f"cannot create the log folder: {error.strerror or error}", where=str(folder)) from error
    begin = replace(begin, log_folder=folder, how="workers" if begin.how == "auto" else begin.how)
    say(where)
    code = guard.run(lambda: start(loaded, begin), argv)
    if not any(folder.iterdir()):  # refused before anything could be logged
        folder.rmdir()
        return code
    say(where)
    if code == ExitCode.DONE:
        say("[SUCCESS] All GPU training completed successfully")
    return code


def _prepare(loaded: Loaded) -> int:
    """Build or find the dataset of a configuration; `prepare` says which."""
    from lockstep.report.logs import setup_logging
    from lockstep.start import prepare_data

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

    if console_handler() is not None:
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
