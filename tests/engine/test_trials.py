"""`lockstep eval` and `lockstep sample` of an agent: the documented lines and files, one goal alone, and refusals."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.engine.trials import evaluate_run
from lockstep.report.logs import close_logging
from tests.gates.training import run
from tests.report.test_tensorboard import read_back

Run = Callable[..., Any]
SHORT = (
    "--device", "cpu", "training.max_steps=4", "training.gen_interval=2", "training.gen_episodes=3",
    "training.gen_repeats=2", "data.horizon=10", "training.context_length=40", "data.data_path=histories",
    "data.num_workers=0", "report.progress=off",
)  # fmt: skip
GOALS, EPISODES = 3, 4  # of a 5 x 5 room, one in ten is unseen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a short run called `a` lies."""
    folder, before = tmp_path_factory.mktemp("agents"), Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", "ad", "tiny", *SHORT, "--name", "a"]) == 0
    finally:
        os.chdir(before)
        close_logging()
    return folder


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    yield
    for path in Path("runs/a").glob("eval_result*"):
        path.unlink()


def events(kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path("runs/a/events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in found if event["kind"] == kind]


def test_a_run_tells_of_its_walks(folder: Path) -> None:
    told = events("walk")
    assert [event["step"] for event in told] == [2, 4]
    assert all(len(event["curve"]) == 3 and 0 <= event["return"] <= event["optimum"] for event in told)
    shown = read_back(folder / "runs" / "a" / "tb")
    for name in ("return", "first_return", "last_return"):
        assert shown[f"walk/{name}"] == [(event["step"] - 1, pytest.approx(event[name])) for event in told]
    log = Path("runs/a/workers/n0-CPU/log.txt").read_text(encoding="utf-8")
    assert re.search(r"Walk \| Step 4 \| 3 unseen tasks \| Return: [\d.]+ → [\d.]+ of [\d.]+ ", log)
    assert re.search(r"return by episode, 1 to 3: ", log)  # the summary
    assert "lockstep eval runs/a" in log


def test_a_resumed_run_walks_as_it_would_have(tmp_path: Path) -> None:
    settings = {key: value for key, equals, value in (word.partition("=") for word in SHORT) if equals}
    settings |= {"training.gen_interval": "1", "training.save_interval": "2", "training.eval_interval": "0"}
    whole = run(tmp_path / "w", settings, family="ad")[1]
    rest = run(tmp_path / "r", settings, family="ad", point=tmp_path / "w" / "checkpoints" / "step_00000002")[1]
    walks = [[fields for kind, fields in record.events if kind == "walk"] for record in (whole, rest)]
    assert [fields["step"] for fields in walks[1]] == [3, 4]
    assert walks[1] == walks[0][2:]


def test_the_documented_lines_and_files(lockstep: Run) -> None:
    found = lockstep("eval", "a", "--episodes", str(EPISODES), "--repeats", "2")
    assert found.code == 0
    lines = found.out.splitlines()
    place = lines.index(f"Available test goals ({GOALS} total):")
    assert all(re.fullmatch(r" +\d+: \(\d, \d\)", line) for line in lines[place + 1 : place + 1 + GOALS])
    assert lines[place + 1 + GOALS].startswith("Mean reward per environment:")
    table = np.load("runs/a/eval_result.npy")
    assert table.shape == (GOALS, EPISODES)
    assert table.dtype == np.float64
    means = [float(re.search(r"\) +([\d.]+) of", line)[1]) for line in lines[place + 2 + GOALS :][:GOALS]]  # pyright: ignore
    assert means == [pytest.approx(mean, abs=0.006) for mean in table.mean(1)]
    assert f"Overall mean reward: {table.mean():.4f}" in lines
    assert any(re.fullmatch(r"Std deviation: [\d.]+", line) for line in lines)
    assert any(line.startswith("Optimum: ") and "max_reward 20" in line for line in lines)
    assert Path("runs/a/eval_result.png").read_bytes().startswith(b"\x89PNG")


def test_one_goal_is_the_same_as_among_all(lockstep: Run) -> None:
    assert lockstep("eval", "a", "--episodes", "4", "--repeats", "2").code == 0
    found = lockstep("eval", "a", "--episodes", "4", "--repeats", "2", "--goal_idx", "1", "--json")
    assert found.code == 0
    alone = np.load("runs/a/eval_result_goal1.npy")
    assert alone.shape == (1, 4)
    assert (alone[0] == np.load("runs/a/eval_result.npy")[1]).all()
    told = json.loads(found.out)
    assert [goal["goal_idx"] for goal in told["goals"]] == [1]
    assert told["overall_mean_reward"] == alone.mean()
    assert told["curve"] == alone[0].tolist()
    assert told["files"] == ["runs/a/eval_result_goal1.npy", "runs/a/eval_result_goal1.png"]


def test_temperature_and_seed_act(lockstep: Run) -> None:
    def curve(**how: Any) -> list[float]:
        return evaluate_run(Path("runs/a"), episodes=EPISODES, repeats=2, **how).outcome.curve

    assert curve(temperature=0.0) == curve(temperature=0.0, seed=5)
    warm = curve(temperature=2.0)
    assert warm != curve(temperature=2.0, seed=5)
    typed = lockstep("eval", "a", "--episodes", "4", "--repeats", "2", "--temperature", "2", "--seed", "0", "--json")
    assert json.loads(typed.out)["curve"] == warm


def test_no_histories_are_needed_to_evaluate() -> None:
    Path("histories").rename("elsewhere")
    try:
        found = evaluate_run(Path("runs/a"), episodes=1, repeats=1)
    finally:
        Path("elsewhere").rename("histories")
    assert not found.files
    assert not Path("runs/a/eval_result.npy").exists()


def test_a_documented_file_walks_as_its_run(tmp_path: Path) -> None:
    from lockstep.engine.trials import load_agent

    loaded = load_agent(Path("runs/a"))
    content = {"model": dict(loaded.model.named_parameters()), "lockstep": {"about": dict(loaded.about)}}
    torch.save({**content, "step": 4}, tmp_path / "ckpt-4.pt")
    mine, its = (evaluate_run(path, episodes=2, repeats=1) for path in (tmp_path / "ckpt-4.pt", Path("runs/a")))
    assert (mine.outcome.returns == its.outcome.returns).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("eval", "a", "--goal-idx", "3"), "there are 3 test goals"),
        (("sample", "a", "--goal-idx", "99"), "there are 3 test goals"),
        (("eval", "a", "--goal-idx", "-1"), "whole number"),
        (("eval", "a", "--episodes", "0"), "whole number"),
        (("eval", "a", "--answer", "x"), "--answer: is for models of texts"),
        (("sample", "a", "Once upon"), "an agent hears no prompt"),
        (("sample", "a", "--top-k", "3"), "--top-k: is for models of texts"),
        (("eval", "of_text", "--goal-idx", "0"), "--goal-idx: is for agents (family ad)"),
        (("eval", "of_text", "--repeats", "2"), "--repeats: is for agents (family ad)"),
        (("sample", "of_text", "hello", "--episodes", "2"), "--episodes: is for agents (family ad)"),
        (("sample", "of_text"), "PROMPT: what shall it say?"),
    ],
)
def test_what_cannot_be_is_refused_in_one_clear_line(lockstep: Run, words: tuple[str, ...], said: str) -> None:
    other = Path("runs/of_text")
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text(json.dumps({"family": "llama"}), encoding="utf-8")
    refused = lockstep(*words)
    assert refused.code == 2
    assert said in refused.err
    assert "  try: " in refused.err
    assert "Traceback" not in refused.text
    assert not refused.out


def test_sample_shows_the_last_episode_and_the_returns(lockstep: Run) -> None:
    found = lockstep("sample", "a", "--goal-idx", "2", "--episodes", "6", "--temperature", "2", "--seed", "3")
    assert found.code == 0
    assert "\x1b" not in found.out
    lines = found.out.splitlines()
    assert lines[0].startswith("unseen task 2 of 3: (")
    assert len(lines) == 2 + 5 + 3
    assert all(len(line.split()) == 5 for line in lines[2:7])
    assert sum(line.count("@") + line.count("★") for line in lines[2:7]) == 1
    paid = evaluate_run(Path("runs/a"), episodes=6, repeats=1, temperature=2.0, seed=3, goal_idx=2).outcome.returns[
        0, 0
    ]
    assert lines[7] == f"episode 6, return {paid[-1]}"
    assert lines[9].startswith(f"return by episode, 1 to 6: {paid[0]:.2f} → {paid[-3:].mean():.2f} (last 3) of ")
