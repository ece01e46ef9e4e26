"""The Python door: train, load a trained model, and configurations as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from torch import nn

    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Tokenizer
    from lockstep.engine.train import Result

DEVICE_KEYS = frozenset({"device", "system.device"})


def train(
    family: str = "llama", preset: str | None = None, *, file: str | Path | None = None, **overrides: Any
) -> Result:
    """Train and return how it ended: `train("llama", "tiny", training={"max_steps": 5}, **{"system.seed": 7})`."""
    from lockstep.engine.train import train as run

    return run(resolve(family, preset=preset, file=Path(file) if file else None, overrides=overrides))


def load(run_or_checkpoint: str | Path) -> tuple[nn.Module, Tokenizer]:
    """The model and the tokenizer of a run (its newest good checkpoint) or of one checkpoint folder."""
    from lockstep.engine.inference import load_run

    trained = load_run(Path(run_or_checkpoint))
    return trained.model, trained.tokenizer


def resolve(
    family: str,
    *,
    preset: str | None = None,
    file: Path | None = None,
    flags: Sequence[tuple[str, str | None]] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """The configuration for what was asked; with neither preset nor file, what suits the machine."""
    from dataclasses import replace

    from lockstep.config.load import load as load_config
    from lockstep.runtime import env

    notice = ""
    if preset is None and file is None:
        preset, notice = pick_preset(_asked_device(flags, overrides or {}))
    loaded = load_config(family, preset=preset, file=file, flags=flags, overrides=overrides or {})
    token = loaded.config.data.hf_token
    env.hide(token.get_secret_value() if token else None)
    _check_shape(loaded)
    return replace(loaded, notices=(notice, *loaded.notices)) if notice else loaded


def pick_preset(device: str) -> tuple[str, str]:
    """The preset when none was named, and the line that says so."""
    if device == "cpu":
        return "demo", "The CPU was asked for: running the demo preset"
    if device == "cuda":
        return "production", "Running the production preset"
    from lockstep.runtime.devices import visible_gpus

    gpus = visible_gpus()
    if not gpus:
        return "demo", "No GPUs detected: running the demo preset on the CPU"
    return "production", f"{len(gpus)} x {gpus[0].name}: running the production preset"


def _asked_device(flags: Sequence[tuple[str, str | None]], overrides: Mapping[str, Any]) -> str:
    """The device named last, or nothing."""
    asked: list[Any] = [text for key, text in flags if key.replace("-", "_") in DEVICE_KEYS]
    asked.append(overrides.get("system.device"))
    system = overrides.get("system")
    if isinstance(system, Mapping):
        asked.append(system.get("device"))  # pyright: ignore[reportUnknownMemberType]
    return next((str(device) for device in reversed(asked) if device), "")


def _check_shape(loaded: Loaded) -> None:
    """Sizes that do not fit together are refused here, at the line that set them, if the shape needs no look-up."""
    from lockstep.models import shapes

    config = loaded.config
    if shapes.known(config.model.model_path) is None:
        return
    try:
        shapes.resolve(config.model, context_length=config.training.context_length)
    except LockstepError as error:
        origin = loaded.origins.get(error.where)
        if origin is None or origin.layer == "preset":
            raise
        raise type(error)(f"{error.where}: {error.what}", where=origin.where, hint=error.hint) from None


def get_default_config(preset: str | None = None, debug_mode: bool = False) -> Config:
    """The configuration of a preset: `production`, or `debug` in debug mode, unless one is named."""
    from lockstep.config.load import load as load_config

    return Config(load_config("llama", preset=preset or ("debug" if debug_mode else "production")).config)


class Config:
    """A configuration, read-only: sections are attributes (`config.training.max_steps`), `replace` makes another."""

    def __init__(self, resolved: RunConfig) -> None:
        self._resolved = resolved

    def __getattr__(self, section: str) -> Any:
        if section.startswith("_"):
            raise AttributeError(section)
        return getattr(self._resolved, section)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._resolved == other._resolved

    def __hash__(self) -> int:
        return hash(str(self.to_dict()))

    def __repr__(self) -> str:
        return f"Config({self.to_dict()})"

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """A configuration file over the defaults."""
        from lockstep.config.load import load_file

        return cls(load_file(Path(path)).config)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Config:
        """A dictionary over the defaults."""
        from lockstep.config.load import from_dict

        return cls(from_dict(tree))

    def to_dict(self) -> dict[str, Any]:
        """A copy as plain values; secrets masked."""
        from lockstep.config.load import to_dict

        return to_dict(self._resolved)

    def save(self, path: str | Path) -> None:
        """Write a JSON file that `load` reads; secrets masked."""
        from lockstep.rundir import write_json

        write_json(Path(path), self.to_dict())

    def replace(self, **overrides: Any) -> Config:
        """The same with some values changed: `replace(training={"max_steps": 5}, **{"system.seed": 7})`."""
        from lockstep.config.load import replaced

        return Config(replaced(self._resolved, overrides))

    def validate(self) -> None:
        """Raise LockstepError unless the sizes fit together too; types and ranges were checked when it was made."""
        from lockstep.models.shapes import resolve as resolve_shape

        resolve_shape(self._resolved.model, context_length=self._resolved.training.context_length)
