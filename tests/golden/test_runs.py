"""Run folders of an earlier version (make_runs.py) resume, load, export, diff, prove and replay bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import lockstep
from lockstep import rundir
from lockstep.engine.build import versions
from tests.golden.make_runs import EVALUATE, KEPT, TRAIN, numbers, sha256
from tests.golden.player import Player

MIDDLE, LAST = "checkpoints/step_00000010", "checkpoints/step_00000020"
STATE = ("model.safetensors", "optimizer.safetensors")
BUNDLE = "workers/n0-CPU/faults/step_000013"
RECORDED: dict[str, Any] = json.loads((KEPT / "recorded.json").read_text(encoding="utf-8"))

every_family = pytest.mark.parametrize("family", list(TRAIN))


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Other content in a file of a sealed folder, with a manifest that fits."""
    path.write_bytes(change(path.read_bytes()))
    (path.parent / rundir.MANIFEST).unlink()
    rundir.seal(path.parent)


def flip(checkpoint: Path) -> None:
    """One bit of one weight."""

    def flipped(content: bytes) -> bytes:
        last = 8 + int.from_bytes(content[:8], "little") + 3  # byte of the first float32, which holds the exponent
        return content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :]

    rewrite(checkpoint / "model.safetensors", flipped)


def of_this_version(run: Path) -> Path:
    """The run as if today's Python, torch and lockstep had made it: `diff` also compares these."""
    for path in run.glob("checkpoints/*/run.json"):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["about"]["versions"] != versions():
            saved["about"]["versions"] = versions()
            rewrite(path, lambda _, saved=saved: json.dumps(saved).encode())
    return run


def state(run: Path) -> list[str]:
    return [sha256(run / LAST / name) for name in STATE]


def steps(run: Path) -> dict[int, tuple[str, str]]:
    events = map(json.loads, (run / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return {event["step"]: (event["loss_hex"], event["grad_norm_hex"]) for event in events if event["kind"] == "step"}


@every_family
def test_it_goes_on_to_the_same_end(family: str, player: Player, copy: Callable[..., Path]) -> None:
    kept, run, other = of_this_version(copy(family, "kept")), copy(family, "run"), copy(family, "other")
    for each in (run, other):
        shutil.rmtree(each / LAST)
    flip(other / MIDDLE)
    for each in (run, other):
        ended = player("resume", f"runs/{each.name}")
        assert ended.code == 0, ended.text
    assert state(run) == state(kept)
    assert steps(run) == steps(kept)
    assert sorted(steps(run)) == list(range(20))
    assert state(other) != state(kept)
    assert steps(other) != steps(kept)
    told = player("diff", "runs/kept", "runs/run")
    assert told.code == 0, told.text
    assert player("diff", "runs/kept", "runs/other").code == 1


@every_family
def test_auto_finds_it(family: str, player: Player, copy: Callable[..., Path]) -> None:
    run = copy(family)
    shutil.rmtree(run / LAST)
    ended = player("train", *TRAIN[family], "--resume", "auto")
    assert ended.code == 0, ended.text
    assert state(run) == state(KEPT / family)


@every_family
def test_trained_anew_it_is_the_same(
    family: str, player: Player, copy: Callable[..., Path], anew: Callable[[str], Path]
) -> None:
    of_this_version(copy(family))
    run = anew(family)
    told = player("diff", "runs/copy", str(run))
    assert told.code == 0, told.text
    assert state(run) == state(KEPT / family)


@every_family
def test_it_is_proven(family: str, player: Player, copy: Callable[..., Path]) -> None:
    run = copy(family)
    proven = player("resume", "runs/copy", "--prove")
    assert proven.code == 0, proven.text
    flip(run / LAST)
    assert player("resume", "runs/copy", "--prove").code == 1


def test_a_proof_reads_the_events(player: Player, copy: Callable[..., Path]) -> None:
    run = copy("llama")
    events = run / "events.jsonl"
    loss, _ = steps(run)[15]
    events.write_text(events.read_text(encoding="utf-8").replace(loss, "0x1.0p+1"), encoding="utf-8")
    assert player("resume", "runs/copy", "--prove").code == 1


@every_family
def test_it_is_loaded_and_measured(family: str, player: Player, copy: Callable[..., Path]) -> None:
    run = copy(family)
    model, _ = lockstep.load(run)
    kept, loaded = load_file(KEPT / family / LAST / "model.safetensors"), model.state_dict()
    assert kept
    assert all(kept[name].equal(loaded[name]) for name in kept)
    verb, *flags = EVALUATE[family]
    assert numbers(player(verb, "runs/copy", *flags).out) == RECORDED[family]["eval"]
    flip(run / LAST)
    assert numbers(player(verb, "runs/copy", *flags).out) != RECORDED[family]["eval"]


@every_family
def test_it_is_exported(family: str, player: Player, copy: Callable[..., Path]) -> None:
    run = copy(family)
    exported = player("export", "runs/copy", "--to", "hf")
    if family == "ad":
        assert exported.code == 2, "an agent is used as it is"
        return
    assert sha256(run / "hf" / "model.safetensors") == RECORDED[family]["export"]
    flip(run / LAST)
    assert player("export", "runs/copy", "runs/other", "--to", "hf").code == 0
    assert sha256(player.folder / "runs" / "other" / "model.safetensors") != RECORDED[family]["export"]


def test_the_nan_is_found_again(player: Player, copy: Callable[..., Path]) -> None:
    bundle = copy("nan") / BUNDLE
    replayed = player("replay", "runs/copy", "--json")
    assert replayed.code == 0, replayed.text
    assert json.loads(replayed.out)["tried"][0]["module"] == "layers.1.mlp.w2"
    rewrite(bundle / "bundle.json", lambda content: content.replace(b"layers.1.mlp.w2,", b"layers.0.mlp.w1,"))
    elsewhere = player("replay", "runs/copy", "--json")
    assert elsewhere.code == 1, elsewhere.text
    assert json.loads(elsewhere.out)["tried"][0]["module"] == "layers.0.mlp.w1"


def test_it_goes_on_after_the_nan(player: Player, copy: Callable[..., Path]) -> None:
    """Its batch was found by `auto` and is that of the other run, which had no NaN: so is its end."""
    run = copy("nan")
    ended = player("resume", "runs/copy")
    assert ended.code == 0, ended.text
    assert state(run) == state(KEPT / "llama")
