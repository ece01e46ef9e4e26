"""`training.batch_size: auto`: the search against brute force, trials that leave nothing behind, what a run keeps."""

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
from lockstep.engine import micro_batch, resume
from lockstep.engine.build import plan
from lockstep.engine.micro_batch import ROOM, Attempts, Place, Search, divisors
from lockstep.engine.step import Stepper
from lockstep.models.build import Built
from lockstep.runtime import hardware, measured
from lockstep.runtime.group import Group
from lockstep.runtime.memory_limits import Bounds
from tests.conftest import Outcome
from tests.engine.test_step import make_batch, make_stepper
from tests.gates.training import FEW_DOCUMENTS, flags, losses, run

Cli = Callable[..., Outcome]
CPU = torch.device("cpu")
CARD = Bounds(peak=0, limit=100_000, words="the card has", taken=500)
SMALL: dict[str, Any] = {
    "training.batch_size": 3, "training.grad_accum_nums": 4, "training.context_length": 16, "training.max_steps": 3,
    "training.eval_interval": 0, "training.save_interval": 0, "data.num_workers": 0, "debug.digest_interval": 1,
}  # fmt: skip
TWELVE = {**SMALL, "training.batch_size": "auto:3"}


def out_of_memory(message: str = "CUDA out of memory. Tried to allocate 2.00 GiB") -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(message)


class Card:
    """A card on which a size needs so much; what was tried on it."""

    def __init__(self, need: Callable[[int], float], limit: int) -> None:
        self.need, self.limit, self.tried = need, limit, list[int]()

    def __call__(self, rows: int) -> int | None:
        self.tried.append(rows)
        needed = self.need(rows)
        return None if needed > self.limit else int(needed)


def test_the_largest_that_fits_is_found_whatever_the_estimate_says() -> None:
    """Against brute force. An estimate within a tenth is never missed by a divisor; a wild one is still safe."""
    dice = random.Random(7)
    tries: list[int] = []
    for case in range(400):
        rows = dice.choice([1, 2, 6, 8, 12, 13, 24, 36, 64, 100])
        fixed, each = dice.uniform(0, 90_000), dice.uniform(100, 60_000)
        wild = case % 2 == 1
        off = dice.uniform(0.2, 5) if wild else dice.uniform(0.9, 1.1)
        card = Card(lambda size, fixed=fixed, each=each: fixed + each * size, CARD.limit - CARD.taken)
        sizes = divisors(rows)
        estimate: Callable[[int], int] = lambda size, fixed=fixed, each=each, off=off: int(off * (fixed + each * size))  # noqa: E731 - a table
        search = Search(sizes, card, estimate, CARD, Group())
        room = int(ROOM * CARD.limit) - CARD.taken
        truth = [size for size in sizes if fixed + each * size <= room]
        found = search.largest()
        assert (found.rows if found else None) == (truth[-1] if truth else None), (case, sizes, card.tried)
        assert found is None or found.peak <= room
        assert len(set(card.tried)) == len(card.tried), "nothing is tried twice"
        tries += [] if wild else [len(card.tried)]
    assert sum(tries) / len(tries) < 2.5


def test_sizes_are_the_divisors() -> None:
    for rows in (1, 2, 12, 13, 36, 97, 240):
        assert divisors(rows) == [size for size in range(1, rows + 1) if rows % size == 0]
    assert len(divisors(1 << 40)) == 41, "as many rows as the settings allow, at once"


def test_a_card_that_is_nearly_full_is_not_filled() -> None:
    """The control: without the limit the last size would be taken."""
    card = Card(lambda size: 12_000 * size, CARD.limit)
    found = Search(divisors(8), card, lambda size: 12_000 * size, CARD, Group()).largest()
    assert found
    assert found.rows == 4
    assert card(8) == 96_000, "it would have run"


def test_a_rehearsal_that_runs_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("fp32", "fp16"):
        ours, other = make_stepper(precision=precision), make_stepper(precision=precision)
        around = ours.exchange, ours.council
        for where in ("loss", "update"):
            with monkeypatch.context() as patch:
                if where == "loss":
                    patch.setattr(ours.objective, "loss", lambda *_: (_ for _ in ()).throw(out_of_memory()))
                else:
                    patch.setattr(torch, "_fused_adamw_", lambda *_, **__: (_ for _ in ()).throw(out_of_memory()))
                with pytest.raises(torch.OutOfMemoryError):
                    ours.rehearse_alone([make_batch(8, seed=1), make_batch(8, seed=2)])
            assert float(ours.optimizer.applied) == 0, "what was counted is taken back"
            assert float(ours.halted) == 0, "or no step would ever change anything"
            assert not ours.updating
            assert all(parameter.grad is None for parameter in ours.model.parameters())
            assert (ours.exchange, ours.council) == around
            if ours.precision.scaler and other.precision.scaler:
                assert ours.precision.scaler.state_dict() == other.precision.scaler.state_dict()
        ours.rehearse_alone([make_batch(8, seed=3)])
        for step in range(3):
            mine, theirs = (each.launch(step, [make_batch(8, seed=step)]).read() for each in (ours, other))
            assert (mine.loss, mine.grad_norm, mine.lr) == (theirs.loss, theirs.grad_norm, theirs.lr)
        for mine, theirs in zip(ours.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_each_size_is_compiled_for_itself_and_once() -> None:
    """As in a run that was told the size: a compiler that knows another one makes a graph that fits many."""
    compiled: list[int] = []

    def note(graph: Any, inputs: list[Any]) -> Any:
        compiled.extend(len(each) for each in inputs if isinstance(each, torch.Tensor) and not each.requires_grad)
        return graph.forward

    stepper, planned = make_stepper(), plan(load("llama", preset="tiny", flags=flags(TWELVE)), CPU)
    model: Any = torch.compile(stepper.model, backend=note)
    stepper.model = model
    built = Built(model, (), "native_math", compiled=True)
    place = Place(planned, built, stepper, Group(), {}, lambda rows: [make_batch(rows, seed=seed) for seed in (1, 2)])
    attempts = Attempts(place)
    for rows in (8, 4, 6, 6):
        attempts(rows)
    assert compiled == [8, 4, 6]
    torch.compiler.reset()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Trials on the CPU, as on a card of which this many rows are too much."""
    pretend: dict[str, Any] = {"too_many": 5, "rows": []}
    real = Stepper.rehearse_alone

    def rehearse_alone(self: Stepper, batches: list[Batch]) -> None:
        pretend["rows"].append([batch.rows for batch in batches])
        if batches[0].rows >= pretend["too_many"]:
            raise out_of_memory()
        real(self, batches)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(micro_batch, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(Stepper, "rehearse_alone", rehearse_alone)
    monkeypatch.setattr(hardware, "memory_bounds", lambda _: Bounds(0, 80 << 30, "the card has"))
    monkeypatch.setattr(hardware, "peak_memory_bytes", lambda _: 1 << 30)
    return pretend


@pytest.mark.usefixtures("shared_cache")
def test_a_run_finds_its_split_and_computes_the_same(tmp_path: Path, tried: dict[str, Any]) -> None:
    plain, records = run(tmp_path / "plain", SMALL)
    parts, found = run(tmp_path / "auto", TWELVE)
    assert (parts.config.training.batch_size, parts.config.training.grad_accum_nums) == (4, 3)
    assert tried["rows"] == [[12], [6, 6], [4, 4]], "from the estimate down; a whole step in one has no second one"
    assert parts.batch_rows == plain.batch_rows == 12
    assert losses(found.records) == pytest.approx(losses(records.records), rel=1e-5)
    other, wrong = run(tmp_path / "wrong", {**SMALL, "training.batch_size": 4})
    assert other.batch_rows == 16
    assert losses(wrong.records) != pytest.approx(losses(records.records), rel=1e-5), "the control"
    given, same = run(tmp_path / "given", {**SMALL, "training.batch_size": 4, "training.grad_accum_nums": 3})
    assert [record.digest for record in same.records] == [record.digest for record in found.records], "bit for bit"
    for about in (parts.about, given.about):
        assert about["identity"]["training.batch_size"] == about["config"]["training"]["batch_size"] == 4
        assert about["identity"]["training.grad_accum_nums"] == 3


@pytest.mark.usefixtures("shared_cache")
def test_the_next_start_tries_only_what_was_found(tmp_path: Path, tried: dict[str, Any]) -> None:
    run(tmp_path / "one", TWELVE)
    tried["rows"].clear()
    run(tmp_path / "two", TWELVE)
    assert tried["rows"] == [[4, 4]]
    tried["rows"].clear()
    tried["too_many"] = 3  # somebody else is on the card: what is known is not believed blindly
    parts, _ = run(tmp_path / "three", TWELVE)
    assert parts.config.training.batch_size == 2
    assert tried["rows"] == [[4, 4], [12], [6, 6], [4, 4], [3, 3], [2, 2]]
    tried["rows"].clear()
    run(tmp_path / "four", {**TWELVE, "training.context_length": 24})
    assert tried["rows"][0] == [12], "another shape is another question"


@pytest.mark.usefixtures("shared_cache")
def test_what_was_found_beside_others_is_not_believed_when_they_have_left(
    tmp_path: Path, tried: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows_with(taken: int, too_many: int) -> int:
        monkeypatch.setattr(hardware, "memory_bounds", lambda _: Bounds(0, 80 << 30, "the card has", taken=taken))
        tried["too_many"] = too_many
        tried["rows"].clear()
        return run(tmp_path / f"{taken}-{too_many}", TWELVE)[0].config.training.batch_size

    assert rows_with(60 << 30, 3) == 2
    assert rows_with((60 << 30) - (256 << 20), 100) == 2, "hardly more room is no reason"
    assert tried["rows"] == [[2, 2]]
    assert rows_with(0, 100) == 12
    assert rows_with(0, 100) == 12
    assert tried["rows"] == [[12]], "and this is what is known now"


@pytest.mark.usefixtures("shared_cache")
def test_a_run_that_goes_on_keeps_its_split(in_dir: Path, tried: dict[str, Any], lockstep: Cli) -> None:
    words = [f"{key}={value}" for key, value in {**SMALL, "training.batch_size": 3}.items()]
    begun = lockstep("train", "llama", "tiny", "--name", "a", "--device", "cpu", *words, "--batch-size", "auto")
    assert begun.code == 0, begun.text
    line = "batch: 4 rows x 3 (auto: largest that fits CPU"
    assert line in begun.text
    assert ", measured now, peak 1.0 of 80.0 GiB; global batch 12 rows)" in begun.text
    saved = json.loads((in_dir / "runs/a/config.json").read_text())
    assert [saved["config"]["training"][name] for name in ("batch_size", "grad_accum_nums")] == [4, 3]
    assert saved["origins"]["training.batch_size"].startswith("auto 4 rows x 3 (auto: largest")
    tried["too_many"] = 100  # now all would fit: bits matter more
    tried["rows"].clear()
    measured_path = measured.place()
    assert measured_path
    measured_path.unlink()
    plain = lockstep("resume", "a")
    assert plain.code == 0, plain.text
    assert tried["rows"] == [], "the configuration has numbers"
    for words_again in (("resume", "a"), ("train", "llama", "tiny", *words, "--resume", "auto", "--device", "cpu")):
        tried["rows"].clear()
        again = lockstep(*words_again, "--batch-size", "auto")
        assert again.code == 0, again.text
        assert "4 rows x 3 (auto: as the run was begun, peak 1.0 of 80.0 GiB; global batch 12 rows)" in again.text
        assert tried["rows"] == [[4, 4]]
    assert not measured_path.exists(), "what a run was begun with is not what fits"
    other = lockstep("train", "llama", "tiny", *words, "--resume", "a", "--batch-size", "auto:5", "--device", "cpu")
    assert other.code == 2
    assert "training.batch_size: 4 in the checkpoint, 5 now" in other.text


@pytest.mark.usefixtures("shared_cache")
def test_where_it_is_as_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_dir: Path, lockstep: Cli
) -> None:
    """On the CPU, and with canonical sums: said in one line."""
    monkeypatch.setattr(Stepper, "rehearse_alone", lambda *_: pytest.fail("nothing is tried"))
    parts, _ = run(tmp_path / "auto", TWELVE)
    assert (parts.config.training.batch_size, parts.config.training.grad_accum_nums) == (3, 4)
    told = lockstep("train", "llama", "tiny", "--device", "cpu", "--batch-size", "auto", "--max-steps", "1")
    assert "batch: 4 rows x 1 (auto: as without it, since want of memory ends a process on the CPU" in told.text
    monkeypatch.setattr(micro_batch, "DEVICES", ("cuda", "cpu"))
    canonical = {**TWELVE, "training.grad_accum_nums": 8, "system.deterministic": "canonical"}
    parts, _ = run(tmp_path / "canonical", canonical)
    assert (parts.config.training.batch_size, parts.config.training.grad_accum_nums) == (3, 8)


def test_what_must_fit_in_any_case_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(load("llama", preset="tiny", flags=flags(TWELVE)), CPU)
    assert planned.auto_rows == 0
    assert type(planned.config.training.batch_size) is int
    assert micro_batch.least(planned).training.batch_size == 3, "of the CPU nothing is looked for"
    monkeypatch.setattr(micro_batch, "DEVICES", ("cuda", "cpu"))
    least = micro_batch.least(planned).training
    assert (least.batch_size, least.grad_accum_nums) == (1, 12)
    given = plan(load("llama", preset="tiny", flags=flags(SMALL)), CPU)
    assert micro_batch.least(given) is given.config
    assert resume.with_saved_split(given, None) is given


def test_a_dry_run_shows_it(lockstep: Cli, in_dir: Path) -> None:
    told = lockstep("train", "llama", "tiny", "--batch-size", "auto", "--dry-run").text
    assert '"auto:4"' in told
    assert "micro-batch       auto, found when it starts; estimated with 4 rows" in told
    assert "micro-batch" not in lockstep("train", "llama", "tiny", "--dry-run").text


@pytest.mark.usefixtures("shared_cache")
def test_rows_that_may_be_longer_later_are_given_the_room_of_the_estimate(
    tmp_path: Path, tried: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentences of their own lengths: the first rows need less than the longest would."""
    tried["too_many"] = 100
    monkeypatch.setattr(hardware, "peak_memory_bytes", lambda _: 1)
    wanted = {"data.documents": "padded", "training.batch_size": "auto:12", "training.grad_accum_nums": 1}
    settings = {**SMALL, **wanted, "training.context_length": 64, "data.data_path": FEW_DOCUMENTS}
    planned = plan(load("mlm", preset="tiny", flags=flags(settings)), CPU)
    needs = {rows: _need(planned, rows) for rows in (12, 6)}
    limit = int((needs[12] + needs[6]) / 2 / ROOM)
    monkeypatch.setattr(hardware, "memory_bounds", lambda _: Bounds(0, limit, "the card has"))
    parts, _ = run(tmp_path / "auto", settings, family="mlm")
    assert parts.config.training.batch_size == 6


def _need(planned: Any, rows: int) -> int:
    from lockstep.engine.present import memory_estimate

    config = micro_batch.with_rows(planned.config, rows)
    return memory_estimate(config, planned.shape, compiled=False).total
