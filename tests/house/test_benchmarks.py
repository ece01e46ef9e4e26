"""The benchmarks judge: over the limit is exit 1, and their page names the limits they have."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.gates.training import FEW_WORDS

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # a script finds those beside it
    spec.loader.exec_module(module)
    return module


def row(name: str) -> str:
    return next(line for line in (FOLDER / "README.md").read_text().splitlines() if f"`{name}.py` |" in line)


def test_a_loop_over_the_limit_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("loop")
    limit = module.LIMIT_MS
    assert module.verdict(limit * 0.99, limit) == 0
    assert capsys.readouterr().out.startswith("ok: lockstep ")
    assert module.verdict(limit * 1.01, limit) == 1
    assert capsys.readouterr().out.startswith("TOO SLOW: lockstep ")
    assert f"| {limit} " in row("loop")


def test_figures_of_the_loop_are_of_neighbours() -> None:
    """A machine that becomes slower and hiccups changes nothing; what each step costs more is found."""
    module, draws = script("loop"), random.Random(1)
    pace = [10.0 + 0.01 * turn + draws.gauss(0, 0.2) + (draws.random() < 0.1) * 5 for turn in range(2000)]
    found = module.figures([each + 0.25 for each in pace[0::2]], pace[1::2])
    assert found.over == pytest.approx(0.25, abs=0.03)
    assert found.own > found.bare > 15


def test_a_burden_makes_the_loop_too_slow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no noise hides, in each of our steps."""
    module = script("loop")
    monkeypatch.setattr(module, "installed", lambda: {"lockstep": module.ours})
    monkeypatch.setattr(module, "WARM_UP_TURNS", 1)
    short = ["--runs", "2", "--rounds", "3", "--limit", "5", "--anyway"]
    assert [module.main([*short, "--burden", burden]) for burden in ("0", "20")] == [0, 1]
    assert capsys.readouterr().out.count("TOO SLOW: lockstep ") == 1


@pytest.mark.parametrize("loads", [[9e9, 0.0], [0.0, 9e9]])
def test_a_busy_machine_has_no_figures_of_the_loop(
    loads: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy before it begins, or by the time it ends."""
    module, asked = script("loop"), iter(loads)
    monkeypatch.setattr("os.getloadavg", lambda: (next(asked), 0.0, 0.0))
    monkeypatch.setattr(module, "installed", dict)
    assert module.main([]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "this machine is busy" in shown.err
    assert "--anyway" in shown.err


@pytest.mark.parametrize("slow", ["", "help", "launcher", "first"])
def test_a_start_over_any_limit_is_exit_1(
    slow: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("start")
    bare = 3.0
    spent = {"help": module.HELP_LIMIT_SECONDS, "launcher": module.LAUNCHER_LIMIT_SECONDS}
    spent["first"] = module.FIRST_STEP_LIMIT_SECONDS
    seconds = {name: limit * (1.01 if name == slow else 0.99) for name, limit in spent.items()}
    monkeypatch.setattr(module, "cpu_seconds", lambda _: seconds["help"])
    monkeypatch.setattr(module, "launch", lambda *_: (bare + seconds["first"], seconds["launcher"]))
    monkeypatch.setattr(module, "bare", lambda _: bare)
    monkeypatch.setattr("sys.argv", ["start.py", "--rounds", "1", "--anyway"])
    assert module.main() == (1 if slow else 0)
    assert capsys.readouterr().out.count("TOO SLOW") == bool(slow)
    assert all(f"{limit} " in row("start") for limit in spent.values())


def test_a_save_over_its_limit_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("checkpoint")
    for limit, unit in ((module.CPU_LIMIT, "plain copies"), (module.CUDA_LIMIT_SECONDS, "s")):
        assert module.verdict(limit * 0.99, limit, unit) == 0
        assert module.verdict(limit * 1.01, limit, unit) == 1
        assert "TOO SLOW: a save stalls" in capsys.readouterr().out
        assert f"{limit:g} {unit}" in row("checkpoint").rpartition(" | ")[2]


def test_a_report_over_its_limit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("report")
    for what, limit in module.LIMITS.items():
        assert module.within(what, limit * 0.99, limit)
        assert not module.within(what, limit * 1.01, limit)
        assert f"TOO SLOW: {what}: " in capsys.readouterr().out
        assert f"{limit:g}" in row("report").rpartition(" | ")[2]


def test_a_learner_under_its_limit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("ad")
    limits = (module.FASTER, module.OWN_FASTER, module.PSRL_STEPS, module.MORE_ACTIONS)
    for limit in limits:
        assert module.verdict("steps", limit, limit)
        assert not module.verdict("steps", 0.99 * limit, limit)
        assert capsys.readouterr().out.count("TOO SLOW") == 1
        assert f" {limit:,} " in row("ad")
    assert f"{module.APART} standard deviations" in row("ad")


def test_fingerprints_over_a_limit_are_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("prints")
    assert module.verdict(2.99, 3.0, "fingerprints cost") == 0
    assert module.verdict(3.01, 3.0, "fingerprints cost") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["ok", "TOO SLOW"]
    limits = (module.LIMIT_PERCENT["cuda"], module.LIMIT_PERCENT["cpu"], module.AGREE_PERCENT)
    assert all(f"{limit:g} %" in row("prints") for limit in limits)


def test_detection_over_its_limit_or_in_vain_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("forensics")
    for limit in module.LIMITS.values():
        assert module.verdict(limit * 0.99, limit, "layers.1.mlp (forward, mul)", "layers.1.mlp (") == 0
        assert module.verdict(limit * 1.01, limit, "layers.1.mlp (forward, mul)", "layers.1.mlp (") == 1
        assert capsys.readouterr().out.count("TOO SLOW") == 1
        assert module.verdict(0.0, limit, "layers.0.mlp (forward, mul)", "layers.1.mlp (") == 1
        assert capsys.readouterr().out.count("NOT FOUND") == 1
        assert f" {limit:g} % " in row("forensics")


def test_the_control_of_forensics_only_does_not_look(tmp_path: Path, shared_cache: Path) -> None:
    """The same bits as the real step; and where that one stands still, the control walks on."""
    import torch

    module = script("forensics")
    module.QUIET.update({"data.dataset_name": "text", "data.data_path": FEW_WORDS})  # ready sooner
    options = argparse.Namespace(device="cpu", preset="tiny", layers=None, rounds=1, steps=1)
    weights: list[torch.Tensor] = []
    for name in ("real", "careless"):
        with module.assembled(options, tmp_path / name) as parts:
            first = next(iter(parts.stepper.model.parameters()))
            with module.careless(parts) if name == "careless" else contextlib.nullcontext():
                module.train(parts, 3)
                weights.append(first.detach().clone())
                with torch.no_grad():
                    parts.stepper.parameters[0][0, 0] = float("nan")
                parts.stepper.launch(3, next(parts.batches))
            weights.append(first.detach().clone())
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[2], weights[3])
