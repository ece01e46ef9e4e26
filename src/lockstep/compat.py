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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.arguments import Parser, Setting, split
from lockstep.errors import ConfigError, ExitCode, LockstepError, OutputError, Stopped
from lockstep.families import doors_folder, families_table, init
from lockstep.registry import nearest
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.config.load import Loaded

__all__ = ["DOORS", "families_table", "init", "main", "parse", "resolve"]
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
        return parser

    def defaults(self) -> dict[str, str]:
        """Settings of the script itself: over the preset, under the file and the flags."""
        places = {"training.checkpoint_dir": "./.checkpoints", "system.output_dir": "./.outputs"}
        return places | {"report.log_prefix": self.log_prefix}


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
    try:
        return _run(DOORS[script], argv)
    except LockstepError as error:
        _complain(str(error))
        return int(error.exit_code)
    except SystemExit as done:  # argparse has shown its help
        return done.code if isinstance(done.code, int) else int(ExitCode.DONE)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "lockstep").partition(".")[0] == "lockstep":
            raise
        _complain(f"{sys.executable} has no package {error.name!r}\n  try: {install_command()}")
        return int(ExitCode.FAILED)
    except Exception as error:
        if not _logs():
            raise
        logger.exception("Unexpected %s", type(error).__name__)
        return int(ExitCode.FAILED)


def _run(door: Door, argv: Sequence[str]) -> int:
    asked, settings = parse(door, argv)
    if asked.dry_run:
        from lockstep.config.show import show

        _write(show(resolve(door, asked, settings), only_set=True) + "\n")
        return ExitCode.DONE
    if door.prepares:
        return _prepare(resolve(door, asked, settings))
    if door.launcher:
        return _launch(door, asked, settings)
    return _train(resolve(door, asked, settings))


def parse(door: Door, argv: Sequence[str]) -> tuple[Namespace, list[Setting]]:
    """The script's own flags, and the settings: `--section.key value`, `section.key=value`, or a short word."""
    parser = door.parser()
    words, settings = split(parser, argv)
    for word, _ in settings:
        flag = f"--{word.replace('_', '-')}"
        if "." not in word and flag not in parser.shorts and not _is_setting(word.replace("-", "_")):
            close = nearest(flag, [*parser.takes_value, *parser.shorts])
            hint = f"did you mean {close}?" if close else f"{parser.prog} --help"
            raise ConfigError(f"no such flag of {door.script}", where=flag, hint=hint)
    return parser.parse_args(words), settings


def _is_setting(word: str) -> bool:
    """Is there a setting of that name, in whatever section?"""
    from lockstep.config import renames
    from lockstep.config.catalog import catalog

    others = {path[-1] for path in (*renames.JOINT, *renames.RETIRED)}
    return bool(catalog("llama").by_name(word)) or bool(renames.moved((word,))) or word in others


def resolve(
    door: Door, asked: Namespace, settings: Sequence[Setting], *, defaults: Mapping[str, str] | None = None
) -> Loaded:
    """The configuration of a command line: preset < the script's own defaults < file < flags."""
    from lockstep import api
    from lockstep.config.load import Origin

    preset, flags = _preset(asked, settings)
    file, notices = _find_config(asked.config)
    first = api.resolve("llama", preset=preset, file=file, flags=flags)
    taken = {key for key, origin in first.origins.items() if origin.layer in ("file", "flag")}
    wanted = door.defaults() | dict(defaults or {})
    own = {key: value for key, value in wanted.items() if key not in taken}
    loaded = api.resolve("llama", preset=first.preset, file=file, flags=[*own.items(), *flags])
    origins = {**loaded.origins, **{key: Origin("preset", door.script) for key in own if key in loaded.origins}}
    return replace(loaded, origins=origins, notices=(*notices, *first.notices))


def _preset(asked: Namespace, settings: Sequence[Setting]) -> tuple[str | None, list[Setting]]:
    """The preset that was asked for, if any, and the settings with those of --debug before them."""
    if asked.debug and asked.preset not in (None, "debug"):
        return asked.preset, [("debug.enabled", "true"), ("debug.log_level", "DEBUG"), *settings]
    return "debug" if asked.debug else asked.preset, [*settings]


def _find_config(name: str | None) -> tuple[Path | None, tuple[str, ...]]:
    """The file of --config: as given, else the example of that name that lies beside the documented scripts."""
    if name is None:
        return None, ()
    examples = doors_folder() / "model_check"
    if not Path(name).exists() and name in {path.name for path in examples.glob("*.json")}:
        return examples / name, (f"No {name} in this folder: using the example {examples / name}",)
    return Path(name), ()


def _train(loaded: Loaded) -> int:
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not env.gpu_label():
        _label_by_device(loaded)
    from lockstep.engine.train import train

    return int(train(loaded).exit_code)


def _label_by_device(loaded: Loaded) -> None:
    """No variable names the GPU: its number is the label. Without a GPU there is none."""
    from lockstep.runtime.devices import visible_gpus

    gpus, system = visible_gpus(), loaded.config.system
    if system.device != "cpu" and system.device_id < len(gpus):
        env.setdefault("GPU_RANK", str(gpus[system.device_id].index))


def _launch(door: Door, asked: Namespace, settings: Sequence[Setting]) -> int:
    """As a launcher: every line labelled, logs in the documented folder, a verdict at the end."""
    from lockstep.runtime.devices import visible_gpus

    gpus = visible_gpus()
    label = env.gpu_label() or (str(gpus[0].index) if gpus else "0")
    folder = LOG_ROOT / f"model_check_logs_{os.getpid()}_{int(time.time())}"
    log = folder / f"gpu_{label}.log"
    loaded = resolve(door, asked, settings, defaults={"report.log_file": str(log)})
    try:
        folder.mkdir(exist_ok=True)
        if loaded.config.report.log_file not in (None, str(log)):  # --log-file: one log, found under both names
            log.symlink_to(Path(str(loaded.config.report.log_file)).absolute())
    except OSError as error:
        raise OutputError(f"cannot create the log folder: {error.strerror or error}", where=str(folder)) from error
    env.setdefault("GPU_RANK", label)
    where = f"Log directory: {folder}"
    try:
        code = _train(replace(loaded, notices=(where, *loaded.notices)))
    except LockstepError as error:
        verdict = "" if isinstance(error, Stopped) else f"\n[FAILURE] Training failed on GPU {label}"
        _complain(f"{error}{verdict}\n{where}")
        return int(error.exit_code)
    logger.info("%s", where)
    logger.info("[SUCCESS] All GPU training completed successfully")
    return code


def _prepare(loaded: Loaded) -> int:
    """Build or find the dataset of a configuration; `prepare` says which."""
    import torch

    from lockstep.engine.build import plan
    from lockstep.engine.prepare import prepare
    from lockstep.report.logs import setup_logging

    config = loaded.config
    log_files = [Path(config.report.log_file)] if config.report.log_file else []
    setup_logging(level=config.debug.log_level, log_files=log_files)
    for notice in loaded.notices:
        logger.info("%s", notice)
    logger.info("%s\nModel: %s", RULE, config.model.model_path)
    planned = plan(loaded, torch.device("cpu"))
    prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
    return ExitCode.DONE


def install_command() -> str:
    """How to give this interpreter what it lacks."""
    lock = Path(__file__).parents[2] / "requirements.lock"
    return f"{sys.executable} -m pip install {f'-r {lock}' if lock.is_file() else 'lockstep-train'}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _complain(text: str) -> None:
    """To the log, once there is one, so that the line carries its label; else to the error stream."""
    if _logs():
        logger.error("%s", text)
    else:
        sys.stderr.write(env.redact(f"lockstep: error: {text}\n"))


def _logs() -> bool:
    from lockstep.report.logs import console_handler

    return console_handler() is not None


if __name__ == "__main__":
    if sys.argv[1:] == ["idlest_gpu"]:
        from lockstep.runtime.devices import idlest_gpu

        try:
            _write(f"{idlest_gpu()}\n")
        except LockstepError as error:
            _complain(str(error))
            sys.exit(int(error.exit_code))
    else:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
