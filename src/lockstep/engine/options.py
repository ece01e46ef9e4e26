"""Settings of the loop (section `training`) and of its checkpoints (section `checkpoint`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from lockstep.config.section import Section, setting

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp64"]
MOST_ROWS = 1 << 20
MicroRows = Annotated[
    int,  # `auto` leaves the number of the layers below, and says in Loaded that another is to be found
    Field(ge=1, le=MOST_ROWS),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_ROWS}, {"type": "string", "const": "auto"}]}
    ),
]


class TrainingOptions(Section, frozen=True):
    """The optimisation."""

    batch_size: MicroRows = setting(
        2,
        "Rows of one micro-batch on one GPU. auto: the largest that fits, found before the run; grad_accum_nums is "
        "fitted to it, so that a step has the rows that it would have with the number that auto replaces.",
        unit="rows",
    )
    grad_accum_nums: int = setting(4, "Micro-batches per optimizer step.", ge=1, le=1 << 20)
    context_length: int = setting(8192, "Tokens per row.", unit="tokens", ge=1, le=1 << 24)
    max_steps: int = setting(100, "Optimizer steps.", unit="steps", ge=1, le=10_000_000)
    learning_rate: float = setting(1e-5, "Peak learning rate.", gt=0, le=100)
    warmup_steps: int = setting(
        0, "Steps of warm-up, linear but with one_cycle; an inherited value is clamped.", unit="steps", ge=0, le=1 << 40
    )
    schedule: Literal["cosine", "linear", "constant", "one_cycle"] = setting(
        "cosine",
        "Shape of the decay after the warm-up. one_cycle: a cosine, and one up from a 25th of the peak before; with a "
        "min_lr_ratio of 4e-6 that of torch's OneCycleLR.",
    )
    min_lr_ratio: float = setting(0.1, "Last learning rate as a share of the peak.", ge=0, le=1)
    weight_decay: float = setting(0.0, "AdamW decay; never on norms, embeddings and 1-D tensors.", ge=0, le=100)
    adam_beta1: float = setting(0.9, "AdamW beta 1.", ge=0, lt=1)
    adam_beta2: float = setting(0.999, "AdamW beta 2.", ge=0, lt=1)
    adam_epsilon: float = setting(1e-8, "AdamW epsilon.", gt=0, le=1)
    optimizer_states: Literal["fp32", "bf16"] = setting(
        "fp32", "What AdamW keeps its two moments in: 8 or 4 bytes a parameter; bf16 is rounded at random."
    )
    max_grad_norm: float = setting(1.0, "Clip the gradient to this norm; 0 or less: no clipping.", le=1e9, ge=-1e9)
    precision: Precision = setting(
        "auto",
        "auto: bf16 on GPUs that have it, fp32 on the CPU. fp16 scales the loss. fp8: as bf16, but the matrices of the "
        "blocks are multiplied in float8, with a scale for each, and so are the gradients of LLaMA's and LLaDA's "
        "output matrix. Weights are fp32; fp64: for proofs.",
    )
    save_interval: int = setting(
        100, "Steps between checkpoints; 0: only the last.", unit="steps", role="cosmetic", ge=0, le=1 << 40
    )
    eval_interval: int = setting(
        50, "Steps between validations; 0: only the last.", unit="steps", role="cosmetic", ge=0, le=1 << 40
    )
    eval_batches: int = setting(
        8, "Global batches of one validation, always the same.", role="cosmetic", ge=1, le=1 << 20
    )
    patience: int = setting(
        0,
        "Stop after this many steps without improvement of the smoothed loss; 0: never.",
        unit="steps",
        ge=0,
        le=1 << 40,
    )
    min_delta: float = setting(1e-4, "What counts as an improvement for patience.", ge=0, le=1e9)
    checkpoint_dir: str | None = setting(
        None,
        "Also write the documented step_<N>.pt files here (null: no). All stay, unless checkpoint.keep_files is set.",
        role="cosmetic",
        max_length=4000,
    )


class EpochTrainingOptions(TrainingOptions, frozen=True):
    """The same for families that count in passes over the data."""

    epochs: float = setting(0, "Passes over the training rows; 0: max_steps decides.", ge=0, le=1e6)
    warmup_ratio: float = setting(0.0, "Warm-up as a share of all steps; 0: warmup_steps decides.", ge=0, le=1)


class AgentTrainingOptions(TrainingOptions, frozen=True):
    """The same for agents, which are also let loose in worlds they have not seen."""

    eval_batch_size: int | None = setting(
        None,
        "Rows of one micro-batch of a validation (null: batch_size).",
        unit="rows",
        role="layout",
        ge=1,
        le=1 << 20,
    )
    gen_interval: int = setting(
        0,
        "Steps between walks in the unseen tasks; 0: only at the end.",
        unit="steps",
        role="cosmetic",
        ge=0,
        le=1 << 40,
    )
    gen_episodes: int = setting(
        40, "Episodes of such a walk, in 64 tasks at most; 0: no walks.", role="cosmetic", ge=0, le=1 << 20
    )
    gen_repeats: int = setting(4, "Walks in each task.", role="cosmetic", ge=1, le=1 << 16)


class CheckpointOptions(Section, frozen=True):
    """Saving and going on."""

    keep_last: int = setting(2, "Checkpoints kept.", role="cosmetic", ge=2, le=1 << 20)
    keep_files: int = setting(
        0,
        "Files step_<N>.pt of this run kept in training.checkpoint_dir; 0: all. Others there stay.",
        role="cosmetic",
        ge=0,
        le=1 << 20,
    )
    resume: str | None = setting(
        None,
        "auto: newest run of this family with this configuration; or a run, a checkpoint or a .pt file.",
        role="cosmetic",
        max_length=4000,
    )
    allow_mismatch: bool = setting(False, "Resume although the configuration differs.", role="cosmetic")
    on_full: Literal["stop", "retry"] = setting(
        "stop",
        "If a disk cannot take a checkpoint: stop with exit 74, or go on and retry at the next. The last must fit.",
        role="cosmetic",
    )
