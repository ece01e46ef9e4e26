"""The learning rate of every step, as one table: warm-up, then the decay."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.engine.options import TrainingOptions

ONE_CYCLE_START = 1 / 25  # of the peak, as torch's OneCycleLR; its own end is a min_lr_ratio of 4e-6


def learning_rates(options: TrainingOptions) -> Tensor:
    """lr of applied step 0, 1, ... as float32, on the CPU."""
    total, warmup, floor = options.max_steps, min(options.warmup_steps, options.max_steps), options.min_lr_ratio
    step = torch.arange(total, dtype=torch.float64)
    rising = (step + 1) / (warmup + 1)  # neither a wasted first step at 0 nor the peak twice
    share = (step - warmup) / max(1, total - warmup)
    match options.schedule:
        case "cosine":
            decay = floor + (1 - floor) * _half_wave(share)
        case "one_cycle":
            if warmup:  # its last step has the peak, and the last step of all the floor
                warmup = min(max(1, warmup - 1), total - 1)
            rising = 1 - (1 - ONE_CYCLE_START) * _half_wave(step / max(1, warmup))
            decay = floor + (1 - floor) * _half_wave((step - warmup) / max(1, total - 1 - warmup))
        case "linear":
            decay = floor + (1 - floor) * (1 - share)
        case "constant":
            decay = torch.ones_like(share)
    return (options.learning_rate * torch.where(step < warmup, rising, decay)).to(torch.float32)


def _half_wave(share: Tensor) -> Tensor:
    """From 1 at 0 to 0 at 1, level at both ends."""
    return (1 + torch.cos(math.pi * share)) / 2
