"""`training.batch_size: auto`: the search against brute force, what is tried, and what a run keeps of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.contracts import Batch
from lockstep.engine import find_batch
from lockstep.engine.find_batch import ROOM, Found, Trial, divisors, largest, resolved
from lockstep.engine.step import Stepper
from lockstep.runtime import hardware
from lockstep.runtime.group import Group
from lockstep.runtime.memory_limits import Bounds
from tests.conftest import Outcome
from tests.gates.training import flags

Cli = Callable[..., Outcome]
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "training.batch_size": 3, "training.grad_accum_nums": 4, "training.context_length": 16, "training.max_steps": 3,
    "training.eval_interval": 0, "training.save_interval": 0, "data.num_workers": 0, "debug.digest_interval": 1,
}  # fmt: skip
WORDS = ("train", "llama", "tiny", "--device", "cpu", *(f"{key}={value}" for key, value in SMALL.items()))
AUTO = (*WORDS, "--batch-size", "auto")


def test_the_largest_that_fits_is_found() -> None:
    """Against brute force, with few trials, and nothing tried twice."""
    dice = random.Random(7)
    for _ in range(400):
        step_rows = dice.choice([1, 2, 6, 8, 12, 13, 24, 36, 64, 100, 240])
        sizes = divisors(step_rows)
        room, tried = dice.uniform(0, 300), list[int]()
        found = largest(
            sizes, lambda rows, tried=tried: tried.append(rows) or rows, room=room, first=dice.choice(sizes)
        )
        truth = max((rows for rows in sizes if rows <= room), default=0)
        assert found == Found(truth, truth), (sizes, room, tried)
        assert len(set(tried)) == len(tried) <= 10


def test_sizes_are_the_divisors() -> None:
    for rows in (1, 2, 12, 13, 36, 97, 240):
        assert divisors(rows) == [size for size in range(1, rows + 1) if rows % size == 0]
    assert len(divisors(1 << 40)) == 41, "as many rows as the settings allow, at once"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Trials on the CPU, as on a card of which this many rows are too much."""
    pretend: dict[str, Any] = {"too_many": 5, "rows": []}
    real, peak = Stepper.rehearse, Trial.peak_bytes

    def rehearse(self: Stepper, batches: list[Batch]) -> Any:
        if batches[0].rows >= pretend["too_many"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, batches)

    monkeypatch.setattr(find_batch, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(Stepper, "rehearse", rehearse)
    monkeypatch.setattr(Trial, "peak_bytes", lambda self, rows: pretend["rows"].append(rows) or peak(self, rows))
    monkeypatch.setattr(hardware, "memory_bounds", lambda _: Bounds(0, 80 << 30, "the card has"))
    monkeypatch.setattr(hardware, "peak_memory_bytes", lambda _: 1 << 30)
    return pretend


def steps(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "step"]


@pytest.mark.usefixtures("shared_cache")
def test_a_run_finds_its_split_and_computes_the_same(in_dir: Path, tried: dict[str, Any], lockstep: Cli) -> None:
    begun = lockstep(*AUTO, "--name", "auto")
    assert begun.code == 0, begun.text
    assert tried["rows"] == [3, 6, 4], "from the number that auto replaces"
    assert "batch: 4 rows x 3 (auto: largest that fits CPU" in begun.text
    assert ", peak 1.0 GiB; 12 rows of a step on each worker)" in begun.text
    for name, rows, count in (("plain", 3, 4), ("given", 4, 3), ("other", 4, 4)):
        words = (f"training.batch_size={rows}", f"training.grad_accum_nums={count}")
        assert lockstep(*WORDS, *words, "--name", name).code == 0
    losses = {name: [step["loss"] for step in steps(in_dir / "runs" / name)] for name in ("auto", "plain", "other")}
    assert losses["auto"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["auto"] != pytest.approx(losses["other"], rel=1e-5), "the control"
    bits = [[step["digest"] for step in steps(in_dir / "runs" / name)] for name in ("auto", "given")]
    assert bits[0] == bits[1], "the search leaves no trace"


@pytest.mark.usefixtures("shared_cache")
def test_a_run_that_goes_on_keeps_its_split(in_dir: Path, tried: dict[str, Any], lockstep: Cli) -> None:
    assert lockstep(*AUTO, "--name", "a").code == 0
    file = in_dir / "runs/a/config.json"
    saved = json.loads(file.read_text())
    assert [saved["config"]["training"][name] for name in ("batch_size", "grad_accum_nums")] == [4, 3]
    assert [saved["asked"][f"training.{name}"] for name in ("batch_size", "grad_accum_nums")] == ["auto", 12]
    assert saved["origins"]["training.batch_size"].startswith("auto 4 rows x 3 (auto: largest")
    tried["too_many"] = 100  # now all would fit: bits matter more
    tried["rows"].clear()
    assert lockstep("resume", "a").code == 0
    goes_on = "4 rows x 3 (auto: as the run was begun; 12 rows of a step on each worker)"
    for words in (("resume", "a", "--batch-size", "auto"), (*AUTO, "--resume", "auto")):
        again = lockstep(*words)
        assert again.code == 0, again.text
        assert goes_on in again.text
    del saved["asked"]  # as version 76f46e4 wrote it
    saved["origins"] |= {
        f"training.{name}": "auto 4 rows x 3 (auto: ...)" for name in ("batch_size", "grad_accum_nums")
    }
    file.write_text(json.dumps(saved))
    again = lockstep(*AUTO, "--resume", "auto")
    assert goes_on in again.text, again.text
    assert tried["rows"] == []
    other = lockstep(*AUTO, "--resume", "a", "training.grad_accum_nums=5")
    assert other.code == 2
    assert "training.batch_size: 4 in the checkpoint, 15 now" in other.text


@pytest.mark.usefixtures("shared_cache")
def test_where_it_is_as_without_it(in_dir: Path, monkeypatch: pytest.MonkeyPatch, lockstep: Cli) -> None:
    """On the CPU, and with canonical sums: said in one line."""
    monkeypatch.setattr(find_batch, "find", lambda *_, **__: pytest.fail("nothing is tried"))
    told = lockstep(*AUTO)
    assert "batch: 3 rows x 4 (auto: as without it, since want of memory ends a process on the CPU" in told.text
    monkeypatch.setattr(find_batch, "DEVICES", ("cuda", "cpu"))
    told = lockstep(*AUTO, "training.grad_accum_nums=8", "system.deterministic=canonical")
    assert "batch: 3 rows x 8 (auto: as without it, since canonical sums are of micro-batches" in told.text


@pytest.mark.usefixtures("shared_cache")
def test_a_model_that_is_too_large_itself_is_one_row(tried: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("llama", preset="tiny", flags=[*flags(SMALL), ("batch-size", "auto")])
    tried["too_many"] = 1
    assert find_batch.find(loaded, CPU, sizes=divisors(12)) == Found(0, 0.0)
    monkeypatch.setattr(Trial, "__init__", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    found = resolved(loaded, CPU, Group())
    assert (found.config.training.batch_size, found.config.training.grad_accum_nums) == (1, 12)
    assert "not even that fits" in found.origins["training.batch_size"].where


@pytest.mark.usefixtures("shared_cache")
def test_a_card_is_not_filled_and_rows_that_may_be_longer_count_as_such(
    tried: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's batch may hold shorter rows than later ones: what a row needs is counted for the longest."""
    peaks = {"resting": 10.0, "peak": 40.0}
    monkeypatch.setattr(hardware, "let_go", lambda _: peaks.update(now=peaks["resting"]))
    monkeypatch.setattr(hardware, "peak_memory_bytes", lambda _: (peaks["now"], peaks.update(now=peaks["peak"]))[0])
    trial = Trial(load("llama", preset="tiny", flags=flags(SMALL)), CPU)
    assert trial.peak_bytes(2) == 40.0
    made = Batch({"inputs": torch.zeros(2, 4)}, {"loss": 8}, 2, 8)
    monkeypatch.setattr(find_batch, "make_loader", lambda *_, **__: iter([[made, made]]))
    monkeypatch.setattr(Stepper, "rehearse", lambda *_: None)
    assert trial.peak_bytes(2) == 10 + 4 * 30, "4 tokens in a row of 16"
    loaded = load("llama", preset="tiny", flags=flags({**SMALL, "training.batch_size": 2}))
    for limit, fits in ((131 / ROOM, 2), (129 / ROOM, 0)):
        monkeypatch.setattr(hardware, "memory_bounds", lambda _, limit=limit: Bounds(0, int(limit), "the card has"))
        assert find_batch.find(loaded, CPU, sizes=[2]).rows == fits


def test_a_dry_run_shows_it(lockstep: Cli, in_dir: Path) -> None:
    told = lockstep("train", "llama", "tiny", "--batch-size", "auto", "--dry-run").text
    assert '"auto (4)"' in told
    assert "micro-batch       auto, found before it starts; estimated with 4 rows" in told
    assert "micro-batch" not in lockstep("train", "llama", "tiny", "--dry-run").text


def test_the_flag_is_printed(lockstep: Cli, tmp_path: Path, tried: dict[str, Any]) -> None:
    tried["too_many"] = 30
    file = tmp_path / "found.json"
    told = lockstep("bench", "llama", "tiny", "--device", "cpu", "--find-batch", "--json", str(file))
    assert told.code == 0, told.text
    assert told.out.endswith("peak 1.0 GiB:\n--batch-size 24\n")
    assert tried["rows"] == [4, 8, 16, 32, 24]
    assert json.loads(file.read_text())["batch_size"] == 24
    tried["too_many"] = 1
    refused = lockstep("bench", "llama", "tiny", "--device", "cpu", "--find-batch")
    assert (refused.code, "not even one row fits" in refused.err) == (1, True)


def test_on_the_cpu_nothing_is_tried(lockstep: Cli) -> None:
    refused = lockstep("bench", "llama", "tiny", "--device", "cpu", "--find-batch")
    assert refused.code == 2
    assert "--find-batch: sizes are tried on a GPU" in refused.err
