"""What check.json holds: every field with its meaning, as models that check it and as a JSON schema. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from lockstep.errors import DataError, NotFoundError

FILE = "check.json"
FORMAT = 1
Verdict = Literal["PASS", "FAIL", "UNDECIDED"]


class Part(BaseModel, frozen=True):
    """Frozen, without unknown keys, silent conversions, NaN or Inf."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class WorkloadEntry(Part, frozen=True):
    """Something every card did alike."""

    name: str
    kind: str = Field(description="train, or the probe it is")
    family: str
    preset: str
    settings: dict[str, JsonValue] = Field(description="on top of the preset, by dotted key")
    steps: int
    interval: int = Field(description="steps between fingerprints")
    warmup_steps: int = Field(description="first steps, whose time is not judged")
    compared_steps: tuple[int, ...] = Field(description="the steps of which some card has a fingerprint, in order")


class DifferenceEntry(Part, frozen=True):
    """The first bits of a card that are not those of the others."""

    workload: str
    step: int
    tensor: str = Field(description='"gradients:NAME", "weights:NAME", "moments:NAME", "loss" or "norm"')
    elements: int | None = Field(description="how many elements of the tensor differ; null: nobody can say")
    positions: tuple[tuple[int, ...], ...] = Field(description="index of the first ones in the tensor")
    right: tuple[str, ...] = Field(description="their bits on the other cards, in hex")
    wrong: tuple[str, ...] = Field(description="their bits on this card, in hex")
    nature: str = Field(description="transient, persistent or intermittent; empty: it was not run again")


class PaceEntry(Part, frozen=True):
    """How fast a card was in one workload."""

    median_seconds: float
    p95_seconds: float
    ratio: float = Field(description="own median over the median of the group")
    slow: bool


class WorkEntry(Part, frozen=True):
    """What one card did of one workload. The lists of a step have the length of `steps`."""

    workload: str
    complete: bool
    error: str = Field(description="why it ended early; empty: it did not")
    damaged_lines: int = Field(description="lines of the record whose checksum does not fit; they blame no card")
    agreement: str = Field(
        description="one letter for each compared step: . as the majority, x different, ? no majority, - missing"
    )
    pace: PaceEntry | None
    weight_hash: str = Field(description="of all weights after the last step; empty: a workload without weights")
    steps: tuple[int, ...]
    losses: tuple[float | None, ...] = Field(description="with all digits; null: none, or not a finite number")
    norms: tuple[float | None, ...] = Field(description="of the gradients, likewise")
    bits: tuple[str, ...] = Field(
        description="hash of everything that was compared at the step, as a golden file has it"
    )
    seconds: tuple[float, ...] = Field(description="time of the step")
    facts: dict[str, JsonValue] = Field(description="kernels, bytes touched, wrong words of the memory pattern")


class Sample(Part, frozen=True):
    """How a card was doing at one moment."""

    seconds: float = Field(description="since the first sample of the check")
    temperature_c: float | None = None
    power_watts: float | None = None


class CardEntry(Part, frozen=True):
    """One GPU, or one CPU worker that stands for one."""

    name: str = Field(description="what the table and the page call it")
    index: int
    slot: int = Field(description="which process of its machine drove it")
    node: int
    host: str
    uuid: str
    serial: str
    model: str
    driver: str
    status: Verdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = Field(description="worth knowing, and no reason to fail it")
    advice: str = Field(description="what to do next; of a PASS: empty")
    exit_code: int | None = Field(description="of its process; null: it was ended, or never ran")
    error: str = Field(description="how its process died; empty: it did not")
    difference: DifferenceEntry | None
    weight_hash: str = Field(description="of the main workload")
    peak_temperature_c: float | None
    works: tuple[WorkEntry, ...]
    versions: dict[str, str]
    before: dict[str, JsonValue] = Field(description="clocks, temperature, ECC counts, ... before the first workload")
    after: dict[str, JsonValue] = Field(description="the same after the last one")
    samples: tuple[Sample, ...]


class Coverage(Part, frozen=True):
    """How far the verdict reaches."""

    covered: tuple[str, ...]
    not_covered: tuple[str, ...]
    limits: tuple[str, ...] = Field(description="what no check of this kind can prove")


class Report(Part, frozen=True):
    """A whole check."""

    format: Literal[1] = FORMAT
    name: str = Field(description="of its folder")
    status: Verdict = Field(description="FAIL if one card fails, else UNDECIDED if one is, else PASS")
    exit_code: int = Field(description="0: every card passes; 3: not")
    level: str = Field(description="quick, default or deep")
    device: str = Field(description="cuda or cpu")
    began: str = Field(description="ISO 8601, UTC")
    seconds: float
    config_hash: str = Field(description="of everything that decides the bits: equal hashes may compare their bits")
    versions: dict[str, str]
    golden: dict[str, JsonValue]
    main_workload: str = Field(description="the one whose times the table shows")
    workloads: tuple[WorkloadEntry, ...]
    gpus: tuple[CardEntry, ...]
    coverage: Coverage


def schema() -> dict[str, Any]:
    """The published JSON schema of check.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Report.model_json_schema(mode="serialization")}


def read(path: Path) -> Report:
    """A check.json, or one clear error."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise NotFoundError("no report of a check here", where=str(path), hint="lockstep check") from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"is no check.json: {place}: {first['msg']}", where=str(path), hint="lockstep check") from None
