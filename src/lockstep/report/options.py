"""Settings of what is shown (section `report`) and of the run's own identity (section `run`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from lockstep.config.section import Section, setting

TRACED_FROM = 2  # steps before it start and warm up what is measured
MOST_TRACED = 1000


def window(text: str) -> tuple[int, int]:
    """The first step and how many, of `3` or of `100-104`."""
    first, dash, last = text.partition("-")
    return (int(first), int(last) - int(first) + 1) if dash else (TRACED_FROM, int(first))


class ReportOptions(Section, frozen=True):
    """What the user sees."""

    log_interval: int = setting(1, "Steps between step lines.", unit="steps", role="cosmetic", ge=1, le=1 << 40)
    log_prefix: Literal["bracket", "colon", "none"] = setting(
        "bracket", "bracket: `[GPU0] Step ...`; colon: `GPU0:INFO | [GPU 0] Step ...`; none: bare.", role="cosmetic"
    )
    log_all_ranks: bool = setting(False, "Show the lines of every worker, not only of the first.", role="cosmetic")
    log_file: str | None = setting(None, "Also write the log here.", role="cosmetic", max_length=4000)
    progress: Literal["auto", "on", "off"] = setting("auto", "Progress bar; auto: on a terminal.", role="cosmetic")
    tensorboard: bool = setting(True, "Write TensorBoard files to <run>/tb.", role="cosmetic")
    profile: bool = setting(
        False,
        "Trace a few steps to <run>/profile.json (chrome://tracing), and tell what took longest.",
        role="cosmetic",
    )
    profile_steps: str = setting(
        "3",
        "Which steps are traced: so many from step 2 on, or first and last; never the first two of a start.",
        role="cosmetic",
        pattern=r"^[0-9]{1,13}(-[0-9]{1,13})?$",
        examples=["3", "100-104"],
    )
    results_dir: str | None = setting(
        None,
        "Also write the documented result files of the family here, after each epoch (null: no).",
        role="cosmetic",
        max_length=4000,
    )
    sample_prompt: str = setting(
        "The", "What the sample at the end continues; empty: no sample.", role="cosmetic", max_length=10_000
    )
    sample_tokens: int = setting(48, "Length of that sample.", unit="tokens", role="cosmetic", ge=1, le=1 << 20)

    @property
    def traced(self) -> tuple[int, int]:
        """The first step that is traced, and how many are."""
        return window(self.profile_steps)

    @field_validator("profile_steps")
    @classmethod
    def _check_steps(cls, text: str) -> str:
        if not 1 <= window(text)[1] <= MOST_TRACED:
            raise ValueError("no such steps")
        return text


class RunOptions(Section, frozen=True):
    """What the run is called and where it lies."""

    name: str | None = setting(None, "Name of the run folder (null: family, preset and time).", role="cosmetic")
    out: str = setting("runs", "Folder of the run folders.", role="cosmetic", min_length=1, max_length=4000)
    experiment_name: str = setting(
        "llama_training", "Name of the experiment, for file names and logs.", role="cosmetic"
    )
    tags: dict[str, str] = Field(
        default_factory=dict,
        description="Free words kept with the run.",
        json_schema_extra={"role": "cosmetic", "unit": ""},
    )
