"""How a card did while it was checked: heat, held-down clocks, and error counts that rose. Torch-free.

The words are those of check/cards.py. A card that does not say something is not blamed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.check.finding import Finding, merge
from lockstep.check.outcome import Status
from lockstep.check.records import Replica

HOT = {"thermal": "its clocks were held down by heat", "hw_thermal": "the hardware slowed it down by heat"}
WEAK_POWER = {
    "power_brake": "the power supply slowed it down",
    "hw_slowdown": "the hardware slowed it down (heat or power)",
}
NOTED = {"power_cap": "it ran at its power limit", "clocks_set": "its clocks are set lower by hand"}
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
    """Of the whole check on one card."""
    return merge([_heat(replica), _clocks(replica), _counts(replica), _states(replica)])


def peak_temperature(replica: Replica) -> float | None:
    """The hottest it was whenever it was asked."""
    told = [each.get("temperature_c") for each in (replica.before, *replica.samples, replica.after)]
    return max((float(value) for value in told if isinstance(value, int | float)), default=None)


def _heat(replica: Replica) -> Finding:
    limit = _number(replica.before, "slowdown_c") or _number(replica.after, "slowdown_c")
    peak = peak_temperature(replica)
    if limit and peak is not None and peak >= limit:
        return Finding(Status.FAIL, (f"hot: {peak:.0f} °C, and it slows down at {limit:.0f} °C",))
    return Finding()


def _clocks(replica: Replica) -> Finding:
    """Why the clocks were held down at any time. What was so before the check began counts too: it ran like that."""
    told = (replica.before, *replica.samples, replica.after)
    words = {str(word) for each in told for word in each.get("throttle") or ()}
    hot = tuple(f"hot: {text}" for word, text in HOT.items() if word in words)
    weak = tuple(text for word, text in WEAK_POWER.items() if word in words)
    notes = tuple(text for word, text in NOTED.items() if word in words)
    return Finding(Status.FAIL if hot or weak else Status.PASS, hot + weak, notes)


def _counts(replica: Replica) -> Finding:
    reasons = tuple(f"{rose} {words}" for name, words in FATAL_COUNTS.items() if (rose := _rise(replica, name)))
    notes = tuple(f"{rose} {words}" for name, words in NOTED_COUNTS.items() if (rose := _rise(replica, name)))
    if codes := _new_xids(replica):
        reasons += (f"the driver reported Xid {', '.join(map(str, codes))}",)
    return Finding(Status.FAIL if reasons else Status.PASS, reasons, notes)


def _states(replica: Replica) -> Finding:
    """Some were so before: a card that waits for a reset is no card to train on."""
    reasons = tuple(
        words for name, words in FATAL_STATES.items() if replica.before.get(name) or replica.after.get(name)
    )
    return Finding(Status.FAIL if reasons else Status.PASS, reasons)


def _rise(replica: Replica, name: str) -> int:
    before, after = _number(replica.before, name), _number(replica.after, name)
    return max(0, int(after - before)) if before is not None and after is not None else 0


def _new_xids(replica: Replica) -> list[int]:
    before: list[int] = list(replica.before.get("xid") or ())
    after: list[int] = list(replica.after.get("xid") or ())
    for code in before:
        if code in after:
            after.remove(code)
    return after


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else None
