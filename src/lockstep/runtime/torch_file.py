"""Files of torch.save that anybody may have written: nothing in them is run, and wrapped names are unwrapped."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from lockstep.errors import DataError, NotFoundError
from lockstep.rundir import open_plain

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}  # what DDP, torch.compile and FSDP put into names


def read(path: Path) -> Any:
    """What such a file holds: plain values and tensors, or it is refused."""
    if not path.exists():
        raise NotFoundError("no such checkpoint", where=str(path))
    try:
        with open_plain(path) as file:
            _check_size(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of bytes that somebody made up: torch's readers then fail in any way
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = "not a file of torch.save" if isinstance(error, KeyError) else first[:200]  # which says a number only
        what, hint = f"foreign or damaged file, refused: {reason}", "an older one, or the checkpoints/ of its run"
        raise DataError(what, where=str(path), hint=hint) from error


def _check_size(file: IO[bytes]) -> None:
    """torch.save packs nothing: what is larger inside than outside was made to fill the memory."""
    size = file.seek(0, 2)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            inside = sum(entry.file_size for entry in archive.infolist())
        if inside > size:
            raise ValueError(f"{size} bytes that claim to hold {inside}")
    file.seek(0)


def unwrapped(tensors: Mapping[str, Any], *, where: str) -> dict[str, torch.Tensor]:
    """Tensors by the names that their model gave them."""
    found: dict[str, torch.Tensor] = {}
    for wrapped, tensor in tensors.items():
        name = ".".join(part for part in str(wrapped).split(".") if part not in WRAPPERS)
        if not is_plain(tensor) or name in found:
            raise DataError(f"{name[:200]} is there twice, or is no plain tensor", where=where)
        found[name] = tensor
    return found


def is_plain(thing: object) -> bool:
    """A tensor whose elements lie there one by one."""
    return isinstance(thing, torch.Tensor) and thing.layout is torch.strided and not thing.is_quantized
