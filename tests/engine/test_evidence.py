"""Items 62-65: the report to the letter, the files at their documented places, each once, readable with numpy alone."""

from __future__ import annotations

import json
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.health import words
from lockstep.health.finding import Finding, Place, Table
from tests.conftest import Outcome
from tests.engine.bad_steps import ALL_BUT_SLOWLY

Cli = Callable[..., Outcome]
GOLDEN = (Path(__file__).parents[1] / "golden" / "nan_report.txt").read_text(encoding="utf-8").splitlines()
QUICK = (
    "--device", "cpu", "--max-steps", "4", "training.eval_batches=1", "training.eval_interval=0", "system.threads=1",
    "training.save_interval=0", "training.checkpoint_dir=.checkpoints",
)  # fmt: skip
SNIPPET = """
import sys
sys.modules['torch'] = None  # as where it is not installed: whatever asks for it fails
import pickle
import numpy as np
with open('.checkpoints/debug/nan_debug_step_0.pkl', 'rb') as f: debug_data = pickle.load(f)
print(debug_data['step'])
for name, param in debug_data['parameters'].items():
    if np.isnan(param).any(): print('parameter', name)
for name, grad in debug_data['gradients'].items():
    if np.isnan(grad).any(): print(f"{name}: {np.isnan(grad).sum() / grad.size:.1%} {grad.dtype}")
"""
pytestmark = pytest.mark.usefixtures("shared_cache")


def table(name: str, *shape: int) -> Table:
    size = int(np.prod(shape))
    return Table(name, shape, "float32", size, size, 0, None, None, ("NaN",) * 5)


DOCUMENTED = Finding(
    kind="nan_grad",
    step=0,
    loss=12.6087,
    grad_norm=float("nan"),
    rank=6,
    gpu="GPU6",
    ranks=(6,),
    reproduced=True,
    gradients=(
        table("tok_embed.weight", 128256, 4096),
        table("layers.0.attention.wq.weight", 4096, 4096),
        *(table(f"layers.{number}.mlp.w1.weight", 8, 8) for number in range(13)),
    ),
    files={"checkpoint": ".checkpoints/nan_grad_step_0.pt", "debug": ".checkpoints/debug/nan_debug_step_0.pkl"},
)


def test_the_documented_report_to_the_letter() -> None:
    assert words.report(DOCUMENTED)[: len(GOLDEN)] == GOLDEN
    assert words.report(DOCUMENTED)[-3:] == ["=" * 80, "EXITING DUE TO NaN [GPU 6]", "=" * 80]


def test_a_letter_more_is_seen() -> None:
    """Negative control."""
    assert words.report(replace(DOCUMENTED, loss=12.60871))[: len(GOLDEN)] == GOLDEN
    for other in (replace(DOCUMENTED, loss=12.7), replace(DOCUMENTED, gpu="GPU7"), replace(DOCUMENTED, step=1)):
        assert words.report(other)[: len(GOLDEN)] != GOLDEN


def report_of(told: Outcome, start: str) -> list[str]:
    """The lines of a report on the screen, without the label before them."""
    lines = [
        line.removeprefix("[GPU6]").removeprefix(" ") if line.startswith("[GPU6]") else line
        for line in told.out.splitlines()
    ]
    first = next(number for number, line in enumerate(lines) if start in line) - 1
    last = next(number for number, line in enumerate(lines) if "EXITING DUE TO" in line)
    return lines[first : last + 2]


def test_a_nan_gradient_on_gpu_6(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 62: the golden file with the sizes, the loss and the names that are this model's."""
    monkeypatch.setenv("GPU_RANK", "6")
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_grad@step=0;nan_grad@step=0,tensor=layers.0.attention.wq.weight")
    told = lockstep("train", "llama", "tiny", *QUICK, "debug.enabled=true")
    assert told.code == 71
    lines = report_of(told, "NaN GRADIENT DETECTED")
    loss = next(line for line in lines if line.startswith("Loss: "))
    here = {
        "Loss: 12.6087": loss,
        "(15 layers)": "(2 layers)", "gradients: 15": "gradients: 2", ".weight', ...]": ".weight']",
        "[128256, 4096]": "[512, 64]", "[4096, 4096]": "[64, 64]", "525336576": "32768", "16777216": "4096",
    }  # fmt: skip
    wanted = "\n".join(GOLDEN)
    for one, other in here.items():
        assert one in wanted
        wanted = wanted.replace(one, other)
    wanted = wanted.split("\n")
    assert lines[: len(wanted)] == wanted
    assert (in_dir / ".checkpoints" / "nan_grad_step_0.pt").is_file()


@pytest.mark.parametrize("debug", [True, False])
def test_files_of_a_nan_gradient(debug: bool, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items 63 and 64: one file each, the dump in debug mode only; the seeds' snippet needs numpy only."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_grad@step=0,tensor=layers.0.attention.wq.weight")
    told = lockstep("train", "llama", "tiny", *QUICK, f"debug.enabled={debug}".lower(), "--precision", "bf16")
    assert told.code == 71
    assert ("Debug tensors saved: .checkpoints/debug/nan_debug_step_0.pkl" in told.out) == debug
    found = sorted(
        path.relative_to(in_dir).as_posix() for path in (in_dir / ".checkpoints").rglob("*") if path.is_file()
    )
    dump = [".checkpoints/debug/nan_debug_step_0.pkl"] if debug else []
    assert found == [*dump, ".checkpoints/nan_grad_step_0.pt"]
    content = torch.load(in_dir / ".checkpoints" / "nan_grad_step_0.pt", weights_only=True)
    keys = {
        "global_step",
        "epoch",
        "model_state_dict",
        "optimizer_state_dict",
        "scheduler_state_dict",
        "best_loss",
        "config",
    }
    assert keys <= content.keys()
    assert all(torch.isfinite(tensor).all() for tensor in content["model_state_dict"].values())
    if debug:
        ran = subprocess.run([sys.executable, "-c", SNIPPET], capture_output=True, text=True, check=True, cwd=in_dir)
        assert ran.stdout.splitlines() == ["0", "layers.0.attention.wq.weight: 100.0% float32"]


def test_bf16_is_stored_as_float32(tmp_path: Path) -> None:
    from lockstep.engine.evidence import _arrays

    arrays: Any = _arrays([("w", torch.ones(3, dtype=torch.bfloat16)), ("n", torch.arange(2))], keep=True)
    assert arrays["w"].dtype == np.float32
    assert arrays["n"].dtype == np.int64
    assert arrays["w"].tolist() == [1, 1, 1]


REPORTS = [
    ("nan_loss", "NaN LOSS DETECTED", "nan_loss_step_3"),
    ("inf_loss", "Inf LOSS DETECTED", "nan_loss_step_3"),
    ("inf_grad", "Inf GRADIENT DETECTED", "nan_grad_step_3"),
    ("nan_weight", "NaN PARAMETER DETECTED", "nan_loss_step_3"),
]


@pytest.mark.parametrize(("kind", "title", "file"), REPORTS)
def test_each_has_its_own_report(
    kind: str, title: str, file: str, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 65, outside debug mode and without clipping."""
    step = 2 if kind == "nan_weight" else 3
    monkeypatch.setenv(
        "LOCKSTEP_FAULT",
        f"{kind}@step={step},tensor=layers.1.mlp.w2.weight" if "loss" not in kind else f"{kind}@step={step}",
    )
    told = lockstep("train", "llama", "tiny", *QUICK, "training.max_grad_norm=0", "--name", "bad")
    assert told.code == 71
    lines = report_of(told, title)
    assert "Step: 3" in lines
    assert f"Checkpoint saved: .checkpoints/{file}.pt" in lines
    assert [path.name for path in (in_dir / ".checkpoints").iterdir()] == [f"{file}.pt"]
    failure = json.loads((in_dir / "runs" / "bad" / "failure.json").read_text())
    assert failure["step"] == 3
    assert failure["module"] == ("loss" if "loss" in kind else "layers.1.mlp.w2")
    assert len(failure["rows"]) == 4
    assert failure["ranks"] == [0]
    again = lockstep("replay", failure["bundle"])
    assert again.code == 0, again.text
    assert "Verdict: " in again.out


def test_what_is_kept_can_be_chosen(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_act@step=1,module=norm")
    place = Path("workers/n0-CPU/faults/step_000001")
    for kept in ("full", "no_weights", "off"):
        assert lockstep("train", "llama", "tiny", *QUICK, f"debug.bundle={kept}", "--name", kept).code == 71
        folder = in_dir / "runs" / kept / place
        assert folder.is_dir() == (kept != "off")
        assert (folder / "model.safetensors").is_file() == (kept == "full")
        if kept != "off":
            assert lockstep("replay", str(folder)).code == 0
    (in_dir / "runs" / "no_weights" / "checkpoints" / "step_00000001").rename(in_dir / "gone")
    gone = lockstep("replay", str(in_dir / "runs" / "no_weights" / place))
    assert gone.code == 66
    assert "the checkpoint it names is gone" in gone.err


def test_replay_says_what_makes_it_go_away(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real overflow of fp16, all that is tried, and a row that is not to blame."""
    from lockstep.models.layers import SwiGLU

    forward = SwiGLU.forward

    def large(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x * 3e4) / 3e4

    monkeypatch.setattr(SwiGLU, "forward", large)
    told = lockstep("train", "llama", "tiny", *QUICK, "--precision", "fp16", "--name", "fp16")
    assert told.code == 71, told.text
    bundle = json.loads((in_dir / "runs" / "fp16" / "failure.json").read_text())["bundle"]
    whole = lockstep("replay", bundle)
    assert whole.code == 0, whole.text
    assert "in fp32: finite" in whole.out
    assert "Verdict: overflow" in whole.out
    asked = json.loads(lockstep("replay", "latest", "--drop-sample", "1", "--json").out)
    assert [(each["change"], each["finite"]) for each in asked["tried"]] == [
        ("as it was", False), ("in fp32", True), ("with plain attention", False), ("without sample 1", False),
    ]  # fmt: skip
    assert lockstep("replay", bundle, "--drop-sample", "4").code == 2
    monkeypatch.setattr(SwiGLU, "forward", forward)
    fine = lockstep("replay", bundle)
    assert fine.code == 1
    assert "hardware-suspect" in fine.out


def test_a_row_that_breaks_the_model(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rare letter is more than the model can bear: without the row that has it, the step is finite."""
    from lockstep.models.llama import Llama

    forward, letter = Llama.forward, ord("Z")

    def delicate(self: Llama, inputs: torch.Tensor, *args: Any, **named: Any) -> Any:
        total = forward(self, inputs, *args, **named)
        return total / 0 if torch.is_grad_enabled() and bool((inputs == letter).any()) else total

    monkeypatch.setattr(Llama, "forward", delicate)
    flags = ("--max-steps", "200", "--name", "delicate", "training.checkpoint_dir=")
    told = lockstep("train", "llama", "tiny", *QUICK, *flags)
    assert told.code == 71, told.text
    failure = json.loads((in_dir / "runs" / "delicate" / "failure.json").read_text())
    assert (failure["module"], failure["operation"]) == ("model", "div (aten.div.Tensor)")
    from safetensors.torch import load_file

    rows = load_file(Path(failure["bundle"]) / "batch.safetensors")["0.tokens"][:, :-1]
    guilty = (rows == letter).any(1).nonzero().flatten().tolist()
    assert len(guilty) == 1, "the letter is rare"
    innocent = lockstep("replay", "delicate", "--drop-sample", str((guilty[0] + 1) % len(rows)))
    assert "Verdict: model: model does it in every way that was tried" in innocent.out
    done = lockstep("replay", "delicate", "--drop-sample", str(guilty[0]))
    assert done.code == 0, done.text
    wanted = f"data: it goes away without sample {guilty[0]} (row {failure['rows'][guilty[0]]} of the table)"
    assert wanted in done.out


def test_a_damaged_bundle_is_refused(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_loss@step=1")
    assert lockstep("train", "llama", "tiny", *QUICK, "--name", "bad").code == 71
    folder = in_dir / "runs" / "bad" / "workers" / "n0-CPU" / "faults" / "step_000001"
    content = bytearray((folder / "batch.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "batch.safetensors").write_bytes(content)
    assert lockstep("replay", str(folder)).code == 65
    assert lockstep("replay", str(folder.parent)).code == 65
    assert lockstep("replay", "nowhere").code == 66


def test_the_words_of_a_place() -> None:
    place = Place("forward", "layers.1.mlp.w1", "mm (aten.mm.default)", "models/layers.py:98: x", eager=False)
    assert place.brief() == "layers.1.mlp.w1 (forward, mm) (only in the compiled block)"
    assert "at models/layers.py:98: x" in place.text()


def test_what_rows_say_cannot_reach_the_terminal() -> None:
    hostile = replace(DOCUMENTED, texts=("\x1b[2J\x1b]0;owned\x07\u202ehidden\r\n",))
    lines = words.report(hostile)
    assert all(line.isprintable() or "⚠️" in line for line in lines)
    assert any("hidden" in line for line in lines)


@pytest.mark.parametrize("family", ALL_BUT_SLOWLY)
def test_every_family_keeps_the_documented_files(family: str, broken: Any, tmp_path: Path) -> None:
    """Items 63 and 64 for each family: the state before the step, and a dump of nothing but numpy."""
    name = "layers.0.attention.wo.weight"
    place = {"training.checkpoint_dir": str(tmp_path / "kept"), "debug.enabled": True}
    finding = broken(f"nan_grad@step=1,tensor={name}", family, **place)
    assert sorted(path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()) == [
        "nan_debug_step_1.pkl", "nan_grad_step_1.pt",
    ]  # fmt: skip
    content = torch.load(finding.files["checkpoint"], weights_only=True)
    assert content["global_step"] == 1
    dump = Path(finding.files["debug"]).read_bytes()
    asked = {str(argument) for _, argument, _ in pickletools.genops(dump) if isinstance(argument, str)}
    assert not [word for word in asked if word.partition(".")[0] in ("torch", "lockstep")]
    debug_data = pickle.loads(dump)  # noqa: S301 - our own, as the seeds do it
    assert debug_data["step"] == 1
    assert content["model_state_dict"].keys() == debug_data["parameters"].keys()
    bad = {key: np.isnan(grad).sum() / grad.size for key, grad in debug_data["gradients"].items()}
    assert {key: share for key, share in bad.items() if share} == {name: 1.0}
    lines = words.report(finding)
    assert f"Debug tensors saved: {finding.files['debug']}" in lines
    assert [line.split(" (")[0] for line in lines if "•" in line] == [f"  • {name}"]
