"""train.py, collect.py and evaluate.py, the documented scripts of Algorithm Distillation: flags, files, lines.

Torch-free at import.
"""

from __future__ import annotations

import logging
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.arguments import OF_COLLECTIONS, Parser, Setting, real, understand, whole, without
from lockstep.compat_door import Door, parse, resolve
from lockstep.compat_llada import NO_FP16, on_cpu
from lockstep.errors import ConfigError, ExitCode, NotFoundError
from lockstep.families import doors_folder
from lockstep.guard import say

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.contracts import Sink, StepRecord
    from lockstep.data.options import HistoryOptions

logger = logging.getLogger(__name__)

TRAINER, COLLECTOR, EVALUATOR = "train.py", "collect.py", "evaluate.py"
CONFIG = "config/model/ad_dr_compressed.yaml"
MODEL, HISTORIES = "AD", "datasets"
COMPRESSED = {"model.model_path": "lockstep/ad-compressed", "model.init_std": "0.045"}  # of the wider model
EPISODES = 500
DEBUG = "debug output; full tracebacks"
PRECISION = "training.precision"


@dataclass(frozen=True)
class AdDoor(Door):
    """What train.py and collect.py share: a YAML file that decides, and --set over it."""

    def new_parser(self) -> Parser:
        parser = super().new_parser()
        parser.flag("--set", "a key of the YAML file and its value, over the file; any number of times",
                    metavar="KEY=VALUE", action="append", default=[])  # fmt: skip
        return parser

    def parser(self) -> Parser:
        return self.with_usual(self.new_parser(), debug=DEBUG)

    def complete(self, argv: Sequence[str]) -> list[str]:
        """With --config as a path that holds for every process: as given, else beside the script, else our own."""
        asked, _ = parse(self, argv)
        return [*without(argv, "--config"), "--config", self.place_of(asked.config or CONFIG)]

    def place_of(self, name: str) -> str:
        """Where a file lies that was given as `name`."""
        beside = Path(sys.argv[0]).parent / name if Path(sys.argv[0]).name == self.script else Path(name)
        places = (Path(name), beside, doors_folder() / "ad" / name)
        return str(next((place for place in places if place.is_file()), name))

    def words(self, asked: Namespace) -> list[Setting]:
        return [setting for text in asked.set for setting in _understood(text, self.family)]

    def switches(self, asked: Namespace, first: Loaded) -> Mapping[str, str]:
        """16 bits that only a file asks for are left to the CPU."""
        del asked
        origin = first.origins.get(PRECISION)
        left = on_cpu(first) and first.config.training.precision == "fp16" and origin and origin.layer == "file"
        return {PRECISION: "auto"} if left else {}


@dataclass(frozen=True)
class TrainDoor(AdDoor):
    """train.py."""

    def defaults(self, asked: Namespace, first: Loaded) -> Mapping[str, str]:
        """What the script sets itself: the folder of its run, its files there, and going on where it stopped."""
        del asked
        run, data = first.config.run, _data(first)
        name = run.name or f"{MODEL}-{data.env}-seed{data.env_split_seed}"
        own = {
            "run.name": name,
            "run.experiment_name": "ad_train",
            "training.checkpoint_dir": str(Path(run.out) / name),
            "training.min_lr_ratio": "0",
            "checkpoint.resume": "auto",
            "data.data_path": HISTORIES,
            "data.collect": "false",
        }
        if first.preset == self.preset and getattr(first.config.model, "compressed", None):
            own |= COMPRESSED
        return own if first.config.report.log_all_ranks else own | {"report.log_prefix": self.log_prefix}

    def ready(self, asked: Namespace, loaded: Loaded) -> None:
        """Without histories there is nothing to learn from."""
        from lockstep.data.histories import file_of

        data = _data(loaded)
        path = file_of(data)
        if not data.collect and not path.exists():
            words = [] if asked.config == self.place_of(CONFIG) else ["--config", shlex.quote(asked.config)]
            words += [f"--set {shlex.quote(text)}" for text in asked.set]
            hint = " ".join(["python", COLLECTOR, *words])
            raise NotFoundError("there are no histories to learn from", where=str(path), hint=hint)

    def opening(self, loaded: Loaded) -> list[str]:
        """Before anything is loaded, of the main process."""
        config = loaded.config
        lines = _notices(loaded)
        if config.system.device == "auto" and on_cpu(loaded):
            lines.append("No GPU found: training on the CPU")
        return [*lines, f"Data loading started at {_now()}"]

    def listeners(self, loaded: Loaded) -> list[Sink]:
        return [Lines(loaded)]


class Lines:
    """The documented lines of a training, and config.yaml in its folder: a sink like any other."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._began = loaded, datetime.now()

    def write(self, record: StepRecord) -> None:
        del record  # steps have lines of their own

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "start":
            self._start(fields)
            self._tell(*self._banner(fields))
            self._tell(f"Data loading ended at {_now()}", f"Elapsed time: {datetime.now() - self._began}")
            self._tell(f"Training started at {_now()}")
        elif kind == "evaluating":
            self._tell(f"Evaluating started at {_now()}")
        elif kind == "eval":
            self._tell(f"Evaluating ended at {_now()}")
        elif kind == "export":
            self._tell(f"Checkpoint saved to {fields['path']}")
        elif kind == "end" and fields.get("exit_code") == ExitCode.DONE:
            self._tell(f"Training ended at {_now()}")

    def close(self) -> None:
        """Nothing to close."""

    def _tell(self, *lines: str) -> None:
        for line in lines:
            logger.info("%s", line)

    def _start(self, fields: Mapping[str, Any]) -> None:
        from lockstep.config.load import to_dict
        from lockstep.config.show import as_yaml
        from lockstep.rundir import io_error, write_bytes

        path = Path(str(fields["run"])) / "config.yaml"
        try:
            write_bytes(path, as_yaml(to_dict(self._loaded.config)).encode())
        except OSError as error:
            raise io_error(error, path, doing="writing the configuration") from error

    def _banner(self, fields: Mapping[str, Any]) -> list[str]:
        """What processes share the work; several have been told of already. Then whose wish the precision was."""
        from lockstep.engine.present import workers_banner
        from lockstep.runtime import env, hardware

        system, place = self._loaded.config.system, env.detect()
        each, accumulated = int(fields["batch_size"]), int(fields["accumulated"])
        replicas = system.mode == "replicas"  # each has the whole batch
        workers = 1 if replicas else place.world
        lines: list[str] = []
        if place.world == 1 or replicas:
            device = hardware.pick_device(system.device, hardware.own_index(place, system.device_id))
            lines = workers_banner(str(fields["precision"]), accumulated, device=device, world=place.world)
        return [
            *lines,
            f"Mixed precision is decided by {precision_source(self._loaded)}",
            f"Batch size per GPU: {each}",
            f"Global batch size: {each * workers * accumulated} ({each} per GPU x {workers} processes x "
            f"{accumulated} accumulated)",
        ]


TRAIN = TrainDoor(
    TRAINER, f"Train an Algorithm Distillation agent by {CONFIG}, or --config FILE.", log_prefix="none",
    family="ad", preset="ad_dr",
)  # fmt: skip


def precision_source(loaded: Loaded) -> str:
    """Who decided the precision: a flag of ours, the launcher, a file, or nobody (contract E5)."""
    from lockstep.runtime import env

    origin = loaded.origins.get(PRECISION)
    if origin is None:
        return "the machine"
    if origin.layer == "flag" and origin.where == f"--{PRECISION}":
        if PRECISION in env.launcher_wishes():
            return "the launcher (--mixed_precision, ACCELERATE_MIXED_PRECISION or default_config.yaml)"
        return "the CPU" if _is_left_to_the_cpu(loaded) else origin.where
    return f"{origin.layer} {origin.where}" if origin.layer in ("preset", "script") else origin.where


def _is_left_to_the_cpu(loaded: Loaded) -> bool:
    """Whether a file has asked for 16 bits that this run does without."""
    origin = loaded.origins.get(PRECISION)
    switched = origin is not None and origin.layer == "flag" and loaded.config.training.precision == "auto"
    return switched and on_cpu(loaded)


def _notices(loaded: Loaded) -> list[str]:
    """What is not quite as the file says."""
    from lockstep.models import shapes

    config, lines = loaded.config, list[str]()
    if _is_left_to_the_cpu(loaded):
        lines.append(NO_FP16)
    shape: Any = shapes.resolve(config.model, context_length=config.training.context_length)
    length = config.training.context_length
    if shape.compressed and (rest := length % shape.region):
        lines.append(
            f"n_transit {length}: {length // shape.region} regions of {shape.region} steps, and {rest} of another"
        )
    return lines


def _understood(text: str, family: str) -> list[Setting]:
    """key=value as the YAML file would mean it: by the words of the family, which are not always those of flags."""
    from lockstep.config import renames

    key, equals, value = text.partition("=")
    path = tuple(part.strip().replace("-", "_") for part in key.split("."))
    if not equals or not all(part.isidentifier() for part in path):
        raise ConfigError(f"got {text[:80]!r}, expected KEY=VALUE", where="--set", hint="--set tf_n_embd=32")
    if folder := renames.run_folder(path, value, family):
        return [(".".join(target), part) for target, part in folder.items()]
    moved = renames.moved(path, family) if path[-1] != "mixed_precision" else None
    return [(".".join(moved or path), value)]


def _data(loaded: Loaded) -> HistoryOptions:
    from lockstep.data.options import HistoryOptions

    assert isinstance(loaded.config.data, HistoryOptions)
    return loaded.config.data


def _now() -> str:
    return datetime.now().isoformat(sep=" ", timespec="seconds")


# ------------------------------------------------------------------------------------------- collect.py and evaluate.py


@dataclass(frozen=True)
class CollectDoor(AdDoor):
    """collect.py."""

    def parser(self) -> Parser:
        parser = self.with_settings(self.new_parser(), debug=DEBUG, shown=OF_COLLECTIONS)
        parser.flag("--overwrite", "collect anew, although the file is there")
        return parser

    def defaults(self, asked: Namespace, first: Loaded) -> Mapping[str, str]:
        del asked, first
        return {"report.log_prefix": self.log_prefix, "data.data_path": HISTORIES}


COLLECT = CollectDoor(
    COLLECTOR, f"Collect the histories that {TRAINER} learns from, by {CONFIG}, or --config FILE.", log_prefix="none",
    family="ad", preset=TRAIN.preset,
)  # fmt: skip


def collect(argv: Sequence[str]) -> int:
    """collect.py: nothing, where the file is there already."""
    from lockstep.preparing import collect_histories
    from lockstep.report.logs import setup_logging
    from lockstep.runtime.devices import check_asked

    asked, settings = parse(COLLECT, COLLECT.complete(argv))
    loaded = resolve(COLLECT, asked, settings)
    check_asked(loaded.config.system)
    setup_logging(level=loaded.config.debug.log_level, prefix="none")
    return collect_histories(loaded, overwrite=asked.overwrite, dry_run=asked.dry_run)


def evaluate(argv: Sequence[str]) -> int:
    """evaluate.py: how the agent of a run does in the goals it has not seen."""
    parser = Door(EVALUATOR, "Let a trained agent loose in tasks it has not seen.", family="ad").new_parser()
    usual = f"runs/{MODEL}-darkroom-seed0"
    parser.flag("--goal-idx", "one of the unseen goals, from 0 (all)", metavar="N", type=whole(0))
    parser.flag(
        "--ckpt-dir",
        f"folder of a run or of ckpt-<step>.pt files, or one such file ({usual})",
        metavar="DIR",
        default=usual,
    )
    parser.flag(
        "--episodes", f"one after another in each walk ({EPISODES})", metavar="N", type=whole(1), default=EPISODES
    )
    parser.flag("--repeats", "walks in each goal (4)", metavar="N", type=whole(1), default=4)
    parser.flag("--temperature", "0 is greedy (0.5)", metavar="T", type=real(0, 100))
    parser.flag("--seed", "another seed, other walks (0)", metavar="N", type=whole(0), default=0)
    parser.flag(
        "--device", "auto, cuda or cpu (auto)", metavar="DEVICE", default="auto", choices=("auto", "cuda", "cpu")
    )
    parser.flag("--debug", "full tracebacks")
    asked, _ = understand(parser, argv, set)
    place = _trained(Path(asked.ckpt_dir))
    from lockstep.engine.trials import evaluate_run
    from lockstep.report.logs import setup_logging

    setup_logging(prefix="none")
    more = {} if asked.temperature is None else {"temperature": asked.temperature}
    found = evaluate_run(
        place, episodes=asked.episodes, repeats=asked.repeats, seed=asked.seed, goal_idx=asked.goal_idx,
        folder=place.parent if place.is_file() else place, device=asked.device, **more,
    )  # fmt: skip
    say(*found.lines())
    return ExitCode.DONE


def _trained(folder: Path) -> Path:
    """The run in a folder, else the newest of its documented files; a file that was named is meant itself."""
    from lockstep.engine.agent_files import newest
    from lockstep.engine.resume import has_saved
    from lockstep.rundir import RunDir

    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise NotFoundError("there is no trained agent", where=str(folder), hint=f"python {TRAINER}, or --ckpt_dir DIR")
    if has_saved(RunDir(folder)):
        return folder
    if (found := newest(folder)) is None:
        raise NotFoundError("no ckpt-<step>.pt here", where=str(folder), hint=f"python {TRAINER}, or --ckpt_dir DIR")
    return found


PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {COLLECTOR: collect, EVALUATOR: evaluate}
