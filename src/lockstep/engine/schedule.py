"""The learning rate of every step, as one table: warm-up, then the decay."""

from __future__ import annotations

import math

import torch

from lockstep.engine.options import TrainingOptions


def learning_rates(options: TrainingOptions) -> torch.Tensor:
    """lr of applied step 0, 1, ... as float32, on the CPU."""
    warmup, floor = min(options.warmup_steps, options.max_steps), options.min_lr_ratio
    step = torch.arange(options.max_steps, dtype=torch.float64)
    share = (step - warmup) / max(1, options.max_steps - warmup)
    match options.schedule:
        case "cosine":
            decay = floor + (1 - floor) * (1 + torch.cos(math.pi * share)) / 2
        case "linear":
            decay = floor + (1 - floor) * (1 - share)
        case "constant":
            decay = torch.ones_like(share)
    rising = (step + 1) / (warmup + 1)  # neither a wasted first step at 0 nor the peak twice
    return (options.learning_rate * torch.where(step < warmup, rising, decay)).to(torch.float32)
