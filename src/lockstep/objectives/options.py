"""Settings of the objectives (section `objective`)."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.config.section import Section, setting


class CausalOptions(Section):
    """Next-token prediction."""

    name: str = setting("causal", "A file of objectives/, or pkg.module:Class for your own.", max_length=200)

    @staticmethod
    def columns_of(documents: str) -> Mapping[str, str]:
        """What a cached row holds under `data.documents`: known before torch is loaded."""
        return {"tokens": "int32", "starts": "uint8"} if documents == "masked" else {"tokens": "int32"}
