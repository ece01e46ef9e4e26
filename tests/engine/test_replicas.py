"""Equal runs and one that is not: every flipped bit is named with its worker, its step and its tensor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.contracts import Batch
from lockstep.engine import replicas
from lockstep.engine.build import assemble, plan
from lockstep.engine.parts import Parts
from lockstep.engine.replicas import Stamps, differences_so_far, short, words
from lockstep.engine.state import trained
from lockstep.errors import ConfigError, ExitCode, LockstepError
from lockstep.health.prints import Prints
from lockstep.health.records import FILE, Stamp, read_lines
from lockstep.health.vote import vote
from lockstep.rundir import RunDir
from lockstep.runtime import faults
from lockstep.runtime.signals import StopRequest
from tests.gates.training import FEW_WORDS, flags, run

pytestmark = pytest.mark.usefixtures("shared_cache")

SETTINGS: dict[str, Any] = {
    "model.vocab_size": 300, "model.hidden_size": 16, "model.num_attention_heads": 2, "model.num_key_value_heads": 1,
    "model.intermediate_size": 24, "training.context_length": 8, "training.batch_size": 2, "training.eval_interval": 0,
    "training.save_interval": 0, "training.eval_batches": 1, "training.max_steps": 3, "data.num_workers": 0,
    "data.data_path": FEW_WORDS, "system.threads": 1,
}  # fmt: skip
BEFORE, AFTER = 2, 3  # steps before the one that is flipped, and from it on
NAMES = [f"GPU {rank}" for rank in range(4)]


@dataclass
class Bench:
    """A stepper that is put back to where it was before step BEFORE, as often as one likes."""

    parts: Parts
    prints: Prints
    batches: Sequence[Sequence[Batch]]
    kept: Sequence[torch.Tensor]

    @property
    def state(self) -> list[torch.Tensor]:
        live, named = self.parts.stepper.optimizer.moments(), trained(self.parts.stepper.model)
        moments = [held for each in named.values() for held in live[id(each)].values()]
        return [*(each.detach() for each in named.values()), *moments, self.parts.stepper.optimizer.applied]

    def steps(self, fault: str = "") -> tuple[list[Stamp], list[str]]:
        """The stamps and the printed losses of the steps from BEFORE on."""
        stepper = self.parts.stepper
        for tensor, kept in zip(self.state, self.kept, strict=True):
            tensor.copy_(kept)
        stepper.halted = torch.zeros_like(stepper.halted)
        stepper.faults = faults.plan(fault)
        stamps, losses = list[Stamp](), list[str]()
        for step in range(BEFORE, BEFORE + AFTER):
            reading = stepper.launch(step, self.batches[step]).read()
            (taken,) = self.prints.taken(up_to=step)
            stamps.append(Stamp(step, reading.loss.hex(), reading.grad_norm.hex(), replicas.as_hex(taken.read())))
            losses.append(f"{reading.loss:.4f}")
        return stamps, losses


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Bench:
    settings = {**SETTINGS, "training.max_steps": BEFORE + AFTER, "system.mode": "replicas"}
    loaded = load("llama", preset="tiny", flags=flags({"system.device": "cpu", **settings}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        folder = RunDir(tmp_path_factory.mktemp("bench"))
        built = assemble(plan(loaded, torch.device("cpu")), folder, point=None, sinks=[], stop=StopRequest())
    parts = built.parts
    batches = [next(parts.batches) for _ in range(BEFORE + AFTER)]
    built.loader.close()
    for step in range(BEFORE):
        parts.stepper.launch(step, batches[step])
    prints = parts.stepper.prints
    assert prints is not None
    assert len(list(prints.taken())) == BEFORE
    made = Bench(parts, prints, batches, [])
    made.kept = [tensor.clone() for tensor in made.state]
    return made


def spots(bench: Bench, count: int) -> list[tuple[str, int]]:
    """Elements of tensors all over the model."""
    draw, named = random.Random(count), trained(bench.parts.stepper.model)
    names = [draw.choice(list(named)) for _ in range(count)]
    return [(name, draw.randrange(named[name].numel())) for name in names]


def judged(bench: Bench, fault: str, guilty: int, clean: list[Stamp]) -> tuple[str, list[str]]:
    """What is said of three clean replicas and one with the fault, and what that one printed."""
    wrong, losses = bench.steps(fault)
    stamps = [{stamp.step: stamp for stamp in (wrong if rank == guilty else clean)} for rank in range(4)]
    result = vote([{step: short(stamp) for step, stamp in each.items()} for each in stamps])
    return words(NAMES, result, stamps, [name for name, _ in bench.prints.tensors]), losses


@pytest.mark.parametrize("kind", ["grad", "weight"])
def test_every_bit_that_flips_is_named_at_its_step_in_its_tensor(bench: Bench, kind: str) -> None:
    """32 of 32; the control, a loss of four decimals as people look at it, sees few of them."""
    clean, losses = bench.steps()
    assert bench.steps() == (clean, losses), "the clean run repeats its bits"
    seen_by_losses = 0
    for bit, (tensor, index) in enumerate(spots(bench, 32)):
        fault, guilty = f"flip_{kind}@step={BEFORE},tensor={tensor},index={index},bit={bit}", bit % 4
        place = f"{'gradients' if kind == 'grad' else 'weights'}:{tensor}"
        expected = f"GPU {guilty} ends step {BEFORE} with other bits than the other 3 replicas, first in {place}"
        said, printed = judged(bench, fault, guilty, clean)
        assert said == expected, fault
        seen_by_losses += printed != losses
    assert seen_by_losses <= 8


def test_several_bits_at_once_are_named_too(bench: Bench) -> None:
    clean, _ = bench.steps()
    several = [(0, 1), (0, 31), tuple(range(32)), tuple(range(16)), tuple(range(23, 31)), (22, 23), (0, 28)]
    for place, (bits, (tensor, index)) in enumerate(zip(2 * several, spots(bench, 14), strict=True)):
        kind, where = ("grad", "gradients") if place < len(several) else ("weight", "weights")
        at = f"flip_{kind}@step={BEFORE + 1},tensor={tensor},index={index}"
        fault = ";".join(f"{at},bit={bit}" for bit in bits)
        said, _ = judged(bench, fault, 3, clean)
        assert said.startswith(f"GPU 3 ends step {BEFORE + 1} with other bits"), fault
        assert said.endswith(f"first in {where}:{tensor}"), fault


def test_two_that_are_wrong_alike_make_no_majority(bench: Bench) -> None:
    clean, _ = bench.steps()
    wrong, _ = bench.steps(f"flip_weight@step={BEFORE},bit=4")
    stamps = [{stamp.step: stamp for stamp in run} for run in (wrong, clean, wrong, clean)]
    result = vote([{step: short(stamp) for step, stamp in each.items()} for each in stamps])
    said = words(NAMES, result, stamps, [name for name, _ in bench.prints.tensors])
    first = next(iter(trained(bench.parts.stepper.model)))
    assert said == (
        f"{', '.join(NAMES)} end step {BEFORE} with different bits in weights:{first}, and no majority says which are "
        "right"
    )


def stamped(folder: Path) -> list[int]:
    (path,) = folder.glob(f"workers/*/{FILE}")
    return [content["step"] for _, content in read_lines(path) if content and content["kind"] == "step"]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, None),
        ({"debug.digest_interval": 2}, None),
        ({"system.mode": "replicas"}, [0, 1, 2, 3]),
        ({"system.mode": "replicas", "debug.digest_interval": 3}, [2]),
    ],
)
def test_fingerprints_are_written_at_their_interval(
    tmp_path: Path, settings: dict[str, Any], steps: list[int] | None
) -> None:
    run(tmp_path, {**SETTINGS, "training.max_steps": 4, **settings})
    assert (stamped(tmp_path) if list(tmp_path.glob(f"workers/*/{FILE}")) else None) == steps


def test_fingerprints_change_no_bit_and_go_on_after_a_resume(tmp_path: Path) -> None:
    settings = {**SETTINGS, "training.max_steps": 4, "training.save_interval": 2}
    _, plain = run(tmp_path / "plain", settings)
    folder, watched = tmp_path / "watched", {**settings, "system.mode": "replicas"}
    _, seen = run(folder, watched)
    assert [record.loss.hex() for record in seen.records] == [record.loss.hex() for record in plain.records]
    (path,) = folder.glob(f"workers/*/{FILE}")
    whole = [content | {"seconds": 0} for _, content in read_lines(path) if content]
    run(folder, watched, point=folder / "checkpoints/step_00000002")
    again = [content | {"seconds": 0} for _, content in read_lines(path) if content]
    assert again == whole, "steps 2 and 3 once, and with the same bits"


def write(folder: Path, tag: str, losses: str, *, damaged: int = -1) -> None:
    """A worker's file with a letter a step for its loss."""
    prints = Prints({"a": torch.zeros(2)}, {"exp_avg.a": torch.zeros(2)})
    stamps = Stamps(folder / f"workers/n0-{tag}" / FILE, prints, begin=0)
    stamps._write("".join(f"{replicas._line(Stamp(step, loss))}\n" for step, loss in enumerate(losses)))
    lines = stamps.path.read_text(encoding="utf-8").splitlines(keepends=True)
    if damaged >= 0:
        lines[damaged + 1] = lines[damaged + 1].replace('loss\\": \\"a', 'loss\\": \\"b')
    stamps.path.write_text("".join(lines), encoding="utf-8")


def test_when_one_fails_the_records_so_far_are_compared(tmp_path: Path) -> None:
    for tag, losses in (("GPU0", "aaaa"), ("GPU1", "aaa"), ("GPU2", "abc")):
        write(tmp_path, tag, losses)
    assert differences_so_far(tmp_path) == "GPU 2 ends step 1 with other bits than the other 2 replicas, first in loss"
    write(tmp_path, "GPU2", "a")  # it failed early, and had the right bits until then
    assert differences_so_far(tmp_path) == ""
    write(tmp_path, "GPU2", "aaaa", damaged=1)
    assert differences_so_far(tmp_path) == "", "a damaged line blames nobody"
    write(tmp_path, "GPU2", "aaba")
    write(tmp_path, "GPU1", "aaca")
    assert "no majority" in differences_so_far(tmp_path)
    assert differences_so_far(tmp_path / "nothing") == ""


def test_a_record_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    prints = Prints({"a": torch.zeros(2)}, {})
    (tmp_path / "workers").write_text("a file where a folder should be", encoding="utf-8")
    with pytest.raises(LockstepError, match="writing fingerprints failed") as caught:
        Stamps(tmp_path / "workers/n0-GPU0" / FILE, prints, begin=0)
    assert caught.value.exit_code == ExitCode.IO


@pytest.mark.parametrize("value", ["-1", "often", "1.5"])
@pytest.mark.parametrize("key", ["debug.digest_interval", "debug.agree_interval"])
def test_an_interval_is_a_whole_number(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        load("llama", preset="tiny", flags=flags({key: value}))
    assert caught.value.exit_code == ExitCode.USAGE
