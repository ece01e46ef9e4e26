"""Settings of the objectives (section `objective`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lockstep.config.section import Section, setting
from lockstep.errors import ConfigError

NAME = "A file of objectives/, or pkg.module:Class for your own."


class ObjectiveOptions(Section, frozen=True):
    """What every objective has."""

    marks_places: ClassVar[bool] = False  # needs a tokenizer with [CLS], [SEP], [PAD] and [MASK]
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

    @staticmethod
    def columns_of(documents: str) -> Mapping[str, str]:
        return {"tokens": "int32", "starts": "uint8"} if documents == "masked" else {"tokens": "int32"}


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
        assert documents
        if self.masked_share + self.random_share > 1 + 1e-9:
            raise ConfigError(
                f"masked_share {self.masked_share:g} and random_share {self.random_share:g} are more than all",
                where="objective.random_share",
                hint=f"at most {1 - self.masked_share:g}",
            )
