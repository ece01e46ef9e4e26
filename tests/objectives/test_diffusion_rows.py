"""Masked diffusion: rows of text and of answers, which id hides a token, and what an evaluation says."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.contracts import PROMPT, Batch, Draw, SampleOptions, Vocabulary
from lockstep.data.cache import Table, write_table
from lockstep.data.loader import Loader, validation_batches
from lockstep.errors import ConfigError
from lockstep.models.build import compile_blocks
from lockstep.models.initialise import initialise
from lockstep.models.llama import Llama
from lockstep.objectives import denoise, diffusion
from lockstep.objectives.diffusion import BUCKETS, Diffusion, build
from lockstep.objectives.options import DiffusionOptions
from tests.objectives.test_diffusion import (
    DRAW,
    EOS,
    LENGTH,
    MASK,
    SHAPE,
    SIZE,
    VOCABULARY,
    made,
    model,
    rows_of,
    text,
)

__all__ = ["model"]
IDS = st.lists(st.integers(0, EOS - 1), max_size=30)


def packed(objective: Diffusion, documents: list[Any], length: int, separator: int = EOS) -> dict[str, np.ndarray]:
    blocks = list(objective.pack(iter(documents), context_length=length, separator=separator))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]} if blocks else {}


@given(documents=st.lists(IDS, max_size=12), length=st.integers(1, 20), marked=st.booleans())
def test_text_is_cut_into_rows_and_only_the_tail_is_dropped(
    documents: list[list[int]], length: int, marked: bool
) -> None:
    stream = [token for ids in documents if ids for token in (*ids, *([EOS] if marked else []))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "PACK_TOKENS", 25)  # so that several blocks are made
        found = packed(made(), [np.array(ids, np.uint32) for ids in documents], length, EOS if marked else -1)
    kept = len(stream) // length * length
    if not kept:
        assert not found
    else:
        assert found["tokens"].dtype == np.int32
        assert found["tokens"].shape[1] == length
        assert found["tokens"].reshape(-1).tolist() == stream[:kept]


def exchange(prompt: list[int], answer: list[int]) -> np.ndarray:
    return np.array([*(token | PROMPT for token in prompt), *answer], np.uint32)


@given(pairs=st.lists(st.tuples(IDS, IDS), max_size=8), length=st.integers(2, 40))
def test_conversations_have_a_row_each(pairs: list[tuple[list[int], list[int]]], length: int) -> None:
    """Whole where they fit; else the end of the prompt, at least half a row of it, and the beginning of the answer."""
    wanted = [(prompt, answer) for prompt, answer in pairs if prompt or answer]
    found = packed(made("answers"), [exchange(*pair) for pair in pairs], length)
    assert len(found.get("tokens", ())) == len(wanted), "none is dropped"
    for (prompt, answer), row, (kept, end) in zip(wanted, *found.values(), strict=True) if found else ():
        tokens = row.tolist()
        assert tokens[:kept] == prompt[len(prompt) - kept :]
        assert kept < end <= length
        assert tokens[kept:end] == [*answer, EOS][: end - kept]
        assert set(tokens[end:]) <= {EOS}
        if len(prompt) + len(answer) < length:
            assert (kept, end) == (len(prompt), len(prompt) + len(answer) + 1)
        else:
            assert end == length
            assert kept >= min(len(prompt), length // 2)
            assert kept == len(prompt) or end - kept >= min(len(answer) + 1, length - length // 2)


def test_what_did_not_fit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    documents = [exchange([1] * 3, [2] * 3), exchange([1] * 9, [2] * 2), exchange([1] * 9, [2] * 9), exchange([], [2])]
    with caplog.at_level(logging.WARNING):
        found = packed(made("answers"), documents, 8)
    assert "of 4 conversations 2 did not fit into 8 tokens: 2 prompts lost their beginning, 1 answers" in caplog.text
    assert found["lengths"].tolist() == [[3, 7], [5, 8], [4, 8], [0, 2]]
    caplog.clear()
    packed(made("answers"), documents[:1], 8)
    assert not caplog.text


def test_answers_without_an_end_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="end token"):
        packed(made("answers"), [exchange([1], [2])], 8, separator=-1)


# ------------------------------------------------------------------------------------------------------------ the mask


def told(vocabulary: Vocabulary, **options: Any) -> Diffusion:
    return build(DiffusionOptions.model_validate(options)).with_vocabulary(vocabulary)


def test_the_mask_is_as_told_else_the_tokenizers_else_the_first_free_row() -> None:
    own = Vocabulary(SIZE, {"mask": 12, "sep": 3, "pad": 4}, np.arange(SIZE) == 5)
    assert told(VOCABULARY).mask == SIZE
    assert told(own).mask == 12
    assert told(own, mask_token_id=30).mask == 30
    assert told(own).possible_ids == SIZE - 1
    assert told(own, mask_token_id=99).mask == 99
    for wrong, what in ((3, "[SEP]"), (4, "[PAD]"), (5, "part of a word")):
        with pytest.raises(ConfigError) as caught:
            told(own, mask_token_id=wrong)
        assert what in str(caught.value)
    with pytest.raises(ConfigError, match="ends each document"):  # also where rows are ready, and none are packed
        told(replace(own, separator=30), mask_token_id=30)
    with pytest.raises(ConfigError, match="ends the documents"):
        told(VOCABULARY, mask_token_id=EOS).pack([], context_length=8, separator=EOS)


def test_a_mask_without_a_row_is_refused_with_the_numbers(model: Llama) -> None:
    """Item 110."""
    objective = told(VOCABULARY, mask_token_id=64)
    with pytest.raises(ConfigError, match="id 64, the model only rows 0 to 63"):
        objective.check_rows(64)
    with pytest.raises(ConfigError, match="id 64"):
        objective.loss(model, objective.collate(rows_of(text()), DRAW))
    objective.check_rows(65)


def test_neither_the_mask_nor_rows_of_nobody_are_answers(model: Llama) -> None:
    bias = made().logit_bias(model)
    assert bias.dtype == torch.float64
    assert torch.equal(bias.isinf().nonzero().flatten(), torch.arange(MASK, 64))
    assert made().logit_bias(model) is not bias
    objective = made()
    assert objective.logit_bias(model) is objective.logit_bias(model), "made once"
    inner = made(mask_token_id=7)
    assert inner.logit_bias(model).isinf().nonzero().flatten().tolist() == [7, *range(SIZE, 64)]


class Stubborn(torch.nn.Module):
    """Would say the mask, else a row of nobody, else 7."""

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.weight = SHAPE, torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor, *, places_M: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = torch.zeros(len(places_M), 64)
        logits[:, MASK], logits[:, 62], logits[:, 7] = 50.0, 40.0, 30.0
        return logits


def test_nor_does_a_sample_hold_them() -> None:
    """Science 3.1: consistent in loss and sampling."""
    options = SampleOptions(tokens=6, temperature=0)
    assert made().sample(Stubborn(), [1, 2], options) == [7] * 6
    unbiased = denoise.generate(Stubborn(), [[1]], denoise.DiffusionSampleOptions(tokens=1, temperature=0), mask=MASK,
                                bias_V=None)  # fmt: skip
    assert unbiased.rows == [[1, MASK]], "control: without the objective's word"


def test_masks_in_the_text_are_no_targets(model: Llama) -> None:
    """A corpus may hold the mask's own text: its loss would be infinite."""
    objective, tokens = made(mask_token_id=7), text()
    tokens[:, ::3] = 7
    batch = objective.collate(rows_of(tokens), DRAW)
    assert 7 not in batch.tensors["targets"].tolist()
    assert math.isfinite(float(objective.loss(model, batch)["loss"].detach()))


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_says_the_bound_and_its_parts(model: Llama) -> None:
    objective, tokens = made(), text(32)
    batch = objective.collate(rows_of(tokens), Draw(1, 0, 32))
    sums = objective.evaluate(model, batch)
    with torch.no_grad():
        bound = float(objective.loss(model, batch)["loss"])
        logits = model(batch.tensors["inputs"]).flatten(0, 1)[batch.tensors["places"]] + objective.logit_bias(model)
    assert float(sums["loss"].total) == pytest.approx(bound, rel=1e-6)
    assert sums["loss"].weight == 32 * LENGTH
    each = torch.nn.functional.cross_entropy(logits, batch.tensors["targets"], reduction="none")
    assert int(sums["accuracy"].total) == int((logits.argmax(-1) == batch.tensors["targets"]).sum())
    assert sums["accuracy"].weight == len(each)
    tenth = torch.floor(batch.tensors["times"] * 10)[batch.tensors["places"] // LENGTH]
    for bucket in range(BUCKETS):
        part = sums[f"loss_t_{bucket}"]
        assert part.weight == int((tenth == bucket).sum())
        assert float(part.total) == pytest.approx(float(each[tenth == bucket].sum()), rel=1e-6, abs=1e-9)
    assert sum(sums[f"loss_t_{bucket}"].weight for bucket in range(BUCKETS)) == len(each)


def ratios(objective: Diffusion, model: Llama, batches: list[Batch]) -> dict[str, float]:
    parts = [objective.evaluate(model, batch) for batch in batches]
    return {
        name: sum(float(p[name].total) for p in parts) / max(1, sum(p[name].weight for p in parts)) for name in parts[0]
    }


@pytest.fixture
def table(tmp_path: Path) -> Table:
    write_table(tmp_path / "rows", [{"tokens": text(12)}], columns=made().columns, stored={})
    return Table(tmp_path / "rows")


@pytest.mark.parametrize("draws", [1, 5])
def test_validation_is_the_same_twice_and_however_cut(model: Llama, table: Table, draws: int) -> None:
    """Item 124."""
    objective = made(eval_draws=draws, random_length_probability=1.0)
    found = [
        ratios(objective, model, validation_batches(table, objective, micro_rows=rows, rows=12, seed=1))
        for rows in (12, 12, 5, 1)
    ]
    assert found[0] == found[1]
    for other in found[2:]:
        assert other == pytest.approx(found[0], rel=1e-9)
    seed = ratios(objective, model, validation_batches(table, objective, micro_rows=12, rows=12, seed=2))
    assert seed["loss"] != pytest.approx(found[0]["loss"], rel=1e-6)


def test_draws_hide_anew_and_are_stratified_together(table: Table) -> None:
    (one,) = validation_batches(table, made(), micro_rows=12, rows=12, seed=1)
    (many,) = validation_batches(table, made(eval_draws=6), micro_rows=12, rows=12, seed=1)
    assert (one.rows, many.rows) == (12, 12)
    assert many.weights["loss"] == 6 * one.weights["loss"]
    assert len(set(np.floor(many.tensors["times"].numpy() * 72 - 72 * float(many.tensors["times"].min()) + 0.5))) == 72
    hidden = (many.tensors["inputs"] == MASK).view(6, 12, LENGTH)
    assert len({row.numpy().tobytes() for row in hidden[:, 3]}) > 4


def test_training_noise_is_new_each_epoch_and_the_same_for_any_loader(table: Table) -> None:
    def steps(rank: int = 0, world: int = 1, workers: int = 0, start: int = 0) -> list[list[Batch]]:
        place: dict[str, Any] = {"rank": rank, "world": world, "workers": workers, "start_step": start, "steps": 50}
        objective = made(random_length_probability=0.2)
        with Loader(table, objective, seed=3, micro_rows=2, micro_batches=3 // world, **place) as loader:
            return [next(loader) for _ in range(20 - start)]

    whole = steps()
    for other in (steps(workers=2), [[]] * 7 + steps(start=7)):
        for one, two in zip(whole, other, strict=True):
            assert not two or all(
                torch.equal(tensor, b.tensors[name])
                for a, b in zip(one, two, strict=True)
                for name, tensor in a.tensors.items()
            )
    ranks = [steps(rank, 3) for rank in range(3)]
    for step, micro in enumerate(whole):
        for rank, batch in enumerate(micro):
            assert torch.equal(batch.tensors["inputs"], ranks[rank][step][0].tensors["inputs"])
    assert len({batch.tensors["inputs"].numpy().tobytes() for step in whole for batch in step}) == 60


def test_a_model_that_is_compiled_later_is_not_left_without_the_compiler() -> None:
    """A run that ends in a cut step, or with an error there, is followed by another in the same process."""
    from torch._dynamo import eval_frame

    torch.compiler.set_stance("force_eager")
    try:
        compile_blocks(Llama(SHAPE, attention="native_math"), torch.device("cpu"), sharded=False, backend="eager")
        assert eval_frame._stance.stance == "default"
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("sharded", [False, True])
def test_rows_that_were_cut_are_not_compiled(sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length would be compiled anew. Also where a backward pass runs the blocks again."""
    graphs: list[Any] = []

    def counted(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = Llama(SHAPE, attention="native_math", checkpointing=True)
    initialise(compiled, seed=1, std=0.2)
    plain = copy.deepcopy(compiled)
    compile_blocks(compiled, torch.device("cpu"), sharded=sharded, backend=counted)
    whole, cuts = made(), made(random_length_probability=1.0)
    seen: list[int] = []
    for step in range(6):
        for objective in (whole, cuts):
            batch = objective.collate(rows_of(text()), DRAW._replace(step=step))
            losses = [objective.loss(model, batch)["loss"] for model in (compiled, plain)]
            gradients = [
                torch.autograd.grad(loss, list(model.parameters()))
                for loss, model in zip(losses, (compiled, plain), strict=True)
            ]
            assert torch.allclose(*losses, rtol=1e-5)
            assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*gradients, strict=True))
            objective.evaluate(compiled, batch)
        seen.append(len(graphs))
    assert seen[0] > 0
    assert len(set(seen)) == 1, "nothing is compiled after the first step"
    torch.compiler.set_stance("default")
    monkeypatch.setattr(diffusion, "_set_stance", lambda *_model, **_how: None)  # the control
    cut = next(
        batch
        for batch in (cuts.collate(rows_of(text()), DRAW._replace(step=step)) for step in range(9))
        if "cut" in batch.tensors
    )
    cuts.loss(compiled, cut)
    assert len(graphs) > seen[-1]
