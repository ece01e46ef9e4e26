"""SIGKILL at random moments of saving: what was acknowledged is there, and nothing half-written is trusted."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep import rundir
from lockstep.engine import checkpoint, legacy
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.engine.saving import Saver
from lockstep.engine.snapshot import Snapshot
from lockstep.errors import LockstepError
from lockstep.runtime.marks import NoMarks

ELEMENTS = 300_000  # about 1 MB a tensor


def state_of(step: int) -> State:
    """A state in which every tensor and value names its step: a mix of two steps cannot hide."""
    tensor = torch.full((ELEMENTS,), float(step))
    return State({"a": tensor, "b": tensor + 0.5}, {"exp_avg.a": tensor - 0.5}, {"progress": {"step": step}})


def check_whole(path: Path) -> int:
    state = checkpoint.load(path)
    step = state.run["progress"]["step"]
    assert path.name == f"step_{step:08d}"
    expected = state_of(step)
    for name, tensor in {**expected.model, **expected.optimizer}.items():
        assert torch.equal({**state.model, **state.optimizer}[name], tensor), f"{name} is not of step {step}"
    return step


IN_PLACE = "step_00000000"


class InPlace(Checkpointer):
    """The known bug: every save writes over the last one, in its place."""

    def save(self, step: int, state: State) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rundir, "publishing", lambda *_: contextlib.nullcontext(self.folder / IN_PLACE))
            (self.folder / IN_PLACE).mkdir(exist_ok=True)
            super().save(step, state)
        rundir.seal(self.folder / IN_PLACE)
        return self.folder / IN_PLACE


class Aside(Checkpointer):
    """As the loop saves: a thread writes a copy, and the state changes meanwhile."""

    def save(self, step: int, state: State) -> Path:
        saver = Saver(Checkpointer(self.folder, keep_last=self.keep_last), Snapshot(torch.device("cpu")))
        saver.begin(step, state)
        for tensor in (*state.model.values(), *state.optimizer.values()):
            tensor.fill_(-1.0)
        saved = saver.land(NoMarks())
        assert saved
        return saved.path


def serve() -> None:
    """Child process: for each line `saver folder`, fork one into that folder; print its acknowledged saves."""
    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        saver, _, folder = line.strip().partition(" ")
        pid = os.fork()
        if pid == 0:
            checkpointer: Checkpointer = globals()[saver](Path(folder), keep_last=2)
            for step in range(1, 10_000):
                checkpointer.save(step, state_of(step))
                os.write(1, f"{os.getpid()} {step}\n".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(1, b"dead 0\n")


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process with torch loaded that becomes savers by forking."""
    command = [sys.executable, "-c", "from tests.faults.test_kills import serve; serve()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def kill_while_saving(
    server: subprocess.Popen[str], kills: int, root: Path, saver: type[Checkpointer]
) -> Iterator[tuple[Path, int]]:
    """Folders in which a saver died of SIGKILL at a random moment, and the last step each had acknowledged.

    More than were asked for: who needs a kill that hits goes on until one has, as a few alone may all miss.
    """
    chance = random.Random(kills)
    assert server.stdin
    assert server.stdout
    for kill in range(10 * kills):
        folder = root / f"kill-{kill}"
        server.stdin.write(f"{saver.__name__} {folder}\n")
        server.stdin.flush()
        pid, acknowledged = server.stdout.readline().split()  # the first save stands: now kill at a random moment
        time.sleep(chance.uniform(0, 0.12))
        os.kill(int(pid), signal.SIGKILL)
        while (words := server.stdout.readline().split())[0] != "dead":
            acknowledged = words[1]
        yield folder, int(acknowledged)


@pytest.mark.parametrize("saver", [Checkpointer, Aside])
@pytest.mark.parametrize("kills", [pytest.param(6, id="6"), pytest.param(200, id="200", marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_sigkill_while_saving_loses_nothing_acknowledged(
    server: subprocess.Popen[str], kills: int, saver: type[Checkpointer], tmp_path: Path
) -> None:
    unfinished = 0
    for number, (folder, acknowledged) in enumerate(kill_while_saving(server, kills, tmp_path, saver), start=1):
        newest = Checkpointer(folder, keep_last=2).latest()
        assert newest is not None, f"{folder.name}: nothing can be loaded"
        assert check_whole(newest) >= acknowledged, f"{folder.name}: an acknowledged save is lost"
        unfinished += any(".tmp-" in path.name for path in folder.iterdir())
        rundir.sweep(folder)
        assert not [path for path in folder.iterdir() if ".tmp-" in path.name]
        if number >= kills and unfinished:
            break
    assert unfinished > 0, "no kill ever hit a save: the test tests nothing"


def test_saving_in_place_does_lose_states(server: subprocess.Popen[str], tmp_path: Path) -> None:
    """Negative control: the harness sees what a save over the same files does."""
    folders = (folder for folder, _ in kill_while_saving(server, 6, tmp_path, InPlace))
    assert any(Checkpointer(folder, keep_last=2).latest() is None for folder in folders)


class Documented(Checkpointer):
    """Writes the documented .pt file instead, always under one name, as `.checkpoints/step_<N>.pt` is rewritten."""

    def save(self, step: int, state: State) -> Path:
        plain = legacy.Plain([("a", ["exp_avg"])], [], torch.tensor(float(step)), 0.0)
        run = {**state.run, "applied_steps": step, "loss_scale": None}
        run["progress"] = {"step": step, "best_loss": None}
        whole, path = State(state.model, state.optimizer, run), self.folder / "step.pt"
        legacy.put(path, plain, whole, epoch=0, config={}, link=NoMarks())
        return path


@pytest.mark.parametrize("kills", [pytest.param(6, id="6"), pytest.param(100, id="100", marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_sigkill_never_leaves_a_documented_file_that_does_not_load(
    server: subprocess.Popen[str], kills: int, tmp_path: Path
) -> None:
    """Item 67."""
    unfinished = 0
    for number, (folder, acknowledged) in enumerate(kill_while_saving(server, kills, tmp_path, Documented), start=1):
        content = torch.load(folder / "step.pt", weights_only=True)
        step = content["global_step"]
        assert step >= acknowledged
        assert all(
            torch.equal(content["model_state_dict"][name], tensor) for name, tensor in state_of(step).model.items()
        )
        unfinished += any(".tmp-" in path.name for path in folder.iterdir())
        if number >= kills and unfinished:
            break
    assert unfinished > 0, "no kill ever hit a save: the test tests nothing"


class Crash(BaseException):
    """Stands for the machine going away at that very call."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Make the number-th call that touches the disk's order of events the last thing that happens."""
    calls = [0]

    def counting(original):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] >= number:
                raise Crash
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", counting(os.fsync))
    monkeypatch.setattr(Path, "rename", counting(Path.rename))
    monkeypatch.setattr("shutil.rmtree", counting(__import__("shutil").rmtree))
    return calls


def test_a_crash_at_every_boundary_of_a_save_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    reached_end = False
    for number in range(1, 100):
        folder = tmp_path / str(number)
        checkpointer = Checkpointer(folder, keep_last=2)
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
        with pytest.MonkeyPatch.context() as patch:
            calls = crash_at(patch, number)
            with contextlib.suppress(Crash):
                checkpointer.save(3, state_of(3))
            reached_end = calls[0] < number
        newest = checkpointer.latest()
        assert newest is not None
        assert check_whole(newest) in (2, 3)
        if reached_end:
            break
    assert reached_end, "the save never finished"
    assert number > 8, "too few boundaries were tried"


@pytest.mark.parametrize("damages", [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["truncate", "flip"])
def test_damage_anywhere_is_seen_and_the_previous_checkpoint_is_used(kind: str, damages: int, tmp_path: Path) -> None:
    chance = random.Random(f"{kind}{damages}")
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    for step in (1, 2):
        checkpointer.save(step, state_of(step))
    newest = tmp_path / "step_00000002"
    files = sorted(newest.iterdir())
    for number in range(damages):
        path = files[number % len(files)]
        good = path.read_bytes()
        place = chance.randrange(len(good.rstrip()))  # without the end of its last line a text is still whole
        bad = (
            good[:place]
            if kind == "truncate"
            else good[:place] + bytes([good[place] ^ 1 << chance.randrange(8)]) + good[place + 1 :]
        )
        path.write_bytes(bad)
        named = newest.name if path.name == rundir.MANIFEST else path.name  # it may be wrong about another file
        with pytest.raises(LockstepError, match=named):
            checkpoint.load(newest)
        fallback = checkpointer.latest()
        assert fallback is not None
        assert check_whole(fallback) == 1
        path.write_bytes(good)
    assert check_whole(newest) == 2


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    from lockstep.engine.resume import point_of_run

    checkpointer = Checkpointer(tmp_path / "checkpoints", keep_last=2)
    (checkpointer.save(1, state_of(1)) / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LockstepError) as caught:
        point_of_run(tmp_path)
    assert caught.value.exit_code == 65
