"""The Python door: train, load a trained model, and configurations as objects."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.registry import suggest

if TYPE_CHECKING:
    from torch import nn

    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Tokenizer
    from lockstep.engine.train import Result

Flag = tuple[str, str | None]  # (key, text); None: a bare switch
DEVICE_KEYS = frozenset({"device", "system.device"})


def train(
    family: str = "llama",
    config: Config | str | Path | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
    **overrides: Any,
) -> Result:
    """Train and return how it ended: `train("llama", "tiny", training={"max_steps": 5}, **{"system.seed": 7})`.

    `config` is a preset, a file, or a Config.
    """
    from lockstep.config.catalog import config_class
    from lockstep.config.load import replaced
    from lockstep.engine.train import train as run
    from lockstep.runtime.devices import check_asked

    if not isinstance(family, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are not all typed
        raise ConfigError("the family comes first", where="train", hint="train('llama', config)")
    path = Path(file) if file else None
    config_class(family)  # refuses what is not a family
    if isinstance(config, Config):
        if preset or path:
            raise ConfigError("a Config takes no preset or file as well", where="config", hint="config.replace(...)")
        loaded = replaced(config._resolved, overrides)  # pyright: ignore[reportPrivateUsage]
        if (own := loaded.config.family) != family:
            raise ConfigError(
                f"the Config is of family {own!r}", where=f"train({family!r})", hint=f"train({own!r}, config)"
            )
        check_fits(loaded)
    else:
        if not isinstance(config, str | Path | None):  # pyright: ignore[reportUnnecessaryIsInstance] - as above
            what = f"got a {type(config).__name__}, expected a preset, a file or a Config"
            raise ConfigError(what, where="config", hint=f"train({family!r}, Config.from_dict(...))")
        if config is not None:
            preset, path = preset_or_file(family, config, preset=preset, file=path)
        loaded = resolve(family, preset=preset, file=path, overrides=overrides)
    check_asked(loaded.config.system)
    return run(loaded)


def load(run_or_checkpoint: str | Path) -> tuple[nn.Module, Tokenizer | None]:
    """The model and the tokenizer of a run (its newest good checkpoint, by path, name or `latest`) or a checkpoint.

    An agent has no tokenizer: `agent, _ = load("runs/my-agent")`.
    """
    from lockstep.engine.inference import load_model, with_words
    from lockstep.home import find_run

    loaded = load_model(find_run(str(run_or_checkpoint)))
    return loaded.model, None if loaded.config.family == "ad" else with_words(loaded).tokenizer


def preset_or_file(
    family: str, what: str | Path, *, preset: str | None = None, file: Path | None = None
) -> tuple[str | None, Path | None]:
    """The preset and the file, one of which was named without saying which it is."""
    from lockstep.config.load import presets
    from lockstep.config.reader import KINDS

    names, word = presets(family), str(what)
    if word in names and preset in (None, word):
        return word, file
    if file is None and word not in names and (Path(word).suffix.lower() in KINDS or os.sep in word):
        return preset, Path(word)
    if word in names or file:
        first = preset if word in names else file
        what = f"a second preset or file {word[:200]!r}"
        raise ConfigError(what, where="PRESET|FILE", hint=f"leave one out, it or {str(first)[:200]!r}")
    raise ConfigError(f"no preset or file {word[:200]!r}", where="PRESET|FILE", hint=suggest(word, names))


def setting_words() -> set[str]:
    """The words that are settings of some family, without their section."""
    from lockstep.config.given import flag_words
    from lockstep.config.schema import FAMILIES

    return set[str]().union(*(flag_words(family) for family in FAMILIES))


def with_debug(preset: str | None, flags: Sequence[Flag]) -> tuple[str, list[Flag]]:
    """What --debug means: the debug preset, or debug output over another one."""
    if preset in (None, "debug"):
        return "debug", list(flags)
    return preset, [("debug.enabled", "true"), ("debug.log_level", "DEBUG"), *flags]


def resolve(
    family: str,
    *,
    preset: str | None = None,
    file: Path | None = None,
    flags: Sequence[Flag] = (),
    overrides: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Loaded:
    """The configuration for what was asked; with neither preset nor file, what suits the machine.

    check: whether its sizes must fit together by now.
    """
    from dataclasses import replace

    from lockstep.config.load import load as load_config
    from lockstep.runtime import env

    notice = ""
    wishes = env.launcher_wishes()  # stronger than a file, weaker than a flag of our own
    flags = [*wishes.items(), *flags]
    if preset is None and file is None:
        preset, notice = pick_preset(_asked_device(flags, overrides or {}), family)
    loaded = load_config(family, preset=preset, file=file, flags=flags, overrides=overrides or {})
    if check:
        check_fits(loaded)
    asked = ", ".join(f"{key} {value}" for key, value in wishes.items())
    said = (*([notice] if notice else []), *([f"accelerate asks for {asked}"] if asked else []))
    return replace(loaded, notices=(*said, *loaded.notices)) if said else loaded


def pick_preset(device: str, family: str = "llama") -> tuple[str, str]:
    """The preset when none was named, and the line that says so."""
    from lockstep.families import FAMILIES

    usual = FAMILIES[family].preset if family in FAMILIES else "production"
    if device == "cpu":
        return "demo", "The CPU was asked for: running the demo preset"
    if device == "cuda":
        return usual, f"Running the {usual} preset"
    from lockstep.runtime.devices import visible_gpus

    gpus = visible_gpus()
    if not gpus:
        return "demo", "No GPUs detected: running the demo preset on the CPU"
    return usual, f"{len(gpus)} x {gpus[0].name}: running the {usual} preset"


def _asked_device(flags: Sequence[Flag], overrides: Mapping[str, Any]) -> str:
    """The device named last, or nothing."""
    asked: list[Any] = [text for key, text in flags if key.replace("-", "_") in DEVICE_KEYS]
    asked.append(overrides.get("system.device"))
    system = overrides.get("system")
    if isinstance(system, Mapping):
        asked.append(system.get("device"))  # pyright: ignore[reportUnknownMemberType]
    return next((str(device) for device in reversed(asked) if device), "")


def check_fits(loaded: Loaded) -> None:
    """What does not fit together is refused here, at the line that set it; sizes if the shape needs no look-up."""
    from lockstep.models import shapes
    from lockstep.runtime import env, hub

    config = loaded.config
    env.hide(hub.token_of(config.data.hf_token))
    try:
        config.check()
        path = config.model.model_path
        if shapes.is_own(path) or shapes.known(path) is not None:
            shapes.resolve(config.model, context_length=config.training.context_length)
    except LockstepError as error:
        origin = loaded.origins.get(error.where)
        if origin is None or origin.layer == "preset":
            raise
        key = "" if error.where in origin.where.replace("-", "_") else f"{error.where}: "
        raise type(error)(f"{key}{error.what}", where=origin.where, hint=error.hint) from None


def sizes(loaded: Loaded, *, workers: int = 1, nodes: int = 1) -> str:
    """The resolved sizes, with the device and the precision the engine will choose; asks no hub and no torch."""
    from lockstep.config import show
    from lockstep.models import shapes
    from lockstep.runtime.devices import visible_gpus
    from lockstep.runtime.grid import shards
    from lockstep.runtime.options import NO_FLOAT8

    config, training = loaded.config, loaded.config.training
    if shapes.known(config.model.model_path) is None and not Path(config.model.model_path).is_dir():
        return "sizes: known once the model's own configuration has been fetched"
    shape = shapes.resolve(config.model, context_length=training.context_length)
    on_gpu = config.system.device == "cuda" or (config.system.device == "auto" and bool(visible_gpus()))
    precision = training.precision if training.precision in shapes.ITEM_BYTES else "bf16" if on_gpu else "fp32"
    if precision.startswith("fp8") and not on_gpu:
        hint = "--precision bf16, or --device cuda to plan for one"
        raise ConfigError(f"training.precision: {precision}: {NO_FLOAT8}", hint=hint)
    memory = shapes.memory_bytes(
        shape,
        batch_size=training.batch_size,
        context_length=training.context_length,
        dtype_name=precision,
        checkpointing=config.system.gradient_checkpointing,
        compiled=config.model.compiles(on_gpu=on_gpu, debug=config.debug.enabled),
        optimizer_states=training.optimizer_states,
        lora=shapes.Lora.of(config.model),
        shards=shards(config.system.mode, world=workers, nodes=nodes),
    )
    workers = 1 if config.system.mode == "replicas" else workers  # each makes the whole step
    tokens = workers * training.batch_size * training.grad_accum_nums * training.context_length
    return show.sizes(
        parameters=shape.parameters(),
        tokens_per_step=f"{tokens:,}" + (f" of {workers} workers" if workers > 1 else ""),
        memory_bytes=memory.total,
        state_bytes=memory.states,
        computing=f"{precision}, {'GPU' if on_gpu else 'CPU'}",
        micro_batch=f"auto, found before it starts; estimated with {training.batch_size} rows"
        if loaded.finds_batch
        else "",
    )


def get_default_config(preset: str | None = None, debug_mode: bool = False, *, family: str = "llama") -> Config:
    """The configuration of a preset (the family's own); in debug mode `debug`, or debug output over the one named."""
    from lockstep.config.load import load as load_config

    flags: list[Flag] = []
    if debug_mode:
        preset, flags = with_debug(preset, flags)
    return Config(load_config(family, preset=preset, flags=flags).config)


class Config:
    """A configuration, read-only: sections are attributes (`config.training.max_steps`), `replace` makes another."""

    def __init__(self, resolved: RunConfig) -> None:
        object.__setattr__(self, "_resolved", resolved)

    if TYPE_CHECKING:
        _resolved: RunConfig
    else:

        def __setattr__(self, name: str, value: Any) -> None:
            from lockstep.config.section import read_only

            raise read_only(name)

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
        """A configuration file over the defaults of the family that it names (llama)."""
        from lockstep.config.load import fixed, load_file

        return cls(fixed(load_file(Path(path))))

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
        from lockstep.config.load import fixed, replaced

        return Config(fixed(replaced(self._resolved, overrides)))

    def validate(self) -> None:
        """Raise LockstepError unless the sizes fit together too; types and ranges were checked when it was made."""
        from lockstep.models.shapes import resolve as resolve_shape

        resolve_shape(self._resolved.model, context_length=self._resolved.training.context_length)
