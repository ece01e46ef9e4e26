"""A bad step in a folder: everything that is needed to run it once more, anywhere, without the run it comes from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep import rundir
from lockstep.contracts import Batch
from lockstep.engine.adapters import BASE
from lockstep.engine.autopsy import BadStep
from lockstep.engine.checkpoint import MODEL
from lockstep.engine.parts import Parts
from lockstep.engine.shards import index_of
from lockstep.engine.state import trained
from lockstep.errors import DataError
from lockstep.health.finding import Finding, from_json
from lockstep.health.fingerprint import digest_model
from lockstep.runtime import env, faults
from lockstep.runtime.parallel import is_sharded, local

ABOUT, BATCH = "bundle.json", "batch.safetensors"
FORMAT = 1
NEEDED: dict[str, type | tuple[type, ...]] = {  # by a replay, beside what `read` takes apart
    "family": str, "config": dict, "shape": dict, "threads": (int, type(None)), "device": str, "seed": int,
    "worker": int, "first_place": int, "denominators": dict, "loss_scale": (int, float), "fault": str,
    "checkpoint": str, "weights_digest": str, "histories": (dict, type(None)), "has_weights": bool,
}  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """One that was read."""

    folder: Path
    about: Mapping[str, Any]
    batches: tuple[Batch, ...]
    finding: Finding
    weights: Path  # the folder that holds model.safetensors, in one piece or many


def write(folder: Path, parts: Parts, bad: BadStep, finding: Finding) -> None:
    """Publish the bundle of one rank: all of it or nothing."""
    weights = parts.config.debug.bundle == "full"
    with rundir.publishing(folder, lambda: parts.link.enter("save")) as staged:
        if weights:
            _put_weights(staged, parts)
        batches, extra = _with_histories(parts, bad.batches)
        save_file(_flat(batches), staged / BATCH)
        for name, content in parts.checkpointer.extra_files.items():
            (staged / name).write_bytes(content)
        about = _describe(parts, bad, finding) | {"histories": extra, "has_weights": weights}
        content = json.dumps(about, indent=1, allow_nan=False, ensure_ascii=False)
        (staged / ABOUT).write_text(env.redact(content) + "\n", encoding="utf-8")


def _describe(parts: Parts, bad: BadStep, finding: Finding) -> dict[str, Any]:
    group, stepper = parts.council.group, parts.stepper
    moments = [
        (f"{kind}.{name}", local(kept))
        for name, parameter in trained(stepper.model).items()
        for kind, kept in stepper.optimizer.moments()[id(parameter)].items()
    ]
    own = [(name, local(parameter)) for name, parameter in trained(stepper.model).items()]
    return {
        "format": FORMAT,
        **{key: parts.about[key] for key in ("family", "config", "shape", "versions", "device_name", "threads")},
        "training": {"max_steps": parts.config.training.max_steps},
        "device": parts.device.type,
        "step": finding.step,
        "seed": parts.config.system.seed,
        "rank": group.rank,
        "worker": env.detect().rank,  # of replicas each is rank 0 of its own group
        "world": group.world,
        "first_place": group.rank * len(bad.batches),  # noise is keyed by (seed, step, place of the micro-batch)
        "denominators": dict(bad.weights),
        "loss_scale": bad.reading.loss_scale,
        "fault": env.get(faults.VARIABLE),
        "checkpoint": str(parts.checkpointer.folder.absolute() / f"step_{parts.progress.step:08d}"),
        "weights_digest": "" if any(map(is_sharded, stepper.model.parameters())) else digest_model(own),
        **{key: parts.about[key] for key in (BASE,) if key in parts.about},  # of frozen weights, which are not kept
        "attention": parts.about.get("attention", ""),
        "compiled": parts.about.get("compiled"),
        "optimizer_digest": digest_model(moments),
        "batches": [{"weights": dict(each.weights), "rows": each.rows, "tokens": each.tokens} for each in bad.batches],
        "finding": finding.as_json(),
    }


def _put_weights(staged: Path, parts: Parts) -> None:
    """Those before the step: the file of the checkpoint that was just saved, under a second name, where it is ours."""
    saved = parts.checkpointer.folder / f"step_{parts.progress.step:08d}"
    parameters = trained(parts.stepper.model)
    sharded = any(is_sharded(parameter) for parameter in parameters.values())
    found = [*saved.glob("model*.safetensors"), *saved.glob(index_of(MODEL))]
    if found and parts.saves and (sharded or parts.council.group.rank == 0):
        for path in found:
            try:
                os.link(path, staged / path.name)
            except OSError:  # another disk
                shutil.copyfile(path, staged / path.name)
        return
    save_file({name: parameter.detach().contiguous() for name, parameter in parameters.items()}, staged / MODEL)


def _with_histories(parts: Parts, batches: Sequence[Batch]) -> tuple[Sequence[Batch], dict[str, Any] | None]:
    """An agent's batch only names the histories it is of: they go along, and are named anew."""
    known: Any = getattr(parts.stepper.objective, "_histories", None)
    if known is None:
        return batches, None
    used = sorted({int(number) for batch in batches for number in batch.tensors["histories"]})
    places = {number: place for place, number in enumerate(used)}
    steps = torch.from_numpy(known.steps[:, used].copy())
    renamed = [
        batch._replace(
            tensors={
                **batch.tensors,
                "histories": torch.tensor([places[int(number)] for number in batch.tensors["histories"]]),
                "steps": steps,
            }
        )
        for batch in batches
    ]
    names = ("size", "horizon", "actions", "region", "stride")
    return renamed, {name: int(getattr(known, name)) for name in names}


def _flat(batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    return {
        f"{place}.{name}": tensor.detach().cpu().clone().contiguous()
        for place, batch in enumerate(batches)
        for name, tensor in batch.tensors.items()
    }


def read(folder: Path) -> Bundle:
    """A bundle after every byte of it was checked."""
    rundir.verify(folder, required=[ABOUT, BATCH])
    try:
        about = rundir.read_json(folder / ABOUT)
        if about["format"] != FORMAT:
            raise DataError(f"a bundle of format {about['format']}, this version reads {FORMAT}", where=str(folder))
        tensors = load_file(folder / BATCH)
        batches = tuple(
            Batch(_part(tensors, place), each["weights"], each["rows"], each["tokens"])
            for place, each in enumerate(about["batches"])
        )
        finding = from_json(about["finding"])
        for key, kind in NEEDED.items():
            if not isinstance(about[key], kind):
                raise DataError(f"not a bundle: {key} is {about[key]!r}"[:200], where=str(folder))
        if not batches:
            raise DataError("a bundle without rows", where=str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"not a bundle: {error!r}"[:200], where=str(folder)) from None
    weights = folder if about["has_weights"] else _checkpoint(folder, Path(about["checkpoint"]))
    return Bundle(folder, about, batches, finding, weights)


def _checkpoint(folder: Path, named: Path) -> Path:
    """The checkpoint a bundle names; of a run that was moved since, the one that went with it."""
    run = folder.resolve().parents[3:4]  # RUN/workers/WORKER/faults/STEP
    beside = run[0] / named.parent.name / named.name if run else named
    return beside if not named.is_dir() and beside.is_dir() else named


def _part(tensors: Mapping[str, torch.Tensor], place: int) -> dict[str, torch.Tensor]:
    start = f"{place}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
