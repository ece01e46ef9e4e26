"""Saves beside the training of several ranks: the state of one step, one outcome for all, heard at one step."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.contracts import StepRecord
from lockstep.engine import checkpoint, loop, shards
from lockstep.engine.parts import Parts
from lockstep.engine.saving import Saver
from lockstep.engine.snapshot import Snapshot
from lockstep.errors import LockstepError
from lockstep.health.fingerprint import digest_model
from lockstep.runtime.group import Group, is_lost_peer
from lockstep.runtime.parallel import is_sharded, local, offset, with_rows
from tests.gates.training import Recorder
from tests.ranks.pool import Pool
from tests.ranks.sharding import assembled

pytestmark = pytest.mark.ranks

FIRST = "checkpoints/step_00000002"
WAIT_SECONDS = 30.0
MODES = [
    pytest.param("ddp", 2, id="ddp-2"),
    pytest.param("fsdp", 2, id="fsdp-2"),
    pytest.param("fsdp", 3, id="fsdp-3", marks=pytest.mark.slow),
    pytest.param("hsdp", 4, id="hsdp-4", marks=pytest.mark.slow),
]


def settings_of(mode: str, **more: Any) -> dict[str, Any]:
    digests = {"debug.digest_interval": 1} if not more else {}
    return {"system.mode": mode, "training.max_steps": 4, "training.save_interval": 2, **digests, **more}


def hold_first_save(patch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """Nothing of the first save is written before the gate is open."""
    for module in (checkpoint, shards):
        write = module.save_file

        def held(tensors: Any, path: Path, write: Any = write) -> None:
            if "step_00000002" in str(path):
                assert gate.wait(WAIT_SECONDS), "nobody trains on"
            write(tensors, path)

        patch.setattr(module, "save_file", held)


def save_beside(group: Group, folder: Path, mode: str, copies: bool, documented: bool) -> str:
    """The digest after the second step; nothing of its save was written before the third."""
    gate, digests = threading.Event(), dict[int, str]()
    more = {"training.checkpoint_dir": str(folder / "documented")} if documented else {}
    made, recorder = assembled(group, folder, {**settings_of(mode), **more})
    note = Recorder.write

    def then(self: Recorder, record: StepRecord) -> None:
        note(self, record)
        digests[record.step] = record.digest
        if record.step == 2:
            gate.set()

    with pytest.MonkeyPatch.context() as patch:
        hold_first_save(patch, gate)
        patch.setattr(Recorder, "write", then)
        if not copies:
            patch.setattr(Snapshot, "take", lambda _self, state: state)
        loop.run(made.parts)
    made.loader.close()
    told = [fields["step"] for kind, fields in recorder.events if kind == "save"]
    assert told == [2, 4]
    return digests[1]


@pytest.mark.parametrize(("mode", "world"), MODES)
def test_a_save_holds_the_weights_of_its_step(ranks: Pool, tmp_path: Path, mode: str, world: int) -> None:
    wanted = ranks(world, save_beside, tmp_path, mode, True, True)
    saved = checkpoint.load(tmp_path / FIRST)
    assert {digest_model(saved.model.items())} == set(wanted)
    content = torch.load(tmp_path / "documented/step_2.pt", weights_only=True)
    assert digest_model(content["model_state_dict"].items()) == wanted[0], "the documented file too"
    slots = content["optimizer_state_dict"]["state"].values()
    moments = sorted(slot["exp_avg"].double().abs().sum().item() for slot in slots)
    assert moments == sorted(
        saved.optimizer[name].double().abs().sum().item() for name in saved.optimizer if name.startswith("exp_avg.")
    )


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_without_a_copy_it_would_not(ranks: Pool, tmp_path: Path, mode: str) -> None:
    """Negative control."""
    wanted = ranks(2, save_beside, tmp_path, mode, False, False)
    assert digest_model(checkpoint.load(tmp_path / FIRST).model.items()) not in wanted


def fail_beside(group: Group, folder: Path, mode: str, full_rank: int, agreeing: bool) -> tuple[str, int, bool]:
    """(what was raised, after how many steps, whether it was only heard from another rank).

    The save after step 10 fails at once, and rank 1 hears of it five steps later: both whatever the machine is at.
    """
    later, write, note = threading.Event(), Saver._write, Recorder.write
    made, _ = assembled(group, folder, settings_of(mode, **{"training.max_steps": 19, "training.save_interval": 10}))

    def late(self: Saver, *details: Any) -> Any:
        try:
            return write(self, *details)
        finally:
            if group.rank == 1:
                later.wait(WAIT_SECONDS)

    def then(self: Recorder, record: StepRecord) -> None:
        note(self, record)
        if record.step >= 14:
            later.set()
        saver, heard_at = made.parts.saver, 14 if group.rank == 1 else 10
        until = time.monotonic() + WAIT_SECONDS
        while record.step >= heard_at and saver.ended < saver.begun and time.monotonic() < until:
            time.sleep(0.001)

    with pytest.MonkeyPatch.context() as patch:
        if group.rank == full_rank:
            patch.setattr(checkpoint, "save_file" if mode == "ddp" else "write_pieces", full_disk)
        patch.setattr(Saver, "_write", late)
        patch.setattr(Recorder, "write", then)
        if not agreeing:
            patch.setattr(Parts, "has_saved", lambda self: self.saver.is_flying and self.saver.ended > 0)
        try:
            loop.run(made.parts)
        except Exception as error:
            later.set()
            known = isinstance(error, LockstepError) and error.exit_code == 74
            return str(error) if known else "lost", made.parts.progress.step, is_lost_peer(error)
        finally:
            made.loader.close()
    return "", made.parts.progress.step, False


def full_disk(*_args: Any, **_options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("mode", "full_rank"), [("ddp", 0), ("fsdp", 1)])
def test_a_failed_save_is_heard_by_all_after_the_same_step(
    ranks: Pool, tmp_path: Path, mode: str, full_rank: int
) -> None:
    results = ranks(2, fail_beside, tmp_path, mode, full_rank, True)
    assert len({(text, step) for text, step, _ in results}) == 1, results
    assert "No space left on device" in results[0][0]
    assert 15 <= results[0][1] < 19, "training has gone on, and not to its end"
    assert [not secondary for _, _, secondary in results] == [rank == full_rank for rank in range(2)]
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_ranks_that_do_not_agree_hear_it_after_different_steps(ranks: Pool, tmp_path: Path) -> None:
    """Negative control: each goes by what it knows itself."""
    results = ranks(2, fail_beside, tmp_path, "ddp", 0, False, timeout_seconds=60, may_fail=True)
    assert len({result[:2] if isinstance(result, tuple) else str(result) for result in results}) == 2, results


def stay_where_they_are(_group: Group) -> tuple[bool, str, tuple[int, ...], tuple[int, ...]]:
    """Rows on another device than the mesh's, as a copy of a GPU's are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = distribute_tensor(torch.arange(21.0).view(7, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    moved = with_rows(whole, torch.empty_like(local(whole), device="meta"))
    return is_sharded(moved), local(moved).device.type, tuple(moved.shape), offset(moved)


def test_a_copy_stays_on_its_device_and_keeps_its_place(ranks: Pool) -> None:
    assert ranks(2, stay_where_they_are) == [(True, "meta", (7, 3), (0, 0)), (True, "meta", (7, 3), (4, 0))]
