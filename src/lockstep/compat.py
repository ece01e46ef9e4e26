"""The documented scripts of each family: their flags, defaults and file names, translated to the native words.

doors/<family>/ holds the scripts, this file what they mean. Torch-free at import. The shell scripts run
`python -m lockstep.compat SCRIPT ...`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.errors import ConfigError, ExitCode, LockstepError, OutputError, Stopped
from lockstep.families import doors_folder, families_table, init
from lockstep.registry import nearest
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.runtime.devices import Gpu

__all__ = ["DOORS", "families_table", "init", "main", "parse", "resolve", "usage"]
logger = logging.getLogger(__name__)

LOG_ROOT = Path("/tmp")  # the documented place, whatever TMPDIR says
CPU_NOTICE = "No GPUs detected: running the demo preset on the CPU"
CPU_ASKED_NOTICE = "The CPU was asked for: running the demo preset"
RULE = "=" * 60


@dataclass(frozen=True)
class Flag:
    """One documented flag: the setting it is another word for, or what it does."""

    name: str  # with hyphens; underscores are accepted everywhere
    help: str
    key: str = ""  # dotted setting
    metavar: str = ""  # "" : a switch
    bare: str = ""  # what the flag means without a value; "" : a value must follow
    prepare: bool = False  # also a flag of prepare_dataset.py


FLAGS = (
    Flag("config", "configuration file, JSON (comments allowed) or YAML", metavar="FILE", prepare=True),
    Flag(
        "preset",
        "settings to start from (default: production; demo where there is no GPU)",
        metavar="NAME",
        prepare=True,
    ),
    Flag("debug", "the debug preset: 2 layers, 10 steps, every check on", prepare=True),
    Flag("max-steps", "optimizer steps", "training.max_steps", "N"),
    Flag("model-path", "shape by name, folder or hub id", "model.model_path", "ID", prepare=True),
    Flag("device", "auto, cuda or cpu", "system.device", "NAME", prepare=True),
    Flag("precision", "auto, fp32, bf16 or fp16", "training.precision", "NAME"),
    Flag("checkpoint", "go on from a run, a checkpoint or a .pt file", "checkpoint.resume", "PATH"),
    Flag(
        "resume",
        "the same; without a path: the newest run of this configuration",
        "checkpoint.resume",
        "[PATH]",
        "auto",
    ),
    Flag("gradient-checkpointing", "less memory, more work", "system.gradient_checkpointing", bare="true"),
    Flag("deterministic", "the same bits in every run, also on a GPU", "system.deterministic", bare="true"),
    Flag("profile", "trace a few steps", "report.profile", bare="true"),
    Flag("experiment-name", "name used in file names and logs", "run.experiment_name", "NAME"),
    Flag("name", "name of the run folder", "run.name", "NAME"),
    Flag("out", "folder of the run folders", "run.out", "DIR"),
    Flag("log-level", "DEBUG, INFO, WARNING or ERROR", "debug.log_level", "LEVEL", prepare=True),
    Flag("log-file", "also write the log here", "report.log_file", "FILE", prepare=True),
    Flag("log-dir", "also write logs to this folder", "system.log_dir", "DIR", prepare=True),
    Flag("log-prefix", "bracket: [GPU0] ...; colon: GPU0:INFO | [GPU 0] ...", "report.log_prefix", "NAME"),
    Flag("hf-token", "Hugging Face token (better: $HF_TOKEN); never written", "data.hf_token", "TOKEN", prepare=True),
    Flag("dry-run", "show the resolved configuration and where each value is from, and stop"),
    Flag("help", "this text", prepare=True),
)


@dataclass(frozen=True)
class Door:
    """A documented script: what it is for and what it sets where the user has not."""

    script: str
    summary: str
    log_prefix: Literal["bracket", "colon"] = "colon"
    launcher: bool = False  # writes /tmp/model_check_logs_*, labels every line
    prepares: bool = False  # only prepares the dataset

    @property
    def flags(self) -> tuple[Flag, ...]:
        return tuple(flag for flag in FLAGS if flag.prepare or not self.prepares)

    def defaults(self) -> dict[str, str]:
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


@dataclass(frozen=True)
class Asked:
    """A command line, understood."""

    switches: Mapping[str, str] = field(default_factory=dict[str, str])  # config, preset, debug, dry-run, help
    settings: tuple[tuple[str, str], ...] = ()  # (dotted key, text), in order

    def last(self, key: str) -> str:
        return dict(self.settings).get(key, "")


def main(script: str, argv: Sequence[str]) -> int:
    """Run a documented script with its arguments; returns the exit code."""
    try:
        door = DOORS[script]
        asked = parse(door, argv)
        if "help" in asked.switches:
            _write(usage(door))
            return ExitCode.DONE
        if door.prepares:
            return _prepare(resolve(door, asked))
        if door.launcher and "dry-run" not in asked.switches:
            return _launch(door, asked)
        return _train(resolve(door, asked), dry_run="dry-run" in asked.switches)
    except LockstepError as error:
        _complain(str(error))
        return int(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "lockstep":
            raise
        _complain(f"{sys.executable} has no package {error.name!r}\n  try: {install_command()}")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        if not _logs():
            raise
        logger.exception("Unexpected %s", type(error).__name__)
        return ExitCode.FAILED


def parse(door: Door, argv: Sequence[str]) -> Asked:
    """Understand a command line: documented flags, `--section.key value`, `section.key=value`; - and _ are the same."""
    known = {flag.name: flag for flag in door.flags}
    switches: dict[str, str] = {}
    settings: list[tuple[str, str]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        given = value if equals else None
        if not word.startswith("-"):
            if "." not in name or given is None:
                raise ConfigError(f"unexpected word {word!r}", hint="--config FILE, or section.key=value")
            settings.append((_key(name), given))
        elif "." in name and word.startswith("--"):
            settings.append((_key(name), _value(word, given, words)))
        elif (flag := known.get("help" if word == "-h" else name.replace("_", "-"))) and word.startswith(("--", "-h")):
            text = _flag_value(flag, word, given, words)
            if flag.key:
                settings.append((flag.key, text))
            else:
                switches[flag.name] = text
        else:
            close = nearest(name.replace("_", "-"), list(known))
            hint = f"did you mean --{close}?" if close else f"{door.script} --help"
            raise ConfigError(f"{door.script} has no flag {word.partition('=')[0]}", hint=hint)
    return Asked(switches, tuple(settings))


def _key(name: str) -> str:
    return name.replace("-", "_")


def _flag_value(flag: Flag, word: str, given: str | None, words: list[str]) -> str:
    if given is not None and not flag.metavar and not flag.bare:
        raise ConfigError(f"--{flag.name} takes no value, got {given!r}")
    if given is not None:
        return given
    if flag.metavar and not flag.bare:
        return _value(word, None, words)
    follows = bool(words) and not words[0].startswith("-") and not ("." in words[0] and "=" in words[0])
    return words.pop(0) if flag.metavar and follows else flag.bare


def _value(word: str, given: str | None, words: list[str]) -> str:
    if given is not None:
        return given
    if not words or words[0].startswith("--"):
        raise ConfigError(f"{word} needs a value", hint=f"{word} VALUE")
    return words.pop(0)


def usage(door: Door) -> str:
    """The help text of a script."""
    call = f"bash {door.script}" if door.script.endswith(".sh") else f"python3 {door.script}"
    lines = [f"usage: {call} [flags] [section.key=value ...]", "", door.summary, ""]
    for flag in door.flags:
        lines.append(f"  {f'--{flag.name} {flag.metavar}'.rstrip():<27} {flag.help}")
    lines += [
        "",
        "Every other setting is a flag too: --training.learning-rate 3e-4, or training.learning_rate=3e-4.",
        "`lockstep config list` shows the presets, `lockstep config explain KEY` the meaning of a setting.",
        "",
    ]
    return "\n".join(lines)


def resolve(
    door: Door, asked: Asked, *, gpus: Sequence[Gpu] | None = None, defaults: Mapping[str, str] | None = None
) -> Loaded:
    """The configuration of a command line: preset < the script's own defaults < file < flags."""
    from lockstep.config.load import Origin, load
    from lockstep.runtime.devices import visible_gpus

    gpus = visible_gpus() if gpus is None else gpus
    preset, notices = _preset(asked, gpus)
    file, found = _find_config(asked.switches.get("config", ""))
    loaded = load("llama", preset=preset, file=file, flags=asked.settings)
    wanted = door.defaults() | dict(defaults or {})
    taken = {key for key, origin in loaded.origins.items() if origin.layer in ("file", "flag")}
    own = {key: value for key, value in wanted.items() if key not in taken}
    loaded = load("llama", preset=preset, file=file, flags=[*own.items(), *asked.settings])
    origins = {**loaded.origins, **{key: Origin("preset", door.script) for key in own if key in loaded.origins}}
    return replace(loaded, origins=origins, notices=(*notices, *found, *loaded.notices))


def _preset(asked: Asked, gpus: Sequence[Gpu]) -> tuple[str, tuple[str, ...]]:
    named = asked.switches.get("preset", "")
    if "debug" in asked.switches:
        if named not in ("", "debug"):
            raise ConfigError(
                f"--debug is --preset debug, but --preset {named} is given too", hint="leave one of them out"
            )
        return "debug", ()
    if named or "config" in asked.switches:
        return named or "production", ()
    if asked.last("system.device") == "cpu":
        return "demo", (CPU_ASKED_NOTICE,)
    if not gpus and asked.last("system.device") != "cuda":
        return "demo", (CPU_NOTICE,)
    return "production", ()


def _find_config(name: str) -> tuple[Path | None, tuple[str, ...]]:
    """The file of --config: as given, else the example of that name that lies beside the documented scripts."""
    if not name:
        return None, ()
    path = Path(name)
    if path.exists():
        return path, ()
    folder = doors_folder() / "model_check"
    examples = sorted(file.name for file in folder.glob("*.json"))
    if name in examples:
        return folder / name, (f"No {name} in this folder: using the example {folder / name}",)
    raise ConfigError(f"--config: no file {name}", hint=f"a path, or one of the examples {', '.join(examples)}")


def _train(loaded: Loaded, *, dry_run: bool = False) -> int:
    if dry_run:
        _write(describe(loaded))
        return ExitCode.DONE
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


def _launch(door: Door, asked: Asked) -> int:
    """As a launcher: every line labelled, logs in the documented folder, a verdict at the end."""
    from lockstep.runtime.devices import visible_gpus

    gpus = visible_gpus()
    label = env.gpu_label() or (str(gpus[0].index) if gpus else "0")
    folder = LOG_ROOT / f"model_check_logs_{os.getpid()}_{int(time.time())}"
    log = folder / f"gpu_{label}.log"
    loaded = resolve(door, asked, gpus=gpus, defaults={"report.log_file": str(log)})
    try:
        folder.mkdir()
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
    """Build or find the dataset of a configuration, and say which."""
    import torch

    from lockstep.engine.build import plan
    from lockstep.engine.prepare import prepare
    from lockstep.report.logs import setup_logging

    config = loaded.config
    log_files = [Path(config.report.log_file)] if config.report.log_file else []
    setup_logging(level=config.debug.log_level, log_files=log_files)
    for notice in loaded.notices:
        logger.info("%s", notice)
    logger.info("%s\nPreparing dataset cache...\n%s", RULE, RULE)
    logger.info("Dataset: %s", config.data.data_path or config.data.dataset_name)
    logger.info("Model: %s", config.model.model_path)
    logger.info("Context length: %d", config.training.context_length)
    planned = plan(loaded, torch.device("cpu"))
    prepared = prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
    logger.info("Dataset ready: %d samples (%d for validation)", prepared.train.rows, prepared.validation.rows)
    logger.info("Cache location: %s", prepared.folder)
    return ExitCode.DONE


def describe(loaded: Loaded) -> str:
    """Every setting that is not the default, and where it is from."""
    from lockstep.config.load import to_dict

    tree = to_dict(loaded.config)
    lines = [f"preset {loaded.preset}", *loaded.notices]
    for key, origin in sorted(loaded.origins.items()):
        value: object = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        lines.append(f"{key} = {value}    ({origin.layer} {origin.where})".rstrip())
    return "\n".join(lines) + "\n"


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
        sys.stderr.write(f"error: {text}\n")


def _logs() -> bool:
    return bool(logging.getLogger("lockstep").handlers)


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
