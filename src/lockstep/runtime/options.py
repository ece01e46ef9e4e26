"""Settings of the machine (section `system`)."""

from __future__ import annotations

from typing import Literal

from lockstep.config.section import Section, setting
from lockstep.errors import ConfigError

Deterministic = bool | Literal["canonical"]
NO_FLOAT8 = "it needs a GPU that multiplies float8 numbers (NVIDIA Ada, Hopper or later)"


class SystemOptions(Section, frozen=True):
    """Where and how exactly the work runs."""

    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "auto: a GPU if there is one, else the CPU.", role="layout"
    )
    device_id: int = setting(0, "Index among the visible devices.", role="layout", ge=0, le=1023)
    gpus: str = setting(
        "all",
        "Which GPUs: all, auto (idlest), auto:memory (most free), a count, or numbers as in 0,2. On the CPU: a count.",
        role="layout",
        min_length=1,
        max_length=4000,
    )
    mode: Literal["ddp", "fsdp", "hsdp", "replicas"] = setting(
        "ddp",
        "ddp: one model, a copy on each GPU; fsdp: one model in shards; hsdp: shards in a node, copies across nodes; "
        "replicas: independent equal runs, compared bit for bit at the end.",
        role="layout",
    )
    hang_seconds: float = setting(
        600.0,
        "A worker without a sign of life for so long is stuck: the run ends with 124.",
        role="cosmetic",
        gt=0,
        le=1e7,
    )
    slow_factor: float = setting(
        1.2, "A worker whose steps take this much longer than the others' is reported.", role="cosmetic", gt=1, le=1e6
    )
    seed: int = setting(42, "Decides the first weights, the order of rows and all noise.", ge=0, le=(1 << 63) - 1)
    deterministic: Deterministic = setting(
        False,
        "true: same bits in every run, also on a GPU (about 5 % slower there). canonical: also on 1, 2, 4 and 8 "
        "workers of ddp, by sums in a fixed order of 8 blocks; on the CPU one thread each, or system.threads.",
        role="layout",
    )
    gradient_checkpointing: bool = setting(
        False, "Recompute each block in the backward pass: less memory, about a third more work.", role="layout"
    )
    empty_cache_interval: int = setting(
        0, "Steps between returns of cached GPU memory; 0: never (it only costs time).", role="layout", ge=0, le=1 << 40
    )
    threads: int = setting(
        0, "CPU threads of a worker; 0: all cores. Other counts give other bits.", role="layout", ge=0, le=4096
    )
    output_dir: str | None = setting(
        None, "Also write <experiment_name>_config.json here (null: no).", role="cosmetic", max_length=4000
    )
    log_dir: str | None = setting(None, "Also write logs here (null: no).", role="cosmetic", max_length=4000)

    @property
    def canonical(self) -> bool:
        """Whether sums have one order for all numbers of workers."""
        return self.deterministic == "canonical"

    def check(self) -> None:
        """Refuse canonical sums where they cannot be had."""
        reasons = {"replicas": "replicas exchange no gradients"}
        if self.canonical and self.mode != "ddp":
            raise ConfigError(
                "canonical sums are of ddp: "
                + reasons.get(self.mode, f"{self.mode} adds in an order that depends on the number of workers"),
                where="system.deterministic",
                hint="--mode ddp, or --deterministic: the same bits on the same number of workers",
            )
