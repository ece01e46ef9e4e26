"""Rows 38, 40 and 43 of the fault matrix: secrets stay secret, files stay inside, permissions are the user's."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import compat
from tests.conftest import Outcome

Cli = Callable[..., Outcome]
QUICK = ("--device", "cpu", "--max-steps", "2", "training.eval_batches=1", "training.checkpoint_dir=.checkpoints")
CANARIES = {
    "HF_TOKEN": "hf_canaryCANARYcanary1",
    "WANDB_API_KEY": "wandbCANARYcanary2",
    "AWS_SECRET_ACCESS_KEY": "awsCANARYcanary3",
    "AWS_SESSION_TOKEN": "awsCANARYcanary4",
    "MY_SERVICE_PASSWORD": "pwCANARYcanary5",
    "HTTPS_PROXY": "http://user:proxyCANARYcanary6@proxy.example:3128",
}
NEEDLES = [
    *(value for name, value in CANARIES.items() if name != "HTTPS_PROXY"),
    "proxyCANARYcanary6",
    "flagCANARYcanary7",
]

pytestmark = pytest.mark.usefixtures("shared_cache")


def leaks(folder: Path) -> list[str]:
    """Every file below the folder that holds a secret."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            found += [f"{path.relative_to(folder)}: {needle}" for needle in NEEDLES if needle.encode() in content]
    return found


def test_no_command_writes_or_prints_a_secret(
    in_dir: Path,
    lockstep: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def door(*words: str) -> Outcome:
        code = compat.main(words[0], words[1:])
        return Outcome(code, *capfd.readouterr())

    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    token = ("--hf-token", "flagCANARYcanary7")
    mine = tmp_path_factory.mktemp("mine") / "mine.json"
    mine.write_text('{"hf_token": "flagCANARYcanary7", "system": {"output_dir": ".outputs"}}')
    monkeypatch.setattr(compat, "LOG_ROOT", in_dir)  # the logs of the doors and crash reports are searched too
    monkeypatch.setattr(tempfile, "tempdir", str(in_dir))
    cache = ("data.cache_dir=mine",)
    outcomes = [
        lockstep("train", "llama", "tiny", *QUICK, *token, *cache, "--debug", "--name", "a", "--log-file", "my.log"),
        lockstep("train", "llama", "tiny", "--config", str(mine), *QUICK, "--name", "b"),
        lockstep("config", "show", "llama", "tiny", *token),
        lockstep("config", "validate", str(mine)),
        lockstep("resume", "runs/a"),
        lockstep("prepare", "llama", "tiny", *token, *cache),
        door("run.sh", "--preset", "tiny", *QUICK, *token, *cache),
        door("prepare_dataset.py", "--preset", "tiny", "--device", "cpu", *token, *cache),
        lockstep("sample", "runs/a", "The", "--tokens", "4"),
        lockstep("export", "runs/a", "--to", "hf", "out"),
        lockstep(),
    ]
    for fault in ("nan_grad@step=1", "raise@step=1"):
        monkeypatch.setenv("LOCKSTEP_FAULT", fault)
        outcomes.append(lockstep("train", "llama", "tiny", *QUICK, *token))
    monkeypatch.delenv("LOCKSTEP_FAULT")
    monkeypatch.setattr(
        "lockstep.engine.train.draw_sample", lambda *_: os.environ["HF_TOKEN"] + 1
    )  # a crash that quotes it
    outcomes.append(lockstep("train", "llama", "tiny", *QUICK))
    outcomes.append(lockstep("train", "llama", "tiny", f"training.max_steps={CANARIES['HF_TOKEN']}"))
    good, bad = outcomes[:11], outcomes[11:13]
    assert {outcome.code for outcome in good} == {0}, [outcome.text for outcome in good if outcome.code]
    assert [outcome.code for outcome in bad] == [71, 1]
    printed = "".join(outcome.text for outcome in outcomes)
    assert [needle for needle in NEEDLES if needle in printed] == []
    assert leaks(in_dir) == []


def test_the_search_would_find_a_leak(in_dir: Path) -> None:
    """Negative control."""
    (in_dir / "x").mkdir()
    (in_dir / "x" / "dump.bin").write_bytes(b"\x00" + CANARIES["HF_TOKEN"].encode() + b"\x00")
    assert leaks(in_dir) == ["x/dump.bin: hf_canaryCANARYcanary1"]


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_the_umask_is_respected(umask: int, file_mode: int, folder_mode: int, in_dir: Path, lockstep: Cli) -> None:
    previous = os.umask(umask)
    try:
        assert (
            lockstep("train", "llama", "tiny", *QUICK, "system.output_dir=.outputs", "system.log_dir=.logs").code == 0
        )
    finally:
        os.umask(previous)
    made = [path for path in in_dir.rglob("*") if not path.is_symlink()]
    assert len(made) > 15
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (folder_mode if path.is_dir() else file_mode), f"{path.relative_to(in_dir)}: {mode:o}"


BAD_NAMES = ["../../x", "/tmp/x", "a/b", "..", ".", "", "a\0b", "x" * 300, "a.tmp-b", "-x", "a\nb", "~", "$(touch x)"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_a_run_name_cannot_lead_outside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lockstep: Cli
) -> None:
    here = tmp_path / "a" / "b" / "c"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    before = sorted(tmp_path.rglob("*"))
    refused = lockstep("train", "llama", "tiny", *QUICK, f"run.name={name}")
    assert refused.code == 2, refused.text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_out_of_the_output_folder_is_not_followed(in_dir: Path, lockstep: Cli) -> None:
    outside = in_dir / "outside"
    outside.mkdir()
    (in_dir / "runs").mkdir()
    (in_dir / "runs" / "mine").symlink_to(outside)
    assert lockstep("train", "llama", "tiny", *QUICK, "--name", "mine").code == 2
    assert list(outside.iterdir()) == []
