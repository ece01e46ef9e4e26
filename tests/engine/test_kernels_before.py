"""A run that goes on keeps the attention kernel and the compiling of its checkpoint, which may have been timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine import resume
from lockstep.engine.resume import ResumePoint
from lockstep.models import attention, build
from lockstep.models.build import Kernels, compile_blocks
from lockstep.models.options import ModelOptions
from tests.gates.training import run

TINY: dict[str, Any] = {
    "training.max_steps": 4, "model.dropout": 0.1, "debug.digest_interval": 1, "data.num_workers": 0,
    "training.save_interval": 2, "training.eval_interval": 0, "training.context_length": 32,
}  # fmt: skip
FACTS: dict[str, Any] = {
    "use_flash": True, "device_type": "cuda", "dtype_name": "bf16", "deterministic": False, "head_dim": 64,
}  # fmt: skip
TIMED = ("native_flash", "attention: native_flash (auto; as in the checkpoint)")


@pytest.fixture(autouse=True)
def _forgetful() -> None:
    build.forget_compiled()


@pytest.mark.filterwarnings("ignore")  # the compiler has its own
def test_a_run_whose_auto_was_decided_by_timing_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_cache: Path
) -> None:
    def traced(*args: Any, **how: Any) -> None:
        compile_blocks(*args, backend="eager", **how)

    monkeypatch.setattr(build, "compile_blocks", traced)
    given, whole = run(tmp_path / "given", {**TINY, "model.compile": "on", "model.attention_backend": "native_math"})
    with monkeypatch.context() as as_it_was:
        as_it_was.setattr(attention, "resolve", lambda *_, **__: ("native_math", "attention: native_math (timed)"))
        as_it_was.setattr(ModelOptions, "compiles", lambda *_, **__: True)
        run(tmp_path / "timed", TINY)
    point = tmp_path / "timed" / "checkpoints" / "step_00000002"
    about = json.loads((point / "run.json").read_text())["about"]
    assert (about["config"]["model"]["compile"], about["config"]["model"]["attention_backend"]) == ("auto", "auto")
    build.forget_compiled()
    later, resumed = run(tmp_path / "again", TINY, point=point)
    assert (later.about["attention"], later.about["compiled"]) == ("native_math", True)
    assert given.about["attention"] == "native_math"
    bits = [[(each.step, each.loss.hex(), each.digest) for each in one.records] for one in (whole, resumed)]
    assert bits[1] == bits[0][2:]
    anew, _ = run(tmp_path / "new", TINY)
    assert (anew.about["attention"], anew.about["compiled"]) == ("native_flash", False), "control: the rule"


def test_what_chooses_must_be_as_it_was(tmp_path: Path) -> None:
    sections = {"system": {"deterministic": False}, "debug": {"enabled": False}, "training": {"precision": "bf16"}}
    now = {"family": "llama", "device_name": "NVIDIA Fake", "attention": "native_flash", "compiled": False}
    now |= {"config": sections}

    def before(**changed: Any) -> Kernels | None:
        (tmp_path / "run.json").write_text(json.dumps({"about": {"identity": {}, **now, **changed}}))
        return resume.kernels_before(ResumePoint(tmp_path, None), now)

    assert before() == Kernels("native_flash", compiled=False)
    assert before(device_name="NVIDIA other") is None
    for section, values in (("system", {"deterministic": True}), ("debug", {"enabled": True}),
                            ("training", {"precision": "fp16"})):  # fmt: skip
        assert before(config={**sections, section: values}) is None
    assert before(compiled=None) is before(attention=None) is None, "an older one does not say"
    assert resume.kernels_before(None, now) is None


def test_a_kernel_that_cannot_run_any_more_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dict[str, str]()
    monkeypatch.setattr(attention, "has_package", lambda name: name == "triton")
    monkeypatch.setattr(attention, "probe", lambda backend, *_: broken.get(backend, ""))
    assert build._attention("auto", "native_flash", **FACTS) == TIMED
    assert build._attention("auto", "", **FACTS)[0] == "cudnn", "the rule"
    assert build._attention("auto", "gone", **FACTS)[0] == "cudnn"
    assert build._attention("native_math", "native_flash", **FACTS)[0] == "native_math", "what is named is used"
    assert build._attention("auto", "cudnn", **{**FACTS, "deterministic": True})[0] == "flex"
    broken["native_flash"] = "no such engine"
    assert build._attention("auto", "native_flash", **FACTS)[0] == "cudnn"
