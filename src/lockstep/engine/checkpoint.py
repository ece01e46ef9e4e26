"""Checkpoints that cannot be torn: a folder per save, a manifest with SHA-256 written last, one rename."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep import rundir
from lockstep.errors import DataError

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, RUN = "model.safetensors", "optimizer.safetensors", "run.json"
REQUIRED = (MODEL, OPTIMIZER, RUN)
NAME = re.compile(r"step_\d{8,}")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class State:
    """All that a run needs to go on: tensors by name, and plain values."""

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    run: Mapping[str, Any]


class Checkpointer:
    """Saves into, and finds in, the checkpoints folder of one run."""

    def __init__(self, folder: Path, *, keep_last: int = 2, extra_files: Mapping[str, bytes] | None = None) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.extra_files = extra_files or {}  # held in memory: what they came from may be gone when it is time to save

    def save(self, step: int, state: State) -> Path:
        """Publish the state after `step` finished steps; only then forget the oldest."""
        final = self.folder / f"step_{step:08d}"
        if final.is_dir() and is_good(final):
            return final  # the state after N steps of a run is one state
        try:
            with rundir.publishing(final) as folder:
                save_file(dict(state.model), folder / MODEL)
                save_file(dict(state.optimizer), folder / OPTIMIZER)
                (folder / RUN).write_text(json.dumps(state.run, indent=1, allow_nan=False) + "\n", encoding="utf-8")
                for name, content in self.extra_files.items():
                    (folder / name).write_bytes(content)
        except (OSError, SafetensorError) as error:
            raise rundir.io_error(_as_os_error(error), final, doing="saving a checkpoint") from error
        found = self.found()
        kept = [path for path in found if is_good(path, content=False)][-self.keep_last :]
        for old in found[: found.index(kept[0])] if kept else []:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def found(self) -> list[Path]:
        """Published checkpoints, oldest first; whether they verify is another question. Other folders are not ours."""
        named = [path for path in self.folder.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))

    def latest(self) -> Path | None:
        """The newest checkpoint that verifies; says which ones do not, and why."""
        return next((path for path in reversed(self.found()) if is_good(path)), None)


def load(path: Path) -> State:
    """The state in a checkpoint folder, after every byte of it was checked."""
    rundir.verify(path, required=REQUIRED)
    run = json.loads((path / RUN).read_text(encoding="utf-8"))
    return State(load_file(path / MODEL), load_file(path / OPTIMIZER), run)


def is_good(path: Path, *, content: bool = True) -> bool:
    """Whether a checkpoint folder is whole; says why not."""
    try:
        rundir.verify(path, content=content, required=REQUIRED)
    except DataError as error:
        logger.warning("Checkpoint passed over: %s", error)
        return False
    return True


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error))
