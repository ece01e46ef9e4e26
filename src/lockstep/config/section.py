"""How a setting is declared: once, typed, with its meaning and its role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["identity", "layout", "cosmetic"]


class Section(BaseModel, frozen=True):
    """A frozen group of settings that knows no unknown keys, no NaN and no silent conversions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), validate_default=True
    )

    if not TYPE_CHECKING:  # type checkers know by `frozen`

        def __setattr__(self, name: str, value: Any) -> None:
            raise read_only(name)


def read_only(name: str) -> AttributeError:
    """What setting an attribute of a configuration raises."""
    return AttributeError(
        f'{name} cannot be set, a configuration is read-only: config.replace(training={{"max_steps": 5}}) makes another'
    )


def setting(default: Any, description: str, *, role: Role = "identity", unit: str = "", **more: Any) -> Any:
    """One setting. Role: identity decides the numbers, layout how they are computed, cosmetic what is shown.

    `before` is the value of all runs that were saved before the setting existed, where that is not its default.
    """
    extra = {"role": role, "unit": unit, **({"before": more.pop("before")} if "before" in more else {})}
    return Field(default, description=description, json_schema_extra=extra, **more)
