"""What a model says at the end of its training: the configured prompt continued, or blanks filled in."""

from __future__ import annotations

import logging

import numpy as np

from lockstep.contracts import SampleOptions
from lockstep.engine import inference
from lockstep.engine.build import Assembled
from lockstep.engine.denoising import Speaker
from lockstep.engine.parts import Parts
from lockstep.errors import LockstepError
from lockstep.objectives.diffusion import Diffusion
from lockstep.runtime.marks import Marks

logger = logging.getLogger(__name__)

EXAMPLES = 3  # rows of the validation text with a blank each
ANSWER = "→ "  # stands before what the model answers
EARLY = {"remasking": "random", "block_length": 8}  # who has learnt little is sure of blanks alone, and says only them
NOTHING = "(no text yet)"
FEWEST_WORDS, EXAMPLE_WORDS = 4, 12  # of one example


def draw_sample(parts: Parts, assembled: Assembled, link: Marks) -> str:
    """What the model says to the configured prompt; of an agent, what its last walks paid."""
    if parts.outcome:
        return "\n".join(parts.outcome.lines())
    report, tokenizer = parts.config.report, assembled.prepared.words
    if not report.sample_prompt or tokenizer is None:
        return ""
    options = SampleOptions(
        tokens=report.sample_tokens, temperature=0.6, seed=parts.config.system.seed, stop=(tokenizer.separator,)
    )
    model, objective = parts.stepper.model, parts.stepper.objective
    every_token = model.register_forward_pre_hook(lambda *_: link.enter("evaluate"))
    try:
        with parts.stepper.precision.context():
            if isinstance(objective, Diffusion):
                return uncovered(parts, assembled, objective)
            if not hasattr(objective, "fill"):
                return inference.continue_text(model, objective, tokenizer, report.sample_prompt, options)
            prompts = [report.sample_prompt] if inference.MASK in report.sample_prompt else blanks(assembled)
            filled = [inference.fill_blanks(model, objective, tokenizer, prompt) for prompt in prompts]
            return "\n\n".join(
                "\n".join([prompt, *each.lines()[1:]]) for prompt, each in zip(prompts, filled, strict=True)
            )
    except (LockstepError, RuntimeError) as error:  # the training is done and saved: this does not undo it
        logger.warning("No sample: %s", error)
        return ""
    finally:
        every_token.remove()


def uncovered(parts: Parts, assembled: Assembled, objective: Diffusion) -> str:
    """Of masked diffusion: no longer than the rows it has learnt; who learns answers is asked something new."""
    report, length = parts.config.report, parts.config.training.context_length
    speaker = Speaker(parts.stepper.model, objective, assembled.prepared.tokenizer, length, report.sample_tokens)
    given = {"seed": parts.config.system.seed}
    if not objective.answers or report.sample_prompt != type(report)().sample_prompt:
        goes_on = not objective.answers and inference.MASK not in report.sample_prompt
        text = speaker.text(report.sample_prompt, given | (EARLY if goes_on else {}))
        return f"{text.strip()} {NOTHING}".lstrip() if speaker.silent(report.sample_prompt, text) else text
    row = assembled.prepared.validation.take(np.arange(1))
    asked = [int(token) for token in row["tokens"][0, : row["lengths"][0, 0]]]
    return f"{speaker.tokenizer.decode(asked).strip()}\n{ANSWER}{speaker.continued(asked, given).strip() or NOTHING}"


def blanks(assembled: Assembled) -> list[str]:
    """The beginnings of some validation documents, each with a word hidden."""
    prepared, tokenizer = assembled.prepared, assembled.prepared.tokenizer
    vocabulary = tokenizer.vocabulary()
    special = list(vocabulary.specials.values())
    found: list[str] = []
    for row in prepared.validation.take(np.arange(min(4 * EXAMPLES, prepared.validation.rows)))["tokens"]:
        ids = row[row != vocabulary.specials["cls"]]
        ids = ids[: np.argmax(np.isin(ids, special))] if np.isin(ids, special).any() else ids
        ids = ids[np.argmin(vocabulary.continues[ids]) :] if len(ids) else ids  # the rest of a word that was cut
        words = tokenizer.decode([int(token) for token in ids]).split()[:EXAMPLE_WORDS]
        if len(words) >= FEWEST_WORDS and len(found) < EXAMPLES:
            hidden = len(words) // 2
            found.append(" ".join([*words[:hidden], inference.MASK, *words[hidden + 1 :]]))
    return found
