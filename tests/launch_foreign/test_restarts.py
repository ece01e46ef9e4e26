"""`torchrun --max-restarts` and accelerate's: the next round goes on with the run of the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.rundir import sha256
from tests.launch_foreign.foreign import LAUNCHERS, start

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FLAGS = {"torchrun": ("--max-restarts", "2"), "accelerate": ("--max_restarts", "2")}
WORDS = (
    *("-m", "lockstep", "train", "llama", "tiny", "--device", "cpu", "--system.hang_seconds", "5"),
    *("--max-steps", "60", "training.save_interval=20", "report.sample_prompt="),
)


def weights(root: Path) -> str:
    return sha256(root / "checkpoints/step_00000060/model.safetensors")


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize("name", [("--name", "run"), ()])
def test_rounds_are_one_run(launcher: str, name: tuple[str, ...], tmp_path: Path, shared_cache: Path) -> None:
    """Killed before the first checkpoint, and a hang after it; the bits are those of the undisturbed run."""
    whole = start(launcher, *WORDS, "--out", "whole", "--name", "run", cwd=tmp_path)
    assert whole.finish(90)[0] == 0
    fault = {"LOCKSTEP_FAULT": "kill@rank=1,step=7,round=0;hang@rank=0,step=30,round=1"}
    foreign = start(launcher, *FLAGS[launcher], *WORDS, *name, cwd=tmp_path, variables=fault)
    code, output = foreign.finish(120)
    assert code == 0, output
    (root,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert weights(root) == weights(tmp_path / "whole/run")
    events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(60))
    assert [event["exit_code"] for event in events if event["kind"] == "restart"] == [137, 124]
    assert output.count("[RESTART]") == 2
    assert output.count("[FAILURE]") == 2
    assert "Resuming from step 20" in output
    assert foreign.survivors() == []


def test_our_flag_is_not_theirs(tmp_path: Path, shared_cache: Path) -> None:
    """`--restarts` where torchrun is the launcher: said, and not silently left out."""
    foreign = start("torchrun", *WORDS, "--restarts", "2", "--name", "run", cwd=tmp_path)
    code, output = foreign.finish(90)
    assert (code, output.count("[WARNING] --restarts is for our own launcher")) == (0, 1), output
