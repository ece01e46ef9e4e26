"""Weights in Hugging Face form: safetensors files and config.json, read and written."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep import rundir
from lockstep.errors import DataError, NotFoundError, OutputError
from lockstep.models.hf_names import TABLES, is_unused, layer_of, their_names, tied_name, usual_name
from lockstep.models.lora import ADDITIONS
from lockstep.models.shapes import AnyShape, LlamaShape, from_hf
from lockstep.runtime.hub import CONFIG_FILE, read_json
from lockstep.runtime.parallel import local, offset

if TYPE_CHECKING:
    from lockstep.models.build import Model

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MARKS = ("pad_token", "cls_token", "sep_token", "unk_token", "mask_token")
CHAT_KEY, CHAT_FILE = "chat_template", "chat_template.jinja"
BY_WORD = ("tok_embed.weight", "output.weight")  # a row for each id
ROWS_AT_ONCE = 1 << 12
NOT_OF_TRANSFORMERS = "transformers has no class for this architecture: lockstep alone reads this folder"


# --------------------------------------------------------------------------------------------- import


@torch.no_grad()
def import_weights(model: Model, folder: Path, *, truncated: bool) -> int:
    """Fill the model from a folder. `truncated`: layers the model does not have are left unread, nothing else is.

    A LLaDA may have more rows than the folder, whose own last id was another's: the new ones begin as the mean of the
    others, where a token nobody has met is least of a surprise. Returns how many.
    """
    shape, files = _source(model, folder), _weight_map(folder)
    stored = {usual_name(shape, name): name for name in files}
    ours = {name: parameter for name, parameter in model.named_parameters() if not name.endswith(ADDITIONS)}
    wanted = {name: their_names(shape, name) for name in ours}
    _check_names(set(stored), {name for names in wanted.values() for name in names}, shape, truncated, where=folder)
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def read(names: tuple[str, ...], parameter: Tensor, rows: int) -> Tensor:
            parts: list[Tensor] = []
            for place, name in enumerate(stored[name] for name in names):
                file = files[name]
                if file not in opened:
                    opened[file] = stack.enter_context(_open(folder / file))
                part = (place, rows // len(names))
                parts.append(_read(opened[file], name, parameter, part, where=folder / file))
                if (new := _new_rows(parameter, rows)) > 0:
                    parts = [parts[0].float(), _mean_row(opened[file], name, rows).expand(new, -1)]
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        for name, parameter in ours.items():
            by_word = name in BY_WORD and isinstance(shape, LlamaShape)
            rows = shape.vocab_size if by_word else parameter.shape[0]
            local(parameter).copy_(read(wanted[name], parameter, rows))
        embedding, tied = model.tok_embed.weight, tied_name(shape)
        if tied in stored:
            head = read((tied,), embedding, shape.vocab_size)
            if not torch.equal(head.to(local(embedding)), local(embedding)):
                raise DataError(
                    f"{tied} differs from the embedding, but the model is tied",
                    where=str(folder),
                    hint="model.tie_word_embeddings false" if shape.model_type == "llama" else "",
                )
    return model.shape.vocab_size - shape.vocab_size


def _source(model: Model, folder: Path) -> AnyShape:
    """The shape of the model with the names and the rows of the folder: a LLaDA may begin as a LLaMA or a Qwen."""
    shape, config = model.shape, folder / CONFIG_FILE
    if not isinstance(shape, LlamaShape) or not config.is_file():
        return shape
    found = from_hf(read_json(config), where=str(config))
    grown = shape.layout == "llada" and found.vocab_size < shape.vocab_size
    return replace(shape, layout=found.model_type, vocab_size=found.vocab_size if grown else shape.vocab_size)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the one file; nothing outside the folder is ever named."""
    if (folder / INDEX_FILE).is_file():
        listed = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(listed, Mapping):
            raise DataError("no weight_map", where=str(folder / INDEX_FILE))
        for name, file in listed.items():
            if not isinstance(file, str) or not rundir.SAFE_NAME.fullmatch(file) or not file.endswith(".safetensors"):
                raise DataError(f"{name} lies in {str(file)[:80]!r}: not a file name", where=str(folder / INDEX_FILE))
        return dict(listed)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise NotFoundError(f"neither {WEIGHTS_FILE} nor {INDEX_FILE}", where=str(folder))
    with _open(path) as file:
        return dict.fromkeys(file.keys(), WEIGHTS_FILE)


def _check_names(found: set[str], wanted: set[str], shape: AnyShape, truncated: bool, *, where: Path) -> None:
    def foreseen(name: str) -> bool:
        layer = layer_of(shape, name)
        beyond = truncated and layer is not None and layer >= shape.num_layers
        return beyond or is_unused(shape, name) or name == tied_name(shape)

    if missing := sorted(wanted - found):
        raise DataError(f"{len(missing)} tensors are missing: {_few(missing)}", where=str(where))
    if extra := sorted(name for name in found - wanted if not foreseen(name)):
        deeper = layer_of(shape, extra[0]) is not None
        hint = "model.init pretrained-truncated keeps the first layers only" if deeper else ""
        raise DataError(f"{len(extra)} tensors have no place: {_few(extra)}", where=str(where), hint=hint)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _open(path: Path) -> Any:
    """Lazily: only the header is read. safetensors itself refuses headers over 100 MB and offsets beyond the file."""
    if not path.is_file():
        raise NotFoundError("no such file", where=str(path))
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(f"not a safetensors file: {error}", where=str(path)) from None


def _read(file: Any, name: str, parameter: Tensor, part: tuple[int, int], *, where: Path) -> Tensor:
    """The tensor of that name, or only the rows of it that this rank holds; it is the i-th of parts with n rows."""
    place, each = part
    try:
        stored = file.get_slice(name)
        if (shape := tuple(stored.get_shape())) != (needed := (each, *parameter.shape[1:])):
            raise DataError(f"{name} is {shape}, the model needs {needed}", where=str(where.parent))
        first = offset(parameter)[0] - place * each
        start, end = max(0, first), min(each, first + local(parameter).shape[0])
        tensor = stored[start:end] if start < end else stored[:1][:0]
    except SafetensorError as error:
        raise DataError(f"{name}: {error}", where=str(where)) from None
    if tensor.dtype not in DTYPES.values():
        raise DataError(f"{name} is {tensor.dtype}: only fp32, bf16 and fp16 weights can be trained", where=str(where))
    return tensor


def _new_rows(parameter: Tensor, rows: int) -> int:
    """How many of this rank's rows lie beyond those of the file."""
    here = local(parameter).shape[0]
    return min(here, offset(parameter)[0] + here - rows)


def _mean_row(file: Any, name: str, rows: int) -> Tensor:
    """Of all rows, added up in the same order on every rank."""
    stored, total = file.get_slice(name), torch.zeros((), dtype=torch.float64)
    for start in range(0, rows, ROWS_AT_ONCE):
        total = total + stored[start : min(rows, start + ROWS_AT_ONCE)].double().sum(0)
    return (total / rows).float()


# --------------------------------------------------------------------------------------------- export


def export(
    model: Model,
    shape: AnyShape,
    folder: Path,
    *,
    dtype: str,
    tokenizer_file: Path | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write a folder that `transformers` loads as it is; all of it or nothing."""
    config = shape.to_hf(dtype_name=dtype)
    if shape.model_type not in TABLES:
        config["note"] = NOT_OF_TRANSFORMERS
    if "note" in config:
        logger.warning(config["note"])
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError("exists and is not empty", where=str(folder), hint="another folder")
        with rundir.publishing(folder) as new:
            rundir.write_json(new / CONFIG_FILE, config)
            if isinstance(shape, LlamaShape):
                generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
                rundir.write_json(new / "generation_config.json", generation)
            if tokenizer_file is not None:
                shutil.copyfile(tokenizer_file, new / "tokenizer.json")
                rundir.write_json(new / "tokenizer_config.json", _tokenizer_config(tokenizer_file, shape))
                if (chat := tokenizer_file.with_name(CHAT_FILE)).is_file():
                    shutil.copyfile(chat, new / CHAT_FILE)
            _write_weights(model, new, dtype=DTYPES[dtype], max_shard_bytes=max_shard_bytes)
    except OSError as error:
        raise rundir.io_error(error, folder, doing="exporting the model") from error
    except SafetensorError as error:  # its writer's word for a full disk
        raise rundir.io_error(OSError(str(error)), folder, doing="exporting the model") from error


def _write_weights(model: Model, folder: Path, *, dtype: torch.dtype, max_shard_bytes: int) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        theirs = their_names(model.shape, name)
        tensors |= zip(theirs, parameter.chunk(len(theirs)), strict=True)
    shards = list(_shards(tensors, dtype.itemsize, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        file = WEIGHTS_FILE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        copies = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_file(copies, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        rundir.write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: Mapping[str, Tensor], item_bytes: int, limit: int) -> Iterator[list[str]]:
    """Names in order, cut where a file would pass the limit; a tensor is never cut."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.numel() * item_bytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.numel() * item_bytes
    yield names


def _tokenizer_config(tokenizer_file: Path, shape: AnyShape) -> dict[str, Any]:
    """Special tokens by name, so that generation knows where to stop; an encoder's as the file beside it has them."""
    added: Iterable[Any] = json.loads(tokenizer_file.read_text(encoding="utf-8")).get("added_tokens", ())
    words = {token["id"]: token["content"] for token in added}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    beside = tokenizer_file.with_name("tokenizer_config.json")
    named = read_json(beside) if beside.is_file() else {}
    if CHAT_KEY in named:
        config[CHAT_KEY] = named[CHAT_KEY]
    if not isinstance(shape, LlamaShape):
        return config | {key: named[key] for key in MARKS if key in named}
    ids = {"bos_token": shape.bos, "eos_token": shape.eos[0] if shape.eos else None, "mask_token": shape.mask}
    return config | {key: words[id_] for key, id_ in ids.items() if id_ in words}


# --------------------------------------------------------------------------------------------- Meta's own files


def halves_to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """wq or wk for a model that turns neighbours (2i, 2i + 1), as Meta's consolidated files do; ours (i, i + E/2)."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(weight.shape)


def pairs_to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """The way back."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)
