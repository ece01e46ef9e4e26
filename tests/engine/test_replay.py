"""Bundles under attack - damaged, foreign, incomplete - and the verdicts, each with its real cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import replaying, rundir
from lockstep.config.load import from_dict
from lockstep.engine import bundle, inference, verdict
from lockstep.engine import replay as engine
from lockstep.engine.replay import replay
from lockstep.errors import ConfigError, DataError, LockstepError, NonFiniteError, NotFoundError
from lockstep.health.finding import from_json
from lockstep.models import attention, hf
from lockstep.models.llama import Llama
from tests.conftest import Outcome
from tests.engine.bad_steps import OF_FAMILY, brought_back
from tests.gates.training import run

pytestmark = pytest.mark.usefixtures("shared_cache")

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Path:
    """The bundle of one run, for who wants to damage a copy of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        patch.setenv("LOCKSTEP_FAULT", "nan_loss@step=1")
        with pytest.raises(NonFiniteError) as caught:
            run(tmp_path_factory.mktemp("kept") / "run", OF_FAMILY["llama"])
    return Path(from_json(caught.value.finding).files["bundle"])


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(kept, tmp_path / "bundle")


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The bundle with another description, and a manifest that fits it."""
    path = folder / bundle.ABOUT
    about = json.loads(path.read_text(encoding="utf-8"))
    change(about)
    path.write_text(json.dumps(about), encoding="utf-8")
    (folder / rundir.MANIFEST).unlink()
    rundir.seal(folder)
    return folder


def test_a_bundle_that_is_whole_is_read(copy: Path) -> None:
    """Control of all that follows: neither the copy nor a new manifest is what is refused."""
    assert bundle.read(copy).finding.kind == "nan_loss"
    assert bundle.read(rewritten(copy, lambda about: about.update(extra=1))).finding.kind == "nan_loss"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_every_file_that_is_damaged_is_named(copy: Path, damage: str) -> None:
    names = [path.name for path in copy.iterdir()]
    assert {"bundle.json", "batch.safetensors", "model.safetensors", "manifest.json"} <= set(names)
    for name in names:
        content = (copy / name).read_bytes()
        middle = len(content) // 2
        spoilt = {
            "cut": content[:middle],
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
        }
        (copy / name).unlink()
        if damage in spoilt:
            (copy / name).write_bytes(spoilt[damage])
        with pytest.raises(DataError) as refused:
            bundle.read(copy)
        assert name in str(refused.value) or name == "manifest.json"
        (copy / name).write_bytes(content)
    bundle.read(copy)


def test_a_description_without_what_a_replay_needs_is_refused(copy: Path) -> None:
    about = json.loads((copy / bundle.ABOUT).read_text(encoding="utf-8"))
    for key in (*bundle.NEEDED, "format", "batches", "finding"):
        for value in (None, [], "x"):
            if isinstance(value, bundle.NEEDED.get(key, ())):
                continue
            with pytest.raises(DataError):
                bundle.read(rewritten(copy, lambda found, key=key, value=value: found.update({key: value})))
        with pytest.raises(DataError):
            bundle.read(rewritten(copy, lambda found, key=key: found.pop(key)))
        rewritten(copy, lambda found: found.update(about))
    bundle.read(copy)


FOREIGN: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda about: about.update(format=bundle.FORMAT + 1),
    "a setting this version does not know": lambda about: about["config"]["training"].update(momentum=1),
    "another family": lambda about: about["config"].update(family="mlm"),
    "another shape": lambda about: about["shape"].update(hidden_size=128),
    "another kind of model": lambda about: about["shape"].update(model_type="bert"),
    "a fault nobody knows": lambda about: about.update(fault="melt@step=1"),
    "other denominators": lambda about: about.update(denominators={}),
    "no rows": lambda about: about.update(batches=[]),
}


@pytest.mark.parametrize("what", list(FOREIGN))
def test_what_comes_from_elsewhere_is_refused_in_words(copy: Path, what: str) -> None:
    with pytest.raises(LockstepError) as refused:
        replay(rewritten(copy, FOREIGN[what]), device="cpu")
    assert isinstance(refused.value, ConfigError | DataError)


def test_a_sample_that_is_not_there_is_refused_before_anything_runs(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the step comes out finite, and nothing would be left out any more."""
    monkeypatch.setattr(engine, "attempt", lambda *_: pytest.fail("it was run"))
    with pytest.raises(ConfigError, match="row 4, the step has 4"):
        replay(copy, drop=4, device="cpu")
    with pytest.raises(pytest.fail.Exception, match="it was run"):
        replay(copy, drop=3, device="cpu")


@pytest.mark.parametrize("flag", ["--fp32", "--no-compile", "--eager-attention"])
def test_a_flag_for_what_is_tried_anyway_is_refused(flag: str, lockstep: Cli) -> None:
    told = lockstep("replay", "BUNDLE", flag)
    assert told.code == 2
    assert "is always tried" in told.err
    assert "lockstep replay BUNDLE" in told.err


def test_the_screen_is_safe_from_what_a_bundle_says(copy: Path, lockstep: Cli) -> None:
    def hostile(about: dict[str, Any]) -> None:
        about["finding"]["place"]["line"] = "\x1b]0;owned\x07\x1b[31mred"

    told = lockstep("replay", str(rewritten(copy, hostile)), "--device", "cpu")
    assert told.code == 0
    assert "\x1b" not in told.text
    assert "red" in told.out


@pytest.mark.slow
def test_json_is_json_and_says_the_same(copy: Path, lockstep: Cli) -> None:
    told = json.loads(lockstep("replay", str(copy), "--device", "cpu", "--json").out)
    assert (told["reproduced"], told["place"]["module"]) == (True, "loss")
    assert [(each["change"], each["finite"], each["module"]) for each in told["tried"][:2]] == [
        ("as it was", False, "loss"), ("with plain attention", False, "loss"),
    ]  # fmt: skip
    assert f"Verdict: {told['verdict']}" in lockstep("replay", str(copy), "--device", "cpu").out


def test_a_checkpoint_with_other_weights_is_refused(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle without weights trusts a folder that something else may have written since."""
    finding = broken("nan_loss@step=1", **{"debug.bundle": "no_weights"})
    brought_back(finding)
    folder = bundle.read(Path(finding.files["bundle"])).weights
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "norm.weight": weights["norm.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.safetensors"):
        replay(Path(finding.files["bundle"]), device="cpu")
    (folder / "manifest.json").unlink()
    rundir.seal(folder)
    with pytest.raises(DataError, match="not the weights before the step"):
        replay(Path(finding.files["bundle"]), device="cpu")


def test_a_step_in_float8_is_replayed_where_there_is_none(copy: Path) -> None:
    """A laptop multiplies no float8 numbers: all else is as it was, and it says so."""
    rewritten(copy, lambda about: about["config"]["training"].update(precision="fp8"))
    done, _ = replay(copy, device="cpu")
    assert done.reproduced
    assert [each.change.name for each in done.outcomes][:2] == ["as it was, in bf16 for fp8", "in fp32"]
    done, _ = replay(rewritten(copy, lambda about: about.update(fault="")), device="cpu")
    assert (done.exit_code, done.verdict.partition(":")[0]) == (1, "overflow")
    rewritten(copy, lambda about: about.update(weights_digest="0"))
    with pytest.raises(DataError, match="not the weights before the step"):
        replay(copy, device="cpu")


@pytest.mark.parametrize(
    ("asked", "compiled", "card", "expected"),
    [("auto", True, "", "on"), ("auto", False, "", "off"), ("auto", None, "", "auto"), ("on", False, "", "on"),
     ("auto", False, "NVIDIA other", "auto")],
)  # fmt: skip
def test_a_step_is_compiled_again_as_auto_had_found(
    copy: Path, asked: str, compiled: bool | None, card: str, expected: str
) -> None:
    """Measured there and then; what was asked for by name is asked for again, and other cards choose for themselves."""

    def change(about: dict[str, Any]) -> None:
        about["config"]["model"]["compile"], about["compiled"] = asked, compiled
        about["device_name"] = card or about["device_name"]

    read = bundle.read(rewritten(copy, change))
    for other in (verdict.AS_IT_WAS, verdict.FP32):
        changes = engine._model_changes(read, from_dict(read.about["config"]), torch.device("cpu"), other)
        assert changes.get("compile", asked) == expected
    changes = engine._model_changes(read, from_dict(read.about["config"]), torch.device("cpu"), verdict.NO_COMPILE)
    assert changes["compile"] == "off"


@pytest.mark.parametrize("asked", ["cudnn", "native_flash", "flash_attn", "flex", "native_math"])
def test_a_kernel_for_halves_is_not_asked_of_fp32(copy: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """Or `replay` would end with a refusal of what it tries by itself."""
    monkeypatch.setattr(engine, "device_name", lambda _device: "a card")
    monkeypatch.setattr(engine.attention, "has_package", lambda _name: True)
    read = bundle.read(rewritten(copy, lambda about: about.update(device="cuda")))
    config = from_dict(read.about["config"] | {"model": {**read.about["config"]["model"], "attention_backend": asked}})
    changes = engine._model_changes(read, config, torch.device("cuda"), verdict.FP32)
    assert changes.get("attention_backend", asked) == (asked if asked in ("flex", "native_math") else "auto")


def test_another_kind_of_device_accuses_no_hardware(copy: Path) -> None:
    """On the card it came again, here it does not: other kernels. Where it never came again: the card."""

    def of_a_card(about: dict[str, Any], *, device: str = "cuda", again: bool = True) -> None:
        about.update(fault="", device=device)
        about["finding"].update(reproduced=again)

    verdicts = [
        replay(rewritten(copy, lambda about, case=case: of_a_card(about, **case)), device="cpu")[0].verdict
        for case in ({}, {"again": False}, {"device": "cpu"})
    ]
    assert [verdict.partition(":")[0] for verdict in verdicts] == ["kernel", "hardware-suspect", "hardware-suspect"]
    assert "--device cuda" in verdicts[0]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("nan_loss@step=1,once=1", verdict.NEXT["hardware-suspect"]),
     ("nan_weight@step=1,tensor=norm.weight,index=5", verdict.IN_WEIGHTS)],
)  # fmt: skip
def test_what_happened_once_is_gone_on_from_unless_it_was_saved(broken: Any, fault: str, expected: str) -> None:
    """A weight that is NaN in the checkpoint too: a resume from there would end at the same step for ever."""
    finding = broken(fault)
    done, _ = replay(Path(finding.files["bundle"]))
    assert done.verdict.startswith("hardware-suspect")
    assert done.lines(finding)[-1] == f"Next: {expected}"


def test_a_run_that_was_moved_has_its_weights_with_it(broken: Any) -> None:
    finding = broken("nan_loss@step=1", **{"debug.bundle": "no_weights"})
    kept = Path(finding.files["bundle"])
    moved = kept.parents[3].rename(kept.parents[3].with_name("moved"))
    found = finding.replace(files={"bundle": str(moved / kept.relative_to(kept.parents[3]))})
    brought_back(found)
    shutil.rmtree(moved / "checkpoints")
    with pytest.raises(NotFoundError, match="the checkpoint it names is gone"):
        replay(Path(found.files["bundle"]), device="cpu")


def test_a_run_with_two_failures_replays_the_one_that_ended_it(tmp_path: Path, broken: Any) -> None:
    first, second = (broken(f"nan_loss@step={step}") for step in (1, 2))
    folder = tmp_path / "run"
    (folder / "config.json").write_text("{}")
    assert replaying.find(str(folder)) == Path(first.files["bundle"]), "nothing says which: the first"
    (folder / "failure.json").write_text(json.dumps({"bundle": second.files["bundle"]}))
    assert replaying.find(str(folder)) == Path(second.files["bundle"])
    (folder / "failure.json").write_text(json.dumps({"cause": "killed", "bundle": ""}))
    assert replaying.find(str(folder)) == Path(first.files["bundle"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Path:
    """A folder with weights, for additions."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        run(folder / "run", {**OF_FAMILY["llada"], "training.max_steps": 1}, family="llada")
    return inference.export_run(folder / "run" / "checkpoints" / "step_00000001", folder / "weights", "bf16")


def test_additions_to_frozen_weights(broken: Any, base: Path) -> None:
    """The bundle holds the additions only; the frozen weights are read again, and others are refused."""
    model = {"model.model_path": str(base), "model.init": "pretrained", "model.lora_rank": 4}
    finding = broken("nan_act@step=1,module=layers.1.mlp.w1", "llada", **model)
    assert finding.place.module.startswith("layers.1.mlp.w1")
    folder = Path(finding.files["bundle"])
    assert (folder / "model.safetensors").stat().st_size < (base / hf.WEIGHTS_FILE).stat().st_size / 2
    brought_back(finding)
    from safetensors.torch import load_file, save_file

    weights = load_file(base / hf.WEIGHTS_FILE)
    name = "model.transformer.blocks.1.up_proj.weight"
    save_file({**weights, name: weights[name] + 1}, base / hf.WEIGHTS_FILE)
    with pytest.raises(DataError, match="frozen weights have changed"):
        replay(folder, device="cpu")


# ----------------------------------------------------------------------------------- verdicts, each by its real cause


def test_a_kernel_that_is_wrong(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the fast attention makes it: the plain one does not."""
    right = attention.attend

    def wrong(q: Tensor, k: Tensor, v: Tensor, *, backend: str, **named: Any) -> Tensor:
        made = right(q, k, v, backend=backend, **named)
        return made / 0 if backend == "native_flash" and torch.is_grad_enabled() else made

    from lockstep.models import layers

    monkeypatch.setattr(layers, "attend", wrong)
    finding = broken("")
    assert finding.place.module == "layers.0.attention"
    assert brought_back(finding) == "kernel: it goes away with plain attention"
    monkeypatch.setattr(layers, "attend", lambda *args, **named: right(*args, **named) / 0)
    assert brought_back(finding).startswith("model: "), "control: every attention is wrong"


def test_a_row_of_the_third_micro_batch(broken: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gradients of three micro-batches are one sum: which of them it was is said, and one row of it can be left out."""
    settings = {"training.grad_accum_nums": 3, "training.max_steps": 2}
    forward, seen = Llama.forward, list[Tensor]()

    def recording(self: Llama, inputs: Tensor, *args: Any, **named: Any) -> Any:
        seen.append(inputs.clone())
        return forward(self, inputs, *args, **named)

    monkeypatch.setattr(Llama, "forward", recording)
    run(tmp_path / "well", {**OF_FAMILY["llama"], **settings})
    row = seen[8][1]  # three of the rehearsal, three of step 0, and the third of step 1

    def delicate(self: Llama, inputs: Tensor, *args: Any, **named: Any) -> Any:
        total = forward(self, inputs, *args, **named)
        return total / 0 if (inputs == row).all(1).any() else total

    monkeypatch.setattr(Llama, "forward", delicate)
    finding = broken("", **settings)
    assert (finding.step, finding.place.module, finding.place.batch) == (1, "model", 2)
    ids = finding.row_ids
    assert len(ids) == 6
    assert f"micro-batch 2 of 3: rows {ids[4]}, {ids[5]}" in finding.notes
    assert brought_back(finding, drop=4).startswith("model: ")
    assert brought_back(finding, drop=5) == f"data: it goes away without sample 5 (row {ids[5]} of the table)"
