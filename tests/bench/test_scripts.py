"""The scripts of benchmarks/ for a GPU: the peers they build are what they say, and they judge as they say."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.load import load
from lockstep.contracts import Draw, Rows, Vocabulary
from lockstep.engine.build import make_objective
from lockstep.models.build import build
from lockstep.models.shapes import resolve
from lockstep.runtime import devices
from tests.house.test_benchmarks import script

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
WITHOUT_CLOCK = {"soak", "float8_parity", "llada_memory"}  # what they compare is bits, losses and bytes


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = script("h200_llama")
    small = {"WIDTH": 64, "INNER": 128, "HEADS": 4, "KV_HEADS": 2, "HEAD": 16, "VOCABULARY": 256, "CHUNK": 32}
    for name, value in {**small, "DEVICE": "cpu"}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    return module


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return script("h200_families")


def test_flops_are_counted_as_the_product_counts_them() -> None:
    shape = resolve(load("llama", preset="production").config.model, context_length=8192)
    assert script("h200_llama").flops_per_token(4, 8192) == shape.flops_per_token(8192)


def test_the_plain_model_is_transformers_llama(llama: ModuleType) -> None:
    """With the same weights the same loss: the peer that is raced against does the same work."""
    plain, loss_of = llama.peer_step("plain", 2, 64)
    theirs, their_loss = llama.peer_step("eager", 2, 64)
    plain.cos, plain.sin = plain_rope(theirs.config, 64)
    body = theirs.model
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)  # so that every part has a say in the loss
        body.embed_tokens.weight.copy_(plain.embed.weight)
        theirs.lm_head.weight.copy_(plain.head)
        for mine, other in zip(plain.blocks, body.layers, strict=True):
            parts = mine.qkv.weight.split([64, 32, 32])
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                getattr(other.self_attn, name).weight.copy_(part)
            other.self_attn.o_proj.weight.copy_(mine.out.weight)
            for name, part in (("gate_proj", mine.gate), ("up_proj", mine.up), ("down_proj", mine.down)):
                getattr(other.mlp, name).weight.copy_(part.weight)
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1))
    # theirs predicts within its 64 inputs, so ours is given the same 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = their_loss(tokens).item()
        assert loss_of(tokens[:, :64]).item() == pytest.approx(wanted, rel=2e-3)
        plain.sin = -plain.sin  # a control: positions that turn the other way
        assert loss_of(tokens[:, :64]).item() != pytest.approx(wanted, rel=2e-3)


def plain_rope(config: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the base that transformers takes by default."""
    parameters = getattr(config, "rope_parameters", None) or {}
    base = parameters.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    angle = torch.arange(length - 1)[:, None] * base ** (-torch.arange(0, 16, 2) / 16)
    return angle.cos(), angle.sin()


def test_all_logits_are_the_same_loss(families: ModuleType) -> None:
    """Every position through the head and most of them ignored: more work, the same number, the same gradients."""
    config = load("llada", preset="tiny").config
    vocabulary = Vocabulary(256, {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": 4}, np.zeros(256, bool), 2)
    objective = make_objective(config).with_vocabulary(vocabulary)
    shape = resolve(config.model, context_length=64)
    model = build(
        config.model, shape, device=torch.device("cpu"), dtype_name="fp32", seed=1, checkpointing=False,
        deterministic=False, debug=False,
    ).model  # fmt: skip
    tokens = np.random.default_rng(1).integers(5, 256, (4, 64))
    ids = np.arange(4)
    batch = objective.collate(Rows(ids, ids * 0, ids, {"tokens": tokens}), Draw(1, 0, 4, 10))
    every = families.with_all_places(batch)
    assert len(every.tensors["places"]) == 256 > len(batch.tensors["places"])
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for each in (batch, every):
        model.zero_grad()
        loss = objective.loss(model, each)["loss"]
        loss.backward()
        grad = next(model.parameters()).grad
        assert grad is not None
        found.append((loss.detach(), grad.clone()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    sent = families.everywhere(config.objective, documents="separated").with_vocabulary(vocabulary)
    torch.testing.assert_close(sent.loss(model, batch)["loss"], found[1][0])
    wrong = every._replace(tensors={**every.tensors, "token_weights": torch.ones(256)})  # a control
    assert not torch.allclose(objective.loss(model, wrong)["loss"], found[0][0], rtol=1e-2)


def test_what_is_due_is_judged(families: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "tokens_per_second": 1.16,
        "mfu": 0.59,
        "step_ms": 4.7,
        "peak_memory_bytes": 100,
        "estimated_memory_bytes": 109,
    }
    base = {"tokens_per_second": 1.0, "step_ms": 4.7, "peak_memory_bytes": 1}
    assert families.show("llada", {"llada": figures, "llada-all": base})
    assert families.show("ad", {"ad": figures})
    assert families.show("full", {"full": figures, "full-kept": figures})
    assert families.show("demo", {"demo": {"cold_seconds": 30.0, "warm_seconds": 7.9, "warm_starts": [7.9]}})
    assert "MISSED" not in capsys.readouterr().out
    assert not families.show("bert", {"bert": figures, "bert-padded": base})
    assert not families.show("ad", {"ad": {**figures, "step_ms": 4.9}})
    assert not families.show("demo", {"demo": {"cold_seconds": 30.0, "warm_seconds": 8.1, "warm_starts": [8.1]}})
    assert not families.show("full", {"full": figures, "full-kept": {**figures, "estimated_memory_bytes": 89}})
    assert capsys.readouterr().out.count("MISSED") == 4
    assert not families.show("full", {"full": {"error": "exit code 1"}})


def ended(module: ModuleType) -> object:
    """The exit code of a script that was given no words."""
    try:
        return module.main(*([[]] if inspect.signature(module.main).parameters else []))
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize("name", sorted({path.stem for path in FOLDER.glob("*.py")} - WITHOUT_CLOCK - {"busy"}))
def test_a_busy_machine_has_no_figures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of any script whose figures are times: one error, and nothing is measured. A quiet machine is the control."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    module = script(name)
    busy: Any = sys.modules["busy"]
    quiet = busy.check_quiet
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 1.0, 1.0))
    assert ended(module) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "this machine is busy" in shown.err
    assert "--anyway" in shown.err

    def measured(*args: Any, **named: Any) -> None:
        quiet(*args, **named)
        raise SystemExit("it would measure now")

    monkeypatch.setattr(busy, "check_quiet", measured)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(devices, "holders", lambda _: [])
    assert ended(module) == "it would measure now"


def test_a_peer_ahead_of_ours_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("h200_llama")
    found = {
        "plain": {"tokens_per_second": 50.0, "peak_gib": 1.0},
        "ours": {"tokens_per_second": 60.0, "peak_gib": 1.0},
    }
    module.show(found)
    assert "0.833" in capsys.readouterr().out
    assert module.verdict(found) == 0
    assert module.verdict({**found, "plain": {"tokens_per_second": 61.0}}) == 1
    assert module.verdict({**found, "eager": {"error": "exit code 1"}}) == 1


def test_what_is_due_of_ours_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("h200_llama")
    good = {
        name: {"tokens_per_second": float(least), "peak_gib": min(most, 60.0)}
        for name, (least, most) in module.DUE.items()
    }
    assert good.keys() == module.OURS.keys()
    assert module.missed(good) == 0
    assert module.missed({"ours": {"error": "exit code 1"}, "plain": {"tokens_per_second": 1.0, "peak_gib": 1e3}}) == 0
    assert "MISSED" not in capsys.readouterr().out
    for name, row in good.items():
        assert module.missed({**good, name: {**row, "tokens_per_second": row["tokens_per_second"] - 1}}) == 1
    for name in ("ours", "batch8"):
        assert module.missed({**good, name: {**good[name], "peak_gib": good[name]["peak_gib"] + 4.1}}) == 1
    assert capsys.readouterr().out.count("MISSED") == 6


@pytest.mark.parametrize("name", ["ours", "deterministic", "batch8", "fp8"])
def test_ours_is_a_command_the_product_knows(name: str, llama: ModuleType, tmp_path: Path) -> None:
    from lockstep.api import setting_words
    from lockstep.verb_arguments import parse

    options = llama.argparse.Namespace(steps=8, layers=4, context=8192, batch=4)
    words = llama.command_of(name, options, tmp_path / "f.json")
    assert words[1:4] == ["-m", "lockstep", "bench"]
    arguments, settings = parse("bench", "", words[4:], setting_words)
    assert (arguments.family, arguments.what, arguments.steps) == ("llama", "production", 8)
    config = load("llama", preset="production", flags=settings).config
    assert config.training.batch_size == (8 if name == "batch8" else 4)
    assert config.training.grad_accum_nums == 1


@pytest.mark.parametrize("name", ["llada", "bert", "ad", "full", "full-kept"])
def test_the_families_are_commands_the_product_knows(name: str, families: ModuleType) -> None:
    from lockstep.api import resolve as resolve_config
    from lockstep.api import setting_words
    from lockstep.verb_arguments import parse

    arguments, settings = parse("bench", "", families.COMMANDS[name][4:], setting_words)
    config = resolve_config(arguments.family, preset=arguments.what, flags=settings).config
    assert config.training.grad_accum_nums == 1
    sizes = {"llada": (8, 4096), "bert": (128, 512), "ad": (512, 240), "full": (1, 8192)}
    assert (config.training.batch_size, config.training.context_length) == sizes[name.removesuffix("-kept")]
    assert config.system.gradient_checkpointing is (name == "full")


def test_a_rule_that_is_behind_torch_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("products")
    assert (
        module.verdict({"up": {"torch": 2.0, "rule": 1.9}, "down": {"torch": 2.0, "rule": 2.1}}) == 0
    )  # up is twice as often
    assert capsys.readouterr().out == "ok: of a step, torch 24.0 ms, the rule 23.6 ms\n"
    assert module.verdict({"up": {"torch": 2.0, "rule": 2.0}}) == 1
    assert capsys.readouterr().out.startswith("TOO SLOW: ")


def test_products_of_a_step_are_all_of_the_large_ones() -> None:
    """Their FLOPs are those of a step, but for keys and values, which are small."""
    module, llama = script("products"), script("h200_llama")
    counted = sum(2.0 * each.count * each.rows * each.inner * each.columns for each in module.STEP.values())
    tokens, keys_and_values = 4 * 8192, 6.0 * 4 * 2 * llama.WIDTH * llama.KV_HEADS * llama.HEAD
    attention = 12.0 * 4 * llama.HEADS * llama.HEAD * 8192
    assert counted == tokens * (llama.flops_per_token(4, 8192) - attention - keys_and_values)
