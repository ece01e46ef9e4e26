"""Resume gate: going on from any checkpoint gives the bits of a run that never stopped.

A later family or mode passes by adding one line to CASES.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import checkpoint
from lockstep.errors import LockstepError
from lockstep.runtime.group import Group
from tests.gates.training import FEW_ANSWERS, FEW_DOCUMENTS, FEW_WORDS, run
from tests.ranks.pool import Pool


@dataclass(frozen=True)
class Case:
    """What to train, and after which steps to stop and go on."""

    name: str
    settings: dict[str, Any]
    steps: int = 20
    family: str = "llama"
    fault: str = ""
    world: int = 1
    mode: str = "ddp"


pytestmark = pytest.mark.usefixtures("shared_cache")

ONE_ROW = {"training.batch_size": 1}
FOUR_PARTS = {**ONE_ROW, "training.grad_accum_nums": 4, "model.dropout": 0.1, "data.num_workers": 2}
SHORT = {"training.context_length": 16}  # half precision is slow on CPUs without its instructions
TWO_PARTS = {**ONE_ROW, **SHORT, "training.grad_accum_nums": 2, "model.dropout": 0.1}
OVERFLOWS = "inf_grad@rank=0,step=2;inf_grad@rank=0,step=3"
MLM = {  # rows of documents masked and padded, masks that grow fewer, dropout: all that a family in epochs draws
    "data.data_path": FEW_DOCUMENTS, "training.context_length": 32, "training.batch_size": 6, "training.epochs": 2,
    "objective.mask_probability": 0.3, "objective.last_mask_probability": 0.15, "model.dropout": 0.1,
    "data.num_workers": 2,
}  # fmt: skip
PADDED = {"data.documents": "padded", "training.batch_size": 8}
LLADA = {  # rows that are cut to random lengths, dropout, prefetch: all that masked diffusion draws
    "data.data_path": FEW_WORDS, "training.context_length": 64, "training.batch_size": 2, "training.grad_accum_nums": 2,
    "objective.random_length_probability": 0.4, "model.dropout": 0.1, "data.num_workers": 2,
}  # fmt: skip
ANSWERS = {**LLADA, "data.data_path": FEW_ANSWERS, "data.documents": "answers"}
AD = {  # windows drawn anew in every pass over the histories, both kinds of dropout, prefetch, two terms
    "training.context_length": 40, "training.batch_size": 8, "data.train_source_timesteps": 60, "model.dropout": 0.1,
    "model.attention_dropout": 0.1, "model.dynamics": True, "training.gen_episodes": 0, "data.num_workers": 2,
}  # fmt: skip
REGIONS = {**AD, "model.compressed": True, "model.region": 20, "training.batch_size": 4, "training.grad_accum_nums": 2}
CASES = [
    Case("fp32", {}),
    Case("fp32-in-flight", {"debug.digest_interval": 20}),  # no look between steps: one is always on its way
    Case("fp32-accumulate-dropout-prefetch", FOUR_PARTS),
    Case("fp32-epochs", {"data.data_path": FEW_WORDS, "training.batch_size": 3, "training.patience": 15}),
    Case("bf16-one", {**ONE_ROW, **SHORT, "training.precision": "bf16"}, steps=4),
    Case("bf16", {**FOUR_PARTS, **SHORT, "training.precision": "bf16"}, steps=6),
    Case("fp16-overflow", {**ONE_ROW, **SHORT, "training.precision": "fp16"}, steps=6, fault=OVERFLOWS),
    *(Case(f"ddp-{world}", TWO_PARTS, steps=5, world=world) for world in (2, 3, 4)),
    Case("ddp-3-fp16-overflow", {**TWO_PARTS, "training.precision": "fp16"}, steps=5, fault=OVERFLOWS, world=3),
    *(Case(f"fsdp-{world}", TWO_PARTS, steps=5, world=world, mode="fsdp") for world in (2, 3, 4)),
    Case("hsdp-4", TWO_PARTS, steps=5, world=4, mode="hsdp"),
    Case("mlm-masked", MLM, 7, "mlm"),
    Case("mlm-padded-in-flight", {**MLM, **PADDED, "debug.digest_interval": 20}, 8, "mlm"),
    Case("mlm-ddp-2", {**MLM, "training.batch_size": 3}, 5, "mlm", world=2),
    Case("mlm-fsdp-2", {**MLM, "training.batch_size": 3, "objective.whole_words": True}, 5, "mlm", "", 2, "fsdp"),
    Case("llada-epochs", LLADA, 10, "llada"),
    Case("llada-answers", ANSWERS, 8, "llada"),
    Case(
        "llada-ddp-2-fp16-overflow",
        {**LLADA, "training.grad_accum_nums": 1, "training.precision": "fp16"},
        5,
        "llada",
        OVERFLOWS,
        2,
    ),
    Case("llada-answers-fsdp-2", {**ANSWERS, "training.grad_accum_nums": 1}, 4, "llada", "", 2, "fsdp"),
    Case("ad", {**AD, "training.batch_size": 64}, 10, "ad"),
    Case("ad-regions", REGIONS, 6, "ad"),
    Case("ad-regions-ddp-2", {**REGIONS, "training.grad_accum_nums": 1}, 5, "ad", world=2),
    Case("ad-fp16-overflow", {**AD, "training.precision": "fp16"}, 5, "ad", OVERFLOWS),
    Case("ad-fsdp-2", {**AD, "training.batch_size": 4}, 4, "ad", "", 2, "fsdp"),
    Case("replicas-2", TWO_PARTS, steps=4, world=2, mode="replicas"),
    Case(
        "fsdp-3-fp16-overflow",
        {**TWO_PARTS, "training.precision": "fp16"},
        steps=5,
        fault=OVERFLOWS,
        world=3,
        mode="fsdp",
    ),
]

QUICK = {  # by default: together they go through every mode, precision, family and kind of rows
    "fp32-in-flight", "fp32-accumulate-dropout-prefetch", "fp32-epochs", "bf16-one", "fp16-overflow",
    "ddp-3-fp16-overflow", "fsdp-3-fp16-overflow", "hsdp-4", "replicas-2", "mlm-masked", "mlm-padded-in-flight",
    "mlm-fsdp-2", "llada-epochs", "llada-answers", "llada-ddp-2-fp16-overflow", "ad",
    "ad-regions-ddp-2",
}  # fmt: skip

EVERY_STEP = {
    "training.save_interval": 1,
    "checkpoint.keep_last": 100,
    "debug.digest_interval": 1,
    "training.eval_interval": 0,
}


def straight(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: Pool | None = None
) -> list[tuple[Any, ...]]:
    if case.fault:
        monkeypatch.setenv("LOCKSTEP_FAULT", case.fault)
    if ranks and case.world > 1:
        return on_ranks(ranks, case, folder, _settings(case))
    parts, recorder = run(folder, _settings(case), family=case.family)
    if case.name.endswith("epochs"):
        assert parts.rows * 3 < parts.batch_rows * case.steps, "the case must walk over the table several times"
        assert parts.rows % parts.batch_rows, "and have batches that straddle two epochs"
    if case.family == "mlm":
        assert parts.rows % parts.batch_rows, "an epoch must end within a batch"
        assert len(parts.progress.train_losses) == 2
    return recorder.trace


def _settings(case: Case) -> dict[str, Any]:
    return {**EVERY_STEP, "training.max_steps": case.steps, "system.mode": case.mode, **case.settings}


def on_rank(group: Group, folder: Path, settings: dict[str, Any], family: str, point: Path | None) -> Any:
    """What one rank of a case does."""
    return run(folder, settings, family=family, point=point, group=group)[1].trace


def on_ranks(
    ranks: Pool, case: Case, folder: Path, settings: dict[str, Any], point: Path | None = None
) -> list[tuple[Any, ...]]:
    """The trace of a case on its ranks, which must be the same on all."""
    first, *others = ranks(case.world, on_rank, folder, settings, case.family, point)
    assert all(other == first for other in others), "the ranks do not agree"
    return first


def resumed(case: Case, folder: Path, step: int, ranks: Pool | None = None) -> list[tuple[Any, ...]]:
    point = folder / "checkpoints" / f"step_{step:08d}"
    settings, other = {**_settings(case), "training.save_interval": 0}, folder.parent / f"from-{step}"
    if ranks and case.world > 1:
        return on_ranks(ranks, case, other, settings, point)
    return run(other, settings, family=case.family, point=point)[1].trace


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_step_resumes_to_the_same_bits(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Pool
) -> None:
    check(case, range(1, case.steps), tmp_path, monkeypatch, ranks)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
def test_a_step_in_the_middle_resumes_to_the_same_bits(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Pool
) -> None:
    """Between two overflows, where there are any; in one process after the first step too."""
    middle = (case.steps + 1) // 2
    check(case, (middle,) if case.world > 1 else (1, middle), tmp_path, monkeypatch, ranks)


def test_the_quick_cases_are_of_every_kind() -> None:
    quick = [case for case in CASES if case.name in QUICK]
    assert len(quick) == len(QUICK)
    for kind in ("family", "mode", "fault"):
        assert {getattr(case, kind) for case in quick} == {getattr(case, kind) for case in CASES}
    changed = {(key, str(value)) for case in CASES for key, value in case.settings.items()}
    sizes = ("training.batch_size", "training.grad_accum_nums")
    left = changed - {(key, str(value)) for case in quick for key, value in case.settings.items()}
    assert {key for key, _ in left} <= set(sizes)


def check(case: Case, steps: Iterable[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Pool) -> None:
    """Whole, and after each of these steps once more."""
    if case.family == "ad":  # collected by whoever comes first
        case = dataclasses.replace(case, settings={**case.settings, "data.data_path": tmp_path / "histories"})
    whole = straight(case, tmp_path / "whole", monkeypatch, ranks)
    assert len(whole) == case.steps
    if case.fault == OVERFLOWS:  # of the first rank alone, and skipped by all of them
        assert whole[-1][5]["skipped"] == 2
        assert whole[-1][6]["scale"] == whole[0][6]["scale"] / 4, "the scale shrinks"
    if "debug.digest_interval" not in case.settings:
        assert len({entry[4] for entry in whole}) >= case.steps - 2, "the digest must move with the weights"
    for step in steps:
        assert resumed(case, tmp_path / "whole", step, ranks) == whole[step:], f"resumed after step {step}"


def _dropped(path: str) -> Callable[[checkpoint.State], checkpoint.State]:
    """The state with one field as a fresh run would have it."""

    def drop(state: checkpoint.State) -> checkpoint.State:
        section, _, key = path.partition(".")
        if section == "model":
            return dataclasses.replace(
                state, model={n: torch.zeros_like(t) if n.endswith(key) else t for n, t in state.model.items()}
            )
        if section == "optimizer":
            zeroed = {n: torch.zeros_like(t) if n.startswith(f"{key}.") else t for n, t in state.optimizer.items()}
            return dataclasses.replace(state, optimizer=zeroed)
        fresh: dict[str, Any] = {"scale": 65536.0, "smoothed_loss": None, "best_loss": None}
        fresh |= {"train_losses": [], "val_losses": []}
        values = dict(state.run)
        if section == "applied_steps":
            values[section] = 0
        else:
            values[section] = {**values[section], key: fresh.get(key, 0)}
        return dataclasses.replace(state, run=values)

    return drop


FIELDS = [
    "model.wq.weight", "optimizer.exp_avg", "optimizer.exp_avg_sq", "applied_steps", "progress.step", "progress.tokens",
    "progress.skipped", "progress.overflow_run", "progress.smoothed_loss", "progress.best_loss", "progress.stale_steps",
    "progress.epoch_loss", "progress.epoch_targets", "loss_scale.scale", "loss_scale.growth_tracker",
]  # fmt: skip
OF_EPOCHS = ["progress.train_losses", "progress.val_losses", "progress.best_val_loss"]


def test_dropping_any_saved_field_breaks_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: no field is saved for nothing, and the gate sees each of them."""
    case = next(case for case in CASES if case.name == "fp16-overflow")
    changes = {
        "training.learning_rate": 1e-12,
        "training.min_delta": 1.0,
    }  # a loss that does not improve counts as stale
    case = dataclasses.replace(case, settings={**case.settings, **changes})
    # before the overflows, when the scaler counts good steps; and between two of them
    assert unseen(case, FIELDS, tmp_path, monkeypatch, at=(1, 3)) == set()


def test_dropping_what_is_kept_of_epochs_breaks_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a run that has ended its first epoch."""
    case = next(case for case in CASES if case.name == "mlm-masked")
    assert unseen(case, OF_EPOCHS, tmp_path, monkeypatch, at=(5,)) == set()


def unseen(
    case: Case, fields: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, *, at: tuple[int, ...]
) -> set[str]:
    """The fields that a checkpoint could as well do without."""
    whole = straight(case, folder / "whole", monkeypatch)
    left = set(fields)
    for step in at:
        state = checkpoint.load(folder / "whole" / "checkpoints" / f"step_{step:08d}")
        saved = {f"progress.{key}" for key in state.run["progress"]} | {
            f"loss_scale.{key}" for key in state.run["loss_scale"] or ("scale", "growth_tracker")
        }
        known = {field for field in [*FIELDS, *OF_EPOCHS] if not field.startswith(("model", "optimizer"))}
        assert saved | {"applied_steps"} == known
        assert resumed(case, folder / "whole", step) == whole[step:]
        for field in sorted(left):
            damaged = _dropped(field)(state)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoint, "load", lambda *_where, damaged=damaged: damaged)
                try:
                    seen = resumed(case, folder / "whole", step) != whole[step:]
                except LockstepError:
                    seen = True  # refused: the counts do not agree
                if seen:
                    left.remove(field)
    return left
