"""`lockstep sample` and `lockstep eval` of a masked-diffusion run, as a person types them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.data.tokenize import ByteTokenizer, TokenizerFile, train_bpe, train_wordpiece
from lockstep.engine import denoising, samples
from lockstep.engine.denoising import Speaker
from lockstep.engine.inference import load_run
from lockstep.engine.measure import Measured, bits_per_byte
from lockstep.objectives.diffusion import Diffusion
from lockstep.report.logs import close_logging

Run = Callable[..., Any]
SHORT = (
    *("--max-steps", "2", "--eval-interval", "0", "--save-interval", "0", "--tensorboard", "false", "--device", "cpu"),
    *("--name", "a"),
)
TEXT = "the old house stands near the sea, and the sea is old.\n" * 9


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Path:
    """A folder with a run in it, for commands that change nothing."""
    from lockstep.cli import main

    folder = tmp_path_factory.mktemp("llada")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("DATASET_CACHE_DIR", str(_prepared))
        assert main(["train", "llada", "tiny", *SHORT]) == 0
    close_logging()
    return folder


@pytest.fixture
def llada(trained: Path, monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> Path:
    """The run, seen from its folder."""
    monkeypatch.chdir(trained)
    return trained / "runs/a"


def test_a_run_speaks_and_is_measured(lockstep: Run, llada: Path) -> None:
    spoken = lockstep("sample", "a", "The ", "--tokens", "8", "--no-eos")
    assert spoken.code == 0
    assert spoken.out.startswith("The ")
    assert spoken.out == lockstep("sample", "a", "The ", "--tokens=8", "--no_eos").out
    drawn = {
        lockstep("sample", "a", "The ", "--tokens", "8", "--temperature", "1", "--seed", seed, *more).out
        for seed in "12"
        for more in (["--remasking", "low_confidence"], ["--block_length", "4", "--steps", "4"], ["--cfg-scale", "2"])
    }
    assert len(drawn) == 6
    filled = lockstep("sample", "a", "the [MASK][MASK] sat on [MASK]", "--threshold", "0.5", "--delay-eos").out
    assert filled.startswith("the ")
    assert " sat on " in filled
    assert "[MASK]" not in filled
    assert "\x1b" not in spoken.out + filled, "text alone"

    events = [json.loads(line) for line in (llada / "events.jsonl").read_text().splitlines()]
    own = [event for event in events if event["kind"] == "eval"][-1]
    found = json.loads(lockstep("eval", "a", "--json").out)
    assert {name: found[name] for name in ("loss", "accuracy", "loss_t_9")} == {
        name: own[f"val_{name}"] for name in ("loss", "accuracy", "loss_t_9")
    }
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=0.01), "bytes, and few ends"
    table = lockstep("eval", "a").out
    assert f"  loss               {found['loss']:.4f} at most" in table
    assert f"    90 to 100 %      {found['loss_t_9']:.4f}" in table


def test_an_answer_is_scored(lockstep: Run, llada: Path) -> None:
    told = ("eval", "a", "--answer", "sea", "--prompt", "the ")
    found = json.loads(lockstep(*told, "--json").out)
    assert (found["tokens"], found["samples"]) == (3, 128)
    assert found["log_likelihood"] == 3 * found["per_token"] < 0
    few, guided = (
        json.loads(lockstep(*told, *more, "--json").out) for more in (["--samples", "9"], ["--cfg-scale", "1"])
    )
    assert few["samples"] == 9
    assert guided["log_likelihood"] != found["log_likelihood"]
    assert f"{found['log_likelihood']:.4f} at least" in lockstep(*told).out
    assert json.loads(lockstep("eval", "a", "--answer", "s", "--json").out)["samples"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sample", "a", "x", "--tokens", "9", "--block-length", "4"], "--block-length: 9 tokens are no whole number"),
        (
            ["sample", "a", "x", "--steps", "5", "--block-length", "8"],
            "--steps: 5 are not the same for each of 7 blocks",
        ),
        (["sample", "a", "x", "--steps", "64"], "--steps: 64 passes for 63 tokens"),
        (["sample", "a", "x", "--tokens", "5000"], "--tokens: a prompt of 1 and 5000 more are over the model's 2048"),
        (["sample", "a", "x" * 3000], "PROMPT: a prompt of 3000 tokens leaves 0 of the model's 2048"),
        (["sample", "a", "x", "--threshold", "0.9", "--steps", "8"], "--threshold: decides the number of steps"),
        (["sample", "a", "x", "--threshold", "2"], "argument --threshold: expected a number from 0 to 1"),
        (["sample", "a", "x", "--remasking", "lowest"], "argument --remasking: invalid choice: 'lowest'"),
        (["sample", "a", "x [MASK]", "--block-length", "4"], "--block-length: blocks are cut from what is appended"),
        (["eval", "a", "--answer", ""], "--answer: the answer holds no token"),
        (["eval", "a", "--samples", "4"], "--samples: goes with --answer"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(llada: Path, lockstep: Run, words: list[str], said: str) -> None:
    refused = lockstep(*words)
    assert refused.code == 2
    first, *rest = refused.err.splitlines()
    assert said in first
    assert [line[:7] for line in rest] == ["  try: "]


def test_others_have_no_such_sampler(lockstep: Run, in_dir: Path, shared_cache: Path) -> None:
    assert lockstep("train", "llama", "tiny", *SHORT).code == 0
    for flag in (["--steps", "4"], ["--block_length", "4"], ["--cfg-scale", "1"], ["--no-eos"]):
        refused = lockstep("sample", "a", "x", *flag)
        assert refused.code == 2
        shown = flag[0].replace("_", "-")
        assert f"{shown}: is for masked diffusion (family llada), and this run is of another" in refused.err
    refused = lockstep("eval", "a", "--answer", "x")
    assert (refused.code, "for masked diffusion" in refused.err) == (2, True)


# ---------------------------------------------------------------------------------------------------- words and blanks

MAKE: dict[str, Callable[[], TokenizerFile]] = {
    "bytes": ByteTokenizer,
    "builtin": lambda: train_bpe([TEXT], 320),
    "wordpiece": lambda: train_wordpiece([TEXT], 400),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_prompt_stays_as_it_was_typed_around_its_blanks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fills in what was hidden gives the text back, to the letter."""
    tokenizer, mask = MAKE[name](), 500
    word = {"bytes": "old"}.get(name, " old")
    hidden = tokenizer.encode([word])[0].tolist()
    gap = "[MASK]" * len(hidden)
    prompt = f"the {gap} house,  stands" if name != "wordpiece" else f"the {gap} house"
    ids = denoising.join_blanks(tokenizer, denoising.split_blanks(tokenizer, prompt), mask)
    assert ids.count(mask) == len(hidden)

    class Knowing:
        answers, mask = False, 500

    def generated(*_: Any) -> tuple[list[int], list[int]]:
        answer = iter(hidden)
        return [next(answer) if token == mask else token for token in ids], []

    monkeypatch.setattr(Speaker, "generated", generated)
    objective: Any = Knowing()
    assert Speaker(torch.nn.Identity(), objective, tokenizer, 64).text(prompt, {}) == prompt.replace(gap, "old")


def test_prompt_and_answer_meet_between_two_tokens() -> None:
    tokenizer = train_bpe([TEXT], 320)
    objective: Any = type("Plain", (), {"answers": False})
    before, after = denoising.exchange(objective, tokenizer, "the old", " house")
    assert tokenizer.decode(before + after) == "the old house"
    assert [*before, *after] == tokenizer.encode(["the old house"])[0].tolist()


def test_ends_of_text_are_those_of_tokenizer_and_model(trained: Path) -> None:
    made = load_run(trained / "runs/a")
    assert isinstance(made.objective, Diffusion)
    assert denoising.ends(made.tokenizer, made.model) == (256,)


@pytest.mark.parametrize(
    ("prompt", "given", "tokens"),
    [(4, {}, 60), (4, {"block_length": 8}, 56), (70, {"block_length": 7}, 63), (70, {}, 64), (4, {"tokens": 100}, 100)],
)
def test_a_text_is_no_longer_than_what_was_learnt(
    trained: Path, prompt: int, given: dict[str, int], tokens: int
) -> None:
    """Unless one says so, or the prompt itself is longer."""
    made = load_run(trained / "runs/a")
    assert isinstance(made.objective, Diffusion)
    speaker = Speaker(made.model, made.objective, made.tokenizer, made.context_length)
    options = speaker._options([1] * prompt, given)
    assert (options.tokens, options.temperature) == (tokens, 0.8)
    assert options.remasking == "random", "a draw; the surest guesses of a text that goes on are blanks"
    for asked in ({"temperature": 0.0}, {"threshold": 0.8}, {"remasking": "low_confidence"}):
        assert speaker._options([1] * prompt, given | asked).remasking == "low_confidence"
    filling = speaker._options([1, made.objective.mask], {})
    assert (filling.tokens, filling.temperature, filling.remasking) == (0, 0, "low_confidence")


@pytest.mark.parametrize(("prompt", "answers"), [("The", False), ("The [MASK]", False), ("What?", True)])
def test_the_closing_sample_goes_on_in_any_order(monkeypatch: pytest.MonkeyPatch, prompt: str, answers: bool) -> None:
    """After a short training the surest guesses are all blanks; what is filled in or answered is not that open."""
    told: list[Mapping[str, Any]] = []
    monkeypatch.setattr(Speaker, "text", lambda _self, said, given: told.append(given) or f"{said} more")
    parts: Any = SimpleNamespace(
        config=load("llada", preset="tiny", flags=[("report.sample_prompt", prompt)]).config,
        stepper=SimpleNamespace(model=torch.nn.Identity()),
    )
    assembled: Any = SimpleNamespace(prepared=SimpleNamespace(words=ByteTokenizer(), tokenizer=ByteTokenizer()))
    objective: Any = SimpleNamespace(answers=answers)
    assert samples.uncovered(parts, assembled, objective) == f"{prompt} more"
    assert (told[0].get("remasking") == "random") == (prompt == "The")
    silence = {"The": "The   \n ", "The [MASK]": "The  ", "What?": " "}[prompt]
    monkeypatch.setattr(Speaker, "text", lambda *_: silence)
    assert samples.uncovered(parts, assembled, objective) == f"{silence.strip()} (no text yet)".strip()


def test_answers_are_given_to_questions(lockstep: Run, in_dir: Path) -> None:
    pairs = [{"prompt": f"{number} and one?", "response": f"It is {number + 1}."} for number in range(200)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    learnt = ("--data-path", "pairs.jsonl", "data.documents=answers", "data.cache_dir=cache")
    ended = lockstep("train", "llada", "tiny", *SHORT, *learnt)
    assert ended.code == 0
    question, answer = ended.text.partition("┌─ sample")[2].splitlines()[1:3]
    assert question.split("│")[-1].strip() in {pair["prompt"] for pair in pairs}, "one of the validation rows"
    assert answer.split("│")[-1].strip().startswith("→")
    close_logging()
    said = lockstep("sample", "a", "4 and one?")
    assert said.code == 0
    assert "4 and one?" not in said.out, "the answer alone"
    scored = json.loads(lockstep("eval", "a", "--prompt", "4 and one?", "--answer", "It is 5.", "--json").out)
    assert scored["tokens"] == len("It is 5.")
    measured = json.loads(lockstep("eval", "a", "--json").out)
    assert "bits_per_byte" not in measured, "the loss of answers is a mean over answers"


def test_bits_do_not_depend_on_the_tokenizer() -> None:
    tokens = {name: make().encode([TEXT])[0] for name, make in MAKE.items() if name != "wordpiece"}
    per_byte = {
        name: bits_per_byte(len(TEXT) / len(ids), ids, MAKE[name]())["bits_per_byte"] for name, ids in tokens.items()
    }
    assert per_byte == pytest.approx(dict.fromkeys(tokens, 1 / math.log(2)))
    assert Measured(Path("x"), 1, {"loss": 1.0}).lines()[1] == "  loss               1.0000"
