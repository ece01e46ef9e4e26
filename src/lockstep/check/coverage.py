"""How far a check reaches: which kernels ran and for how long, and what was left out. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.check.condition import peak_temperature
from lockstep.check.records import Replica, Workload
from lockstep.check.workloads import ADA, workloads

KERNELS = ("attention", "precision", "kernels")  # facts of a workload that name what computed it
NEVER = (
    "links between cards (NVLink, PCIe peer to peer, network)",
    "memory bandwidth of the host, and how fast it loads data",
)
UNREPEATED = "the query gradient of cuDNN attention: it does not repeat its bits, and is not compared"
TOLD = {"ecc_uncorrected": "memory errors (ECC)", "thermal_seconds": "clocks held down by heat"}  # by the driver


def covered(found: Sequence[Replica], chosen: Sequence[Workload], seconds: float) -> tuple[str, ...]:
    """What ran, in words."""
    works = [work for replica in found for work in replica.works]
    facts = [(name, value) for work in works for name, value in work.facts.items() if name in KERNELS]
    kernels = sorted({f"{name} {value}" for name, value in facts if isinstance(value, str)})
    kernels += ["compiled"] if any(work.facts.get("compiled") is True for work in works) else []
    count = f"{len(chosen)} workload{'s' if len(chosen) > 1 else ''}"
    peaks = [peak for replica in found if (peak := peak_temperature(replica)) is not None]
    heat = [f"peak temperature {max(peaks):.0f} C"] if peaks else []
    return (f"{count} in {seconds / 60:.1f} min", *kernels, *heat)


def not_covered(found: Sequence[Replica], chosen: Sequence[Workload], device: str) -> tuple[str, ...]:
    """What did not run, what is not compared, and what nobody could say."""
    names = [each.name for each in chosen]
    missing = [each.name for each in workloads("default", device, capability=ADA) if each.name not in names]
    silent = [words for name, words in TOLD.items() if not all(name in replica.after for replica in found)]
    reasons = {(work.workload, work.facts.get("skipped")) for replica in found for work in replica.works}
    return (
        *sorted(f"{name}: {reason}" for name, reason in reasons if reason),
        *([f"workload{'s' if len(missing) > 1 else ''} {', '.join(missing)}"] if missing else []),
        *([UNREPEATED] if any(each.kind == "attention_probe" for each in chosen) else []),
        *NEVER,
        *([f"{', '.join(silent)}: the driver does not say"] if silent and device == "cuda" else []),
    )
