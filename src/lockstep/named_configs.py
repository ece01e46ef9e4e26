"""The named configurations of masked-LM training: plain data that a user may add to, and their texts. Torch-free.

`CONFIGS["my_custom_config"] = TrainingConfig(...)` in multi_gpu_configs.py makes one more. Keys of the three
dictionaries are settings under their own or their documented names; one that is no setting is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RULE = "=" * 80
GUIDE_TIMES = {"h200_8gpu_fast": "~20min", "h200_8gpu_standard": "~30min", "h200_8gpu_quality": "~2hrs"}


@dataclass
class TrainingConfig:
    """One configuration, in the words of the guide."""

    name: str
    description: str
    num_gpus: int
    batch_size_per_gpu: int
    epochs: int
    learning_rate: float
    model_config: dict[str, Any]
    dataset_config: dict[str, Any]
    optimization_config: dict[str, Any]

    @property
    def total_batch_size(self) -> int:
        """Rows of one step on all GPUs."""
        return self.num_gpus * self.batch_size_per_gpu

    @property
    def model(self) -> str:
        """6L/8H/16D: layers, heads, width."""
        sizes = self.model_config
        return "/".join(f"{sizes.get(key, '?')}{letter}" for key, letter in zip(_SIZES, "LHD", strict=True))

    @property
    def samples(self) -> str:
        """How many documents are read at most."""
        count = self.dataset_config.get("max_samples", "?")
        return f"{count:,}" if isinstance(count, int) else str(count)

    def sections(self) -> dict[str, dict[str, Any]]:
        return {name: getattr(self, name) for name in ("model_config", "dataset_config", "optimization_config")}


_SIZES = ("n_layers", "n_heads", "n_embed")


def _named(  # noqa: PLR0913 - the columns of the guide's table
    title: str, description: str, *, gpus: int, batch: int, epochs: int, lr: float, model: Sequence[int], samples: int
) -> TrainingConfig:
    """Those of the guide differ in these values only."""
    return TrainingConfig(
        name=title,
        description=description,
        num_gpus=gpus,
        batch_size_per_gpu=batch,
        epochs=epochs,
        learning_rate=lr,
        model_config={**dict(zip(_SIZES, model, strict=True)), "max_seq_len": 128},
        dataset_config={"max_samples": samples, "streaming": True, "min_words": 5},
        optimization_config={
            "gradient_clip": 1.0,
            "warmup_ratio": 0.1,
            "weight_decay": 0.01,
            "mixed_precision": True,
        },
    )


CONFIGS: dict[str, TrainingConfig] = {
    "h200_8gpu_fast": _named(
        "H200 8-GPU Fast Training", "Quick testing on 8 GPUs",
        gpus=8, batch=64, epochs=3, lr=5e-5, model=(4, 4, 8), samples=500_000,
    ),
    "h200_8gpu_standard": _named(
        "H200 8-GPU Standard Training", "Standard training on 8 GPUs",
        gpus=8, batch=32, epochs=5, lr=3e-5, model=(6, 8, 16), samples=1_000_000,
    ),
    "h200_8gpu_quality": _named(
        "H200 8-GPU Quality Training", "The largest of these models, on 8 GPUs",
        gpus=8, batch=16, epochs=10, lr=2e-5, model=(8, 12, 24), samples=2_000_000,
    ),
    "4gpu_standard": _named(
        "4-GPU Standard Training", "Standard training on 4 GPUs",
        gpus=4, batch=32, epochs=5, lr=3e-5, model=(4, 4, 8), samples=500_000,
    ),
    "2gpu_standard": _named(
        "2-GPU Standard Training", "Standard training on 2 GPUs",
        gpus=2, batch=32, epochs=5, lr=3e-5, model=(4, 4, 8), samples=500_000,
    ),
    "1gpu_standard": _named(
        "1-GPU Standard Training", "Standard training on one GPU",
        gpus=1, batch=16, epochs=5, lr=3e-5, model=(4, 4, 8), samples=250_000,
    ),
}  # fmt: skip


def listing(configs: Mapping[str, TrainingConfig]) -> str:
    """What `list` prints."""
    lines = ["Available Multi-GPU Training Configurations:", RULE]
    for name, config in configs.items():
        lines += ["", f"{name}:", *(f"  {line}" for line in _facts(config))]
    return "\n".join(lines)


def _facts(config: TrainingConfig) -> list[str]:
    return [
        f"Description: {config.description}",
        f"GPUs: {config.num_gpus}",
        f"Batch size per GPU: {config.batch_size_per_gpu}",
        f"Total batch size: {config.total_batch_size}",
        f"Epochs: {config.epochs}",
        f"Learning rate: {config.learning_rate}",
        f"Model: {config.model}",
        f"Dataset samples: {config.samples}",
    ]


def details(name: str, config: TrainingConfig) -> str:
    """What `info` prints: every field. A time is the guide's own and not measured here."""
    lines = [f"Configuration: {name}", RULE, f"Name: {config.name}", *_facts(config)]
    for title, section in config.sections().items():
        lines += [f"{title}:", *(f"  {key}: {shown(value)}" for key, value in section.items())]
    width, heads = config.model_config.get("n_embed"), config.model_config.get("n_heads")
    if isinstance(width, int) and isinstance(heads, int) and heads and width // heads <= 2:
        lines.append(f"Note: head size {width // heads}; `lockstep train mlm mlm_small` is a sane small model")
    if name in GUIDE_TIMES:
        lines.append(f"Time in the guide: {GUIDE_TIMES[name]} (the guide's own figure, measured on no machine of ours)")
    lines.append(f"Time on this machine: ./train_{name}.sh says it before it trains")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """1_000_000 as 1,000,000; all else as Python writes it."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def flags(name: str, config: TrainingConfig) -> list[str]:
    """The configuration as flags of mlm_pretrain_v3.py: all of it, so that nothing else need be read."""
    top = {
        "config_name": name,
        "batch_size": config.batch_size_per_gpu,
        "epochs": config.epochs,
        "lr": config.learning_rate,
    }
    words: list[str] = []
    for key, value in (*top.items(), *(pair for section in config.sections().values() for pair in section.items())):
        words += [f"--{str(key).replace('_', '-')}", _word(value)]
    return words


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
