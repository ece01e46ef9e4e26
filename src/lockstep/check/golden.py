"""The bits a healthy card has, kept in a file: one JSON document for many models, drivers and versions. Torch-free.

A passing check writes what is not there yet; a later one is held against it. An entry is found by everything that
decides bits: model of the card, driver, torch, and the hash of what was run.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import rundir
from lockstep.check.records import Card, Replica, Work, Workload
from lockstep.errors import DataError, LockstepError, NotFoundError
from lockstep.health.records import Stamp

KIND = "lockstep golden"
FORMAT = 1
DIGEST_DIGITS = 32
HASH_DIGITS = 16
LOCK_SECONDS = 60.0
DECIDING = ("lockstep", "torch", "cuda", "cudnn", "triton")  # of all versions: those that decide bits


@dataclass(frozen=True)
class Known:
    """Of one workload: step -> digest of the right bits, and how long a step took there."""

    steps: Mapping[int, str]
    median_seconds: float = 0.0


@dataclass(frozen=True)
class Golden:
    """The entries of a file that are of this check, by their keys."""

    config_hash: str
    entries: Mapping[str, Mapping[str, Known]] = field(default_factory=dict[str, Mapping[str, Known]])

    def key(self, card: Card, versions: Mapping[str, str]) -> str:
        return key(card, versions, self.config_hash)

    def of(self, card: Card, versions: Mapping[str, str]) -> Mapping[str, Known]:
        """Workload -> what is known of it, for cards like this one; empty: nothing."""
        return self.entries.get(self.key(card, versions), {})


def key(card: Card, versions: Mapping[str, str], config_hash: str) -> str:
    return " | ".join((card.model or "?", card.driver or "-", versions.get("torch", "?"), config_hash))


def config_hash(workloads: Sequence[Workload], *, device: str, threads: int, versions: Mapping[str, str]) -> str:
    """Of all that decides bits but the card and its driver: two sites with the same may compare."""
    deciding = {
        "workloads": [dataclasses.asdict(workload) for workload in workloads],
        "device": device,
        "threads": threads if device == "cpu" else 0,  # the host's threads do not touch a GPU's bits
        "versions": {name: versions[name] for name in DECIDING if name in versions},
    }
    return hashlib.sha256(_canonical(deciding).encode()).hexdigest()[:HASH_DIGITS]


def digest(stamp: Stamp) -> str:
    """All bits of a step in one word."""
    return hashlib.sha256("\n".join(stamp.bits).encode()).hexdigest()[:DIGEST_DIGITS]


def open_book(path: Path, config_hash: str) -> Golden:
    """What a file knows. A file that is not there yet knows nothing; a foreign or damaged one is refused."""
    return Golden(config_hash, {name: _known(entry["workloads"]) for name, entry in _read(path).items()})


def add(path: Path, config_hash: str, replicas: Iterable[Replica]) -> list[str]:
    """Write down the bits of cards that passed, where their key is missing; the keys that are new.

    What is there already stays: a later check is held against it, it does not overrule it.
    """
    from filelock import FileLock, Timeout

    fresh: dict[str, dict[str, Any]] = {}
    for replica in replicas:
        fresh.setdefault(key(replica.card, replica.versions, config_hash), _entry(replica, config_hash))
    try:
        with FileLock(path.with_name(f"{path.name}.lock"), timeout=LOCK_SECONDS):
            entries = _read(path)
            new = [name for name in fresh if name not in entries]
            if new:
                entries |= {name: fresh[name] for name in new}
                document = {"kind": KIND, "format": FORMAT, "sum": _sum(entries), "entries": entries}
                rundir.write_json(path, document)
            return new
    except Timeout:
        raise LockstepError("another check has been writing it for a minute", where=str(path)) from None
    except OSError as error:
        raise rundir.io_error(error, path, doing="writing the golden record") from None


def _entry(replica: Replica, config_hash: str) -> dict[str, Any]:
    return {
        "model": replica.card.model,
        "driver": replica.card.driver,
        "versions": {name: replica.versions[name] for name in DECIDING if name in replica.versions},
        "config_hash": config_hash,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "workloads": {work.workload: _told(work) for work in replica.works if work.complete and work.stamps},
    }


def _told(work: Work) -> dict[str, Any]:
    return {
        "steps": {str(stamp.step): digest(stamp) for stamp in work.stamps},
        "median_seconds": statistics.median(stamp.seconds for stamp in work.stamps),
    }


def _read(path: Path) -> dict[str, dict[str, Any]]:
    hint = "another --golden FILE; one that is not there yet is written by a check that passes"
    if not path.parent.is_dir():
        raise NotFoundError("there is no such folder for the golden record", where=str(path.parent), hint=hint)
    try:
        document = rundir.read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        if error.errno == errno.EINVAL:  # a pipe or a device
            raise DataError(f"is no golden record of lockstep: {error.strerror}", where=str(path), hint=hint) from None
        raise rundir.io_error(error, path, doing="reading the golden record") from None
    except ValueError:
        raise DataError("is no golden record of lockstep: not JSON", where=str(path), hint=hint) from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise DataError("is no golden record of lockstep", where=str(path), hint=hint)
    if document.get("format") != FORMAT:
        told = document.get("format")
        raise DataError(f"is a golden record of format {told!r}; this version reads {FORMAT}", where=str(path))
    entries: dict[str, dict[str, Any]] = document.get("entries", {})
    if document.get("sum") != _sum(entries):
        raise DataError("the golden record is damaged: its checksum does not fit", where=str(path), hint=hint)
    return entries


def _known(workloads: Mapping[str, Any]) -> dict[str, Known]:
    return {
        name: Known({int(step): str(told) for step, told in each["steps"].items()}, float(each["median_seconds"]))
        for name, each in workloads.items()
    }


def _sum(entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(entries).encode()).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
