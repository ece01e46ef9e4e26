"""The first loss of encoders at start-up, as foreseen; and an export of each that others can use."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.contracts import Batch
from lockstep.engine import build
from lockstep.engine.first_loss import TOLERANCE, foreseen
from lockstep.engine.inference import load_run
from lockstep.models import hf
from lockstep.models.agent_shapes import KNOWN as AGENTS
from lockstep.models.build import build as build_model
from lockstep.models.encoder_shapes import KNOWN
from lockstep.models.options import EncoderOptions
from lockstep.models.shapes import resolve
from lockstep.report.jsonl import read_events
from tests.conftest import Outcome

pytestmark = pytest.mark.usefixtures("shared_cache")
Cli = Callable[..., Outcome]
QUICK = ("--device", "cpu", "report.sample_prompt=", "report.tensorboard=false", "training.eval_batches=1",
         "system.threads=1", "training.batch_size=32", "--max-steps", "1", "--name", "one")  # fmt: skip


@pytest.mark.parametrize("architecture", ["prenorm", "bert", "modern"])
def test_a_run_of_each_architecture(in_dir: Path, lockstep: Cli, architecture: str) -> None:
    """Science C2; then `export --to hf`, and the folder has what the checkpoint has."""
    done = lockstep("train", "mlm", "tiny", f"model.architecture={architecture}", *QUICK)
    assert done.code == 0, done.text
    run = in_dir / "runs" / "one"
    first = next(event for event in read_events(run / "events.jsonl") if event["kind"] == "first_loss")
    assert first["expected"] == pytest.approx(math.log(512) + 64 * 0.02**2 / 2)
    assert first["loss"] == pytest.approx(first["expected"], abs=TOLERANCE)
    assert "First loss" not in done.text
    assert ("export runs/one --to hf" in done.text) == (architecture != "prenorm"), "what others can read"
    exported = lockstep("export", str(run), "--to", "hf")
    assert exported.code == 0, exported.text
    assert ("transformers has no class" in exported.text) == (architecture == "prenorm")
    options = EncoderOptions(model_path=str(run / "hf"), init="pretrained")
    again = build_model(
        options, resolve(options, context_length=64), device=torch.device("cpu"), dtype_name="fp32", seed=0,
        checkpointing=False, deterministic=False, debug=False,
    ).model  # fmt: skip
    trained = load_run(run, device="cpu")
    theirs = trained.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())
    specials = trained.tokenizer.vocabulary().specials
    assert (again.shape.pad, again.shape.bos, again.shape.eos) == (specials["pad"], specials["cls"], (specials["sep"],))  # pyright: ignore
    assert (run / "hf" / hf.WEIGHTS_FILE).is_file()


def test_a_wrong_one_is_said(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model = build.make_model

    def with_wide_logits(plan: build.Plan, **named: Any) -> build.Built:
        built = make_model(plan, **named)
        with torch.no_grad():
            built.model.get_parameter("head.norm.weight").mul_(8)
        return built

    monkeypatch.setattr(build, "make_model", with_wide_logits)
    assert "First loss" in lockstep("train", "mlm", "tiny", *QUICK).text


def test_a_word_that_comes_often_is_one_word() -> None:
    """Untrained, every blank gets the same logits: a thousand targets of one word are one draw."""
    config, shape = load("mlm", preset="tiny").config, KNOWN["lockstep/mlm-base"]
    spread = 0.02 * math.sqrt(768)

    def room(targets: torch.Tensor, **tensors: torch.Tensor) -> float:
        batch = Batch({"targets": targets, **tensors}, {"loss": len(targets)}, 1, 4096)
        return (foreseen(config, shape, [batch])[1] - TOLERANCE) / (4 * spread)

    places = torch.arange(1000)
    assert room(torch.full((1000,), 7), places=places) == pytest.approx(1)
    assert room(torch.arange(1000), places=places) == pytest.approx(1000**-0.5)
    assert room(torch.arange(1000) % 10, places=places) == pytest.approx(10**-0.5)
    assert room(torch.arange(0), places=places[:0]) == pytest.approx(1)
    assert room(torch.full((1000,), 7)) == pytest.approx(4096**-0.5)  # of all tokens, as in a language model


# -------------------------------------------------------------------------------------------------------------- agents

FEW_CHOICES = ("--device", "cpu", "report.tensorboard=false", "training.eval_batches=1", "system.threads=1",
               "--name", "one", "--max-steps", "1", "training.gen_episodes=0")  # fmt: skip


@pytest.mark.parametrize(
    ("more", "answers"),
    [
        ((), ["action"]),
        (("model.dynamics=true", "model.dynamics_strength=0.5"), ["action", "x", "y", "reward"]),
        (("model.compressed=true", "model.region=20", "model.summary_tokens=2"), ["action", "kind"]),
        (("model.init_std=0.02", "model.head_init_std=0.1", "model.dynamics=true"), ["action", "x", "y", "reward"]),
    ],
    ids=["plain", "dynamics", "compressed", "head"],
)
def test_all_that_an_agent_guesses_is_foreseen(
    in_dir: Path, lockstep: Cli, more: tuple[str, ...], answers: list[str]
) -> None:
    done = lockstep("train", "ad", "tiny", *more, *FEW_CHOICES)
    assert done.code == 0, done.text
    first = next(
        event for event in read_events(in_dir / "runs" / "one" / "events.jsonl") if event["kind"] == "first_loss"
    )
    choices = {"action": 5, "kind": 3, "x": 16, "y": 16, "reward": 2}
    std = 0.1 if "model.head_init_std=0.1" in more else 0.06
    strength = 0.5 if "model.dynamics_strength=0.5" in more else 1.0
    each = [
        (1 if name in ("action", "kind") else strength) * (math.log(choices[name]) + 32 * std**2 / 2)
        for name in answers
    ]
    assert first["expected"] == pytest.approx(sum(each))
    assert first["loss"] != pytest.approx(first["expected"], abs=1e-3)
    assert "First loss" not in done.text


def test_a_broken_agent_is_said(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of 5, where 1.6 is a guess."""
    make_model = build.make_model

    def with_wide_logits(plan: build.Plan, **named: Any) -> build.Built:
        built = make_model(plan, **named)
        with torch.no_grad():
            built.model.get_parameter("output.weight").mul_(12)
        return built

    monkeypatch.setattr(build, "make_model", with_wide_logits)
    done = lockstep("train", "ad", "tiny", *FEW_CHOICES)
    assert "(ln A + d std²/2 of A actions)" in done.text
    assert "First loss" in done.text


def test_steps_that_look_alike_do_not_average_out() -> None:
    """The room is that of a few guesses, however many steps there are; and less where the actions are mixed."""
    config = load("ad", preset="tiny").config
    shape = AGENTS["lockstep/ad-tiny"]
    spread = 0.06 * math.sqrt(32)

    class Told:
        def __init__(self, count: float) -> None:
            self.count = count

        def guesses(self, _: Any) -> dict[str, tuple[float, float]]:
            return {"action": (1.0, self.count)}

    batch = Batch({}, {"loss_action": 10_000}, 100, 10_000)
    for count in (1.0, 4.0, 5.0):
        told: Any = Told(count)
        _, room, formula = foreseen(config, shape, [batch], objective=told)
        assert room == pytest.approx(TOLERANCE + 4 * spread / math.sqrt(count))
        assert formula.startswith("ln A")
