"""Settings of the objectives (section `objective`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lockstep.config.section import Section, setting
from lockstep.errors import ConfigError

NAME = "A file of objectives/, or pkg.module:Class for your own."


def _refuse_answers(documents: str, who: str) -> None:
    if documents == "answers":
        raise ConfigError(
            f"{who} does not tell answers from prompts",
            where="data.documents",
            hint="lockstep train llada, or data.documents=separated",
        )


class ObjectiveOptions(Section, frozen=True):
    """What every objective has."""

    marks_places: ClassVar[bool] = False  # needs a tokenizer with [CLS], [SEP], [PAD] and [MASK]
    spare_ids: ClassVar[int] = 0  # rows of the embedding beyond a tokenizer that has no mask token
    name: str = setting("causal", NAME, max_length=200)

    @staticmethod
    def columns_of(documents: str) -> Mapping[str, str]:
        """What a cached row holds under `data.documents`: known before torch is loaded."""
        assert documents
        return {"tokens": "int32"}

    def check(self, documents: str) -> None:
        """Refuse what does not fit together: known before torch is loaded."""


class CausalOptions(ObjectiveOptions, frozen=True):
    """Next-token prediction."""

    def check(self, documents: str) -> None:
        if documents == "padded" and self.name == "causal":
            raise ConfigError(
                "next-token prediction has no padded rows", where="data.documents", hint="data.documents=masked"
            )
        if self.name == "causal":
            _refuse_answers(documents, "next-token prediction")

    @staticmethod
    def columns_of(documents: str) -> Mapping[str, str]:
        return {"tokens": "int32", "starts": "uint8"} if documents == "masked" else {"tokens": "int32"}


class DiffusionOptions(ObjectiveOptions, frozen=True):
    """Masked diffusion: a random share of the tokens is hidden, and predicted from all that are left."""

    spare_ids: ClassVar[int] = 1
    name: str = setting("diffusion", NAME, max_length=200)
    eps: float = setting(1e-3, "The smallest share of tokens that is hidden.", gt=0, lt=1)
    random_length_probability: float = setting(
        0.01, "How often a whole batch is cut to a random length (not where answers are learnt).", ge=0, le=1
    )
    mask_token_id: int | None = setting(
        None,
        "The id that hides a token (null: the model's, else the tokenizer's, else the first row no token has).",
        ge=0,
        le=1 << 24,
    )
    eval_draws: int = setting(
        1, "How often each validation row is hidden anew, always in the same ways.", role="cosmetic", ge=1, le=4096
    )

    @staticmethod
    def columns_of(documents: str) -> Mapping[str, str]:
        return {"tokens": "int32", "lengths": "int32"} if documents == "answers" else {"tokens": "int32"}

    def check(self, documents: str) -> None:
        if documents in ("masked", "padded") and self.name == "diffusion":
            raise ConfigError(
                f"masked diffusion has no {documents} rows", where="data.documents", hint="data.documents=separated"
            )


class MlmOptions(ObjectiveOptions, frozen=True):
    """Masked-LM: some tokens are hidden and predicted from both sides."""

    marks_places: ClassVar[bool] = True
    name: str = setting("mlm", NAME, max_length=200)
    mask_probability: float = setting(0.15, "Share of the tokens that is chosen to be predicted.", gt=0, lt=1)
    last_mask_probability: float | None = setting(
        None, "Share at the last step, reached on a straight line (null: mask_probability throughout).", gt=0, lt=1
    )
    masked_share: float = setting(0.8, "Of the chosen tokens, how many become [MASK].", ge=0, le=1)
    random_share: float = setting(0.1, "Of the chosen tokens, how many become a random token.", ge=0, le=1)
    whole_words: bool = setting(False, "Choose whole words: all tokens of a word, or none.")

    def check(self, documents: str) -> None:
        if self.name == "mlm":
            _refuse_answers(documents, "masked-LM")
        if self.masked_share + self.random_share > 1 + 1e-9:
            raise ConfigError(
                f"masked_share {self.masked_share:g} and random_share {self.random_share:g} are more than all",
                where="objective.random_share",
                hint=f"at most {1 - self.masked_share:g}",
            )


class DistillOptions(ObjectiveOptions, frozen=True):
    """Algorithm Distillation: the action of a source learner at every step of its history."""

    name: str = setting("distill", NAME, max_length=200)
    label_smoothing: float = setting(0.0, "Share of each target that is spread over all actions.", ge=0, lt=1)

    @staticmethod
    def columns_of(documents: str) -> Mapping[str, str]:
        assert documents
        return {"histories": "int32"}
