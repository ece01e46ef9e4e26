"""Science 2.3: a linear probe on a pretrained encoder beats the same encoder with random first weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lockstep as library
from lockstep.config.load import from_saved
from lockstep.engine.inference import bare_model, fill_blanks, load_run
from lockstep.engine.resume import read_about
from tests.science import regimes

Run = Callable[..., Any]
TRAINING_TEXTS, LABELLED_TEXTS = 6000, 1500
CLEAR = 2.0  # standard deviations over the seeds


def pretrain(folder: Path, *, steps: int) -> Path:
    """A small encoder on texts without labels."""
    result = library.train(
        "mlm",
        "tiny",
        data={"data_path": str(folder / "texts.jsonl"), "tokenizer_name": "word", "documents": "padded",
              "text_column": "text", "cache_dir": str(folder / "cache")},
        objective={"mask_probability": 0.3},
        model={"hidden_size": 32, "num_layers": 1, "dropout": 0.0, "init_std": 0.1},
        training={"context_length": 32, "max_steps": steps, "batch_size": 16, "learning_rate": 1e-2,
                  "warmup_steps": min(60, steps), "adam_beta2": 0.98, "eval_interval": 0, "save_interval": 0},
        system={"device": "cpu"},
        report={"tensorboard": False, "sample_prompt": ""},
        run={"out": str(folder / "runs"), "name": f"{steps}-steps"},
    )  # fmt: skip
    return result.run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("regimes")
    regimes.write(place / "texts.jsonl", regimes.texts(TRAINING_TEXTS, seed=1))
    labelled = regimes.texts(LABELLED_TEXTS, seed=2)
    regimes.write(place / "labels.jsonl", labelled)
    regimes.write(place / "shuffled.jsonl", labelled, shuffled=True)
    return place


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return pretrain(folder, steps=600)


def probe(run: Path, labelled: Path) -> tuple[float, float, float]:
    """Test accuracy on the mean hidden states: pretrained, random, and their difference in standard deviations.

    Three seeds, each with a split and random first weights of its own.
    """
    rows = [json.loads(line) for line in labelled.read_text(encoding="utf-8").splitlines()]
    labels, trained = np.array([row["label"] for row in rows]), load_run(run, device="cpu")
    config = from_saved(read_about(trained.checkpoint)["config"])

    @torch.no_grad()
    def features(model: Any) -> Any:
        ids = (torch.tensor([trained.tokenizer.encode_prompt(row["text"])]) for row in rows)
        return np.stack([model.hidden(each).float().mean(dim=1)[0].numpy() for each in ids])

    pretrained, found = features(trained.model), []
    for seed in range(3):
        random = features(bare_model(config, trained.shape, torch.device("cpu"), documents_apart=False, seed=seed))
        learnt, tested = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
        judge = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        found.append(
            [judge.fit(x[learnt], labels[learnt]).score(x[tested], labels[tested]) for x in (pretrained, random)]
        )
    scores = np.array(found)
    binomial = np.sqrt(2 * 0.25 / (LABELLED_TEXTS * 0.2))  # three seeds may agree better than 300 test texts allow
    deviation = max(float((scores[:, 0] - scores[:, 1]).std(ddof=1)), binomial)
    return *scores.mean(axis=0).tolist(), float((scores[:, 0] - scores[:, 1]).mean() / deviation)


def test_the_probe_beats_random_first_weights(run: Path, folder: Path) -> None:
    """Pretraining has seen no label."""
    pretrained, random, deviations = probe(run, folder / "labels.jsonl")
    assert pretrained > 0.9
    assert pretrained - random > 0.08
    assert deviations > CLEAR


def test_shuffled_labels_show_no_difference(run: Path, folder: Path) -> None:
    """The control: the same encoders, the same texts, labels that mean nothing."""
    pretrained, _, deviations = probe(run, folder / "shuffled.jsonl")
    assert abs(deviations) < CLEAR
    assert abs(pretrained - 0.5) < 0.06


def test_an_encoder_that_has_learnt_nothing_is_no_better(folder: Path) -> None:
    """The control: one step of pretraining."""
    assert abs(probe(pretrain(folder, steps=1), folder / "labels.jsonl")[2]) < CLEAR


# ------------------------------------------------------------------------------------------------ the commands


def test_eval_repeats_the_validation_of_the_run(lockstep: Run, run: Path) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    own = [event for event in events if event["kind"] == "eval"][-1]
    found = json.loads(lockstep("eval", str(run), "--json").out)
    assert found["loss"] == own["val_loss"]  # the same bits
    for name in ("accuracy", "accuracy_masked", "accuracy_random", "accuracy_kept"):
        assert found[name] == own[f"val_{name}"]
    shown = lockstep("eval", str(run))
    assert shown.code == 0
    assert f"  loss               {found['loss']:.4f}" in shown.out
    assert f"  perplexity         {found['perplexity']:.4f}" in shown.out


def test_labels_are_refused_with_the_recipe(lockstep: Run, run: Path) -> None:
    refused = lockstep("eval", str(run), "--labels", "reviews.jsonl")
    assert refused.code == 2
    assert "docs/mlm.md#what-an-encoder-is-worth" in refused.err


def test_text_that_has_changed_is_not_measured(lockstep: Run, run: Path, folder: Path) -> None:
    texts = folder / "texts.jsonl"
    before = texts.read_bytes()
    try:
        texts.write_bytes(before.replace(b"w17 ", b"w18 "))
        refused = lockstep("eval", str(run))
    finally:
        texts.write_bytes(before)
    assert refused.code == 65
    assert "not what it was" in refused.err


def test_blanks_are_filled_by_what_stands_around_them(lockstep: Run, run: Path) -> None:
    """Words of one regime around a blank: one of the same regime is the answer."""
    for regime in (1, 4):
        around = [f"w{regimes.REGIMES * place + regime}" for place in range(20)]
        prompt = " ".join([*around[:10], "[MASK]", *around[10:]])
        shown = lockstep("sample", str(run), prompt)
        assert shown.code == 0
        lines = shown.out.splitlines()
        assert lines[1] == "[MASK] at position 11:"
        words = [line.split()[0] for line in lines[2:7]]
        likely = [float(line.split()[1]) for line in lines[2:7]]
        assert likely == sorted(likely, reverse=True)
        assert all(int(word[1:]) % regimes.REGIMES == regime for word in words)
        assert lines[0] == prompt.replace("[MASK]", words[0])


def test_several_blanks_and_none(lockstep: Run, run: Path) -> None:
    trained = load_run(run)
    filled = fill_blanks(trained.model, trained.objective, trained.tokenizer, "[MASK] w1 w7 [MASK]")
    assert [blank.position for blank in filled.blanks] == [1, 4]
    assert "[MASK]" not in filled.text
    refused = lockstep("sample", str(run), "w1 w7")
    assert (refused.code, refused.out) == (2, "")
    assert 'try: lockstep sample RUN "the [MASK] sat"' in refused.err
    drawn = {
        lockstep("sample", str(run), "[MASK] w1", "--temperature", "5", "--seed", str(seed)).out for seed in range(4)
    }
    assert len(drawn) > 1
