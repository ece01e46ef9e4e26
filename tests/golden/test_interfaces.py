"""What other programs read: the keys of a run's files, the exit codes, check.json.

Rewrite: LOCKSTEP_GOLDEN=write python -m pytest tests/golden/test_interfaces.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ExitCode
from tests.check.test_real_checks import FLIP, OneByOne, check
from tests.golden.make_runs import TRAIN
from tests.golden.player import Player

FOLDER = Path(__file__).parent / "interfaces"
TWICE = ("config", "identity")  # of a checkpoint's run.json: compared with config.json

Anew = Callable[[str], Path]


def flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key; `[]` stands for all entries of a list."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flat(value, f"{name}.{key}" if name else key)
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for value in tree:
            yield from flat(value, f"{name}[]")
    else:
        yield name, tree


def keys(tree: Any) -> list[str]:
    return sorted({key for key, _ in flat(tree)})


def is_golden(name: str, found: Any) -> None:
    path = FOLDER / f"{name}.json"
    if os.environ.get("LOCKSTEP_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert found == json.loads(path.read_text(encoding="utf-8"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def events(run: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_key_is_seen_wherever_it_stands() -> None:
    assert keys({"a": {"b": 1, "c": {}}, "d": [{"e": 1}, {"e": 2, "f": 3}], "g": [1]}) == [
        "a.b", "a.c", "d[].e", "d[].f", "g"
    ]  # fmt: skip


def test_config_json(anew: Anew) -> None:
    """Keys and values of the resolved configurations: those that all families share, and the others of each.

    The identity that a run was asked for, its origins and its checkpoints speak of the same keys.
    """
    found: dict[str, dict[str, Any]] = {}
    for family in TRAIN:
        run = anew(family)
        told = read(run / "config.json")
        assert sorted(told) == ["asked", "config", "created", "family", "identity_hash", "origins", "preset"]
        config = found[family] = dict(flat(told["config"]))
        about = read(run / "checkpoints/step_00000020/run.json")["about"]
        assert dict(flat(about["config"])) == config
        assert about["identity"].items() <= config.items()
        assert {"training.learning_rate", "data.data_path", "system.seed"} <= about["identity"].keys()
        assert dict(flat(told["asked"])).keys() == about["identity"].keys()
        assert told["origins"].keys() <= config.keys()
    first, *others = found.values()
    shared = {key: value for key, value in first.items() if all(key in each and each[key] == value for each in others)}
    own = {family: {key: each[key] for key in each.keys() - shared} for family, each in found.items()}
    is_golden("config", {"all": shared, **own})


def test_run_json(anew: Anew) -> None:
    """Of the checkpoints of all families."""
    found: set[str] = set()
    for family in TRAIN:
        saved = read(anew(family) / "checkpoints/step_00000020/run.json")
        saved["about"] = {key: value for key, value in saved["about"].items() if key not in TWICE}
        found.update(keys(saved))
    is_golden("run", sorted(found))


def test_events(anew: Anew, player: Player, copy: Callable[..., Path]) -> None:
    """Of runs of all families, one that ended with a NaN, and one that went on."""
    copy("llama")
    assert player("resume", "runs/copy").code == 0
    told = [event for run in (*TRAIN, "nan") for event in events(anew(run))]
    told += [event for event in events(player.folder / "runs" / "copy") if event["kind"] == "resume"]
    is_golden("events", sorted({f"{event['kind']}.{key}" for event in told for key in event}))


def test_exit_codes() -> None:
    is_golden("exit_codes", {code.name: code.value for code in ExitCode})


def test_check_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a check of two CPU workers, one of which computes wrongly."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.check.conduct.Crew", OneByOne)
    told = check(f"{FLIP},bit=4,rank=1", code=3, gpus="2")
    is_golden("check", keys(told))
