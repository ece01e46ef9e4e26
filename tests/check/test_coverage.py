"""What a check says of its own reach: nothing that did not run is left unsaid."""

from __future__ import annotations

from lockstep.check import coverage
from lockstep.check.records import Card, Replica, Work
from lockstep.check.workloads import workloads

TOLD = {"temperature_c": 61, "ecc_uncorrected": 0, "thermal_seconds": 0.0}


def ran(**facts: object) -> Replica:
    return Replica(Card(0, 0), (Work("production", facts=facts),), after=TOLD)


def test_a_quick_check_names_the_workloads_it_leaves_out() -> None:
    quick, whole = (workloads(level, "cuda", capability=(9, 0)) for level in ("quick", "default"))
    [left_out] = [text for text in coverage.not_covered([ran()], quick, "cuda") if text.startswith("workloads ")]
    missing = {each.name for each in whole} - {each.name for each in quick}
    assert set(left_out.removeprefix("workloads ").split(", ")) == missing
    assert {"fp32", "mlm", "strict_flash"} <= missing
    assert not any(text.startswith("workload") for text in coverage.not_covered([ran()], whole, "cuda"))


def test_a_card_without_fp8_is_not_said_to_be_checked_in_it() -> None:
    ampere = workloads("default", "cuda", capability=(8, 0))
    assert "workload fp8_probe" in coverage.not_covered([ran()], ampere, "cuda")


def test_what_is_not_compared_and_what_the_driver_hides_is_said() -> None:
    chosen = workloads("default", "cuda", capability=(9, 0))
    told = coverage.not_covered([ran()], chosen, "cuda")
    assert coverage.UNREPEATED in told
    assert not any("the driver does not say" in text for text in told)
    silent = coverage.not_covered([ran(), Replica(Card(1, 1), after={"ecc_uncorrected": 0})], chosen, "cuda")
    assert silent[-1] == "clocks held down by heat: the driver does not say"
    silent = coverage.not_covered([Replica(Card(0, 0))], chosen, "cuda")
    assert silent[-1] == "memory errors (ECC), clocks held down by heat: the driver does not say"
    on_cpu = coverage.not_covered([Replica(Card(0, 0))], workloads("default", "cpu"), "cpu")
    assert on_cpu == coverage.NEVER
    skipped = coverage.not_covered([ran(skipped="no cuDNN here")], chosen, "cuda")
    assert skipped[0] == "production: no cuDNN here"


def test_kernels_minutes_and_heat_are_told() -> None:
    hot = Replica(
        Card(0, 0), ran(attention="flex", precision="bf16", compiled=True).works, samples=({"gpu_temperature_c": 71},)
    )
    told = coverage.covered([hot, ran(attention="flex", compiled=False)], workloads("quick", "cpu"), 90.0)
    assert told == ("2 workloads in 1.5 min", "attention flex", "precision bf16", "compiled", "peak temperature 71 C")
