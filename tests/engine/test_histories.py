"""Histories before training: collected once, opened as they are, and never learnt from unless they are sound."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from filelock import FileLock

from lockstep.api import resolve
from lockstep.cli import main
from lockstep.config.schema import RunConfig
from lockstep.data.histories import file_of
from lockstep.data.loader import Loader
from lockstep.data.options import TEXT_SETTINGS
from lockstep.engine import collect, histories, history_files
from lockstep.engine.prepare import is_prepared
from lockstep.engine.unseen import unseen_tasks
from lockstep.errors import ConfigError, ExitCode, NotFoundError
from lockstep.objectives.distill import Distill
from lockstep.worlds import split
from tests.engine.gathered import STEPS, STREAMS, TASKS, collected, configuration, file_in, options_of, own, prepare
from tests.gates.training import flags, run

__all__ = ["collected", "own"]

# ------------------------------------------------------------------------------------------------ opening


def test_they_are_collected_once_and_then_opened(collected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(collected)
    monkeypatch.setattr(collect, "_make", lambda *_: pytest.fail("collected again"))
    read: list[Any] = []
    monkeypatch.setattr(histories, "read_hdf5", lambda *what: read.append(history_files.read_hdf5(*what)) or read[0])
    before = {path.name: path.read_bytes() for path in collected.iterdir()}
    prepared = prepare(config)
    assert is_prepared(config)
    assert prepared.histories is not None
    assert prepared.histories.steps.shape == (3, TASKS * STREAMS, STEPS)
    assert np.shares_memory(prepared.histories.steps, read[0].table), "no copy of it"
    assert {path.name: path.read_bytes() for path in collected.iterdir()} == before
    train, unseen = split.split(TASKS, seed=0, ratio=0.9)
    for table, tasks in ((prepared.train, train), (prepared.validation, unseen)):
        places = table.take(np.arange(table.rows))["histories"][:, 0]
        assert sorted(places) == sorted(task * STREAMS + stream for task in tasks for stream in range(STREAMS))
        assert tuple(places[: len(tasks)] // STREAMS) == tasks, "the first rows are of all tasks"
    assert prepared.notices == ()


def test_the_launcher_asks_without_torch(collected: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from lockstep.config.load import load; from lockstep.engine.prepare import is_prepared\n"
        "at = lambda path: load('ad', preset='tiny', flags=[('data.data_path', path)]).config\n"
        "print([is_prepared(at(path)) for path in sys.argv[1:]], 'torch' in sys.modules, 'h5py' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(collected), str(tmp_path / "nowhere")]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    assert answer.stdout.split("\n")[0] == "[True, False] False False"


def test_only_the_streams_steps_and_episodes_that_are_asked_for(collected: Path) -> None:
    whole = prepare(configuration(collected)).histories
    config = configuration(collected, train_n_stream=3, train_source_timesteps=90, episode_stride=2)
    shorter = config.training.model_copy(update={"context_length": 40})
    part = prepare(config.model_copy(update={"training": shorter})).histories
    assert whole is not None
    assert part is not None
    table = whole.steps.reshape(3, TASKS, STREAMS, STEPS)[:, :, :3]
    expected = np.concatenate((table[..., :20], table[..., 40:60]), -1).reshape(3, -1, 40)
    assert np.array_equal(part.steps, expected), "the first and the third episode of the four whole ones"


def test_more_than_there_is_is_told(collected: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepare(configuration(collected, train_n_stream=9, train_source_timesteps=1000))
    assert prepared.train.rows == 22 * STREAMS
    assert list(prepared.notices) == [
        "data.train_n_stream is 9, the histories have 8 streams: all are distilled",
        "data.train_source_timesteps is 1,000, the histories have 100 steps: all are distilled",
    ]
    assert all(notice in caplog.text for notice in prepared.notices)


def test_a_window_longer_than_the_histories_is_refused(collected: Path) -> None:
    with pytest.raises(ConfigError, match="a window of 80 steps, histories of 60") as error:
        prepare(configuration(collected, train_source_timesteps=60))
    assert error.value.where == "training.context_length"


def test_a_context_that_holds_no_episode_is_refused(collected: Path, tmp_path: Path) -> None:
    settings = {"data.data_path": collected, "training.context_length": 16}
    with pytest.raises(ConfigError, match="an episode of 20 steps does not fit into a context of 16"):
        run(tmp_path, settings, family="ad")
    assert run(tmp_path, {**settings, "training.context_length": 20, "training.max_steps": 1}, family="ad")


def test_a_model_of_other_actions_is_refused(collected: Path) -> None:
    with pytest.raises(ConfigError, match="7, and darkroom has 5 actions") as error:
        prepare(configuration(collected), actions=7)
    assert error.value.where == "model.vocab_size"


def test_what_learners_refuse_is_named_as_it_was_set(tmp_path: Path) -> None:
    for name, settings in {
        "source_batch_size": {"alg": "PPO", "source_batch_size": 30},
        "n_stream": {"alg": "PPO", "streams_per_learner": 3},
        "train_env_ratio": {"train_env_ratio": 0.001},
    }.items():
        with pytest.raises(ConfigError) as error:
            prepare(configuration(tmp_path, **settings))
        assert error.value.where == f"data.{name}"


OF_TEXTS: dict[str, Any] = {
    "dataset_name": "builtin", "text_column": "text", "streaming": True, "max_train_samples": 10, "min_words": 2,
    "documents": "masked", "validation_fraction": 0.5, "tokenizer_name": "bytes", "tokenizer_vocab_size": 300,
}  # fmt: skip


@pytest.mark.parametrize("name", [*TEXT_SETTINGS, "sample_prompt", "sample_tokens"])
def test_settings_of_texts_are_refused(name: str) -> None:
    key = f"{'data' if name in OF_TEXTS else 'report'}.{name}"
    with pytest.raises(ConfigError, match="is for families that learn from text") as error:
        resolve("ad", preset="tiny", flags=flags({key: OF_TEXTS.get(name, 7)}))
    assert error.value.where == f"--{key}"
    resolve("llama", preset="tiny", flags=flags({key: OF_TEXTS.get(name, 7)}))  # the control


# ------------------------------------------------------------------------------------------------ what decides the key


def test_the_key_is_of_what_is_learnt_and_of_nothing_else(collected: Path, own: Path, tmp_path: Path) -> None:
    key = prepare(configuration(collected)).key
    assert prepare(configuration(own, n_process=1, max_reward=3, collect=False)).key == key
    half = prepare(configuration(collected, train_n_stream=4)).key
    assert half != key
    with h5py.File(file_in(own), "r+") as file:  # of a stream that is not distilled
        del file.attrs[history_files.SETTINGS]
        for group in file.values():
            swapped = {name: group[name][()][:, [0, 1, 2, 3, 4, 5, 7, 6]] for name in ("states", "actions", "rewards")}
            for name, column in swapped.items():
                group[name][...] = column
    assert prepare(configuration(own, train_n_stream=4)).key == half
    assert prepare(configuration(own)).key != key
    assert prepare(configuration(collected, env_split_seed=1)).key != key
    assert prepare(configuration(tmp_path / "other", alg_seed=7)).key != key


def test_other_histories_refuse_to_go_on(own: Path, tmp_path: Path) -> None:
    settings = {"data.data_path": own, "training.max_steps": 2, "training.save_interval": 1, "data.num_workers": 0}
    run(tmp_path / "run", settings, family="ad")
    point = tmp_path / "run" / "checkpoints" / "step_00000001"
    run(tmp_path / "again", settings, family="ad", point=point)
    with h5py.File(file_in(own), "r+") as file:
        del file.attrs[history_files.SETTINGS]
        for name in ("states", "actions", "rewards"):
            file["7"][name][...] = file["7"][name][()][:, ::-1]
    with pytest.raises(ConfigError, match="data"):
        run(tmp_path / "other", settings, family="ad", point=point)


# ------------------------------------------------------------------------------------------------ commands


def test_other_settings_are_named_with_the_command(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own)
    config = configuration(own, source_noise=0.1, n_stream=4)
    with pytest.raises(ConfigError) as error:
        prepare(config)
    assert "made with other settings: source_noise is 0.05, not 0.1; n_stream is 8, not 4" in error.value.what
    command, _, other = error.value.hint.partition(", or ")
    assert other == "another data.data_path"
    assert command.startswith("lockstep collect ad tiny ")
    assert command.endswith(" --overwrite")
    before = file_in(own).read_bytes()
    assert main([*shlex.split(command)[1:-1], "--device", "cpu"]) == ExitCode.USAGE, "without --overwrite they stay"
    assert file_in(own).read_bytes() == before
    assert main([*shlex.split(command)[1:], "--device", "cpu"]) == ExitCode.DONE, capsys.readouterr().err
    assert prepare(config).train.rows == 22 * 4


def test_missing_histories_and_the_command_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration(tmp_path / "a folder", collect=False, horizon=10, alg_seed=7)
    with pytest.raises(NotFoundError, match="no histories to learn from") as error:
        prepare(config)
    command = f"lockstep collect ad tiny data.horizon=10 data.alg_seed=7 'data.data_path={tmp_path}/a folder'"
    assert error.value.hint == command
    assert not (tmp_path / "a folder").exists()
    assert main([*shlex.split(error.value.hint)[1:], "--device", "cpu"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    file = tmp_path / "a folder" / "history_darkroom_PSRL_alg-seed7.hdf5"
    assert lines[0] == f"Collected: {file}"
    assert lines[1].split() == ["histories", "25", "tasks", "x", "8", "streams", "x", "100", "steps", "(20,000)"]
    assert lines[2].endswith(" of 8.56 (mean of all, against the optimum)")
    assert len(lines) == 3
    assert file == file_of(options_of(config))
    assert prepare(config).train.rows == 22 * STREAMS
    capsys.readouterr()
    assert main([*shlex.split(error.value.hint)[1:], "--device", "cpu"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith(f"There already: {file}\n")


@pytest.mark.parametrize("alg", ["Q", "Noise"])
def test_a_removed_source_learner_is_refused_and_its_run_stays(
    alg: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    saved = {"family": "ad", "preset": "tiny", "config": {"family": "ad", "data": {"alg": alg}}}
    (run_folder / "config.json").write_text(json.dumps(saved))
    before = (run_folder / "config.json").read_bytes()
    for words in (["collect", "ad", "tiny", f"data.alg={alg}"], ["resume", str(run_folder)]):
        assert main(words) == ExitCode.USAGE
        told = capsys.readouterr().err
        assert f'data.alg: "{alg}" was removed: PPO and PSRL are the source learners' in told
        assert "  try: lockstep train ad data.alg=PSRL" in told
    assert (run_folder / "config.json").read_bytes() == before


def test_what_is_told_of_the_last_return_is_so(collected: Path) -> None:
    found = histories.gather(configuration(collected))
    with h5py.File(file_in(collected)) as file:
        paid = [file[str(task)]["rewards"][80:100].sum(0) for task in range(TASKS)]
    assert found.last_return == pytest.approx(np.mean(paid))
    assert not found.made


def test_collect_is_of_agents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", "llama", "tiny"]) == ExitCode.USAGE
    assert "learns from text, and not from histories" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    assert main(["collect", "ad", "tiny", f"data.data_path={tmp_path / 'file' / 'in'}"]) == ExitCode.CANNOT_CREATE
    assert "data.data_path=DIR, a folder you can write to" in capsys.readouterr().err


def test_a_file_instead_of_its_folder_is_told_apart(collected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_in(collected)
    assert main(["collect", "ad", "tiny", f"data.data_path={file}"]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert f"{file} is a file" in told
    assert f"data.data_path={shlex.quote(str(file.parent))}\n" in told


def test_a_dry_run_tells_how_much_is_collected_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["collect", "ad", "tiny", "--dry-run", "data.n_stream=4", "data.total_source_timesteps=240"]) == 0
    told = capsys.readouterr().out
    assert "25 tasks x 4 streams x 60 steps (6,000)\n" in told
    assert "file              datasets/tiny/history_darkroom_PSRL_alg-seed42.hdf5\n" in told
    assert not [*tmp_path.iterdir()], "nothing is made"


def test_prepare_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "ad", "tiny", "--device", "cpu"]) == ExitCode.DONE
    file = "datasets/tiny/history_darkroom_PSRL_alg-seed42.hdf5"
    said = capsys.readouterr().out
    assert f"Collecting histories: {file}" in said
    assert f"Histories: {file}, 176 to learn from, 24 of unseen tasks" in said
    assert main(["prepare", "ad", "tiny", "--list"]) == ExitCode.DONE
    assert Path(file).exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_who_is_stopped_keeps_the_finished_chunks(
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["collect", "ad", "tiny", "--device", "cpu", f"data.data_path={tmp_path}", "data.n_process=1"]
    make, made = collect._chunk, list[int]()
    monkeypatch.setattr("lockstep.learners.posterior.Posterior.chunk", lambda *_: 40)
    stopped, slow = threading.Event(), threading.Event()

    def chunk(wanted: Any, world: Any, at: int, path: Path) -> None:
        if at == 2 and not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), number)
            slow.wait(20)  # a chunk that takes long: who leaves does not wait for it
            return
        made.append(at)
        make(wanted, world, at, path)

    monkeypatch.setattr(collect, "_chunk", chunk)
    assert main(words) == code
    slow.set()
    said = capsys.readouterr().err
    kept = tmp_path / "history_darkroom_PSRL_alg-seed42.parts"
    assert f"the same command goes on: 2 of 5 chunks are kept in {kept}" in said
    assert main(words) == ExitCode.DONE
    assert sorted(made) == [0, 1, 2, 3, 4], "none was made twice"
    assert not kept.exists()


# ------------------------------------------------------------------------------------------------ several processes


def test_who_comes_second_waits_and_opens_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks of torchrun do: each prepares, one collects."""
    made: list[int] = []
    make = collect._collect
    monkeypatch.setattr(collect, "_collect", lambda *args: made.append(1) or make(*args))
    keys: list[str] = []
    threads = [threading.Thread(target=lambda: keys.append(prepare(configuration(tmp_path)).key)) for _ in range(3)]
    held = FileLock(tmp_path / ".history_darkroom_PSRL_alg-seed42.lock", thread_local=False)
    with held:
        for thread in threads:
            thread.start()
        threads[0].join(0.3)
        assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(120)
    assert len(set(keys)) == 1
    assert len(keys) == 3
    assert made == [1]


def test_no_history_is_drawn_by_two_ranks(collected: Path) -> None:
    """Item 140: over one pass each history once, by one rank."""
    config = configuration(collected)
    prepared = prepare(config)
    objective = histories.with_histories(Distill(), prepared, config, shape_of(config))

    def drawn(rank: int, world: int) -> list[int]:
        loader = Loader(
            prepared.train,
            objective,
            seed=3,
            micro_rows=4,
            micro_batches=1,
            rank=rank,
            world=world,
            workers=0,
            steps=22,
        )
        batches = [batch for _ in range(22) for batch in next(loader)]
        return [int(place) for batch in batches for place in batch.tensors["histories"]]

    first, second = drawn(0, 2), drawn(1, 2)
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted(prepared.train.take(np.arange(176))["histories"][:, 0])
    assert set(drawn(0, 1)) & set(second), "control: who knows of no other rank draws its rows too"


@pytest.mark.parametrize("seed", [0, 3])
def test_what_is_walked_in_was_not_learnt_from(seed: int, collected: Path) -> None:
    """Item 148: one split for collection, training, validation and walks; control: of another seed it is another."""
    config = configuration(collected, env_split_seed=seed)
    prepared = prepare(config)
    learnt, measured = (
        set(table.take(np.arange(table.rows))["histories"][:, 0] // STREAMS)
        for table in (prepared.train, prepared.validation)
    )
    world, walked = unseen_tasks(config)
    assert measured == set(walked)
    assert learnt | measured == set(range(world.tasks))
    assert not learnt & measured
    assert set(unseen_tasks(configuration(collected, env_split_seed=seed + 1))[1]) != measured


def shape_of(config: RunConfig) -> Any:
    from lockstep.models import shapes

    return shapes.resolve(config.model, context_length=config.training.context_length)
