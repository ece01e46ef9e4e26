"""Steps of small encoders as one CUDA graph on a real GPU, although each hides another number of tokens.

On the CPU, by a tape of operations: tests/objectives/test_mlm_steady.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.objectives import mlm
from tests.gpu.ready import no_waiting
from tests.gpu.test_cuda_graph import ALWAYS, NEVER, ran, ready, repeating

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
    pytest.mark.usefixtures("shared_cache"),
]
MLM: dict[str, Any] = {
    "system.device": "cuda", "training.max_steps": 30, "training.eval_interval": 10, "training.save_interval": 15,
    "training.eval_batches": 1, "debug.digest_interval": 1, "data.num_workers": 0, "model.dropout": 0.1,
    "report.sample_prompt": "",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("precision", "settings", "spreads"),
    [
        ("bf16", {}, 6), ("fp16", {}, 6), ("fp32", {}, 6), ("bf16", {"data.documents": "separated"}, 6),
        ("bf16", {"data.documents": "padded", "data.num_workers": 1}, 6), ("bf16", {"model.architecture": "modern"}, 6),
        ("bf16", {"model.hidden_size": 256, "model.vocab_size": 8192, "training.context_length": 256}, 6),
        ("bf16", {}, 0),
    ],
    ids=["bf16", "fp16", "fp32", "separated", "padded", "modern", "large tensors", "often more places"],
)  # fmt: skip
def test_small_encoders_too_although_their_places_change(
    tmp_path: Path, precision: str, settings: dict[str, Any], spreads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step hides another number of tokens: batches have room for more, and shares lie on the device."""
    monkeypatch.setattr(mlm, "ROOM_SPREADS", spreads)
    settings = {**MLM, "training.precision": precision, **settings}
    graph, plain = (ran(tmp_path / str(least), settings, least, family="mlm").trace for least in (ALWAYS, NEVER))
    assert len(graph) == 30
    assert graph == plain
    for begun, least in ((ALWAYS, NEVER), (NEVER, ALWAYS)):
        point = tmp_path / str(begun) / "checkpoints" / "step_00000015"
        assert ran(tmp_path / f"rest{least}", settings, least, family="mlm", point=point).trace == graph[15:]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_small_encoder_is_faster_and_looks_at_nothing(
    tmp_path: Path, deterministic: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed: a step of the tiny preset, recorded and plain; the second half of it may not wait for the GPU."""
    took: dict[float, float] = {}
    for least in (ALWAYS, NEVER):
        settings = {**MLM, "training.max_steps": 400, "debug.digest_interval": 0, "training.precision": "bf16"}
        with (
            repeating(deterministic=deterministic),
            ready(tmp_path / str(least), settings, family="mlm", least=least) as parts,
        ):
            stepper = parts.stepper
            assert (stepper.graph is not None) == (least == ALWAYS)
            for step in range(200):
                last = stepper.launch(step, next(parts.batches))
            last.read()
            began = time.perf_counter()
            with no_waiting():
                for step in range(200, 400):
                    last = stepper.launch(step, next(parts.batches))
            last.read()
            took[least] = (time.perf_counter() - began) / 200
    with capsys.disabled():
        print(f"\nmlm tiny: graph {1e3 * took[ALWAYS]:.2f} ms, plain {1e3 * took[NEVER]:.2f} ms")
    assert took[ALWAYS] < took[NEVER]
