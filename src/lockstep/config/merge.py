"""Layers to one configuration: later ones win, old words are translated, the whole is checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import ValidationError

from lockstep import registry, rundir
from lockstep.arguments import NOT_CARRIED, is_carried
from lockstep.config import reader, renames, saved
from lockstep.config.catalog import Catalog, Setting, catalog, config_class, show_value
from lockstep.config.given import Given, Origin, joint_setting
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError

MASK = "***"
PRECISION = ("training", "precision")
WARMUP, MAX_STEPS = ("training", "warmup_steps"), ("training", "max_steps")
WARMUP_RATIO = ("training", "warmup_ratio")
CONTEXT = ("training", "context_length")
BATCH = ("training", "batch_size")
PROFILE, PROFILE_STEPS = ("report", "profile"), ("report", "profile_steps")
MOST_STEPS = 10_000_000  # no limit: the setting takes no more


@dataclass(frozen=True)
class Loaded:
    """A configuration and how it came about."""

    config: RunConfig
    origins: Mapping[str, Origin]  # dotted key -> origin, non-defaults only
    notices: tuple[str, ...]
    preset: str
    family: str
    name: str = ""  # for the run folder: of the file if one was given, else of the preset
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the identity settings before `auto` was resolved
    finds_batch: bool = False  # training.batch_size is `auto`: a number is found before the run begins


def resolve(family: str, layers: Sequence[Sequence[Given]], *, preset: str) -> Loaded:
    """Merge layers of rising precedence, translate old words, validate."""
    known = catalog(family)
    notices: list[str] = []
    merged: dict[tuple[str, ...], Given] = {}
    finds_batch = False
    for rank, layer in enumerate(layers):
        for item in _translate(layer, known, notices):
            value = item.value
            if item.path == BATCH:
                finds_batch = value == "auto"
                value = _rows(value, merged, known)
            _merge(merged, replace(item, rank=rank, value=value))
    _join_precision(merged, notices, known)
    _prefer_trace(merged)
    _prefer_own_data(merged, notices)
    _prefer_steps(merged, notices)
    same_length = merged.pop(renames.MAX_SEQ_LENGTH, None)
    config = _validate(family, merged, known)
    config = _check_together(config, merged, notices, same_length)
    origins = {".".join(path): item.origin for path, item in merged.items()}
    return Loaded(config, origins, tuple(notices), preset, family, preset, finds_batch=finds_batch)


def _merge(merged: dict[tuple[str, ...], Given], item: Given) -> None:
    path, value = item.path[:2], item.value
    before = merged.get(path)
    if len(item.path) == 3:  # run.tags.team=x adds one tag
        older = cast("dict[str, Any]", before.value) if before and isinstance(before.value, dict) else {}
        value = {**older, item.path[2]: value}
    elif before and before.rank == item.rank and item.origin.layer != "flag" and before.value != value:
        raise ConfigError(
            f"{item.written} and {before.written} set the same thing twice ({'.'.join(path)})",
            where=item.key_where,
            hint=f"keep one of them; the other is at {before.key_where}",
        )
    merged[path] = replace(item, path=path, value=value)


def _rows(value: Any, merged: Mapping[tuple[str, ...], Given], known: Catalog) -> Any:
    """A batch size; for `auto` that of the layers below, and for `auto:N` of earlier versions N."""
    if value == "auto":
        return before.value if (before := merged.get(BATCH)) else known.settings[BATCH].default
    number = value.removeprefix("auto:") if isinstance(value, str) else ""
    return int(number) if number.isdecimal() and number != value else value


def _translate(layer: Sequence[Given], known: Catalog, notices: list[str]) -> Iterable[Given]:
    """Every value under its present name and of its setting's type; unknown ones are refused."""
    for item in layer:
        if (retired := renames.retired(item.path, known.family)) is not None:
            _retire(item, retired, notices)
            continue
        target = item.path
        if target not in known.settings and (new := renames.moved(target, known.family)) is not None:
            told = item.origin.layer == "file" or "." in item.written
            if told and not renames.is_quiet(item.path, known.family):
                notices.append(f"{item.key_where}: {item.written} is read as {'.'.join(new)}")
            target = new
        setting = known.settings.get(target[:2]) or (joint_setting(target) if target in renames.JOINT else None)
        if setting is None and (error := saved.refusal(".".join(target), item.value, where=item.key_where)):
            raise error
        if setting is None or (len(target) > 2 and "object" not in setting.types) or len(target) > 3:
            raise ConfigError(_unknown(item, known), where=item.key_where, hint=_meant(item.path, known))
        if target == PRECISION and item.is_text and item.value is None and item.path[-1] in renames.SWITCHES:
            item = replace(item, value="true")  # --fp16
        value = _read(item, setting) if len(target) < 3 else item.value
        if target == PRECISION:
            value = renames.precision_word(value, word=item.path[-1])
        if setting.secret and value == MASK:
            notices.append(f"{item.where}: {setting.key} is masked there and was left out")
            continue
        yield replace(item, path=target, value=value, is_text=False)


def _prefer_own_data(merged: dict[tuple[str, ...], Given], notices: list[str]) -> None:
    """A file of the user's own is stronger than the dataset a lower layer names."""
    path, name = merged.get(("data", "data_path")), merged.get(("data", "dataset_name"))
    if path and name and path.value is not None and path.rank > name.rank and name.value != "text":
        place = f"preset {name.origin.where}" if name.origin.layer == "preset" else name.where
        notices.append(f"{path.where}: data_path replaces the dataset {name.value} of {place}")
        merged[name.path] = replace(name, value="text", origin=path.origin, rank=path.rank)


def _prefer_steps(merged: dict[tuple[str, ...], Given], notices: list[str]) -> None:
    """A warm-up in steps is stronger than a share of all steps that a lower layer names.

    Only a lower one: a run's own configuration is written out in full, in one layer. max_steps need not win over
    epochs: it ends the run in any case.
    """
    share, steps = merged.get(WARMUP_RATIO), merged.get(WARMUP)
    if share and steps and share.value and steps.rank > share.rank:
        notices.append(
            f"{steps.where}: training.warmup_steps {show_value(steps.value)} decides, "
            f"not training.warmup_ratio {show_value(share.value)}"
        )
        merged[WARMUP_RATIO] = replace(share, value=0.0, origin=steps.origin, rank=steps.rank)


def _unknown(item: Given, known: Catalog) -> str:
    if item.origin.layer == "flag" and item.is_text:
        return "no such setting"
    section = item.path[0]
    if len(item.path) == 1:
        return f"{item.written[:200]}: no such section or setting"
    return (
        f"{item.written[:200]}: no such setting in section {section}"
        if section in known.sections
        else f"no section {section}"
    )


def _meant(path: tuple[str, ...], known: Catalog) -> str:
    """The likely slip: in a word of the family's own files, else in the name of a setting."""
    own = sorted(renames.plain_words(known.family)) if renames.of_family(known.family) and len(path) == 1 else []
    near = "" if not own or known.by_name(path[0]) else registry.nearest(path[0], own)
    return f"did you mean {near}?" if near else known.suggest(path)


def _read(item: Given, setting: Setting) -> Any:
    if not item.is_text:
        return item.value
    if item.value is None:
        if "boolean" in setting.types:
            return True
        raise ConfigError("needs a value", where=item.where, hint=f"{item.where} VALUE: {setting.expected}")
    return setting.read(item.value)


def _retire(item: Given, retired: renames.Retired, notices: list[str]) -> None:
    if not retired.reason:
        return
    value = reader.scalar(item.value or "true") if item.is_text else item.value
    if not any(value == inert and type(value) is type(inert) for inert in retired.inert):
        raise ConfigError(
            f"{item.written}: {show_value(value)} is refused: {retired.reason}", where=item.where, hint=retired.hint
        )
    if not retired.quiet:
        notices.append(f"{item.key_where}: {item.written} has no effect: {retired.reason}")


def _join_precision(merged: dict[tuple[str, ...], Given], notices: list[str], known: Catalog) -> None:
    """`use_amp` and `amp_dtype`, wherever they stand, as training.precision."""
    use_amp, amp_dtype = merged.pop(renames.USE_AMP, None), merged.pop(renames.AMP_DTYPE, None)
    latest = max((item for item in (use_amp, amp_dtype) if item), key=lambda item: item.rank, default=None)
    if latest is None:
        return
    if use_amp and not isinstance(use_amp.value, bool):
        raise _refusal(use_amp, joint_setting(renames.USE_AMP), known)
    if amp_dtype and renames.dtype(amp_dtype.value) is None:
        raise _refusal(amp_dtype, joint_setting(renames.AMP_DTYPE), known)
    value = renames.precision_of(
        use_amp.value if use_amp else None, renames.dtype(amp_dtype.value) if amp_dtype else None
    )
    native = merged.get(PRECISION)
    if native and native.rank == latest.rank and native.value != value:
        raise ConfigError(
            f"{latest.written} means training.precision {value}, but that is set to {show_value(native.value)}",
            where=latest.key_where,
            hint=f"keep one of them; the other is at {native.key_where}",
        )
    if native is None or native.rank <= latest.rank:
        words = " and ".join(f"{item.written} {show_value(item.value)}" for item in (use_amp, amp_dtype) if item)
        notices.append(f"{latest.key_where}: {words}: read as training.precision {value}")
        merged[PRECISION] = replace(latest, path=PRECISION, value=value)


def _prefer_trace(merged: dict[tuple[str, ...], Given]) -> None:
    """Who names steps wants their trace, unless he says no beside them. How many may be a plain number."""
    steps, wanted = merged.get(PROFILE_STEPS), merged.get(PROFILE)
    if steps and type(steps.value) is int:
        merged[PROFILE_STEPS] = replace(steps, value=str(steps.value))
    if steps and (wanted is None or wanted.rank < steps.rank):
        merged[PROFILE] = replace(steps, path=PROFILE, value=True)


def _validate(family: str, merged: Mapping[tuple[str, ...], Given], known: Catalog) -> RunConfig:
    tree: dict[str, Any] = {}
    for path, item in merged.items():
        _check_texts(item)
        inner = tree if len(path) == 1 else tree.setdefault(path[0], {})
        inner[path[-1]] = item.value
    tree.setdefault("family", family)
    try:
        return config_class(family).model_validate(tree)
    except ValidationError as error:
        locations = [
            tuple(str(part) for part in problem["loc"][:2])
            for problem in error.errors(include_url=False, include_input=False)
        ]
    bad = [path if path in merged else path[:1] for path in locations]
    first = min((merged[path] for path in bad if path in merged), key=lambda item: item.rank, default=None)
    assert first is not None, f"the defaults do not fit their own schema: {locations}"
    raise _refusal(first, known.settings[first.path], known)


def _check_texts(item: Given) -> None:
    value = item.value
    words = [*value.keys(), *value.values()] if isinstance(value, dict) else [value]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    for word in words:  # pyright: ignore[reportUnknownVariableType]
        if isinstance(word, str) and not is_carried(word):
            raise ConfigError(f"{item.written}: {NOT_CARRIED}", where=item.where, hint="retype it")


def _refusal(item: Given, setting: Setting, known: Catalog) -> ConfigError:
    """Got, expected, and the likely slip."""
    value = item.value
    if error := saved.refusal(setting.key, value, where=item.where):
        return error
    key = setting.key if item.origin.layer != "flag" or item.written != setting.key else ""
    got = "something else" if setting.secret else show_value(value)
    hint = known.explanation(setting.key)
    if isinstance(value, str) and setting.types & {"integer", "number", "boolean"} and item.origin.layer != "flag":
        meant = reader.scalar(value)
        if isinstance(meant, int | float) and math.isfinite(meant):
            hint = f"write {value} without quotes"
    elif isinstance(value, str) and setting.words:
        lower = {word.lower(): word for word in setting.words}
        if near := registry.nearest(value.lower(), list(lower)):
            hint = f"did you mean {lower[near]}?"
    what = f"got {got}, expected {setting.expected}"
    return ConfigError(f"{key}: {what}" if key else what, where=item.where, hint=hint)


def _check_together(
    config: RunConfig, merged: Mapping[tuple[str, ...], Given], notices: list[str], same_length: Given | None
) -> RunConfig:
    """What no single setting can say about itself."""
    training = config.training
    if same_length and (same_length.value != training.context_length or isinstance(same_length.value, bool)):
        context = merged.get(CONTEXT)
        raise ConfigError(
            f"{same_length.written} {show_value(same_length.value)} differs from training.context_length "
            f"{training.context_length} ({context.where if context else 'the default'})",
            where=same_length.where,
            hint="set training.context_length only",
        )
    for path, name in ((("run", "name"), config.run.name), (("run", "experiment_name"), config.run.experiment_name)):
        if name is not None:
            _check_name(name, ".".join(path), merged.get(path))
    if config.data.dataset_name == "text" and config.data.data_path is None:
        raise ConfigError(
            "data.dataset_name: text needs data.data_path",
            where=merged["data", "dataset_name"].where,
            hint="--data-path FILE",
        )
    objective = config.objective.name
    if ":" not in objective and objective not in (names := registry.names("objectives")):
        raise ConfigError(
            f"objective.name: {objective!r} is not in objectives/",
            where=merged["objective", "name"].where,
            hint=registry.suggest(objective, names),
        )
    return _fit_warmup(_let_epochs_count(config, merged), merged, notices)


def _let_epochs_count(config: RunConfig, merged: Mapping[tuple[str, ...], Given]) -> RunConfig:
    """With epochs, steps are counted once the rows are known; max_steps is a limit where it was given for this run."""
    steps = merged.get(MAX_STEPS)
    if not getattr(config.training, "epochs", 0) or (steps and steps.origin.layer in ("file", "flag")):
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"max_steps": MOST_STEPS})})


def _check_name(name: str, key: str, item: Given | None) -> None:
    try:
        rundir.check_name(name, what=key)
    except ConfigError as error:
        raise ConfigError(error.what, where=item.where if item else "", hint=error.hint) from None


def _fit_warmup(config: RunConfig, merged: Mapping[tuple[str, ...], Given], notices: list[str]) -> RunConfig:
    """A warm-up longer than the run: refused where it was written for this run, clamped where it was inherited."""
    training = config.training
    warmup, steps = merged.get(WARMUP), merged.get(MAX_STEPS)
    by_passes = getattr(training, "epochs", 0) > 0  # how many steps that is, is known once the rows are
    if warmup is None or by_passes or training.warmup_steps <= training.max_steps:
        return config
    if steps is None or warmup.rank >= steps.rank:
        raise ConfigError(
            f"training.warmup_steps: {training.warmup_steps} is more than training.max_steps {training.max_steps}",
            where=warmup.where,
            hint=f"at most {training.max_steps}",
        )
    notices.append(
        f"training.warmup_steps {training.warmup_steps} ({warmup.origin.layer} {warmup.origin.where}) "
        f"is clamped to max_steps {training.max_steps}"
    )
    return config.model_copy(update={"training": training.model_copy(update={"warmup_steps": training.max_steps})})
