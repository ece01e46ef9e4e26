"""`lockstep bench` and `lockstep bench scaling`: short real runs with one or several numbers of workers."""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import rundir
from lockstep.bench.short_run import TRACED, Measured, open_flags, run, with_made_rows
from lockstep.bench.show import GIB, as_json, table
from lockstep.config.load import replaced, to_dict
from lockstep.errors import ConfigError, ExitCode, LockstepError, OutputError
from lockstep.guard import say
from lockstep.runtime import devices, env, signals

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig

MOST_WORKERS = 1024


def bench(loaded: Loaded, arguments: Namespace) -> int:
    """What either command line asks for; the exit code."""
    file = _file(arguments.json) if arguments.json else None
    if getattr(arguments, "find_batch", False):
        return find_batch(loaded, file)
    wanted = counts(getattr(arguments, "workers", "1"))
    config = _config(loaded, wanted)
    gpus = devices.visible_gpus() if config.system.device != "cpu" else []
    first = [str(gpu.index) for gpu in gpus][config.system.device_id :][:1]
    busy = busy_reasons([gpu.index for gpu in gpus[: wanted[-1]]])
    for notice in (*loaded.notices, *(f"WARNING: this machine is busy: {reason}" for reason in busy)):
        say(notice)
    found = list[Measured]()
    with signals.listening(), tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        made = _with_made_rows(config, Path(name), workers=wanted[-1])
        for count in wanted:
            workers = f"{first[0]}," if first and wanted == [1] else str(count)  # with the comma: its number
            named = {"workers": workers, "steps": arguments.steps, "traced": TRACED, "flags": open_flags(loaded)}
            found.append(run(made, folder=Path(name), **named))
    if file:
        about = {"family": loaded.family, "preset": loaded.preset, "busy": busy, "settings": to_dict(config)}
        _write(file, about | as_json(found))
    say(*table(found, on_gpu=bool(gpus)))
    if not gpus and wanted[-1] > (os.cpu_count() or 1):
        say("There are fewer cores than workers: several share one.")
    return ExitCode.DONE


def find_batch(loaded: Loaded, file: Path | None) -> int:
    """Print the flag of the largest micro-batch that fits one GPU, in this process."""
    from lockstep.engine import find_batch as finder
    from lockstep.report.logs import setup_logging
    from lockstep.runtime import determinism, hardware

    system, rows = loaded.config.system, loaded.config.training.batch_size
    device = hardware.pick_device(system.device, system.device_id)
    if device.type not in finder.DEVICES:
        what = "sizes are tried on a GPU: want of memory ends a process on the CPU"
        raise ConfigError(what, where="--find-batch", hint="--batch-size N")
    setup_logging(level="WARNING")
    powers = [1 << power for power in range(21)]
    sizes = sorted({rows, *powers, *(3 * power // 2 for power in powers[1:-1])})
    with (
        signals.listening(),
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name,
        determinism.mode(device, deterministic=system.deterministic, threads=system.threads),
    ):
        made = replace(loaded, config=_with_made_rows(loaded.config, Path(name), workers=1), finds_batch=False)
        found = finder.find(made, device, sizes=sizes)
    on = hardware.device_name(device)
    if not found.rows:
        raise LockstepError(f"not even one row fits {on}", hint="--gradient-checkpointing, or a smaller model")
    if file:
        _write(file, {"batch_size": found.rows, "peak_memory_bytes": int(found.peak_bytes), "device": on})
    say(f"largest micro-batch that fits {on}, peak {found.peak_bytes / GIB:.1f} GiB:", f"--batch-size {found.rows}")
    return ExitCode.DONE


def counts(text: str) -> list[int]:
    """The numbers of workers in "1,2,4", in order; one alone is always among them, to compare with."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    for part in found or [text]:
        if not (part.isdecimal() and 1 <= int(part) <= MOST_WORKERS):
            what = f"expected numbers of workers, got {part[:40]!r}"
            raise ConfigError(what, where="--workers", hint="--workers 1,2,4")
    return sorted({1, *map(int, found)})


def busy_reasons(indices: Sequence[int]) -> list[str]:
    """Why figures of now may be those of somebody else's work; none: all is quiet."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    found = [f"the load average is {load:.1f} on {cores} cores"] if load > cores else []
    others = [holder for index in indices for holder in devices.holders(index) if holder.pid != os.getpid()]
    return [*found, *(devices.busy_notices(indices) if others else [])]


def _config(loaded: Loaded, wanted: Sequence[int]) -> RunConfig:
    """The configuration that is measured; what cannot be is refused before minutes are spent."""
    if env.detect().world > 1:
        what = "a bench starts its own workers, and this is one of several"
        raise ConfigError(what, where="lockstep bench", hint="lockstep bench scaling --workers 1,2,4, started once")
    if (origin := loaded.origins.get("system.gpus")) and origin.layer == "flag":
        hint = "lockstep bench scaling --workers 1,2,4; another card: --system.device-id=N"
        raise ConfigError("--workers says how many", where="system.gpus", hint=hint)
    system = loaded.config.system
    visible = devices.visible_gpus() if system.device != "cpu" else []
    if system.device == "auto" and not visible:
        say("No GPUs detected: the CPU is measured")
    if system.device != "cpu" and visible and len(visible) < wanted[-1]:
        fitting = sorted({len(visible), *(count for count in wanted if count <= len(visible))})
        raise ConfigError(
            f"{wanted[-1]} workers, and this machine shows {len(visible)} GPUs",
            where="--workers",
            hint=f"--workers {','.join(map(str, fitting))}, or --device cpu",
        )
    if visible or system.device == "cuda":
        return loaded.config
    alone = {"system.threads": 1} if len(wanted) > 1 else {}  # else one worker had all the cores that several share
    return replaced(loaded.config, {"system.device": "cpu", **alone}).config


def _with_made_rows(config: RunConfig, folder: Path, *, workers: int) -> RunConfig:
    try:
        return with_made_rows(config, folder, workers=workers)
    except OSError as error:
        if error.errno is None or error.errno not in rundir.NO_ROOM:
            raise
        told = rundir.io_error(error, folder, doing="making rows")
        told.hint = "free some space there, or set TMPDIR to a folder on another disk"
        raise told from error


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


def _write(path: Path, figures: Mapping[str, Any]) -> None:
    """The figures, and what they were measured with."""
    from lockstep.engine.build import versions  # of torch, too, which is loaded when all is measured

    about = {
        "kind": "lockstep bench",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "load": list(os.getloadavg()),
        "cores": os.cpu_count(),
    }
    try:
        rundir.write_json(path, about | dict(figures))
    except OSError as error:
        raise rundir.io_error(error, path, doing="writing the figures") from error
