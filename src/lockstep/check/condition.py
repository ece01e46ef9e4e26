"""How a card did while it was checked: clocks that heat held down, and error counts that rose. Torch-free.

The words are those of check/cards.py. A card that does not say something is not blamed for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.check.finding import Finding
from lockstep.check.outcome import Status
from lockstep.check.records import Replica

LONGEST_HELD_DOWN_SECONDS = 1.0  # less is no fault
FATAL_SECONDS = {
    "thermal_seconds": "hot: heat held its clocks down",
    "hw_thermal_seconds": "hot: the hardware slowed it down for heat",
    "power_brake_seconds": "the power supply slowed it down",
}
FATAL_COUNTS = {
    "ecc_uncorrected": "uncorrectable memory errors (ECC)",
    "remapped_rows": "rows of memory were given up for errors that could not be corrected",
}
NOTED_COUNTS = {
    "ecc_corrected": "corrected memory errors (ECC)",
    "remapped_rows_corrected": "rows of memory were given up for corrected errors",
}
FATAL_STATES = {
    "remap_pending": "rows of memory wait for a reset to be given up",
    "remap_failed": "a bad row of memory could not be replaced",
}


def condition(replica: Replica) -> Finding:
    """Of the whole check on one card. A state of before counts too: who waits for a reset is no card to train on."""
    before, after = replica.before, replica.after
    reasons = [
        f"{words} for {seconds:.0f} s"
        for name, words in FATAL_SECONDS.items()
        if (seconds := _rise(replica, name)) >= LONGEST_HELD_DOWN_SECONDS
    ]
    reasons += [f"{rose:.0f} {words}" for name, words in FATAL_COUNTS.items() if (rose := _rise(replica, name))]
    reasons += [words for name, words in FATAL_STATES.items() if before.get(name) or after.get(name)]
    notes = [f"{rose:.0f} {words}" for name, words in NOTED_COUNTS.items() if (rose := _rise(replica, name))]
    if _rise(replica, "power_cap_seconds") >= LONGEST_HELD_DOWN_SECONDS:
        notes.append("it ran at its power limit")
    return Finding(Status.FAIL if reasons else Status.PASS, tuple(reasons), tuple(notes))


def peak_temperature(replica: Replica) -> float | None:
    """The hottest it was whenever it was asked."""
    told = [_number(replica.before, "temperature_c"), _number(replica.after, "temperature_c")]
    told += [_number(sample, "gpu_temperature_c") for sample in replica.samples]
    return max((value for value in told if value is not None), default=None)


def _rise(replica: Replica, name: str) -> float:
    before, after = _number(replica.before, name), _number(replica.after, name)
    return max(0.0, after - before) if before is not None and after is not None else 0.0


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
