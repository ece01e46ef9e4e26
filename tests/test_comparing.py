"""`lockstep diff A B`: settings by role, surroundings, data, the first step and the first tensor with other bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep import comparing, rundir
from lockstep.comparing import read
from lockstep.engine import likeness
from lockstep.engine.checkpoint import MODEL, OPTIMIZER
from lockstep.errors import ExitCode
from lockstep.health import records
from lockstep.report import losses
from lockstep.report.jsonl import read_events
from tests.conftest import Outcome
from tests.test_proving import OF_FAMILY, train

Cli = Callable[..., Outcome]

pytestmark = pytest.mark.usefixtures("shared_cache")


def section(text: str, name: str) -> list[str]:
    """The lines that stand under a heading."""
    lines = text.splitlines()
    if f"{name}: equal" in lines:
        return []
    begin = lines.index(name) + 1
    end = next(place for place in range(begin, len(lines)) if not lines[place].startswith("  "))
    return [line.strip() for line in lines[begin:end]]


def change(run: Path, file: str, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = run / file
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def test_runs_of_the_same_command_are_equal(in_dir: Path, lockstep: Cli) -> None:
    """But for their names. Then one of them is changed, one thing after the other: each is found, and nothing else."""
    for name in ("one", "two"):
        train(lockstep, name)
    same = lockstep("diff", "one", "two")
    assert same.code == 0, same.text
    assert section(same.out, "cosmetic") == ['run.name: "one" | "two"']
    assert section(same.out, "steps") == ["4 compared, losses and gradient norms equal to the bit"]
    assert section(same.out, "tensors") == ["equal in the checkpoints after 2, 4 steps"]
    assert same.out.splitlines()[-1] == "Equal"
    told = json.loads(lockstep("diff", "one", "two", "--json").out)
    assert (told["equal"], told["compared_steps"], told["compared_checkpoints"]) == (True, 4, [2, 4])

    def with_about(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda run: run | {"about": run["about"] | changes}

    newest = "checkpoints/step_00000004/run.json"
    about = read(Path("runs/one")).about
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in about["config"].items()}
    rate = settings["training"]["learning_rate"]
    settings["training"]["learning_rate"] = 0.5
    settings["system"]["gpus"] = "2"
    for changes, place, words in (
        ({"config": settings}, "identity", f"training.learning_rate: {rate} | 0.5"),
        ({"config": settings}, "layout", 'system.gpus: "all" | "2"'),
        ({"versions": about["versions"] | {"torch": "1.0"}}, "environment", f'torch: "{torch.__version__}" | "1.0"'),
        ({"threads": 7}, "environment", "threads: 1 | 7"),
        ({"data_key": "other"}, "data", f'data key: "{about["data_key"]}" | "other"'),
        ({"determinism": "none"}, "determinism", f'label: "{about["determinism"]}" | "none"'),
    ):  # fmt: skip
        other = shutil.copytree(Path("runs/two"), Path("runs/other"))
        change(other, newest, with_about(**changes))
        shutil.rmtree("runs/other/checkpoints/step_00000002")
        rundir.seal(reset(other / "checkpoints" / "step_00000004"))
        found = lockstep("diff", "one", "other")
        assert found.code == ExitCode.FAILED, found.text
        assert words in section(found.out, place)
        assert found.out.splitlines()[-1] == "Different, with the same bits as far as both are on record"
        shutil.rmtree(other)


def reset(checkpoint: Path) -> Path:
    """Without its manifest."""
    (checkpoint / rundir.MANIFEST).unlink()
    return checkpoint


def test_the_first_step_and_tensor_are_named(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that flips after step 2: the checkpoint before is equal, the loss after it is not."""
    train(lockstep, "sound")
    with monkeypatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", "flip_weight@rank=0,step=2,tensor=norm.weight,index=5,bit=21")
        train(lockstep, "hurt", steps=4)
    found = lockstep("diff", "sound", "hurt", "--json")
    assert found.code == ExitCode.FAILED
    told = json.loads(found.out)
    assert told["configuration"]["identity"] == told["configuration"]["layout"] == told["environment"] == []
    assert (told["first_step"]["step"], told["first_step"]["what"]) == (3, "loss")
    assert told["first_step"]["one"] != told["first_step"]["other"]
    assert told["first_tensor"]["step"] == 3
    assert 0 < told["first_tensor"]["differing_elements"] <= told["first_tensor"]["elements"]
    assert told["first_tensor"]["name"].startswith("weights:")
    shown = lockstep("diff", "sound", "hurt").out
    assert section(shown, "steps")[0].startswith("first difference at step 3: loss 0x")
    assert "Different" in shown.splitlines()[-1]


def test_a_shorter_run_is_another(in_dir: Path, lockstep: Cli) -> None:
    train(lockstep, "whole")
    part = shutil.copytree(Path("runs/whole"), Path("runs/part"))
    lines = (part / "events.jsonl").read_text().splitlines(keepends=True)
    (part / "events.jsonl").write_text("".join(line for line in lines if '"step":3,' not in line))
    found = lockstep("diff", "whole", "part")
    assert found.code == ExitCode.FAILED
    assert section(found.out, "steps") == ["3 compared, losses and gradient norms equal to the bit (A has 4, B has 3)"]


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in OF_FAMILY if name != "ad"])
def test_families_have_little_in_common(family: str, in_dir: Path, lockstep: Cli) -> None:
    """A run of each beside an agent's: no traceback, and the family is the first thing that is said."""
    train(lockstep, "agent", family="ad", steps=2)
    train(lockstep, "run", family=family, steps=2)
    found = lockstep("diff", "run", "agent")
    assert found.code == ExitCode.FAILED, found.text
    assert section(found.out, "identity")[0] == f'family: "{family}" | "ad"'


def test_replicas_tell_the_tensor_of_the_very_step(in_dir: Path) -> None:
    """By their fingerprints, where no checkpoint is so near."""
    from lockstep.comparing import _by_fingerprints
    from lockstep.health import records

    names = ["gradients:a", "weights:a"]
    for name, sums in (("one", ("0", "1", "2")), ("two", ("0", "1", "3"))):
        file = in_dir / name / "workers" / "n0-GPU0" / records.FILE
        file.parent.mkdir(parents=True)
        stamps = [records.line("step", step=step, sums="0" * 32 + digit * 32) for step, digit in enumerate(sums)]
        file.write_text("\n".join([records.line("workload", workload="train", tensors=names), *stamps]) + "\n")
    found = _by_fingerprints(in_dir / "one", in_dir / "two")
    assert found is not None
    assert (found.step, found.name) == (2, "weights:a")
    assert _by_fingerprints(in_dir / "one", in_dir / "one") is None
    assert _by_fingerprints(in_dir / "one", in_dir / "nowhere") is None


# ------------------------------------------------------------------------------------------------ bits


def saved(folder: Path, weights: dict[str, torch.Tensor], **progress: Any) -> Path:
    """A checkpoint of these weights."""
    with rundir.publishing(folder) as staged:
        save_file(weights, staged / MODEL)
        save_file({}, staged / OPTIMIZER)
        run = {"progress": {"step": 1, **progress}, "loss_scale": None, "about": {}}
        (staged / "run.json").write_text(json.dumps(run))
    return folder


def test_every_bit_counts(tmp_path: Path) -> None:
    """-0 is not 0, NaN is itself, and another type or shape is another tensor."""
    plain = {"a": torch.tensor([[0.0, float("nan")], [1.0, 2.0]]), "b": torch.ones(3, dtype=torch.bfloat16)}
    one = saved(tmp_path / "one", plain)
    assert likeness.compare(one, saved(tmp_path / "same", plain)).equal
    signed = {**plain, "a": torch.tensor([[-0.0, float("nan")], [1.0, 2.5]])}
    found = likeness.compare(one, saved(tmp_path / "signed", signed))
    assert (found.tensors, [(each.name, each.differing, each.place) for each in found.differing]) == (2, [("a", 2, 0)])
    assert found.differing[0].values == ("0x0.0p+0", "-0x0.0p+0")
    half = {**plain, "b": torch.ones(3, dtype=torch.float16)}
    assert "weights b: bfloat16 (3,) | float16 (3,)" in likeness.compare(one, saved(tmp_path / "half", half)).text()
    more = {**plain, "c": torch.ones(1)}
    assert "weights c: nothing | float32 (1,)" in likeness.compare(one, saved(tmp_path / "more", more)).text()
    counted = likeness.compare(one, saved(tmp_path / "counted", plain, tokens=5))
    assert counted.counts == (("tokens", None, 5),)
    assert not counted.equal


def test_losses_are_compared_by_their_bits() -> None:
    def steps(*values: float, digest: str = "") -> dict[int, dict[str, Any]]:
        return {
            at: {"loss_hex": value.hex(), "grad_norm_hex": "0x1p0", "digest": digest} for at, value in enumerate(values)
        }

    assert losses.compare(steps(1.0, float("nan")), steps(1.0, float("nan"), 3.0)) == losses.Compared(2, None)
    first = losses.compare(steps(1.0, 2.0), steps(1.0, 2.0 + 2**-51)).first
    assert first is not None
    assert (first.step, first.what, first.one) == (1, "loss", "0x1.0000000000000p+1")
    digests = losses.compare(steps(1.0, digest="x"), steps(1.0, digest="y")).first
    assert digests is not None
    assert digests.what == "digest"
    assert losses.compare(steps(1.0, digest="x"), steps(1.0)).first is None, "one that was not taken says nothing"


def test_what_is_no_run(in_dir: Path, lockstep: Cli) -> None:
    refused = lockstep("diff", "here", "there")
    assert refused.code == ExitCode.NOT_FOUND
    assert "Traceback" not in refused.text


def test_checkpoints_of_a_run_are_not_taken_for_the_run(in_dir: Path, lockstep: Cli) -> None:
    """Which would be equal to itself."""
    run = rundir.RunDir(in_dir / "runs" / "a")
    rundir.write_json(run.config, {"family": "llama", "preset": "tiny", "config": {}})
    one, other = run.checkpoint(1), run.checkpoint(2)
    for checkpoint in (one, other):
        rundir.write_json(checkpoint / rundir.MANIFEST, {})
    for words in ((one, other), ("a", other), (one, "a")):
        refused = lockstep("diff", *map(str, words))
        assert refused.code == ExitCode.USAGE, refused.text
        assert ": is a checkpoint, and runs are compared\n  try: " in refused.err
        assert f"lockstep resume {run.root} --prove" in refused.err


def test_files_of_others_are_read_as_far_as_they_make_sense(tmp_path: Path) -> None:
    """Values of the wrong kind where ours would be: nothing to compare, and no traceback."""
    run = rundir.RunDir(tmp_path)
    strange = [{"kind": "resume", "step": "x"}, {"kind": "start", "step": []}, {"kind": "step", "step": 0}]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in strange))
    assert [event["kind"] for event in read_events(run.events)] == ["resume", "start", "step"]
    stamp = tmp_path / "workers/n0-GPU0" / records.FILE
    stamp.parent.mkdir(parents=True)
    stamp.write_text(
        "".join(records.line(kind="step", **more) + "\n" for more in ({}, {"step": "x"}, {"step": 0, "no": 1}))
    )
    assert comparing._by_fingerprints(tmp_path, tmp_path) is None
    told = comparing.Told(tmp_path, "llama", {}, {"versions": ["x"]}, {}, {"variables": 1, "versions": "x"}, {}, {})
    assert told.facts == replace(told, about={"versions": {}}).facts
    assert replace(told, about={}).facts["device_name"] is None


def test_a_gradient_norm_counts_as_a_loss_does() -> None:
    """A digest only where both have one."""
    one = {0: {"loss_hex": "0x1p+0", "grad_norm_hex": "0x1p+1"}}
    other = {0: {"loss_hex": "0x1p+0", "grad_norm_hex": "0x1p+2", "digest": "d"}}
    assert losses.compare(one, other).first == losses.FirstDifference(0, "grad_norm", "0x1p+1", "0x1p+2")
    other[0]["grad_norm_hex"] = "0x1p+1"
    assert losses.compare(one, other) == losses.Compared(1, None)
    one[0]["digest"] = "e"
    assert losses.compare(one, other).first == losses.FirstDifference(0, "digest", "e", "d")


@pytest.mark.parametrize(("stamped", "first"), [(2, (2, "stamp")), (3, (3, "step: 1 | 2")), (5, (3, "step: 1 | 2"))])
def test_whichever_shows_a_tensor_first(
    stamped: int, first: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fingerprint after a step, or the checkpoint after 4 steps, which says more of the same step."""
    told = comparing.Told(tmp_path, "llama", {}, {}, {}, {}, {}, {4: tmp_path})
    monkeypatch.setattr(comparing, "_by_fingerprints", lambda *_: comparing.FirstTensor(stamped, "stamp"))
    monkeypatch.setattr(likeness, "compare", lambda *_: likeness.Likeness(1, (), (("step", 1, 2),)))
    found = comparing.first_tensor(told, told, [4])
    assert found
    assert (found.step, found.text) == first


def test_lines_fit_80_columns_and_lose_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["bitwise, also on other numbers of workers, with the kernels named above" + end for end in ("", " only")]
    name, ours, theirs = f"weights model.{'layers.' * 12}weight", "0x1.0000000000000p+1", "0x1.0000000000001p+1"
    tensor = f"12 of 24 tensors differ, first {name}, 5 of 1,234 elements, the first at 1,111: {ours} | {theirs}"
    found = comparing.Comparison(
        a=f"runs/{'a long name ' * 10}", b="runs/b", environment=[comparing.Pair("threads", 1, 7)], data=None,
        configuration={"identity": [comparing.Pair("data.data_path", "x" * 50, None)], "layout": [], "cosmetic": []},
        determinism=comparing.Pair("label", *labels), label="", steps=(123_456, 3), compared_steps=3,
        first_step={"step": 3, "what": "grad_norm", "one": ours, "other": theirs},
        first_tensor=comparing.FirstTensor(3, tensor),
    )  # fmt: skip
    monkeypatch.setattr(comparing, "read", lambda root: root)
    monkeypatch.setattr(comparing, "compare", lambda *_: found)
    assert comparing.diff(tmp_path, tmp_path) == ExitCode.FAILED
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == f"A  {found.a}", "a path is never broken"
    assert [line for line in lines[1:] if len(line) > 80 and name.split()[1] not in line] == []
    assert section(shown, "identity") == [f'data.data_path: "{"x" * 50}" | null']
    assert section(shown, "determinism") == ["label", *(f'{side}  "{labels[0][:56]}...' for side in "AB")]
    together = f"first difference at step 3: grad_norm {ours} | {theirs} (A has 123456, B has 3)"
    assert " ".join(section(shown, "steps")) == together
    assert " ".join(section(shown, "tensors")) == f"after step 3: {tensor}"
