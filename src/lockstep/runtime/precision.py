"""In which numbers a step computes. Weights, gradients and moments are fp32 in every mode but fp64."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.runtime.options import NO_FLOAT8

GROWTH, BACKOFF, GROWTH_INTERVAL, FIRST_SCALE = 2.0, 0.5, 2000, 65536.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
FLOAT8_CAPABILITY = (8, 9)  # the first compute capability that multiplies float8 numbers


def resolve(asked: str, device: torch.device) -> str:
    """The precision that `auto` means here; a named one is honoured or refused."""
    if asked == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if asked == "fp8" and (reason := float8_obstacle(device)):
        raise ConfigError(f"training.precision: {asked}: {reason}", hint="--precision bf16")
    if asked == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"training.precision: {torch.cuda.get_device_name(device)} has no bf16", hint="--precision fp16 or fp32"
        )
    return asked


def float8_obstacle(device: torch.device) -> str:
    """Why this device cannot train with float8 products, or ''."""
    if device.type != "cuda":
        return NO_FLOAT8
    name, needed = torch.cuda.get_device_name(device), FLOAT8_CAPABILITY
    if torch.version.hip:
        return f"{name} has float8 numbers of another kind, which were never tried"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < needed:
        return f"{name} has compute capability {major}.{minor}, and these products begin with {needed[0]}.{needed[1]}"
    return ""


def without_float8(name: str) -> str:
    """The precision of all that float8 leaves as it is."""
    return "bf16" if name == "fp8" else name


def for_measuring(name: str) -> str:
    """What a model that was trained so is measured in: float8 is for training, fp64 for proofs."""
    return "fp32" if name == "fp64" else without_float8(name)


@dataclass
class LossScale:
    """The loss scaler of fp16, kept on the device: no step waits for it."""

    scale: torch.Tensor
    growth_tracker: torch.Tensor

    def update(self, overflow: torch.Tensor) -> None:
        """Halve after an overflow, double after 2000 steps without one."""
        update = torch._amp_update_scale_  # pyright: ignore[reportPrivateImportUsage]
        update(self.scale, self.growth_tracker, overflow, GROWTH, BACKOFF, GROWTH_INTERVAL)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale.item(), "growth_tracker": int(self.growth_tracker.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(float(state["scale"]))
        self.growth_tracker.fill_(int(state["growth_tracker"]))


class Precision:
    """The autocast context of a mode, and its loss scale (fp16 only)."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.scaler = None
        if name == "fp16":
            self.scaler = LossScale(
                torch.full((), FIRST_SCALE, device=device), torch.zeros((), dtype=torch.int32, device=device)
            )

    @staticmethod
    def widen(value: torch.Tensor) -> torch.Tensor:
        """A loss in fp32 at least."""
        return value if value.dtype == torch.float64 else value.float()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Compute inside this."""
        if self.name not in DTYPES:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.name])
