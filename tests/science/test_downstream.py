"""Science 2.3: a pretrained encoder is worth more than a random one, and `lockstep eval` says so only where it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep as library
from lockstep.engine.downstream import CLEAR, Comparison, How
from lockstep.engine.inference import fill_blanks, load_run
from lockstep.engine.labelled import read_labelled
from lockstep.engine.measure import measure_labels
from tests.science import kinds, regimes

Run = Callable[..., Any]
TRAINING_TEXTS, LABELLED_TEXTS = 6000, 1500


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


def judged(run: Path, labels: Path, how: How | None = None) -> Comparison:
    return measure_labels(run, read_labelled(str(labels)), how or How())


def test_the_probe_beats_random_first_weights(run: Path, folder: Path) -> None:
    """0.967 against 0.843, 4.8 standard deviations, when this was written. Pretraining has seen no label."""
    found = judged(run, folder / "labels.jsonl")
    assert found.deviations > CLEAR
    assert found.difference > 0.08
    assert found.pretrained.mean > 0.9
    assert found.verdict == "pretraining helps"


def test_shuffled_labels_show_no_difference(run: Path, folder: Path) -> None:
    """The control: the same encoders, the same texts, labels that mean nothing."""
    found = judged(run, folder / "shuffled.jsonl")
    assert abs(found.deviations) < CLEAR
    assert abs(found.pretrained.mean - 0.5) < 0.06


def test_an_encoder_that_has_learnt_nothing_is_no_better(folder: Path) -> None:
    """The control: one step of pretraining."""
    found = judged(pretrain(folder, steps=1), folder / "labels.jsonl")
    assert abs(found.deviations) < CLEAR


@pytest.mark.slow
def test_fine_tuning_learns_and_is_not_fooled(run: Path, folder: Path) -> None:
    """Of single words random weights learn as much as pretrained ones, once they may: no gain is claimed here."""
    found = judged(run, folder / "labels.jsonl", How("finetune"))
    assert min(found.pretrained.mean, found.random.mean) > 0.9
    assert abs(found.deviations) < CLEAR
    shuffled = judged(run, folder / "shuffled.jsonl", How("finetune"))
    assert abs(shuffled.deviations) < CLEAR
    assert abs(shuffled.pretrained.mean - 0.5) < 0.06


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_real_text_helps_with_real_text(tmp_path: Path) -> None:
    """`demo` on 4.8 MB of documentation, probed on 2,400 snippets of other files, four kinds: a minute or two."""
    texts, labels, shuffled = kinds.write(tmp_path)
    run = library.train(
        "mlm",
        "demo",
        data={"dataset_name": "text", "data_path": str(texts), "cache_dir": str(tmp_path / "cache")},
        training={"eval_interval": 0, "save_interval": 0},
        system={"device": "cpu"},
        report={"tensorboard": False, "sample_prompt": "", "log_interval": 100},
        run={"out": str(tmp_path / "runs"), "name": "real"},
    ).run
    found = judged(run, labels)
    assert found.deviations > CLEAR, found.lines()
    control = judged(run, shuffled)
    assert abs(control.deviations) < CLEAR, control.lines()


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


def test_eval_with_labels_prints_both_and_a_verdict(lockstep: Run, run: Path, folder: Path) -> None:
    words = ["eval", str(run), "--labels", str(folder / "labels.jsonl"), "--seeds", "2", "--max-samples", "400"]
    shown = lockstep(*words)
    assert shown.code == 0
    assert "400 texts, 2 labels, 2 seeds" in shown.out
    found = json.loads(lockstep(*words, "--json").out)
    for name in ("pretrained", "random"):
        assert f"{found[name]['mean']:.4f} ± {found[name]['deviation']:.4f}" in shown.out
        assert len(found[name]["accuracies"]) == 2
    assert shown.out.splitlines()[-1] == f"Verdict: {found['verdict']}"


def test_eval_refuses_what_it_cannot_measure(lockstep: Run, run: Path, folder: Path, tmp_path: Path) -> None:
    one_class = regimes.write(tmp_path / "one.jsonl", [(text, 1) for text, _ in regimes.texts(20, seed=4)])
    refused = lockstep("eval", str(run), "--labels", str(one_class))
    assert (refused.code, refused.out) == (65, "")
    assert "all 20 texts have one label" in refused.err
    assert lockstep("eval", str(run), "--labels", str(folder / "texts.jsonl"), "--label-column", "no").code == 65
    assert lockstep("eval", str(run), "--labels", str(tmp_path / "nowhere.jsonl")).code == 66
    assert lockstep("eval", str(run), "--method", "guess").code == 2
    assert lockstep("eval", "nobody").code == 66


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
