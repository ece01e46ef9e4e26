"""What a replica is sent to do, as one JSON file: torch-free, written by the conductor, read by the replica."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.check.records import Card, Workload
from lockstep.errors import DataError
from lockstep.health import records

FILE = "errand.json"
DUMP_FILE = "dump.safetensors"
SAMPLES_FILE = "gpu.jsonl"


@dataclass(frozen=True)
class Dump:
    """A tensor to keep as it was when it was fingerprinted. Its name is one of Work.tensors."""

    workload: str
    step: int
    tensor: str


@dataclass(frozen=True)
class Errand:
    """One process, one card, some workloads. `folder` is the replica's own; `data` is prepared and only read."""

    card: Card
    device: str  # cpu or cuda: the process sees one card, which is number 0 to it
    workloads: tuple[Workload, ...]
    folder: Path
    data: Path
    until: int | None = None  # the last step of each workload
    dump: Dump | None = None
    threads: int = 1
    memory_bytes: int = 0  # of the card, for this process; 0: all of it

    @property
    def record(self) -> Path:
        return self.folder / records.FILE

    @property
    def samples(self) -> Path:
        return self.folder / SAMPLES_FILE

    @property
    def dump_file(self) -> Path:
        return self.folder / DUMP_FILE

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False, default=str) + "\n")
        return path


def read(path: Path) -> Errand:
    """The errand in a file; whoever starts a replica by hand gets one clear error."""
    try:
        return _errand(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise DataError(f"cannot read the errand: {error.strerror}", where=str(path)) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"is no errand of a replica: {error}", where=str(path)) from error


def _errand(content: Mapping[str, Any]) -> Errand:
    own = dict(content)
    dump = own.pop("dump", None)
    return Errand(
        card=Card(**own.pop("card")),
        workloads=tuple(Workload(**each) for each in own.pop("workloads")),
        folder=Path(own.pop("folder")),
        data=Path(own.pop("data")),
        dump=Dump(**dump) if dump else None,
        **own,
    )
