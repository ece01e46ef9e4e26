"""`lockstep bench` and `lockstep bench scaling`: refuses what cannot be measured, measures, shows, writes."""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import rundir
from lockstep.bench import busy, scaling
from lockstep.bench.show import scaling_table, table
from lockstep.errors import ConfigError, ExitCode, OutputError
from lockstep.guard import say
from lockstep.runtime import devices, env, signals

if TYPE_CHECKING:
    from lockstep.arguments import Setting
    from lockstep.config.load import Loaded


@dataclass(frozen=True)
class Asked:
    """The words of the command line."""

    steps: int
    json: Path | None = None
    anyway: bool = False


def bench(loaded: Loaded, arguments: Namespace, settings: Sequence[Setting]) -> int:
    """What either command line asks for; the exit code."""
    file = _file(arguments.json) if arguments.json else None
    asked = Asked(arguments.steps, file, arguments.anyway)
    _check(loaded, one_device=not hasattr(arguments, "workers"))
    with signals.listening():  # who is asked to end leaves no run and no folder behind
        if not hasattr(arguments, "workers"):
            return bench_one(loaded, asked)
        return bench_scaling(
            loaded, asked, workers=arguments.workers, given=_named(loaded, arguments), settings=settings
        )


def _named(loaded: Loaded, arguments: Namespace) -> list[str]:
    """The words that name this configuration to another process; a preset that was picked here is picked for good."""
    flags = [f"--{word}={text}" for word in ("preset", "config") if (text := getattr(arguments, word))]
    what = [arguments.what] if arguments.what else [] if flags else [loaded.preset]
    return [loaded.family, *what, *flags, *(["--debug"] if arguments.debug else [])]


def bench_one(loaded: Loaded, asked: Asked) -> int:
    """Measure one configuration on one device."""
    found = busy.check_quiet(busy.cards(loaded.config), anyway=asked.anyway)
    env.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of its own comings and goings
    from lockstep.bench.drive import measure
    from lockstep.report.logs import setup_logging

    setup_logging(level="DEBUG" if loaded.config.debug.enabled else "WARNING")
    for notice in loaded.notices:
        say(notice)
    try:
        figures = measure(loaded, steps=asked.steps, busy=found)
    except OSError as error:
        if error.errno is None or error.errno not in rundir.NO_ROOM:
            raise
        told = rundir.io_error(error, Path(tempfile.gettempdir()), doing="making rows")
        told.hint = "free some space there, or set TMPDIR to a folder on another disk"
        raise told from error
    _write(asked, "bench", figures.as_json())
    say(*table(figures))
    return ExitCode.DONE


def bench_scaling(
    loaded: Loaded, asked: Asked, *, workers: str, given: Sequence[str], settings: Sequence[Setting]
) -> int:
    """Measure one configuration with several numbers of workers; `given` and `settings` are what names it."""
    wanted, config = scaling.counts(workers), loaded.config
    on_gpu = busy.on_gpu(config)
    if on_gpu and (there := len(devices.visible_gpus())) < wanted[-1]:
        fitting = sorted({there, *(count for count in wanted if count <= there)})
        raise ConfigError(
            f"{wanted[-1]} workers, and this machine shows {there} GPUs",
            where="--workers",
            hint=f"--workers {','.join(map(str, fitting))}, or --device cpu" if there else "--device cpu",
        )
    found = busy.check_quiet(busy.cards(config, wanted[-1]), anyway=asked.anyway)
    if not on_gpu and config.system.device == "auto":
        say("No GPUs detected: workers of the CPU are measured")
        settings = [*settings, ("device", "cpu")]  # a run takes no --gpus for the CPU unless it is named
    options, points = config.training, list[scaling.Point]()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        words = scaling.command_words(given, config, settings, folder=Path(name), cpu=not on_gpu)
        for count in wanted:
            points.append(scaling.run(words, config, workers=count, steps=asked.steps, folder=Path(name)))
    device = devices.visible_gpus()[0].name if on_gpu else f"CPU, {os.cpu_count()} cores"
    batch = f"{options.batch_size} rows x {options.grad_accum_nums} x {options.context_length:,}"
    figures = [point.as_json(points[0]) for point in points]
    subject = {"family": loaded.family, "preset": loaded.preset, "device": device, "batch": batch, "busy": found}
    _write(asked, "bench scaling", {**subject, "steps": asked.steps, "command": words.all, "workers": figures})
    say(*scaling_table(points, device=device, batch=batch, busy=found))
    if not on_gpu and wanted[-1] > (os.cpu_count() or 1):
        say("There are fewer cores than workers: several share one.")
    return ExitCode.DONE


def _check(loaded: Loaded, *, one_device: bool) -> None:
    """Refuse before minutes are spent."""
    several = "lockstep bench scaling --workers 1,2,4"
    if env.detect().world > 1:
        what = "a bench is one process, and this is one of several workers"
        raise ConfigError(what, where="lockstep bench", hint=f"{several}, started once")
    for key in ("system.gpus", "system.mode") if one_device else ("system.gpus",):
        if (origin := loaded.origins.get(key)) and origin.layer == "flag":
            what = "a bench is of one device" if one_device else "--workers says how many"
            raise ConfigError(what, where=key, hint=f"{several}; another card: --system.device-id=N")


def _file(text: str) -> Path:
    """Where the figures go, if they can."""
    path = rundir.expanded(text, where="--json")
    what = "the sign for a stream, which has the table" if text == "-" else ""
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            what = "a folder" if path.is_dir() else "in a folder that is not there"
    except OSError as error:  # a name that is too long
        what = f"no name for one ({error.strerror})"
    if what:
        raise OutputError(f"cannot be written, it is {what}", where=text[:80], hint="--json FILE.json")
    return path


def _write(asked: Asked, kind: str, figures: Mapping[str, Any]) -> None:
    """The figures, if they are wanted, and what they were measured with."""
    if not asked.json:
        return
    from lockstep.engine.build import versions  # of torch, too, which is loaded when all is measured

    about = {
        "kind": f"lockstep {kind}",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "load": list(os.getloadavg()),
        "cores": os.cpu_count(),
    }
    try:
        rundir.write_json(asked.json, about | dict(figures))
    except OSError as error:
        raise rundir.io_error(error, asked.json, doing="writing the figures") from error
