"""mlm_pretrain_v3.py under torchrun and accelerate when something happens (contract items 51-54, 62, 67, 161, 162)."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gates.training import FEW_DOCUMENTS
from tests.launch_foreign.foreign import LAUNCHERS, ROOT, Foreign, bits_of, events_of, failure_of, last_block, start

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TRAINER = str(ROOT / "doors" / "mlm" / "mlm_pretrain_v3.py")
WORDS = ("--device", "cpu", "--data-path", FEW_DOCUMENTS, "--no-streaming", "--batch-size", "3", "--max-seq-len", "32",
         "--vocab-size", "400", "--epochs", "20", "--lr", "1e-3", "--name", "run", "report.tensorboard=false",
         "training.eval_batches=1", "training.save_interval=10", "report.log_interval=1", "system.hang_seconds=5",
         "debug.digest_interval=1")  # fmt: skip
FAULTS = {  # kind -> (exit code in failure.json, words of the cause)
    "kill": (137, "killed by SIGKILL (out of memory?)"),
    "raise": (1, "InjectedFault"),
    "exit": (7, "exited with code 7"),
    "hang": (124, "hangs: no sign of life"),
    "nan_grad": (71, "is nan"),
}
RESULTS = ".mlm_pretrained_v3"
SECONDS = 150.0


def begin(launcher: str, folder: Path, fault: str = "", *words: str) -> Foreign:
    return start(launcher, TRAINER, *WORDS, *words, cwd=folder, variables={"LOCKSTEP_FAULT": fault} if fault else {})


def events(folder: Path) -> list[dict[str, Any]]:
    return events_of(folder / "runs/run")


def losses(folder: Path) -> dict[int, tuple[str, str, str]]:
    return bits_of(folder / "runs/run")


def check_results(folder: Path) -> int:
    """Whatever lies under a documented name is whole; how many epochs are told."""
    weights = torch.load(folder / RESULTS / "mlm_model.pth", weights_only=True)
    assert "mlm_head.weight" in weights
    assert not list((folder / RESULTS).glob("*.tmp*"))
    history = json.loads((folder / RESULTS / "mlm_training_history.json").read_text())
    assert len(history["train_losses"]) == len(history["val_losses"])
    return len(history["train_losses"])


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize("kind", list(FAULTS))
def test_a_fault_ends_all_and_has_the_last_word(launcher: str, kind: str, tmp_path: Path, shared_cache: Path) -> None:
    """Some epochs are done by then: their result files stay as they were, and no checkpoint follows the fault."""
    extra = ",code=7" if kind == "exit" else ",where=forward" if kind == "raise" else ""
    foreign = begin(launcher, tmp_path, f"{kind}@rank=1,step=17{extra}")
    code, output = foreign.finish(SECONDS)
    exit_code, cause = FAULTS[kind]
    assert code == 1, output
    block = last_block(output)
    assert block, output
    record = failure_of(tmp_path / "runs/run")
    assert record["exit_code"] == exit_code, output
    if kind == "nan_grad":  # the sum over all ranks has it, and the weights have not
        assert f"step 17: gradient norm {cause}" in output
    else:
        assert block[0] == "[FAILURE] Training failed on GPU 1"
        assert cause in block[1]
        assert record["rank"] == 1
    assert foreign.survivors() == []
    assert "MLM pre-training completed!" not in output
    assert 1 <= check_results(tmp_path) < 20
    saved = {int(path.name[5:]) for path in (tmp_path / "runs/run/checkpoints").glob("step_????????")}
    assert max(saved) <= 17


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_sigterm_saves_and_the_same_command_goes_on_to_the_same_bits(
    launcher: str, tmp_path: Path, shared_cache: Path
) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    code, output = begin(launcher, tmp_path / "whole").finish(SECONDS)
    assert code == 0, output
    whole, cut = losses(tmp_path / "whole"), tmp_path / "cut"
    assert sorted(whole) == list(range(len(whole)))
    foreign = begin(launcher, cut, "hang@seconds=0.1")
    foreign.reaches(cut / "runs/run", 13, SECONDS)
    foreign.process.send_signal(signal.SIGTERM)
    code, output = foreign.finish(SECONDS)
    assert code != 0, output
    assert foreign.survivors() == []
    last = max(losses(cut))
    assert 13 <= last < len(whole) - 1, "it stopped"
    code, output = begin(launcher, cut).finish(SECONDS)
    assert code == 0, output
    (resumed,) = [event for event in events(cut) if event["kind"] == "resume"]
    assert resumed["step"] == last + 1
    assert losses(cut) == whole
    assert check_results(cut) == 20
    history = [(tmp_path / name / RESULTS / "mlm_training_history.json").read_text() for name in ("whole", "cut")]
    assert history[0] == history[1]
