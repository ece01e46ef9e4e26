"""What a configuration leaves open, decided once before anything starts: `auto`, a list of datasets, a commit.

One process decides: the launcher for its workers (through the environment), else the first worker for all. What was
decided stands in the run's configuration, so a run that goes on later goes on with the same text. Torch-free.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep import registry
from lockstep.config.given import Origin
from lockstep.config.load import as_asked, identity
from lockstep.data.options import HistoryOptions
from lockstep.engine import predecessor
from lockstep.engine.choices import (
    AUTOMATIC,
    Room,
    cache_roots,
    choose_source,
    existing,
    hub_tokenizer,
    is_of_hub,
    is_own,
    is_windows,
    with_mask,
)
from lockstep.engine.predecessor import is_open
from lockstep.errors import ConfigError, DataError, LockstepError, NotFoundError
from lockstep.models import shapes
from lockstep.runtime import env, hub

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig
    from lockstep.data.options import DataOptions

logger = logging.getLogger(__name__)

Decided = Mapping[str, tuple[str | None, str]]  # setting of `data` -> its value, and the line that says why
SETTLED = "LOCKSTEP_SETTLED"  # what a launcher has decided, for its workers
OWN_TEXT = "data.data_path=FILE for your own"


def decide(config: RunConfig, asked: Mapping[str, Any] | None = None) -> Decided:
    """Everything that is open in `data`, decided; what a launcher has decided is taken as it is.

    `asked`: the settings as they were given, where the configuration does not say it.
    """
    if told := env.get(SETTLED):
        return {name: (value, "") for name, value in json.loads(told).items()}
    decided: dict[str, tuple[str | None, str]] = {}
    if isinstance(config.data, HistoryOptions):
        return decided
    if config.data.data_path == "-":
        hint = "COMMAND > corpus.txt, then --data-path corpus.txt"
        raise ConfigError("stdin is not read as a dataset", where="data.data_path", hint=hint)
    options = config.data.model_copy(update={"cache_dir": str(cache_roots(config.data)[0])})
    earlier = predecessor.resolved_before(config.model_copy(update={"data": options}), asked or identity(config))
    decided |= {name: (value, "") for name, value in earlier.items()}
    options = _with(options, decided)
    if is_open("dataset_name", options.dataset_name):
        decided["dataset_name"] = _dataset(options)
        options = _with(options, decided)
        if options.data_path is not None and options.dataset_name != "text":  # of a list in which text came later
            decided["data_path"] = (None, "")
    if is_of_hub(options.dataset_name) and "dataset_name" not in earlier:
        pinned: str = registry.load("sources", "hf", "pinned_name")(options)
        if pinned != options.dataset_name:
            decided["dataset_name"] = (pinned, decided.get("dataset_name", ("", ""))[1])
    if "tokenizer_name" not in earlier and (tokenizer := _tokenizer(config, options.dataset_name)):
        decided["tokenizer_name"] = tokenizer
    return decided


def applied(config: RunConfig, decided: Decided) -> RunConfig:
    """The configuration with nothing left open."""
    return config.model_copy(update={"data": _with(config.data, decided)})


def settled(loaded: Loaded, decided: Decided) -> Loaded:
    """The same with the reasons, each kept as the origin of its value; a name that only got a commit keeps its own."""
    origins = {
        f"data.{name}": Origin("auto", line)
        for name, (value, line) in decided.items()
        if value != (was := getattr(loaded.config.data, name)) and (name != "dataset_name" or is_open(name, was))
    }
    return replace(
        loaded,
        config=applied(loaded.config, decided),
        origins={**loaded.origins, **origins},
        asked=as_asked(loaded),
    )


def lines(decided: Decided) -> list[str]:
    """What to tell the user of it, once and loudly."""
    return [line for _, line in decided.values() if line]


def for_workers(loaded: Loaded) -> dict[str, str]:
    """The environment that tells workers what was decided, so that they need not ask again."""
    return {SETTLED: json.dumps({name: getattr(loaded.config.data, name) for name in predecessor.NAMES})}


def _with(options: DataOptions, decided: Decided) -> DataOptions:
    return options.model_copy(update={name: value for name, (value, _) in decided.items()})


def _dataset(options: DataOptions) -> tuple[str, str]:
    """The first dataset of a list that can be had. A name that stands alone is never replaced by another."""
    if options.dataset_name != "auto":
        return _first_of([name.strip() for name in options.dataset_name.split("|")], options)
    if options.data_path is not None:
        return "text", ""
    first, last = predecessor.AUTO_DATASETS
    reason = registry.load("sources", "hf", "reachable")(options.model_copy(update={"dataset_name": first}))
    if not reason:
        return first, f"No dataset named: training on {first} ({OWN_TEXT})"
    return last, f"No dataset named, no {first} ({reason}): training on the text built into Python ({OWN_TEXT})"


def _first_of(names: list[str], options: DataOptions) -> tuple[str, str]:
    """The first that can be had, saying why not those before it; the last is not questioned."""
    if not all(names):
        raise ConfigError(f"{options.dataset_name!r} has an empty place", where="data.dataset_name", hint="A|B")
    reasons: list[str] = []
    for name in names[:-1]:
        try:
            path = options.data_path if name == "text" else None
            choose_source(options.model_copy(update={"dataset_name": name, "data_path": path})).fingerprint()
        except (NotFoundError, DataError) as error:
            reasons.append(f"no {name} ({error.what})")
        else:
            return name, "; ".join([*reasons, f"training on {name}"]) if reasons else ""
    return names[-1], "; ".join([*reasons, f"training on {names[-1]}"])


def _tokenizer(config: RunConfig, dataset: str) -> tuple[str, str] | None:
    """The model's own from the hub, where `auto` would need it and it can be had; None: there is nothing to ask."""
    data, path = config.data, shapes.full_name(config.model.model_path)
    if data.tokenizer_name not in (None, "auto") or dataset == "synthetic" or is_own(dataset):
        return None
    ready = is_windows(data)  # ids that are there already: no tokenizer is trained on them
    if ready and existing(f"{data.data_path}/tokenizer.json"):
        return None
    if existing(f"{config.model.model_path}/tokenizer.json"):
        return None
    reason = ""
    if hub.looks_like_id(path) and not shapes.is_own(path) and not (reason := _why_not(config, path)):
        return path, f"{data.data_path} has no tokenizer.json: its ids are taken for those of {path}" if ready else ""
    if config.family == "llada" and config.model.init == "pretrained" and not ready:
        raise NotFoundError(
            f"no tokenizer of {path}{': ' if reason else ''}{reason}, and to its weights other ids mean other words",
            where="data.tokenizer_name",
            hint="data.tokenizer_name=FOLDER with its tokenizer.json, or model.init=random",
        )
    if ready or not reason:
        return None
    name, instead = AUTOMATIC[config.objective.marks_places]
    _, _, trained = instead.partition(": ")
    return name, f"No tokenizer named, none of {path} ({reason}): {trained} (data.tokenizer_name=FOLDER for your own)"


def _why_not(config: RunConfig, path: str) -> str:
    """Why the tokenizer of a model of the hub cannot be used; '': it can."""
    token = hub.token_of(config.data.hf_token)
    if reason := hub.available(path, "tokenizer.json", token=token):
        return reason
    try:
        found = hub_tokenizer(config.data, path)
    except ConfigError:
        raise
    except LockstepError as error:  # whatever it is: nobody has asked for this one
        return error.what
    shape = shapes.resolve(config.model, context_length=config.training.context_length, token=token)
    if Room.of(with_mask(config, shape), shape.vocab_size).holds(found):
        return ""
    return f"its {found.vocab_size} ids do not fit model.vocab_size {shape.vocab_size}"
