"""Using a trained model: load it from a run, let it speak, hand it to others."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import rundir
from lockstep.config.load import from_saved
from lockstep.config.schema import RunConfig
from lockstep.contracts import Objective, SampleOptions, Tokenizer
from lockstep.data.tokenize import CONTINUED, SPECIALS, TokenizerFile, load_tokenizer
from lockstep.engine import adapters
from lockstep.engine.build import make_objective
from lockstep.engine.checkpoint import MODEL, check_not_spoilt, verify
from lockstep.engine.choices import speaking
from lockstep.engine.denoising import Speaker
from lockstep.engine.resume import point_of_run, read_about
from lockstep.engine.shards import Stored
from lockstep.errors import ConfigError
from lockstep.models import hf, shapes
from lockstep.models.agent import Agent
from lockstep.models.build import Model
from lockstep.models.build import build as build_model
from lockstep.objectives.diffusion import Diffusion
from lockstep.runtime.hardware import pick_device

logger = logging.getLogger(__name__)

MASK = SPECIALS["mask_token"]
SHOWN_WORDS = 5  # for each blank
GREEDY = SampleOptions(temperature=0)
FLAGS = {"forbid_eos": "no_eos"}  # that are not called as their fields are


@dataclass(frozen=True)
class LoadedModel:
    """A model as its checkpoint has it."""

    model: Model
    config: RunConfig
    shape: shapes.AnyShape
    checkpoint: Path
    about: Mapping[str, Any]  # what the checkpoint belongs to


@dataclass(frozen=True)
class Trained:
    """A model with what belongs to it."""

    model: Model
    tokenizer: TokenizerFile
    objective: Objective
    shape: shapes.AnyShape
    checkpoint: Path
    context_length: int  # of the rows it has learnt


def load_run(path: Path, *, device: str = "auto", documents_apart: bool = False) -> Trained:
    """The model of a run (its newest good checkpoint) or of one checkpoint folder, with its words."""
    loaded = load_model(path, device=device, documents_apart=documents_apart)
    if isinstance(loaded.model, Agent):
        what = "this is a run of an agent (family ad), which has no words"
        raise ConfigError(what, where=str(path), hint=f"lockstep eval {path}, or lockstep sample {path}")
    return with_words(loaded)


def with_words(loaded: LoadedModel) -> Trained:
    """A model of texts, with its tokenizer and its objective."""
    tokenizer = load_tokenizer(loaded.checkpoint)
    objective = speaking(make_objective(loaded.config), tokenizer)
    length = loaded.config.training.context_length
    return Trained(loaded.model, tokenizer, objective, loaded.shape, loaded.checkpoint, length)


def load_model(path: Path, *, device: str = "auto", documents_apart: bool = False) -> LoadedModel:
    """The same without the words, which not every model has."""
    checkpoint = _checkpoint_of(path)
    about = read_about(checkpoint, trains=False)
    config = from_saved(about["config"])
    shape = shapes.from_hf(about["shape"])
    place = pick_device(device, 0)
    if adapters.has_additions(config):
        model = adapters.load_merged(config, shape, checkpoint, place, documents_apart=documents_apart)
    else:
        model = bare_model(config, shape, place, documents_apart=documents_apart)
        fill(model, Stored(checkpoint, MODEL))
    return LoadedModel(model.eval(), config, shape, checkpoint, about)


def _checkpoint_of(path: Path) -> Path:
    """The checkpoint that was named, or the newest good one of a run: whole, and of a model that computes numbers."""
    if not (path / rundir.MANIFEST).is_file():
        return point_of_run(path).checkpoint
    verify(path)
    check_not_spoilt(path)
    return path


def bare_model(
    config: RunConfig, shape: shapes.AnyShape, place: torch.device, *, documents_apart: bool, seed: int = 0
) -> Model:
    """The model of a run with random first weights, for use and not for training."""
    without = {"lora_rank": 0} if adapters.has_additions(config) else {}
    kept = {"init": "random", "compile": "off", "attention_backend": "auto", **without}
    plain = config.model.model_copy(update=kept)
    return build_model(
        plain,
        shape,
        device=place,
        dtype_name="fp32",
        seed=seed,
        checkpointing=False,
        deterministic=False,
        debug=False,
        documents_apart=documents_apart,
    ).model


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """The weights into a model of their names."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


@dataclass(frozen=True)
class Blank:
    """What a model would put in the place of one [MASK]: words with their probabilities, the likeliest first."""

    position: int  # among the tokens, from 1
    words: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Filled:
    """A text with its blanks filled in."""

    text: str
    blanks: tuple[Blank, ...]

    def lines(self) -> list[str]:
        """The text, and the documented lines for each blank."""
        found = [self.text]
        width = max((20, *(len(word) for blank in self.blanks for word, _ in blank.words)))
        for blank in self.blanks:
            found.append(f"[MASK] at position {blank.position}:")
            found += [f"  {word:<{width}} {probability:.4f}" for word, probability in blank.words]
        return found


def fill_blanks(
    model: nn.Module, objective: Objective, tokenizer: TokenizerFile, prompt: str, options: SampleOptions = GREEDY
) -> Filled:
    """The prompt with each [MASK] filled in, the surest first, and the likeliest words of each blank by itself."""
    mask = tokenizer.special_texts["mask"]
    prompt = prompt.replace(MASK, mask)  # ours is understood whatever the tokenizer's is
    if mask not in prompt:
        example = 'lockstep sample RUN "the [MASK] sat"'
        raise ConfigError(f"this model fills blanks, and the prompt has no {mask}", where="PROMPT", hint=example)
    ids, goes_on = tokenizer.encode_prompt(prompt), tokenizer.vocabulary().continues
    likeliest = objective.fill(model, ids, top=SHOWN_WORDS)  # pyright: ignore[reportAttributeAccessIssue] - who fills
    chosen = objective.sample(model, ids, options)
    text, *rest = prompt.split(mask)
    blanks: list[Blank] = []
    for (place, found), after in zip(likeliest, rest, strict=True):
        marks = {True: CONTINUED, False: ""}
        words = tuple((marks[bool(goes_on[token])] + _word(tokenizer, token), share) for token, share in found)
        blanks.append(Blank(place + 1, words))
        before = text.rstrip() if goes_on[chosen[place]] else text
        text = before + _word(tokenizer, chosen[place]) + after
    return Filled(text, tuple(blanks))


def _word(tokenizer: TokenizerFile, token: int) -> str:
    """A token as people read it."""
    text = tokenizer.decode([token])
    return text.strip().removeprefix(CONTINUED) or repr(text)


def continue_text(
    model: nn.Module, objective: Objective, tokenizer: Tokenizer, prompt: str, options: SampleOptions | None = None
) -> str:
    """The prompt and what the model adds to it, up to the end of the document."""
    options = options or SampleOptions()
    ids = [int(token) for token in tokenizer.encode([prompt])[0]]
    if not ids:
        raise ConfigError("the prompt holds no token", hint="a prompt of at least one character")
    was_training = model.training
    model.eval()
    try:
        added = objective.sample(model, ids, options)
    finally:
        model.train(was_training)
    return prompt + _continuation(tokenizer, prompt, ids, [token for token in added if token != tokenizer.separator])


def _continuation(tokenizer: Tokenizer, prompt: str, ids: list[int], added: list[int]) -> str:
    """What was added, with the blank before it if there is one: tokenizers of words leave it out at the beginning."""
    before, whole = tokenizer.decode(ids), tokenizer.decode([*ids, *added])
    if not whole.startswith(before):
        return tokenizer.decode(added)
    return whole[len(before) :].lstrip() if prompt[-1].isspace() and not before[-1:].isspace() else whole[len(before) :]


def sample_run(path: Path, prompt: str, given: Mapping[str, Any]) -> str:
    """`lockstep sample RUN "prompt"`; `given` are fields of the sampler's options, the rest is as suits the model."""
    trained = load_run(path)
    if isinstance(trained.objective, Diffusion):
        speaker = Speaker(trained.model, trained.objective, trained.tokenizer, trained.context_length)
        text = speaker.text(prompt, given)
        if speaker.silent(prompt, text):
            logger.warning("Nothing but blanks: the model has learnt too little so far")
        return text
    refuse_others(given, path)
    what = (trained.model, trained.objective, trained.tokenizer, prompt)
    if hasattr(trained.objective, "fill"):
        return "\n".join(fill_blanks(*what, dataclasses.replace(GREEDY, **given)).lines())
    return continue_text(*what, SampleOptions(stop=(trained.tokenizer.separator,), **given))


def refuse_others(given: Mapping[str, Any], path: Path) -> None:
    """Flags of a sampler that is not this model's."""
    known = {field.name for field in dataclasses.fields(SampleOptions)}
    if others := [name for name in given if name not in known]:
        raise ConfigError(
            "is for masked diffusion (family llada), and this run is of another",
            where=f"--{FLAGS.get(others[0], others[0]).replace('_', '-')}",
            hint=f'lockstep sample {path} "..." without it',
        )


def export_run(path: Path, folder: Path, dtype: str = "fp32") -> Path:
    """`lockstep export RUN --to hf`: a folder that transformers loads. Additions become part of the weights."""
    loaded = load_model(path, device="cpu")
    if isinstance(loaded.model, Agent):
        raise ConfigError(
            "transformers has no such model: an agent (family ad) is used as it is",
            where=str(path),
            hint=f"lockstep.load({str(path)!r}) in Python; the weights are {loaded.checkpoint}/model.safetensors",
        )
    trained = with_words(loaded)
    tokenizer = trained.tokenizer
    specials = tokenizer.vocabulary().specials
    mask = getattr(trained.objective, "mask", None)
    shape = shapes.with_tokens(trained.shape, separator=tokenizer.separator, specials=specials, mask=mask)
    tokenizer_file = trained.checkpoint / "tokenizer.json"
    hf.export(trained.model, shape, folder, dtype=dtype, tokenizer_file=tokenizer_file)
    return folder


def export_adapter(path: Path, folder: Path) -> Path:
    """`lockstep export RUN --to peft`: the additions of a LoRA run, for the peft package."""
    checkpoint = _checkpoint_of(path)
    about = read_about(checkpoint, trains=False)
    return adapters.export_adapter(from_saved(about["config"]), shapes.from_hf(about["shape"]), checkpoint, folder)
