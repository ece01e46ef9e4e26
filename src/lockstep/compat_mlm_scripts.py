"""The scripts around mlm_pretrain_v3.py: those that start it on every GPU, and the named configurations. Torch-free.

`run_multi_gpu_training.sh` and every generated `train_<config>.sh` come here: they name the log, adjust to the GPUs
that are there, and start the trainer under our supervisor, which makes its exit code theirs.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import guard, named_configs
from lockstep.arguments import refuse_removed, without
from lockstep.compat_door import parse, resolve
from lockstep.compat_mlm import DOOR, NAMED, TRAINER, epochs_text, given
from lockstep.errors import ConfigError, ExitCode, LockstepError, OutputError
from lockstep.guard import say
from lockstep.named_configs import CONFIGS, TrainingConfig

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.runtime.devices import Gpu

GENERIC, GENERATED = "run_multi_gpu_training.sh", "train_config.sh"
USAGE = """Usage:
  python multi_gpu_configs.py list                    # List all configurations
  python multi_gpu_configs.py info <config_name>      # Show config details
  python multi_gpu_configs.py generate <config_name>  # Generate training script"""
COMMANDS = ("list", "info", "generate")
RULE = "=" * 42
POSITIONS = ("dataset", "batch-size", "epochs", "lr", "streaming", "max-samples")  # of the generic script


@dataclass(frozen=True)
class Script:
    """What a launching script says about itself; the rest of its words are the trainer's."""

    title: str
    description: str
    log_name: str
    num_gpus: int


def generic(argv: Sequence[str]) -> int:
    """run_multi_gpu_training.sh [dataset] [batch size per GPU] [epochs] [lr] [streaming] [max samples] [flags]"""
    if any(word in ("--help", "-h") for word in argv):
        say(f"usage: ./{GENERIC} [{'] ['.join(POSITIONS)}] [flags of {TRAINER}]", "")
        DOOR.parser().print_help()
        return ExitCode.DONE
    count = next((index for index, word in enumerate(argv) if word.startswith("-") or "=" in word), len(argv))
    if count > len(POSITIONS):
        raise ConfigError(f"{count} values", where=GENERIC, hint=f"at most {len(POSITIONS)}: {' '.join(POSITIONS)}")
    words = [word for pair in zip(POSITIONS, argv, strict=False) for word in (f"--{pair[0]}", pair[1])][: 2 * count]
    dataset = argv[0] if count else "hf"
    safe = "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in dataset)
    script = Script("Multi-GPU MLM Training", "Every GPU of this machine", f"multi_gpu_training_{safe}", 8)
    return _launch(script, [*words, *argv[count:]])


def generated(argv: Sequence[str]) -> int:
    """A generated train_<config>.sh: its title, its GPUs, then flags of the trainer."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--title", "--description", "--num-gpus"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--config-name", required=True)
    about, _ = parser.parse_known_args(argv)
    words = without(argv, "--title", "--description", "--num-gpus")
    script = Script(about.title, about.description, f"{about.config_name}_training", int(about.num_gpus))
    return _launch(script, words)


def _launch(script: Script, words: Sequence[str]) -> int:
    from lockstep.bench import estimate
    from lockstep.planning import show_plan
    from lockstep.runtime.devices import check_asked
    from lockstep.start import Start, start

    asked, settings = parse(DOOR, words)
    loaded = resolve(DOOR, asked, settings)
    check_asked(loaded.config.system)
    workers, adjusted = _workers(script, loaded)
    full = [*words, *_placed(loaded, workers)]
    loaded = resolve(DOOR, *parse(DOOR, full))
    begin = Start.of(("lockstep.compat", TRAINER), full, asked)
    if asked.dry_run:
        return show_plan(loaded, begin)
    tell = _Told(log := _log_of(script))
    tell(*_banner(script, loaded, workers))
    tell(*estimate.lines(loaded, workers=workers, gpus=_used(loaded, workers)), RULE)
    tell(*adjusted, "", "Starting training...", f"Log file: {log}")
    begin = replace(begin, how="workers" if begin.how == "auto" else begin.how, told=tell, transcript=log)
    code = guard.run(lambda: start(loaded, begin), full, tell=tell.complain)
    if code == ExitCode.DONE:
        results = loaded.config.report.results_dir
        saved = [f"Results saved to: {results.rstrip('/')}/"] if results else []
        tell("", "Training completed!", *saved, f"Log file: {log}")
    return code


def _workers(script: Script, loaded: Loaded) -> tuple[int, list[str]]:
    """How many there will be, and the lines that say why: as many GPUs as were asked for, or as are there."""
    from lockstep.runtime import devices

    system, visible = loaded.config.system, devices.visible_gpus()
    said = [f"Available GPUs: {len(visible)}"]
    if "system.gpus" in given(loaded):
        return len(devices.choose(system.gpus, cpu=system.device == "cpu" or not visible)), said
    if len(visible) >= script.num_gpus:
        return script.num_gpus, said
    said.append(f"Warning: Requested {script.num_gpus} GPUs but only {len(visible)} are available.")
    said.append(f"Adjusting to use {len(visible)} GPUs." if visible else "Adjusting to use the CPU.")
    return max(1, len(visible)), said


def _placed(loaded: Loaded, workers: int) -> list[str]:
    """The flags that start so many workers: where there is no GPU, those of the CPU have to be asked for."""
    from lockstep.runtime.devices import visible_gpus

    device = ["--device", "cpu"] if loaded.config.system.device == "auto" and not visible_gpus() else []
    return device + ([] if "system.gpus" in given(loaded) else ["--gpus", str(workers)])


def _log_of(script: Script) -> Path:
    """logs/<name>_<stamp>.log"""
    path = Path("logs") / f"{script.log_name}_{time.strftime('%Y%m%d_%H%M%S')}.log"
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create the log folder: {error.strerror or error}", where="logs") from error
    return path


def _banner(script: Script, loaded: Loaded, workers: int) -> list[str]:
    """The documented lines, but for the times, which are measured first."""
    config, training = loaded.config, loaded.config.training
    model: Any = config.model
    on_cpu = config.system.device == "cpu"
    return [
        RULE,
        script.title,
        RULE,
        f"Description: {script.description}",
        f"Dataset: {config.data.dataset_name}",
        f"Batch size per GPU: {training.batch_size}",
        f"Total batch size: {training.batch_size * training.grad_accum_nums * workers}",
        f"Epochs: {epochs_text(loaded)}",
        f"Learning rate: {training.learning_rate}",
        f"Number of GPUs: {workers}{' (CPU workers)' if on_cpu else ''}",
        f"Model: {model.num_layers}L/{model.num_attention_heads}H/{model.hidden_size}D",
        f"Dataset samples: {config.data.max_train_samples:,}",
    ]


def _used(loaded: Loaded, workers: int) -> list[Gpu]:
    """The GPUs that so many workers compute on, as the driver describes them; none on the CPU."""
    from lockstep.runtime import devices

    system, visible = loaded.config.system, devices.visible_gpus()
    if system.device == "cpu" or not visible:
        return []
    numbers = devices.choose(system.gpus, cpu=False, repeats=True)[:workers]
    return [gpu for gpu in visible if gpu.index in numbers]


class _Told:
    """Lines to the screen and to the log file."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, *lines: str) -> None:
        guard.mention(*lines)
        self._keep("".join(f"{line}\n" for line in lines))

    def complain(self, text: str, kind: guard.Kind) -> None:
        guard.complain(text, kind)
        self._keep(f"{text}\n")

    def _keep(self, text: str) -> None:
        from lockstep.runtime import env

        try:
            with self.log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(env.redact(text))
        except OSError as error:
            raise OutputError(f"cannot write the log: {error.strerror or error}", where=str(self.log)) from error


# ------------------------------------------------------------------------------------------------ named configurations


def configurations(argv: Sequence[str], source: str | None = None) -> int:
    """multi_gpu_configs.py; `source` is the user's copy of it, with whatever was added there."""
    configs = _configs_of(source)
    if not argv or argv[0] in ("--help", "-h"):
        say(USAGE)
        return ExitCode.DONE if argv else ExitCode.FAILED
    command, names = argv[0], argv[1:]
    refuse_removed(f"{NAMED} {command}")
    if command not in COMMANDS:
        guard.complain_plainly(f"Error: Unknown command '{command[:80]}'. Available: {list(COMMANDS)}")
        return ExitCode.USAGE
    if len(names) != (command != "list"):
        say(USAGE)
        return ExitCode.FAILED if not names else ExitCode.USAGE
    if command == "list":
        say(named_configs.listing(configs))
        return ExitCode.DONE
    if names[0] not in configs:
        guard.complain_plainly(f"Error: Configuration '{names[0][:80]}' not found. Available: {list(configs)}")
        return ExitCode.USAGE
    (_info if command == "info" else _generate)(names[0], configs[names[0]])
    return ExitCode.DONE


def _configs_of(source: str | None) -> Mapping[str, TrainingConfig]:
    """All of them: those written below the line that runs the script count too."""
    if source is None:
        return CONFIGS
    try:
        configs: Any = runpy.run_path(source, run_name=Path(source).stem).get("CONFIGS")
    except LockstepError:
        raise
    except Exception as error:
        raise ConfigError(f"{type(error).__name__}: {error}", where=source) from error
    if not isinstance(configs, dict) or not all(isinstance(one, TrainingConfig) for one in configs.values()):  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
        raise ConfigError("CONFIGS must hold TrainingConfig objects by name", where=source)
    return configs  # pyright: ignore[reportUnknownVariableType]


def _info(name: str, config: TrainingConfig) -> None:
    say(named_configs.details(name, config))


def _check(name: str, config: TrainingConfig) -> None:
    """What cannot be trained is refused here, with the key that is wrong."""
    from lockstep import rundir

    rundir.check_name(name, what="configuration")
    if type(config.num_gpus) is not int or config.num_gpus < 1:
        raise ConfigError(f"got {config.num_gpus!r}, expected a whole number of at least 1", where=f"{name}.num_gpus")
    missing = [key for key in ("n_layers", "n_heads", "n_embed", "max_seq_len") if key not in config.model_config]
    if missing:
        raise ConfigError(f"has no {', '.join(missing)}", where=f"{name}.model_config")
    resolve(DOOR, *parse(DOOR, named_configs.flags(name, config)))


def _generate(name: str, config: TrainingConfig) -> None:
    from lockstep.launch.scripts import quoted, shell_words

    _check(name, config)
    about = ["--title", config.name, "--description", config.description, "--num-gpus", str(config.num_gpus)]
    words = [*about, *named_configs.flags(name, config)]
    literal = any(sign in word for word in words for sign in "$`\\")
    text = "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Auto-generated training script for {_one_line(config.name)}",
            f"# Generated from configuration: {name}",
            "# It holds every value and needs no other file. Flags behind its name count more: --epochs 1 --gpus 2",
            *(["# shellcheck disable=SC1003,SC2016 # the words are quoted on purpose"] if literal else []),
            "set -euo pipefail",
            f"python={quoted(sys.executable)}",
            'if [[ ! -x "$python" ]]; then',
            f'    echo "$0: there is no $python any more: python {NAMED} generate {name}" >&2',
            "    exit 1",
            "fi",
            f'exec "$python" -m lockstep.compat {GENERATED} \\',
            f"    {shell_words(words)} \\",
            '    "$@"',
            "",
        ]
    )
    path = Path(f"train_{name}.sh")
    try:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    except OSError as error:
        raise OutputError(f"cannot write: {error.strerror or error}", where=str(path)) from error
    say(f"Training script generated: {path}")


def _one_line(text: str) -> str:
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {
    GENERIC: generic,
    GENERATED: generated,
    NAMED: configurations,
}
