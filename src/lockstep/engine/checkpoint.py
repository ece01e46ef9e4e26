"""Checkpoints that cannot be torn: a folder per save, a manifest with SHA-256 written last, one rename."""

from __future__ import annotations

import json
import logging
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
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class State:
    """All that a run needs to go on: tensors by name, and plain values."""

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    run: Mapping[str, Any]


class Checkpointer:
    """Saves into, and finds in, the checkpoints folder of one run."""

    def __init__(self, folder: Path, *, keep_last: int, tokenizer_folder: Path | None = None) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.tokenizer_folder = tokenizer_folder

    def save(self, step: int, state: State) -> Path:
        """Publish the state after `step` finished steps; only then forget the oldest."""
        final = self.folder / f"step_{step:08d}"
        if final.exists() and _verifies(final):
            return final  # the state after N steps of a run is one state
        try:
            with rundir.publishing(final) as folder:
                save_file(dict(state.model), folder / MODEL)
                save_file(dict(state.optimizer), folder / OPTIMIZER)
                (folder / RUN).write_text(json.dumps(state.run, indent=1, allow_nan=False) + "\n", encoding="utf-8")
                for name in TOKENIZER_FILES:
                    if self.tokenizer_folder and (self.tokenizer_folder / name).is_file():
                        shutil.copyfile(self.tokenizer_folder / name, folder / name)
        except (OSError, SafetensorError) as error:
            raise rundir.io_error(_as_os_error(error), final, doing="saving a checkpoint") from error
        for old in self.found()[: -self.keep_last]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def found(self) -> list[Path]:
        """Published checkpoints, oldest first; whether they verify is another question."""
        return sorted(path for path in self.folder.glob("step_*") if ".tmp-" not in path.name and path.is_dir())

    def latest(self) -> Path | None:
        """The newest checkpoint that verifies; says which ones do not, and why."""
        return next((path for path in reversed(self.found()) if _verifies(path)), None)


def load(path: Path) -> State:
    """The state in a checkpoint folder, after every byte of it was checked."""
    rundir.verify(path)
    run = json.loads((path / RUN).read_text(encoding="utf-8"))
    return State(load_file(path / MODEL), load_file(path / OPTIMIZER), run)


def _verifies(path: Path) -> bool:
    try:
        rundir.verify(path)
    except DataError as error:
        logger.warning("Checkpoint passed over: %s", error)
        return False
    return True


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error))
