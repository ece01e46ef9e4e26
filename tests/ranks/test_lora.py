"""Additions to frozen weights, and small optimizer states, on several ranks: as in one process. Item 126."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lockstep.engine import checkpoint, compact, inference
from lockstep.models import hf, lora
from lockstep.models.build import build
from lockstep.models.options import LladaOptions
from lockstep.models.shapes import resolve
from lockstep.runtime.group import Group
from tests.gates.training import FEW_WORDS, run
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

ROWS = 4  # of a global batch
SETTINGS: dict[str, Any] = {
    "model.vocab_size": 300, "model.hidden_size": 18, "model.num_attention_heads": 3, "model.num_key_value_heads": 1,
    "model.head_dim": 6, "model.intermediate_size": 22, "model.lora_rank": 3, "training.context_length": 16,
    "training.max_steps": 4, "training.save_interval": 2, "training.eval_interval": 0, "training.batch_size": 1,
    "training.learning_rate": 1e-2, "training.warmup_steps": 0, "data.num_workers": 0, "data.data_path": FEW_WORDS,
}  # fmt: skip
FULL = {"model.lora_rank": 0}
FP64 = {"training.precision": "fp64"}
FSDP, DDP = {"system.mode": "fsdp"}, {"system.mode": "ddp"}
HALF_WAY, LAST = "checkpoints/step_00000002", "checkpoints/step_00000004"


def train(
    group: Group, folder: Path, settings: dict[str, Any], point: Path | None = None, mistaken: bool = False
) -> list[tuple[Any, ...]]:
    share = {"training.grad_accum_nums": ROWS // group.world}
    wrong = mock.patch.object(compact, "flat_offset", return_value=0)
    if mistaken:
        with wrong:
            return run(folder, {**SETTINGS, **share, **settings}, family="llada", group=group)[1].trace
    _, recorder = run(folder, {**SETTINGS, **share, **settings}, family="llada", group=group, point=point)
    return recorder.trace


def distance(ours: Path, theirs: Path) -> float:
    first, second = (checkpoint.load(folder / LAST).model for folder in (ours, theirs))
    assert set(first) == set(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("mode", [pytest.param(FSDP, marks=pytest.mark.slow), DDP], ids=["fsdp", "ddp"])
def test_additions_on_two_ranks_are_those_of_one_process(ranks: Pool, mode: dict[str, Any], tmp_path: Path) -> None:
    settings = {**mode, **FP64}
    train(Group(), tmp_path / "one", FP64)
    traces = ranks(2, train, tmp_path / "two", settings)
    assert traces[0] == traces[1]
    assert distance(tmp_path / "one", tmp_path / "two") < 1e-9
    names = set(checkpoint.load(tmp_path / "two" / LAST).model)
    assert len(names) == 2 * 7 * 2
    assert all(name.endswith(lora.ADDITIONS) for name in names)


@pytest.mark.parametrize("mode", [FSDP, pytest.param(DDP, marks=pytest.mark.slow)], ids=["fsdp", "ddp"])
def test_frozen_bf16_beside_fp32_resumes_exactly_and_exports_plain_weights(
    ranks: Pool, mode: dict[str, Any], tmp_path: Path
) -> None:
    """Item 126: mixed types in one shard group; the exported folder is read as any other."""
    settings = {**mode, "training.precision": "bf16"}
    through = ranks(2, train, tmp_path / "through", settings)[0]
    again = ranks(2, train, tmp_path / "again", settings, tmp_path / "through" / HALF_WAY)[0]
    assert again == through[2:]
    trained = inference.load_run(tmp_path / "again" / LAST, device="cpu")
    inference.export_run(tmp_path / "again" / LAST, tmp_path / "plain")
    options = LladaOptions(model_path=str(tmp_path / "plain"), init="pretrained")
    plain = build(
        options, resolve(options, context_length=16), device=torch.device("cpu"), dtype_name="fp32", seed=0,
        checkpointing=False, deterministic=False, debug=False,
    ).model  # fmt: skip
    ids = torch.arange(32).view(2, 16)
    assert torch.equal(plain(ids), trained.model(ids))
    assert (tmp_path / "plain" / hf.WEIGHTS_FILE).stat().st_size > 4 * resolve(options, context_length=16).parameters()


def test_small_states_in_shards_are_those_of_one_process(ranks: Pool, tmp_path: Path) -> None:
    """Noise by the place in the whole tensor: no cut is seen. Also through a resume."""
    settings = {**FULL, **FP64, "training.optimizer_states": "bf16", "model.hidden_size": 270, "model.head_dim": 90}
    train(Group(), tmp_path / "one", settings)
    ranks(2, train, tmp_path / "two", {**settings, **FSDP})
    assert distance(tmp_path / "one", tmp_path / "two") < 1e-9
    again = ranks(2, train, tmp_path / "again", {**settings, **FSDP}, tmp_path / "two" / HALF_WAY)[0]
    assert len(again) == 2
    assert distance(tmp_path / "two", tmp_path / "again") == 0


def test_noise_by_the_place_in_the_shard_is_seen(ranks: Pool, tmp_path: Path) -> None:
    """Negative control of the test above."""
    settings = {**FULL, **FP64, "training.optimizer_states": "bf16"}
    train(Group(), tmp_path / "one", settings)
    ranks(2, train, tmp_path / "two", {**settings, **FSDP}, None, True)
    assert distance(tmp_path / "one", tmp_path / "two") > 1e-6
