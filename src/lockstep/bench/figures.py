"""What was measured, and what follows from it: rates, the three forms of MFU, deviations. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.models.shapes import AgentShape, AnyShape, LlamaShape

if TYPE_CHECKING:
    from lockstep.bench.anatomy import Anatomy

TERA = 1e12


@dataclass(frozen=True)
class Flops:
    """Of one token, forward and backward."""

    palm: float  # attention not discounted for causality, as peers count
    causal: float  # what has to be computed

    @staticmethod
    def of(shape: AnyShape, context_length: int, *, head_share: float = 1.0) -> Flops:
        """Of a shape at a length. `head_share` of the tokens go through the output matrix, where that is a choice."""
        counted = shape.flops_per_token(context_length)
        attention = counted - shape.flops_per_token(0)
        if isinstance(shape, AgentShape):  # counts causally itself
            return Flops(counted + attention, counted)
        if isinstance(shape, LlamaShape) and not shape.bidirectional:
            return Flops(counted, counted - attention / 2)
        if isinstance(shape, LlamaShape):
            counted -= (1 - head_share) * 6 * shape.vocab_size * shape.hidden_size
        return Flops(counted, counted)


@dataclass(frozen=True)
class Subject:
    """What was measured, where."""

    family: str
    preset: str
    settings: Mapping[str, Any]
    model: str
    parameters: int
    batch: str  # how the tokens of a step come about
    precision: str
    attention: str
    compiled: bool
    device: str
    on_gpu: bool
    busy: Sequence[str] = ()  # why the figures may be worth nothing


@dataclass(frozen=True)
class Figures:
    """The figures of one bench."""

    subject: Subject
    step_seconds: Sequence[float]
    rows_per_step: float
    tokens_per_step: float  # real ones: padding is none
    flops: Flops
    peak_flops: float | None  # of the data sheet; None where no honest figure is known
    measured_flops: float  # of matrix products alone, just now
    memory_bytes: int
    estimated_bytes: int
    compile_seconds: float
    anatomy: Anatomy

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def mfu_palm(self) -> float | None:
        return self.tokens_per_second * self.flops.palm / self.peak_flops if self.peak_flops else None

    @property
    def mfu_causal(self) -> float | None:
        return self.tokens_per_second * self.flops.causal / self.peak_flops if self.peak_flops else None

    @property
    def of_measured_peak(self) -> float:
        return self.tokens_per_second * self.flops.causal / self.measured_flops

    @property
    def estimate_off(self) -> float | None:
        """How far the estimate is from the peak, as a share of it; a CPU's peak holds the whole process."""
        return self.estimated_bytes / self.memory_bytes - 1 if self.subject.on_gpu and self.memory_bytes else None

    def as_json(self) -> dict[str, Any]:
        """All of it, with what was measured."""
        subject = self.subject
        return {
            "family": subject.family,
            "preset": subject.preset,
            "device": subject.device,
            "model": subject.model,
            "parameters": subject.parameters,
            "batch": subject.batch,
            "precision": subject.precision,
            "attention": subject.attention,
            "compiled": subject.compiled,
            "busy": list(subject.busy),
            "steps": len(self.step_seconds),
            "rows_per_step": self.rows_per_step,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_second": self.tokens_per_second,
            "step_ms": 1e3 * self.seconds,
            "step_ms_p95": 1e3 * p95(self.step_seconds),
            "steps_per_second": 1 / self.seconds,
            "flops_per_token_palm": self.flops.palm,
            "flops_per_token_causal": self.flops.causal,
            "peak_flops": self.peak_flops,
            "measured_peak_flops": self.measured_flops,
            "mfu_palm": self.mfu_palm,
            "mfu_causal": self.mfu_causal,
            "of_measured_peak": self.of_measured_peak,
            "peak_memory_bytes": self.memory_bytes,
            "estimated_memory_bytes": self.estimated_bytes,
            "estimate_off": self.estimate_off,
            "compile_seconds": self.compile_seconds,
            "anatomy": self.anatomy.as_json(),
            "settings": dict(subject.settings),
        }


def p95(values: Sequence[float]) -> float:
    """The smallest value that 95 of 100 do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]
