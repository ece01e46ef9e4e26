"""Ready windows: written by `lockstep prepare llada --to DIR`, and looked over when they are trained on. Torch-free."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, cast

from lockstep import rundir
from lockstep.data.cache import Table
from lockstep.data.order import Order
from lockstep.data.tokenize import load_tokenizer
from lockstep.engine.choices import existing, speaking
from lockstep.errors import ConfigError, DataError, LockstepError, OutputError
from lockstep.models import shapes
from lockstep.runtime import hub
from lockstep.runtime.later import numpy as np
from lockstep.sources.windows import DATA, LENGTHS, METADATA, Metadata, WindowSource, command

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Array, Objective, Source
    from lockstep.engine.choices import TokenizerChoice
    from lockstep.engine.prepare import Prepared

FAMILY = "llada"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
BLOCK_TOKENS = 1 << 22


# ------------------------------------------------------------------------------------------------------ reading them


def check(config: RunConfig, source: Source, choice: TokenizerChoice, *, rows: int) -> str:
    """Refuse windows that this model cannot learn from; returns what is to be said about them. `rows`: of the model."""
    if not isinstance(source, WindowSource):
        return ""
    about = source.metadata
    asked: int | None = getattr(config.objective, "mask_token_id", None)
    if config.family == FAMILY and asked is None and about.mask_token is not None and about.mask_token >= rows:
        raise DataError(
            f"mask_token {about.mask_token}, the embedding of the model has {rows} rows (0 to {rows - 1})",
            where=str(about.folder / METADATA),
            hint=f"{command(about.folder, config.model.model_path)}, or objective.mask_token_id={rows - 1}",
        )
    _check_tokenizer(config, about, choice)
    return _check_length(config, about) if config.family == FAMILY else ""


def _check_tokenizer(config: RunConfig, about: Metadata, choice: TokenizerChoice) -> None:
    """Ids mean something only to the tokenizer they were made with."""
    if about.tokenizer is None:
        return
    other = choice.name if choice.ready and choice.ready.definition() != about.tokenizer else ""
    if not other and config.model.init == "pretrained":
        path = config.model.model_path
        own = existing(f"{path}/tokenizer.json") or _downloaded(shapes.full_name(path))
        with contextlib.suppress(LockstepError):  # one that cannot be read says nothing
            other = path if own and load_tokenizer(own).definition() != about.tokenizer else ""
    if other:
        own = config.data.tokenizer_name == other and existing(f"{about.folder}/tokenizer.json")
        raise DataError(
            f"these windows were made with another tokenizer than that of {other}",
            where=str(about.folder),
            hint="data.tokenizer_name=auto" if own else command(f"{about.folder}_2", config.model.model_path),
        )


def _downloaded(path: str) -> Path | None:
    return hub.cached(hub.model(path), "tokenizer.json") if hub.looks_like_id(path) else None


def _check_length(config: RunConfig, about: Metadata) -> str:
    length, context = about.sequence_length, config.training.context_length
    if length == context:
        return ""
    if length % context or about.answers:
        raise ConfigError(
            f"windows of {length} tokens cannot be cut into rows of {context}",
            where="training.context_length",
            hint=f"training.context_length={length}",
        )
    return (
        f"windows of {length} tokens are cut into {length // context} rows of {context} "
        f"(training.context_length={length} to keep them whole)"
    )


# ------------------------------------------------------------------------------------------------------ writing them


def check_target(config: RunConfig, folder: Path) -> None:
    """Refuse, before any work is done, what could not be written in the end."""
    if config.family != FAMILY:
        raise ConfigError(
            f"windows are for the family {FAMILY}, not {config.family}",
            where="--to",
            hint=f"lockstep prepare {FAMILY} --to DIR",
        )
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not _is_ours(folder))):
        raise OutputError("something else is there", where=str(folder), hint="--to DIR, a new folder")


def export(config: RunConfig, prepared: Prepared, objective: Objective, rows: int, folder: Path) -> list[str]:
    """Write a folder of windows, whole or not at all; the lines that say so. `rows`: of the model."""
    tables = {"train": prepared.train, "validation": prepared.validation}
    about = describe(config, prepared, speaking(objective, prepared.tokenizer), rows=rows)
    said = (
        f"{about['train_samples']} training and {about['val_samples']} validation windows of "
        f"{about['sequence_length']} tokens"
    )
    train = f"lockstep train {FAMILY} --model-path {quote(config.model.model_path)} --data-path {quote(str(folder))}"
    if folder.is_dir() and any(folder.iterdir()):
        if _metadata(folder) != about:
            raise OutputError(
                "other windows are there already", where=str(folder), hint="--to another DIR, or remove it first"
            )
        with contextlib.suppress(DataError):  # damaged: written anew
            rundir.verify(folder)
            return [f"{folder} has them already: {said}"]
    try:
        with rundir.publishing(folder) as temporary:
            for side, table in tables.items():
                _write(temporary, side, table, seed=config.system.seed)
            for name in TOKENIZER_FILES:
                shutil.copyfile(prepared.folder / name, temporary / name)
            rundir.write_json(temporary / METADATA, about)
    except OSError as error:
        raise rundir.io_error(error, folder, doing="writing the windows") from error
    answers = " --documents answers" if config.data.documents == "answers" else ""
    return [f"Wrote {folder}: {said}", f"Train on it: {train} --context-length {about['sequence_length']}{answers}"]


def describe(config: RunConfig, prepared: Prepared, objective: Objective, *, rows: int) -> dict[str, Any]:
    """metadata.json: ids are of the tokenizer in the folder, vocab_size counts the rows of the model's embedding."""
    check_rows = getattr(objective, "check_rows", None)
    if check_rows is not None:  # the mask is one of them
        check_rows(rows)
    counts = [prepared.train.rows, prepared.validation.rows]
    length, specials = config.training.context_length, prepared.tokenizer.vocabulary().specials
    end = prepared.tokenizer.separator
    return {
        "sequence_length": length,
        "vocab_size": rows,
        "train_samples": counts[0],
        "val_samples": counts[1],
        "total_tokens": sum(counts) * length,
        "mask_token": getattr(objective, "mask", None),
        "bos_token": specials.get("bos", specials.get("cls")),
        "eos_token": end,
        "pad_token": specials.get("pad", end),
        "tokenizer_size": prepared.tokenizer.vocab_size,
        "tokenizer": prepared.tokenizer.definition(),
        "model": config.model.model_path,
        "source": prepared.source,
        "documents": config.data.documents,
        "key": prepared.key,
        "seed": config.system.seed,
        "made_by": "lockstep",
    }


def _write(folder: Path, side: str, table: Table, *, seed: int) -> None:
    """The rows of one side in an order of the seed, some at a time."""
    with (folder / DATA[side]).open("xb") as file:
        width = table.columns["tokens"].shape[1]
        _header(file, (table.rows, width))
        for block in _blocks(table, seed, width):
            file.write(block["tokens"].astype("<i8").tobytes())
    if "lengths" in table.columns:
        prompts = [block["lengths"][:, 0] for block in _blocks(table, seed, width)]
        np.save(folder / LENGTHS[side], np.concatenate(prompts).astype("<i8"))


def _header(file: Any, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})


def _blocks(table: Table, seed: int, width: int) -> Iterator[Mapping[str, Array]]:
    order, at_once = Order(table.rows, seed), max(1, BLOCK_TOKENS // width)
    for start in range(0, table.rows, at_once):
        ids, _ = order.at(start, min(at_once, table.rows - start))
        yield table.take(ids)


def _is_ours(folder: Path) -> bool:
    return (folder / rundir.MANIFEST).is_file() and _metadata(folder).get("made_by") == "lockstep"


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
