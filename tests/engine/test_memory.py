"""The estimate of memory: near what is counted, printed before loading, and a refusal that knows what would fit."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.engine import fitting
from lockstep.engine.compact import make_optimizer
from lockstep.engine.fitting import Work
from lockstep.engine.present import memory_estimate
from lockstep.errors import ExitCode, LockstepError
from lockstep.models.build import build
from lockstep.models.shapes import AnyShape, resolve
from lockstep.runtime import hardware
from tests.conftest import Outcome
from tests.gates.training import flags

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EIGHT = {
    "model.model_path": "GSAI-ML/LLaDA-8B-Instruct", "training.context_length": 2048, "training.batch_size": 1,
    "training.precision": "bf16", "model.init": "pretrained",
}  # fmt: skip
CARD_80, CARD_141 = 80_000 << 20, 143_771 << 20  # as the drivers say
FLAGS = re.compile(r"(--\S+(?: [^-(]\S*)?)")


def asked(settings: dict[str, Any]) -> tuple[RunConfig, AnyShape]:
    config = load("llada", preset="tiny", flags=flags(settings)).config
    return config, resolve(config.model, context_length=config.training.context_length)


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize(("rank", "targets"), [(0, "all"), (8, "all"), (8, "q,v")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_estimate_is_near_what_is_counted(states: str, rank: int, targets: str, precision: str) -> None:
    """Contract item 170."""
    config, shape = asked({
        "model.model_path": "lockstep/llada-demo", "training.optimizer_states": states, "model.lora_rank": rank,
        "model.lora_targets": targets, "training.precision": precision, "model.hidden_size": 512,
        "model.intermediate_size": 1024, "model.num_layers": 2,
    })  # fmt: skip
    model = build(
        config.model, shape, device=CPU, dtype_name=precision, seed=0, checkpointing=False, deterministic=False,
        debug=False,
    ).model  # fmt: skip
    optimizer = make_optimizer(model, config.training, CPU, seed=0)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    moments = sum(held.nbytes for kept in optimizer.moments().values() for held in kept.values())
    need = memory_estimate(config, shape, compiled=False)
    assert need.weights == pytest.approx(weights, rel=0.15)
    assert need.gradients == pytest.approx(gradients, rel=0.15)
    assert need.moments == pytest.approx(moments, rel=0.15)
    assert need.states == pytest.approx(weights + gradients + moments, rel=0.15)
    halves = memory_estimate(config, shape, compiled=False, shards=2)
    assert halves.states == pytest.approx(need.states / 2, abs=3)


def test_the_plan_for_one_card_of_141_gb() -> None:
    """8B: all weights with small states and recomputing, batch 1; additions with room to spare."""
    saving = {**EIGHT, "system.gradient_checkpointing": True}
    totals = {
        name: memory_estimate(*asked({**saving, **change}), compiled=True).total
        for name, change in {
            "fp32": {}, "bf16": {"training.optimizer_states": "bf16"},
            "lora": {"model.lora_rank": 16},
        }.items()
    }  # fmt: skip
    assert totals["lora"] < 24e9 < totals["bf16"] < 0.8 * CARD_141
    assert totals["fp32"] - totals["bf16"] == pytest.approx(4 * 8_015_581_184, rel=0.01)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(hardware, "device_name", lambda _device: "NVIDIA Fake")
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda _device: CARD_80)
    return monkeypatch


@pytest.mark.usefixtures("card")
def test_eight_billion_on_80_gb_are_refused_with_what_would_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Item 125; D1, D2: never by leaving half precision, and never batch x GPUs x size."""
    with caplog.at_level(logging.INFO), pytest.raises(LockstepError, match=r"8,015,581,184 .* 119\.4 GiB") as caught:
        fitting.check_memory(Work(*asked(EIGHT), CUDA))
    assert "Memory per GPU, estimated: 1" in caplog.text
    assert "weights 29.9, gradients 29.9, optimizer 59.7" in caplog.text
    hints = caught.value.hint.split("; ")
    assert any(hint.startswith("--model.lora-rank 16") for hint in hints)
    assert any(hint.startswith("--mode fsdp --gpus 2") for hint in hints)
    assert len(hints) == 2
    assert not any("no_fp16" in hint or "fp32" in hint for hint in hints)
    assert not any("optimizer-states" in hint for hint in hints), "ten bytes each are 75 GiB, without any activation"


def test_the_refusal_comes_before_anything_is_read(
    lockstep: Callable[..., Outcome], in_dir: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 125: as a person types it. Without a network the weights could not even be asked for."""
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda _device: CARD_80)
    model = ("--model-path", "GSAI-ML/LLaDA-8B-Instruct", "--init", "pretrained", "--device", "cpu", "--name", "x")
    refused = lockstep("train", "llada", "tiny", *model)
    assert refused.code == ExitCode.FAILED, refused.text
    estimate, error = (
        refused.text.index("Memory, estimated: 1"),
        refused.text.index("the model does not fit: 8,015"),
    )
    assert estimate < error
    assert "try: --model.lora-rank 16 (3" in refused.text
    assert list(in_dir.iterdir()) == [], "no run was begun"

    def read(*_: Any, **__: Any) -> Any:
        raise LockstepError("here the weights would be read")

    monkeypatch.setattr("lockstep.engine.build.build_model", read)
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda _device: 2 * CARD_141)
    assert "here the weights would be read" in lockstep("train", "llada", "tiny", *model).text, "the control"


@pytest.mark.usefixtures("card")
def test_nobody_is_told_to_add_to_random_weights() -> None:
    work = Work(*asked({**EIGHT, "model.init": "random"}), CUDA)
    hints = [remedy.flags for remedy in fitting.remedies(work, CARD_80)]
    assert any("fsdp" in hint for hint in hints)
    assert not any("lora" in hint for hint in hints)


def followed(hint: str, settings: dict[str, Any]) -> tuple[RunConfig, AnyShape, int]:
    """The configuration that takes flags at their word, and its shards."""
    names = {"--mode": "system.mode", "--gradient-checkpointing": "system.gradient_checkpointing"}
    words: dict[str, Any] = {}
    shards = 1
    for found in FLAGS.findall(hint):
        flag, _, value = found.partition(" ")
        if flag == "--gpus":
            shards = int(value)
            continue
        words[names.get(flag) or flag.removeprefix("--").replace("-", "_")] = value or True
    return *asked({**settings, **words}), shards


@pytest.mark.parametrize("more", [{}, {"training.batch_size": 8}, {"training.optimizer_states": "bf16"}])
@pytest.mark.parametrize("room", [CARD_80, CARD_141, 40_000 << 20])
def test_every_hint_fits_when_it_is_followed(
    more: dict[str, Any], room: int, card: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card.setattr(hardware, "free_memory_bytes", lambda _device: room)
    settings = {**EIGHT, **more}
    work = Work(*asked(settings), CUDA)
    hints = [remedy.flags for remedy in fitting.remedies(work, int(fitting.ROOM * room))]
    assert hints
    for hint in hints:
        changed, its_shape, shards = followed(hint, settings)
        assert changed != work.config
        caplog.clear()
        fitting.check_memory(Work(changed, its_shape, CUDA, shards))
        assert "may not fit" not in caplog.text


@pytest.mark.parametrize(("room", "warned"), [(0.99, True), (1.03, True), (1.07, False)])
def test_what_would_just_fit_is_warned_of(
    room: float, warned: bool, card: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An estimate is no measurement, and where the kernel ends a run it says nothing."""
    work = Work(*asked({"training.precision": "bf16"}), CUDA)
    card.setattr(hardware, "free_memory_bytes", lambda _device: int(room * work.need().total))
    fitting.check_memory(work)
    assert ("may not fit" in caplog.text) == warned


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_only_states_that_do_not_fit_are_refused(
    device: torch.device, card: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are certain; the estimate of activations is a warning, unless it is several times the free memory."""
    work = Work(*asked({"training.batch_size": 4096, "training.precision": "fp32"}), device)
    need = work.need()
    assert need.activations > 100 * need.states, "the control"
    card.setattr(hardware, "free_memory_bytes", lambda _device: need.total // 3)
    fitting.check_memory(work)
    assert "may not fit" in caplog.text
    for free in (need.total // 5, need.states - 1):
        card.setattr(hardware, "free_memory_bytes", lambda _device, free=free: free)
        with pytest.raises(LockstepError, match="does not fit"):
            fitting.check_memory(work)


@pytest.mark.usefixtures("card")
def test_a_small_run_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fitting.check_memory(Work(*asked({"training.precision": "fp32"}), CPU))
    assert caplog.text == ""


def test_the_benchmark_writes_loads_and_trains_a_small_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The 8B form runs on a GPU; this one is its plot: several files, an index, three ways of training."""
    path = Path(__file__).parents[2] / "benchmarks" / "llada_memory.py"
    spec = importlib.util.spec_from_file_location("benchmark_llada_memory", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = [str(tmp_path / "weights"), "--shape", "lockstep/llada-tiny", "--layers", "1", "--context", "32"]
    assert module.main([*given, "--steps", "2", "--rank", "4", "--device", "cpu", "--json", str(tmp_path / "out")]) == 0
    found = {entry["case"]: entry for entry in json.loads((tmp_path / "out").read_text())}
    assert list(found) == ["lora", "bf16"]
    assert found["lora"]["trained"] < found["bf16"]["trained"]
    assert found["lora"]["states_bytes"] < found["bf16"]["states_bytes"]
    assert len(list((tmp_path / "weights").glob("model-*-of-00002.safetensors"))) == 2
    assert all(loss == pytest.approx(6.2, abs=2) for entry in found.values() for loss in entry["losses"])
    assert "lora: " in capsys.readouterr().out
