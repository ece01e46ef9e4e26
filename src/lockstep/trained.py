"""The verbs for a trained model: let it speak or walk, measure it, hand it on. Nothing heavy is imported before."""

from __future__ import annotations

import itertools
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lockstep.arguments import Setting
from lockstep.errors import ConfigError, ExitCode, OutputError
from lockstep.guard import say
from lockstep.home import family_of, find_run, prompt_of, root_of

AGENTS = "ad"  # the family that walks; the others speak
OF_TEXTS = (
    "tokens", "temperature", "top_k", "seed", "steps", "block_length", "remasking", "cfg_scale", "threshold", "no_eos",
    "delay_eos",
)  # fmt: skip
OF_WALKS = ("episodes", "temperature", "seed", "goal_idx")
FIELDS = {"no_eos": "forbid_eos"}  # flags that are not called as what they set


def sample(arguments: Namespace, _: list[Setting]) -> int:
    """Let a trained model speak: continue a text, or fill its blanks. An agent walks."""
    path = find_run(arguments.run)
    given = _given(arguments, {*OF_TEXTS, *OF_WALKS})
    if family_of(path) == AGENTS:
        _refuse(given, OF_WALKS, "is for models of texts, and this run is of an agent")
        if arguments.prompt is not None:
            raise ConfigError("an agent hears no prompt, it walks", where="PROMPT", hint=f"lockstep sample {path}")
        from lockstep.engine.strolls import walk_run

        say(walk_run(path, **given))
        return ExitCode.DONE
    _refuse(given, OF_TEXTS, "is for agents (family ad), and this run is of another family")
    if arguments.prompt is None:
        raise ConfigError("what shall it say?", where="PROMPT", hint=f"lockstep sample {path}{prompt_of(path)}")
    from lockstep.engine.inference import sample_run

    asked = {FIELDS.get(name, name): value for name, value in given.items()}
    say(sample_run(path, arguments.prompt, asked))
    return ExitCode.DONE


def evaluate(arguments: Namespace, _: list[Setting]) -> int:
    """Measure a trained model on its validation rows or on one answer; an agent in unseen tasks."""
    path = find_run(arguments.run)
    walks = _given(arguments, {*OF_WALKS, "repeats"})
    if family_of(path) == AGENTS:
        texts = _given(arguments, {"answer", "prompt", "samples", "cfg_scale"})
        _refuse(texts, (), "is for models of texts, and this run is of an agent")
        from lockstep.engine.trials import evaluate_run

        found: Any = evaluate_run(path, folder=root_of(path), **walks)
    else:
        _refuse(walks, (), "is for agents (family ad), and this run is of another family")
        found = _measured(path, arguments)
    say(json.dumps(found.fields(), indent=2) if arguments.json else "\n".join(found.lines()))
    return ExitCode.DONE


def _measured(path: Path, arguments: Namespace) -> Any:
    """What a model of texts is worth."""
    asked = _given(arguments, {"prompt", "samples", "cfg_scale"})
    if arguments.answer is None and asked:
        raise ConfigError("goes with --answer", where=f"--{next(iter(asked)).replace('_', '-')}", hint="--answer TEXT")
    if arguments.answer is not None:
        from lockstep.engine.measure import measure_answer

        return measure_answer(path, arguments.answer, **asked)
    from lockstep.engine.measure import measure_run

    return measure_run(path)


def _given(arguments: Namespace, names: set[str]) -> dict[str, Any]:
    """Those of the flags that were given, in the order they are known in."""
    found = {name: value for name, value in vars(arguments).items() if name in names}
    return {name: value for name, value in found.items() if value is not None and value is not False}


def _refuse(given: dict[str, Any], known: tuple[str, ...], why: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(why, where=f"--{name.replace('_', '-')}", hint="leave it out")


def export(arguments: Namespace, _: list[Setting]) -> int:
    """Hand a trained model to other programs."""
    from lockstep.config.renames import dtype

    path, kind = find_run(arguments.run), dtype(arguments.dtype)
    if kind is None:
        raise ConfigError(f"got {arguments.dtype[:40]!r}", where="--dtype", hint="one of fp32, bf16, fp16")
    folder = Path(os.path.realpath(arguments.folder)) if arguments.folder else root_of(path) / arguments.to
    if Path.cwd().is_relative_to(folder):  # it becomes another folder, with all who are in it left in the old one
        hint = f"a folder of its own: lockstep export {arguments.run} {arguments.to} --to {arguments.to}"
        raise OutputError("is where you are, and an export takes the place of its folder", where=str(folder), hint=hint)
    if _is_taken(folder):
        others = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
        free = next(other for other in others if not _is_taken(other))
        hint = f"lockstep export {arguments.run} {free} --to {arguments.to}"
        raise OutputError("exists and is not empty", where=str(folder), hint=hint)
    from lockstep.engine.inference import export_adapter, export_run

    written = export_adapter(path, folder) if arguments.to == "peft" else export_run(path, folder, kind)
    say(f"Exported to {written}")
    return ExitCode.DONE


def _is_taken(folder: Path) -> bool:
    try:
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise OutputError(f"cannot be used: {error.strerror or error}", where=str(folder)[:300]) from error
