"""How long training will take here, and how much memory: from a short run with the same workers. Torch-free.

Text that lies on this machine is what the short run learns from, and the rows of an epoch are counted; it stays in the
cache for the run itself. Of any other one full row a sample is assumed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.bench.short_run import Measured, open_flags, run, with_made_rows
from lockstep.config.load import replaced
from lockstep.errors import LockstepError
from lockstep.report.words import format_about, format_bytes
from lockstep.runtime import signals

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig
    from lockstep.runtime.devices import Gpu

STEPS = 8  # that are timed
ENDLESS = 1e6  # epochs: the short run ends by its steps


def lines(loaded: Loaded, *, workers: int, gpus: Sequence[Gpu] = ()) -> list[str]:
    """The documented lines: measured here and now, or not given. `gpus`: those to be used, as the driver has them."""
    config = loaded.config
    has = format_bytes(bytes_of(gpus)) if bytes_of(gpus) else "n/a"  # not every driver says it
    of_gpu = f" of {has} ({min(gpus, key=lambda gpu: gpu.memory_bytes).name})" if gpus else ""
    try:
        found = measure(loaded, workers=workers)
    except LockstepError as error:
        why = next((line for line in error.what.splitlines() if "error:" in line), error.what).strip()
        times = [f"Estimated time per epoch: n/a ({why})", f"Estimated total time: n/a ({why})"]
        return [*times, *([f"Estimated memory per GPU: n/a{of_gpu}"] if gpus else [])]
    rows = found.start["epoch_steps"] * found.rows_per_step if lies_here(config) else 0
    samples = round(config.data.max_train_samples * (1 - config.data.validation_fraction))
    epoch_seconds = (rows or samples) / found.rows_per_second
    total = config.training.max_steps * found.seconds  # with epochs: a limit, which may be out of reach
    epochs: float = getattr(config.training, "epochs", 0)
    total = min(total, epochs * epoch_seconds) if epochs else total
    counted = f"{rows:,.0f} rows" if rows else f"at most {samples:,} samples"
    where = f"{workers} x {found.start['device']}" if workers > 1 else found.start["device"]
    return [
        f"Estimated time per epoch: {format_about(epoch_seconds)} "
        f"({counted} at {found.rows_per_second:,.0f}/s, measured on {where})",
        f"Estimated total time: {format_about(total)}",
        f"Estimated memory per {'GPU' if gpus else 'worker'}: {format_bytes(found.memory_bytes)}{of_gpu}",
    ]


def measure(loaded: Loaded, *, workers: int) -> Measured:
    """A short run with so many workers."""
    config, flags = loaded.config, open_flags(loaded)
    with signals.listening(), tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        if lies_here(config):
            config = replaced(config, {"training.epochs": ENDLESS}).config
        else:
            config = with_made_rows(config, Path(name), workers=workers)
        return run(config, workers=str(workers), steps=STEPS, folder=Path(name), flags=flags)


def lies_here(config: RunConfig) -> bool:
    """Whether the text of a configuration in epochs is on this machine, to be read as often as one likes."""
    data = config.data
    there = data.data_path not in (None, "-") if data.dataset_name == "text" else data.dataset_name == "builtin"
    return there and hasattr(config.training, "epochs")


def bytes_of(gpus: Sequence[Gpu]) -> int:
    """Of the smallest of them, since all do the same."""
    return min((gpu.memory_bytes for gpu in gpus), default=0)
