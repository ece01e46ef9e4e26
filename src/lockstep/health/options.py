"""Settings of debugging (section `debug`)."""

from __future__ import annotations

from typing import Literal

from lockstep.config.section import Section, setting


class DebugOptions(Section, frozen=True):
    """More words, more checks, less speed."""

    enabled: bool = setting(False, "Read every step at once and check every gradient.", role="cosmetic")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = setting("INFO", "What is worth a line.", role="cosmetic")
    digest_interval: int = setting(
        0,
        "Steps between fingerprints of all parameters in events.jsonl; 0: none. In mode replicas also of every "
        "gradient and moment, in workers/*/fingerprint.jsonl, and 0 is every step.",
        role="cosmetic",
        ge=0,
        le=1 << 40,
    )
    agree_interval: int = setting(
        50,
        "Steps after which ranks that have equal weights (ddp, hsdp) compare them, as before each save; 0: never.",
        role="cosmetic",
        ge=0,
        le=1 << 40,
    )
    bundle: Literal["full", "no_weights", "off"] = setting(
        "full",
        "What is kept of a step that is not finite, for `lockstep replay`; no_weights: it needs the checkpoint.",
        role="cosmetic",
    )
