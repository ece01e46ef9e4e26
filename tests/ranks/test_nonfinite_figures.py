"""Row 16 at its figures: NaN and Inf at a random module, step and rank; the exact module named, and replayed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import rundir
from lockstep.engine import autopsy, bundle
from lockstep.engine.replay import replay
from lockstep.errors import NonFiniteError
from lockstep.health.finding import Place, from_json
from lockstep.health.locate import Subject, locate
from lockstep.models.build import lay_out
from lockstep.models.shapes import LlamaShape
from lockstep.runtime import precision
from lockstep.runtime.group import Group
from tests.gates.training import Recorder, run
from tests.ranks.data_parallel import SMALL
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

SETTINGS: dict[str, Any] = {
    **SMALL, "training.batch_size": 2, "training.max_steps": 8, "system.threads": 1, "training.eval_batches": 1,
}  # fmt: skip
TIMES = 20
ROW_16 = ("nan_loss", "inf_loss", "inf_grad", "nan_act", "nan_weight")
OTHERS = ("nan_grad", "inf_act", "inf_weight", "nan_input", "inf_input")
PHASES = {"loss": "loss", "grad": "backward", "act": "forward", "weight": "weights", "input": "input"}


@dataclass(frozen=True)
class Trial:
    """A fault, and what must be said of it."""

    fault: str
    step: int  # at which it shows
    rank: int
    phase: str
    module: str

    @property
    def family(self) -> str:
        """Only masked diffusion is given numbers that can be bad."""
        return "llada" if self.phase == "input" else "llama"


def modules_and_tensors() -> tuple[list[str], list[str]]:
    shape = LlamaShape(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
        max_position_embeddings=8, rope_theta=1e4,
    )  # fmt: skip
    model = lay_out(shape, attention="native_flash")
    uncalled = ("", "layers", "output")  # the output matrix is multiplied chunk by chunk
    parts = [name for name, _ in model.named_modules() if name not in uncalled]
    return parts, [name for name, _ in model.named_parameters()]


def drawn(kind: str, *, ranks: int = 1) -> list[Trial]:
    """At random modules, steps and ranks, always the same of a kind."""
    draw, found = random.Random(kind), list[Trial]()
    parts, tensors = modules_and_tensors()
    target = kind.partition("_")[2]
    for _ in range(TIMES):
        step, rank = draw.randrange(1, 6), draw.randrange(ranks)
        module, tensor, fault = draw.choice(parts), draw.choice(tensors), f"{kind}@step={step},rank={rank}"
        shows = step + 1 if target == "weight" else step  # weights are spoilt after the update
        if target == "act":
            found.append(Trial(f"{fault},module={module}", shows, rank, PHASES[target], module))
        elif target == "loss":
            found.append(Trial(fault, shows, rank, PHASES[target], "loss"))
        elif target == "input":
            named = "batch 0 token_weights"
            found.append(Trial(f"{fault},tensor=token_weights,index=0", shows, rank, PHASES[target], named))
        else:
            owner = tensor.rpartition(".")[0]
            found.append(Trial(f"{fault},tensor={tensor}", shows, rank, PHASES[target], owner))
    return found


def found_after(group: Group | None, folder: Path, trial: Trial, mode: str = "ddp") -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", trial.fault)
        try:
            run(folder, {**SETTINGS, "system.mode": mode}, group=group, family=trial.family)
        except NonFiniteError as error:
            return dict(error.finding)
    return {}


def is_named(saved: dict[str, Any], trial: Trial) -> bool:
    if not saved or not (place := from_json(saved).place):
        return False
    kind = trial.fault.partition("@")[0]
    if saved["kind"] != kind and trial.phase != "forward":  # what an activation does to the loss, it does
        return False
    named = (saved["step"], tuple(saved["ranks"]), place.phase, place.module)
    return named == (trial.step, (trial.rank,), trial.phase, trial.module)


def is_replayed(saved: dict[str, Any]) -> bool:
    return replay(Path(saved["files"]["bundle"]), device="cpu")[0].reproduced


def judged(found: Iterable[dict[str, Any]], trials: Sequence[Trial], *, again: bool = True) -> None:
    """Every one of them named, and brought back."""
    both = list(zip(found, trials, strict=True))
    misnamed = [
        (trial.fault, saved.get("kind"), saved.get("place")) for saved, trial in both if not is_named(saved, trial)
    ]
    assert misnamed == []
    lost = [trial.fault for saved, trial in both if again and not is_replayed(saved)]
    assert lost == []
    print(f"{len(both)}/{len(trials)} named" + f", {len(both) - len(lost)}/{len(trials)} replayed" * again)


@pytest.mark.parametrize("kind", [*ROW_16, *OTHERS])
def test_alone(tmp_path: Path, kind: str) -> None:
    trials = drawn(kind)
    judged((found_after(None, tmp_path / str(number), trial) for number, trial in enumerate(trials)), trials)


def together(group: Group, folder: Path, trials: Sequence[Trial], mode: str) -> list[dict[str, Any]]:
    return [found_after(group, folder / str(number), trial, mode) for number, trial in enumerate(trials)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "kind"), [*(("ddp", kind) for kind in (*ROW_16, *OTHERS)), *(("fsdp", kind) for kind in ROW_16)]
)
def test_two_ranks(ranks: Pool, tmp_path: Path, mode: str, kind: str) -> None:
    trials = drawn(kind, ranks=2)
    first, second = ranks(2, together, tmp_path, trials, mode, timeout_seconds=500)
    assert first == second, "all ranks say the same"
    whole = mode == "ddp" or kind != "inf_grad"  # else the fault spoils a part that only a rank among others holds
    judged(first, trials, again=whole)


def test_the_figures_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one who names the neighbour, one who names nobody, and a bundle that has lost its cause."""
    trial = next(trial for trial in drawn("nan_act") if trial.module.startswith("layers.0"))

    def beside(subject: Subject) -> Place | None:
        place = locate(subject)
        return place and replace(place, module=place.module.replace("layers.0", "layers.1"))

    for number, wrong in enumerate((beside, lambda _subject: None)):
        with monkeypatch.context() as patch:
            patch.setattr(autopsy, "locate", wrong)
            saved = found_after(None, tmp_path / str(number), trial)
        assert saved["step"] == trial.step
        assert not is_named(saved, trial)
    saved = found_after(None, tmp_path / "right", trial)
    assert is_named(saved, trial)
    assert is_replayed(saved)
    kept = Path(saved["files"]["bundle"])
    about = json.loads((kept / bundle.ABOUT).read_text())
    monkeypatch.setattr(rundir, "verify", lambda *_, **__: None)
    (kept / bundle.ABOUT).write_text(json.dumps(about | {"fault": ""}))
    assert not is_replayed(saved)


def test_row_17(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overflow in every step from a random one on: counted; a scale below 1 ends the run, or 20 in a row where the
    scale is too large for that; the schedule waits."""
    draw, (_, tensors) = random.Random("row 17"), modules_and_tensors()
    settings = {**SETTINGS, "training.precision": "fp16", "training.max_steps": 40}
    for number in range(TIMES):
        by_count, recorder, tensor = number % 2 == 1, Recorder(), draw.choice(tensors)
        begun, first, times = (2.0**20, 0, 20) if by_count else (2.0**16, draw.randrange(5), 18)
        monkeypatch.setattr(precision, "FIRST_SCALE", begun)
        faults = (f"inf_grad@step={step},tensor={tensor}" for step in range(first, 40))
        monkeypatch.setenv("LOCKSTEP_FAULT", ";".join(faults))
        with pytest.raises(NonFiniteError, match=f"{times} times in a row") as caught:
            run(tmp_path / str(number), settings, recorder=recorder)
        finding = from_json(caught.value.finding)
        assert (finding.kind, finding.step) == ("overflow", first + times - 1)
        assert finding.place
        assert (finding.place.phase, finding.place.module) == ("backward", tensor.rpartition(".")[0])
        assert recorder.parts
        assert [record.skipped for record in recorder.records] == [False] * first + [True] * times
        assert recorder.parts.stepper.optimizer.applied.item() == first, "the schedule counts what took effect"
        assert len({record.lr for record in recorder.records[first:]}) == 1
        assert recorder.records[-1].loss_scale == begun / 2 ** (times - 1)
    print(f"{TIMES}/{TIMES}")
