"""train_llada_pretrained.py and launch_training.sh, the documented scripts of LLaDA: flags, defaults, lines.

Torch-free at import.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import guard
from lockstep.arguments import Parser, Short
from lockstep.compat_door import Door, parse, resolve
from lockstep.errors import ConfigError, ExitCode, NotFoundError
from lockstep.guard import say

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.contracts import Sink, StepRecord

logger = logging.getLogger(__name__)

TRAINER, LAUNCHER = "train_llada_pretrained.py", "launch_training.sh"
DATA_DIR, SAVE_DIR, LOG_DIR = "shakespeare_processed", "checkpoints_pretrained", "logs"
OWN_SHAPES = "lockstep/"  # no weights were ever published for these
NO_FP16 = "fp16 needs a GPU: on the CPU this run uses fp32 (--precision fp16 or bf16 for 16 bits all the same)"
GPUS = 2  # of the launcher, where no number is given
RULE = "=" * 46
DOCUMENTED = (
    Short("--data-dir", f"Path to processed dataset (default: {DATA_DIR})", "DIR"),
    Short("--model-name", "Hugging Face model name, folder or shape (default: GSAI-ML/LLaDA-8B-Instruct)", "NAME"),
    Short("--batch-size", "Batch size per GPU (default: 1; total batch size = batch_size x num_gpus)", "INT"),
    Short("--epochs", "Number of training epochs (default: 5)", "INT"),
    Short("--learning-rate", "Learning rate (default: 1e-5)", "FLOAT"),
    Short("--save-dir", f"Directory to save checkpoints (default: {SAVE_DIR})", "DIR"),
)
OWN = (
    Short("--precision", "auto, fp32, fp16, bf16 or fp8: stronger than the two words above", "TYPE"),
    Short("--gradient-accumulation-steps", "Micro-batches per optimizer step (default: 1)", "INT"),
    Short("--resume", "Go on from the newest run with these settings, a run, or a .pt file", "[auto|PATH]", "auto"),
)  # fmt: skip


@dataclass(frozen=True)
class LladaDoor(Door):
    """train_llada_pretrained.py."""

    def parser(self) -> Parser:
        parser = self.new_parser()
        for short in DOCUMENTED:
            parser.add_short(short)
        parser.flag("--fp16", "Enable mixed precision training (default: True)")
        parser.flag("--no-fp16", "Disable mixed precision training; stronger than --fp16")
        for short in OWN:
            parser.add_short(short)
        parser.flag("--nccl-debug", f"NCCL's own log, one file for each process in --log-dir (default: {LOG_DIR})")
        return self.with_usual(parser, debug="debug output; full tracebacks")

    def switches(self, asked: Namespace, first: Loaded) -> Mapping[str, str]:
        """--no_fp16 counts more than --fp16, which on the CPU means what the machine can."""
        if asked.no_fp16:
            return {"training.precision": "fp32"}
        return {"training.precision": _usual_precision(first)} if asked.fp16 else {}

    def defaults(self, asked: Namespace, first: Loaded) -> Mapping[str, str]:
        """What the script sets itself: its files, the length of the windows, and random weights for our own shapes."""
        from lockstep.compat_mlm import must_train

        must_train(first)
        config = first.config
        own = {"report.results_dir": SAVE_DIR, "training.precision": _usual_precision(first)}
        if not config.report.log_all_ranks:
            own["report.log_prefix"] = self.log_prefix
        if config.model.model_path.startswith(OWN_SHAPES):
            own["model.init"] = "random"
        if asked.nccl_debug:
            own["system.log_dir"] = LOG_DIR
        if config.data.data_path is None and config.data.dataset_name == "auto":
            own["data.data_path"] = DATA_DIR
        path = Path(config.data.data_path or DATA_DIR)
        if "data.data_path" in own or (config.data.data_path and not path.is_file()):
            own |= _of_windows(path, config.model.model_path)
        return own

    def ready(self, asked: Namespace, loaded: Loaded) -> None:
        """NCCL reads its wishes when it starts, which is later than this."""
        from lockstep.runtime import env

        if not asked.nccl_debug:
            return
        env.setdefault("NCCL_DEBUG", "INFO")
        folder = Path(loaded.config.system.log_dir or LOG_DIR).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        env.setdefault("NCCL_DEBUG_FILE", str(folder / "nccl.%h.%p.log"))

    def opening(self, loaded: Loaded) -> list[str]:
        """The documented lines before anything is loaded, of the main process."""
        from lockstep.runtime import env

        config = loaded.config
        alone = ["Single GPU training mode"] if env.detect().world == 1 else []
        loads = "Loading pre-trained model" if config.model.init == "pretrained" else "Creating model, random weights"
        return [*alone, *_fp16_notice(loaded), f"{loads}: {config.model.model_path}"]

    def listeners(self, loaded: Loaded) -> list[Sink]:
        return [Lines(loaded)]


class Lines:
    """The documented lines after model and tokenizer were loaded: a sink like any other."""

    def __init__(self, loaded: Loaded) -> None:
        self._config = loaded.config

    def write(self, record: StepRecord) -> None:
        del record  # steps have lines of their own

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind != "start":
            return
        from lockstep.runtime import env

        world, precision = env.detect().world, str(fields["precision"])
        half, bits = precision in ("fp16", "bf16", "fp8"), {"fp64": 64}.get(precision, 32)
        epochs: float = getattr(self._config.training, "epochs", 0)
        length = f"{epochs:g} epochs" if epochs else f"{fields['max_steps']:,} steps"
        made = "loaded" if self._config.model.init == "pretrained" else "created"
        lines = [
            "✓ Tokenizer loaded successfully",
            f"✓ Model {made} successfully",
            "✓ 16-bit mixed precision training enabled" if half else f"Using {bits}-bit precision training",
            f"Vocabulary size: {fields['vocab_size']}",
            f"Starting training for {length}...",
            f"Model parameters: {fields['parameters']:,}",
            *([f"Training on {_counted(world)}"] if world > 1 else []),
        ]
        for line in lines:
            logger.info("%s", line)

    def close(self) -> None:
        """Nothing to close."""


DOOR = LladaDoor(
    TRAINER, "Train a LLaDA by masked diffusion.", log_prefix="none", family="llada", preset="pretrained"
)  # fmt: skip


def on_cpu(loaded: Loaded) -> bool:
    """Whether the CPU will do the work."""
    from lockstep.runtime.devices import visible_gpus

    device = loaded.config.system.device
    return device == "cpu" or (device == "auto" and not visible_gpus())


def _counted(workers: int) -> str:
    """So many GPUs, as documented; where there are none, what is counted works on the CPU."""
    from lockstep.runtime.devices import visible_gpus

    return f"{workers} GPUs" if visible_gpus() else f"{workers} CPU worker{'s' * (workers != 1)}"


def _usual_precision(loaded: Loaded) -> str:
    """Half precision with a loss scale, as documented; the CPU decides by itself."""
    return "auto" if on_cpu(loaded) else "fp16"


def _fp16_notice(loaded: Loaded) -> list[str]:
    """Where 16 bits were left to the CPU: which precision is used instead."""
    if not on_cpu(loaded) or loaded.config.training.precision != "auto":
        return []
    return [NO_FP16]


def _of_windows(folder: Path, model: str) -> dict[str, str]:
    """The settings that prepared windows decide."""
    from lockstep.sources import windows

    about = windows.check_folder(folder, model=model)
    documents = "answers" if about.answers else "joined"
    return {"training.context_length": str(about.sequence_length), "data.documents": documents}


# ------------------------------------------------------------------------------------------------------ the launcher


def launch(argv: Sequence[str]) -> int:
    """launch_training.sh [GPUs] [folder] [flags of the trainer]: torchrun under our supervisor."""
    from lockstep.planning import show_plan
    from lockstep.runtime.devices import check_asked
    from lockstep.start import Start, start

    if any(word in ("--help", "-h") for word in argv):
        say(f"usage: ./{LAUNCHER} [GPUs ({GPUS})] [folder ({DATA_DIR})] [flags of {TRAINER}]", "")
        DOOR.parser().print_help()
        return ExitCode.DONE
    wanted, words = _understood(argv)
    asked, settings = parse(DOOR, words)
    try:
        loaded = resolve(DOOR, asked, settings)
    except NotFoundError as error:
        if not error.what.startswith("Dataset directory"):
            raise
        guard.complain_plainly(f"Error: {error.what}\n  try: {error.hint}")  # as documented
        return error.exit_code
    check_asked(loaded.config.system)
    workers, placed, adjusted = _workers(wanted, loaded)
    full = [*words, *placed]
    loaded = resolve(DOOR, *parse(DOOR, full))
    begin = replace(Start.of(("lockstep.compat", TRAINER), full, asked), opening=DOOR.opening)
    begin = replace(begin, listeners=DOOR.listeners, how="torchrun" if begin.how == "auto" else begin.how)
    if asked.dry_run:
        return show_plan(loaded, begin)
    DOOR.ready(asked, loaded)
    guard.mention(*_banner(loaded, workers, adjusted))
    return start(loaded, begin)


def _understood(argv: Sequence[str]) -> tuple[int, list[str]]:
    """How many GPUs, and the words of the trainer."""
    count = next((place for place, word in enumerate(argv) if word.startswith("-") or "=" in word), len(argv))
    if count > 2:
        raise ConfigError(f"{count} values", where=LAUNCHER, hint=f"./{LAUNCHER} [GPUs] [folder] [flags of {TRAINER}]")
    if count and (not argv[0].isdecimal() or not 1 <= int(argv[0]) <= 4096):
        raise ConfigError(f"got {argv[0][:80]!r}, expected a number of GPUs first", where=LAUNCHER, hint=f"{GPUS}")
    folder = ["--data_dir", argv[1]] if count == 2 else []
    return int(argv[0]) if count else GPUS, [*folder, *argv[count:]]


def _workers(wanted: int, loaded: Loaded) -> tuple[int, list[str], list[str]]:
    """How many there will be, the flags that start them, and the lines that say why."""
    from lockstep.compat_mlm import given
    from lockstep.runtime import devices

    system, visible = loaded.config.system, devices.visible_gpus()
    said = [f"Available GPUs: {len(visible)}"]
    device = ["--device", "cpu"] if system.device == "auto" and not visible else []
    if "system.gpus" in given(loaded):
        return len(devices.choose(system.gpus, cpu=system.device == "cpu" or not visible)), device, said
    if len(visible) < wanted and system.device != "cpu":
        said.append(f"Warning: Requested {wanted} GPUs but only {len(visible)} are available.")
        said.append(f"Adjusting to use {len(visible)} GPUs." if visible else "Adjusting to use the CPU.")
        wanted = max(1, len(visible))
    return wanted, [*device, "--gpus", str(wanted)], said


def _banner(loaded: Loaded, workers: int, found: Sequence[str]) -> list[str]:
    """The documented lines of the launcher."""
    from lockstep.compat_mlm import epochs_text
    from lockstep.runtime.devices import visible_gpus

    config, training = loaded.config, loaded.config.training
    dataset = config.data.data_path or config.data.dataset_name
    return [
        f"Launching training on {_counted(workers)} with dataset: {dataset}",
        *found,
        f"Starting {'multi-GPU ' if visible_gpus() else ''}training with torchrun...",
        RULE,
        f"Dataset: {dataset}",
        f"Model: {config.model.model_path}",
        f"Batch size per GPU: {training.batch_size}",
        f"Total batch size: {training.batch_size * training.grad_accum_nums * workers}",
        f"Epochs: {epochs_text(loaded)}",
        f"Learning rate: {training.learning_rate}",
        f"Save directory: {config.report.results_dir}",
        f"Number of GPUs: {workers}{'' if visible_gpus() else ' (CPU workers)'}",
        RULE,
    ]


PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {LAUNCHER: launch}
