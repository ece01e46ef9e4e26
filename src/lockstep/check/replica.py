"""One process on one card: run the workloads of an errand and write down every step's fingerprint.

It talks to nobody: no group, no collectives. A sick card can hang or kill this process and no other.
`python -m lockstep.check.replica ERRAND.json`; with --prepare before it, only the data is made.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from lockstep.check import errand as errands
from lockstep.check import probes
from lockstep.check.errand import Errand
from lockstep.check.records import Workload
from lockstep.check.training import Named, NotFinite, Training
from lockstep.check.workloads import prepare_all
from lockstep.engine.build import versions
from lockstep.errors import ExitCode, LockstepError
from lockstep.health import records
from lockstep.health.records import Stamp
from lockstep.models.build import forget_compiled
from lockstep.runtime import determinism, hardware
from lockstep.runtime.gpu_facts import Sampler

ERROR_CHARACTERS = 300
SAMPLE_SECONDS = 2.0


class Doing(Protocol):
    """A workload at work."""

    @property
    def tensors(self) -> Named: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...  # complete after the last stamp
    @property
    def chain(self) -> str: ...
    def stamps(self) -> Iterator[Stamp]: ...


KINDS: dict[str, Callable[[Workload, Errand, torch.device], Doing]] = {"train": Training, **probes.KINDS}


class Record:
    """The replica's own file, line by line: what was told is there even if the process dies in the next step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")

    def tell(self, kind: str, **content: Any) -> None:
        self._file.write(records.line(kind, **content) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def main(argv: Sequence[str] | None = None) -> int:
    """As a process of its own. What goes wrong in a workload stands in the record; here only a bad errand fails."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepares = words[:1] == ["--prepare"]
    try:
        if len(words) != 1 + prepares:
            raise LockstepError("expected one file: [--prepare] ERRAND.json", exit_code=ExitCode.USAGE)
        errand = errands.read(Path(words[-1]))
        if prepares:
            prepare_all(errand.workloads, errand.data)
            return ExitCode.DONE
        return run(errand)
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def run(errand: Errand) -> int:
    """All workloads in turn. 0: each was done to its end, whatever it has shown; 1: one was not."""
    device = hardware.pick_device(errand.device, 0)
    mode = determinism.mode(device, deterministic=True, threads=errand.threads)
    done = True
    sampler = Sampler(errand.card.uuid or None, errand.samples, period=SAMPLE_SECONDS)
    with contextlib.closing(Record(errand.record)) as record, contextlib.closing(sampler), mode:
        if errand.memory_bytes and device.type == "cuda":
            total = hardware.total_memory_bytes(device) or errand.memory_bytes
            torch.cuda.set_per_process_memory_fraction(min(1.0, errand.memory_bytes / total), device)
        record.tell("about", versions={**versions(), "device": hardware.device_name(device)})
        lost = ""  # why no kernel runs any more in this process, as after an illegal access
        for workload in errand.workloads:
            done &= not lost and _do(workload, errand, device, record)
            if lost:
                _tell_lost(record, workload, lost)
            lost = lost or _free(device)
    return ExitCode.DONE if done else ExitCode.FAILED


def _do(workload: Workload, errand: Errand, device: torch.device, record: Record) -> bool:
    """One workload to its end, and whether it came there. An error is told, and the other workloads go on."""
    record.tell("begin", workload=workload.name)
    forget_compiled()  # as in a fresh process: run again alone, it must have the same bits
    facts: Mapping[str, Any] = {}
    begun = False
    try:
        doing = KINDS[workload.kind](workload, errand, device)
        facts = doing.facts
        record.tell("workload", workload=workload.name, facts=dict(facts), **_described(doing.tensors))
        begun = True
        for stamp in doing.stamps():
            record.tell("step", **asdict(stamp))
        record.tell("done", facts=dict(facts), chain=doing.chain)
    except Exception as error:
        if not begun:
            record.tell("workload", workload=workload.name)
        if isinstance(error, NotFinite):
            record.tell("step", **asdict(error.stamp))
        record.tell("done", facts=dict(facts), error=_words(error))
        return False
    return True


def _tell_lost(record: Record, workload: Workload, lost: str) -> None:
    record.tell("workload", workload=workload.name)
    record.tell("done", error=f"not begun: the device is lost since the workload before ({lost})")


def _described(tensors: Named) -> dict[str, Any]:
    return {
        "tensors": [name for name, _ in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
    }


def _words(error: Exception) -> str:
    """One line; a bug says its type too."""
    text = error.what if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"
    return (text.strip().splitlines() or [type(error).__name__])[0][:ERROR_CHARACTERS]


def _free(device: torch.device) -> str:
    """Give back what the last workload held; why the device does not answer any more, or ''."""
    if device.type != "cuda":
        return ""
    gc.collect()
    try:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.ones(1, device=device).sum().item()
    except RuntimeError as error:
        return _words(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
