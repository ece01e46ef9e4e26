"""Settings of the objectives (section `objective`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lockstep.config.section import Section, setting


class CausalOptions(Section):
    """Next-token prediction."""

    columns: ClassVar[Mapping[str, str]] = {"tokens": "int32"}  # of a cached row: known before torch is loaded

    name: str = setting("causal", "A file of objectives/, or pkg.module:Class for your own.", max_length=200)
