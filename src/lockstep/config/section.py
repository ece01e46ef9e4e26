"""How a setting is declared: once, typed, with its meaning and its role."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["identity", "layout", "cosmetic"]


class Section(BaseModel):
    """A frozen group of settings that knows no unknown keys, no NaN and no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), validate_default=True
    )


def setting(default: Any, description: str, *, role: Role = "identity", unit: str = "", **limits: Any) -> Any:
    """One setting. Role: identity decides the numbers, layout how they are computed, cosmetic what is shown."""
    return Field(default, description=description, json_schema_extra={"role": role, "unit": unit}, **limits)
