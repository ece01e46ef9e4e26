"""Checkpoints of a model in shards: any mode and world loads any other's bits; all ranks succeed or none does."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep import rundir
from lockstep.engine import checkpoint, inference, shards
from lockstep.engine.checkpoint import MODEL, OPTIMIZER, RUN, Checkpointer, check_common
from lockstep.errors import DataError, LockstepError
from lockstep.health.fingerprint import digest_model
from lockstep.runtime.group import Group
from lockstep.runtime.parallel import local
from tests.ranks.pool import Pool
from tests.ranks.sharding import assembled, resave, train

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

TWO_STEPS = {"training.max_steps": 2, "training.warmup_steps": 1}
SECOND = "checkpoints/step_00000002"


def mode(name: str) -> dict[str, Any]:
    return {**TWO_STEPS, "system.mode": name}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


WAY = ((2, "fsdp"), (1, "ddp"), (3, "fsdp"), (2, "ddp"), (4, "hsdp"), (2, "fsdp"))


@pytest.mark.parametrize("way", [WAY[1:2] + WAY[4:], pytest.param(WAY, marks=pytest.mark.slow)], ids=["short", "long"])
def test_any_mode_and_world_loads_the_bits_of_any_other(
    ranks: Pool, tmp_path: Path, way: tuple[tuple[int, str], ...]
) -> None:
    first = tmp_path / "fsdp-4"
    ranks(4, train, first, {**mode("fsdp"), "debug.digest_interval": 1})
    wanted = checkpoint.load(first / SECOND)
    assert len(list((first / SECOND).glob("model-*-of-00004.safetensors"))) == 4
    assert any(float(tensor.abs().max()) > 0 for tensor in wanted.optimizer.values())
    digest = digest_model(wanted.model.items())
    before = first
    for world, name in way:
        after = tmp_path / f"{name}-{world}-after-{before.name}"
        if world == 1:
            digests = [resave(Group(), before / SECOND, after, mode(name))]
        else:
            digests = ranks(world, resave, before / SECOND, after, mode(name))
        assert digests == [digest] * world
        found = checkpoint.load(after / SECOND)
        assert same(found.model, wanted.model)
        assert same(found.optimizer, wanted.optimizer)
        assert found.run["progress"] == wanted.run["progress"]
        assert (after / SECOND / MODEL).is_file() == (name == "ddp"), "whole in one file, or in pieces"
        before = after


def test_a_digest_in_shards_is_that_of_the_whole(ranks: Pool, tmp_path: Path) -> None:
    traces = ranks(3, train, tmp_path, {**mode("fsdp"), "debug.digest_interval": 1})
    whole = digest_model(checkpoint.load(tmp_path / SECOND).model.items())
    assert [trace[-1][4] for trace in traces] == [whole] * 3


def test_a_checkpoint_in_shards_is_exported_like_a_whole_one(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, train, tmp_path / "shards", mode("fsdp"))
    resave(Group(), tmp_path / "shards" / SECOND, tmp_path / "whole", mode("ddp"))
    for kind in ("shards", "whole"):
        inference.export_run(tmp_path / kind / SECOND, tmp_path / f"{kind}-exported")
    ours, theirs = (load_file(tmp_path / f"{kind}-exported" / MODEL) for kind in ("shards", "whole"))
    assert same(ours, theirs)


def test_the_documented_file_holds_whole_tensors(ranks: Pool, tmp_path: Path) -> None:
    settings = {**mode("fsdp"), "training.checkpoint_dir": str(tmp_path / "documented")}
    ranks(3, train, tmp_path / "run", settings)
    written, saved = tmp_path / "documented" / "step_2.pt", checkpoint.load(tmp_path / "run" / SECOND)
    content = torch.load(written, weights_only=True)
    assert same(content["model_state_dict"], saved.model)
    again = tmp_path / "again"
    ranks(2, resave, written, again, mode("fsdp"))
    assert same(checkpoint.load(again / SECOND).optimizer, saved.optimizer)


# --------------------------------------------------------------------------------------------- all or none


def save_with_a_full_disk(
    group: Group, folder: Path, full_rank: int, doing: str = "write_pieces"
) -> tuple[str, int, bool]:
    """A second save during which one rank's disk is full: (the error, its code, whether it is another rank's)."""
    made, _ = assembled(group, folder, mode("fsdp"), folder / SECOND)
    made.loader.close()
    made.parts.progress.step += 1
    made.parts.stepper.optimizer.applied += 1
    from lockstep.engine import loop

    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if full_rank == group.rank:
            patch.setattr(checkpoint, doing, full)
        if full_rank == -1 and group.rank == 0:  # everyone's pieces are written, the manifest is not
            patch.setattr(rundir, "seal", full)
        try:
            loop.save(made.parts, "full")
        except LockstepError as error:
            return str(error), int(error.exit_code), error.secondary
    return "saved", 0, False


def test_one_full_disk_is_everyones_failure_and_loses_nothing(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, train, tmp_path, mode("fsdp"))
    for full_rank, teller, doing in ((1, 1, "write_pieces"), (0, 0, "write_pieces"), (-1, 0, ""), (2, 2, "are_finite")):
        outcomes = ranks(3, save_with_a_full_disk, tmp_path, full_rank, doing)
        assert {(text, code) for text, code, _ in outcomes} == {(outcomes[0][0], 74)}
        assert "No space left on device" in outcomes[0][0]
        assert [not secondary for _, _, secondary in outcomes] == [rank == teller for rank in range(3)]
        assert full_rank < 0 or f"rank {full_rank}" in outcomes[0][0]
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert Checkpointer(tmp_path / "checkpoints").latest() == tmp_path / SECOND
    assert ranks(3, save_with_a_full_disk, tmp_path, 7)[0][0] == "saved"  # nobody's disk is full


def save_with_a_nan(group: Group, folder: Path, bad_rank: int) -> None:
    """A second save, of weights of which one rank's part has a number that is none."""
    made, _ = assembled(group, folder, mode("fsdp"), folder / SECOND)
    made.loader.close()
    made.parts.progress.step += 1
    made.parts.stepper.optimizer.applied += 1
    if group.rank == bad_rank:
        local(next(made.parts.stepper.model.parameters()).detach()).view(-1)[-1] = float("nan")
    from lockstep.engine import loop

    loop.save(made.parts, "")


@pytest.mark.parametrize("bad_rank", [0, 2, 7])
def test_what_is_not_finite_on_one_rank_is_marked_for_all(ranks: Pool, tmp_path: Path, bad_rank: int) -> None:
    """And nobody goes on from it; where there is no such rank, from the last one."""
    ranks(3, train, tmp_path, mode("fsdp"))
    ranks(3, save_with_a_nan, tmp_path, bad_rank)
    third = tmp_path / "checkpoints/step_00000003"
    assert rundir.read_json(third / RUN).get(rundir.SPOILT, False) == (bad_rank < 3)
    assert Checkpointer(tmp_path / "checkpoints").latest() == (tmp_path / SECOND if bad_rank < 3 else third)


def save_plain(group: Group, folder: Path, full: bool) -> str:
    """What each rank hears of rank 0's save."""
    state = checkpoint.State({"a": torch.arange(3.0)}, {"b": torch.zeros(2)}, {"step": 1})
    with pytest.MonkeyPatch.context() as patch:
        if full:
            patch.setattr(checkpoint, "save_file", lambda *_args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        try:
            return str(Checkpointer(folder, group=group).save(1, state))
        except LockstepError as error:
            return f"{int(error.exit_code)} {error.what}"


def test_a_whole_checkpoint_is_written_by_rank_0_and_known_to_all(ranks: Pool, tmp_path: Path) -> None:
    failed = ranks(2, save_plain, tmp_path, True)
    assert failed[0].startswith("74 ")
    assert failed[0] == failed[1]
    assert ranks(2, save_plain, tmp_path, False) == [str(tmp_path / "step_00000001")] * 2
    assert sorted(path.name for path in (tmp_path / "step_00000001").iterdir()) == sorted(
        [MODEL, OPTIMIZER, RUN, "manifest.json"]
    )


def look(group: Group, common: Path, blind_rank: int) -> tuple[str, int]:
    folder = common if group.rank != blind_rank else common / "elsewhere"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "SEEN_SECONDS", 0.2)
            check_common(folder, group)
    except LockstepError as error:
        return error.what, int(error.exit_code)
    return "", 0


def test_a_folder_that_a_rank_does_not_see_is_refused_at_the_start(ranks: Pool, tmp_path: Path) -> None:
    outcomes = ranks(3, look, tmp_path, 2)
    assert {code for _, code in outcomes} == {73}
    assert all(what.startswith("rank 2 on ") for what, _ in outcomes)
    assert ranks(3, look, tmp_path, -1) == [("", 0)] * 3
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- damaged ones


@pytest.fixture
def in_pieces(tmp_path: Path) -> Path:
    """A checkpoint in three pieces of 3, 3 and 1 rows, made by hand."""
    whole = torch.arange(21.0).view(7, 3)
    with rundir.publishing(tmp_path / "step_00000001") as folder:
        for file in (MODEL, OPTIMIZER):
            written: list[dict[str, Any]] = []
            for number, start in enumerate((0, 3, 6), start=1):
                name, part = shards.piece_file(file, number, 3), whole[start : start + 3].clone()
                save_file({"w": part}, folder / name)
                piece = {"file": name, "start": [start, 0], "shape": list(part.shape)}
                written.append({"w": {"shape": [7, 3], "dtype": "float32", "piece": piece}})
            (folder / shards.index_of(file)).write_text(json.dumps(shards.make_index(written)))
        (folder / RUN).write_text("{}")
    return tmp_path / "step_00000001"


def test_any_rows_can_be_read(in_pieces: Path) -> None:
    stored = checkpoint.load(in_pieces).model
    assert isinstance(stored, shards.Stored)
    whole = torch.arange(21.0).view(7, 3)
    assert torch.equal(stored["w"], whole)
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(stored.rows("w", start, stop - start), whole[start:stop])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda pieces: pieces.pop(1), "are missing"),
        (lambda pieces: pieces.pop(2), "6 of 7 rows"),
        (lambda pieces: pieces.pop(0), "are missing"),
        (lambda pieces: pieces[1].update(start=[2, 0]), "overlap"),
        (lambda pieces: pieces.append(dict(pieces[0])), "overlap"),
        (lambda pieces: pieces[0].update(start=[0, 1]), "no run of rows"),
        (lambda pieces: pieces[0].update(shape=[3, 2]), "no run of rows"),
        (lambda pieces: pieces[0].update(file="../secret.safetensors"), "no run of rows"),
        (lambda pieces: pieces[0].update(file="unlisted.safetensors"), "unlisted"),
        (lambda pieces: pieces[0].pop("start"), "unreadable index"),
    ],
)
def test_an_index_that_does_not_add_up_is_refused(in_pieces: Path, change: Any, says: str) -> None:
    index = in_pieces / shards.index_of(OPTIMIZER)
    content = json.loads(index.read_text())
    assert checkpoint.is_good(in_pieces)
    change(content["tensors"]["w"]["pieces"])
    index.write_text(json.dumps(content))
    (in_pieces / rundir.MANIFEST).unlink()
    rundir.seal(in_pieces)  # damaged before it was sealed: the checksums say nothing
    with pytest.raises(DataError, match=says):
        checkpoint.load(in_pieces)
    assert not checkpoint.is_good(in_pieces)


def test_a_piece_of_another_size_than_the_index_says_is_refused(in_pieces: Path) -> None:
    save_file({"w": torch.zeros(2, 3)}, in_pieces / shards.piece_file(MODEL, 1, 3))
    (in_pieces / rundir.MANIFEST).unlink()
    rundir.seal(in_pieces)
    with pytest.raises(DataError, match=r"\(2, 3\)"):
        _ = checkpoint.load(in_pieces).model["w"]


def load_together(group: Group, path: Path) -> str:
    try:
        checkpoint.load(path, group)
    except DataError as error:
        return str(error)
    return "loaded"


def test_a_flipped_bit_in_any_file_is_seen_by_all(ranks: Pool, in_pieces: Path) -> None:
    assert ranks(3, load_together, in_pieces) == ["loaded"] * 3
    for path in sorted(in_pieces.glob("*.safetensors")):
        content = bytearray(path.read_bytes())
        content[-1] ^= 4
        path.write_bytes(content)
        outcomes = ranks(3, load_together, in_pieces)
        assert len(set(outcomes)) == 1, "each file is read by one rank, all hear what it found"
        assert path.name in outcomes[0]
        content[-1] ^= 4
        path.write_bytes(content)
