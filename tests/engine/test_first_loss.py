"""The first loss of encoders at start-up, as foreseen; and an export of each that others can use."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import build
from lockstep.engine.inference import load_run
from lockstep.models import hf
from lockstep.models.build import build as build_model
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
    assert first["loss"] == pytest.approx(first["expected"], abs=0.1)
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
