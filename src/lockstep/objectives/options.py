"""Settings of the objectives (section `objective`)."""

from __future__ import annotations

from lockstep.config.section import Section, setting


class CausalOptions(Section):
    """Next-token prediction."""

    name: str = setting("causal", "A file of objectives/, or pkg.module:Class for your own.", max_length=200)
