"""Every setting that Algorithm Distillation has of its own, or reads in its own way, acts (item 136)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.api import resolve
from lockstep.config.catalog import catalog
from lockstep.engine import collect
from lockstep.engine.prepare import prepare
from lockstep.errors import ConfigError
from lockstep.objectives.distill import Distill
from tests.gates.training import flags, run
from tests.test_keys_act import ELSEWHERE, NUMBERS, named_tests

BASE: dict[str, Any] = {
    "training.max_steps": 3, "training.context_length": 40, "training.batch_size": 4, "training.learning_rate": 0.01,
    "training.warmup_steps": 1, "training.eval_interval": 0, "training.save_interval": 0, "training.eval_batches": 1,
    "training.gen_episodes": 0, "data.num_workers": 0, "debug.digest_interval": 1, "system.threads": 1,
    "data.train_source_timesteps": 80, "model.region": 20,
}  # fmt: skip
REGIONS: dict[str, Any] = {**BASE, "model.compressed": True, "model.summary_tokens": 4}
DYNAMICS: dict[str, Any] = {**BASE, "model.dynamics": True}

# Setting -> a value with which the weights after three steps are others.
OF_AD: dict[str, Any] = {
    "model.model_path": "lockstep/ad-demo",
    "model.num_layers": 1,
    "model.hidden_size": 48,
    "model.num_attention_heads": 4,
    "model.intermediate_size": 100,
    "model.init_std": 0.03,
    "model.head_init_std": 0.01,
    "model.dropout": 0.3,
    "model.attention_dropout": 0.3,
    "model.compressed": True,
    "model.dynamics": True,
    "objective.label_smoothing": 0.2,
    "training.context_length": 20,
    "training.batch_size": 3,
    "training.weight_decay": 0.5,
    "training.precision": "bf16",
    "training.optimizer_states": "bf16",
    "data.env": "darkroompermuted",
    "data.grid_size": 4,
    "data.horizon": 10,
    "data.env_split_seed": 1,
    "data.train_env_ratio": 0.5,
    "data.alg": "PPO",
    "data.source_noise": 0.4,
    "data.alg_seed": 7,
    "data.total_source_timesteps": 480,
    "data.n_stream": 5,
    "data.train_source_timesteps": 60,
    "data.train_n_stream": 5,
    "data.episode_stride": 2,
    "system.seed": 7,
}
OF_REGIONS: dict[str, Any] = {"model.region": 10, "model.summary_tokens": 2, "data.n_steps": 10}  # compressed only
OF_PPO: dict[str, Any] = {  # what decides the histories of that learner
    "data.n_steps": 40, "data.source_batch_size": 20, "data.n_epochs": 2, "data.source_lr": 0.1,
    "data.streams_per_learner": 2,
}  # fmt: skip
OF_AD_ELSEWHERE: dict[str, str] = {  # setting -> the test that shows what it does
    "model.model_type": "test_it_is_refused_unless_it_says_what_is_so_anyway",
    "model.vocab_size": "test_a_model_of_other_actions_is_refused",
    "model.dynamics_strength": "test_the_strength_of_the_dynamics_acts",
    "data.data_path": "test_missing_histories_and_the_command_that_makes_them",
    "data.policy": "test_there_is_one_policy",
    "training.eval_batch_size": "test_validation_is_cut_as_asked_and_measures_the_same",
    "data.n_process": "test_threads_are_as_many_as_asked_and_there_are",
    "data.collect": "test_missing_histories_and_the_command_that_makes_them",
    "data.max_reward": "test_the_documented_lines_and_files",
    **dict.fromkeys(
        ("training.gen_interval", "training.gen_episodes", "training.gen_repeats"), "test_a_run_tells_of_its_walks"
    ),
}
REFUSED = {  # of texts: `test_settings_of_texts_are_refused`
    "data.dataset_name", "data.text_column", "data.streaming", "data.max_train_samples", "data.min_words",
    "data.documents", "data.validation_fraction", "data.tokenizer_name", "data.tokenizer_vocab_size",
}  # fmt: skip


def test_no_setting_of_agents_is_forgotten() -> None:
    shared = NUMBERS.keys() | ELSEWHERE.keys()
    own = OF_AD.keys() | OF_REGIONS.keys() | OF_PPO.keys() | OF_AD_ELSEWHERE.keys()
    settings = {setting.key for setting in catalog("ad").settings.values()}
    assert settings - shared - own == set(), "neither probed nor named"
    assert (own | REFUSED) - settings == set(), "probed, and not there"
    assert set(OF_AD_ELSEWHERE.values()) <= set(named_tests())


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("histories")


def digest(folder: Path, settings: dict[str, Any]) -> str:
    return run(folder, settings, family="ad")[1].records[-1].digest


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, histories: Path) -> dict[str, str]:
    """The weights of each kind of agent, of the same histories."""
    kinds = {"plain": BASE, "regions": REGIONS, "dynamics": DYNAMICS}
    folder = tmp_path_factory.mktemp("base")
    return {name: digest(folder / name, {**kind, "data.data_path": histories}) for name, kind in kinds.items()}


OF_HISTORIES = {f"data.{key}" for key in ("env", "grid_size", "horizon", "alg", "source_noise", "alg_seed",
                                          "total_source_timesteps", "n_stream", "n_steps")}  # fmt: skip


def at(key: str, histories: Path, tmp_path: Path) -> dict[str, Any]:
    """Histories of other settings lie elsewhere."""
    return {"data.data_path": tmp_path / "histories" if key in OF_HISTORIES else histories}


@pytest.mark.parametrize(  # what other families have too is a long proof here
    "key", [pytest.param(key, marks=pytest.mark.slow) if key in NUMBERS else key for key in OF_AD]
)
def test_it_changes_the_numbers(key: str, bases: dict[str, str], histories: Path, tmp_path: Path) -> None:
    found = digest(tmp_path / "run", {**BASE, **at(key, histories, tmp_path), key: OF_AD[key]})
    assert found not in ("", bases["plain"])


@pytest.mark.parametrize("key", OF_REGIONS)
def test_it_changes_a_compressed_agent(key: str, bases: dict[str, str], histories: Path, tmp_path: Path) -> None:
    found = digest(tmp_path / "run", {**REGIONS, **at(key, histories, tmp_path), key: OF_REGIONS[key]})
    assert found not in ("", bases["regions"])


def test_the_strength_of_the_dynamics_acts(bases: dict[str, str], histories: Path, tmp_path: Path) -> None:
    changed = {"data.data_path": histories, "model.dynamics_strength": 0.2}
    assert digest(tmp_path, {**DYNAMICS, **changed}) not in ("", bases["dynamics"])


def test_the_same_settings_give_the_same_numbers(bases: dict[str, str], histories: Path, tmp_path: Path) -> None:
    """What the probes compare with is stable, also under settings that must not change it."""
    cosmetic = {"data.num_workers": 1, "data.n_process": 1, "data.max_reward": 3, "data.collect": False,
                "training.gen_episodes": 1, "training.gen_repeats": 1, "training.gen_interval": 2}  # fmt: skip
    assert digest(tmp_path, {**BASE, "data.data_path": histories, **cosmetic}) == bases["plain"]


def learnt(folder: Path, settings: dict[str, Any]) -> str:
    """What PPO would make, as the key of the data."""
    ppo = {"data.alg": "PPO", "data.n_epochs": 1, "data.n_stream": 2, "data.total_source_timesteps": 320,
           "data.source_lr": 0.01, "data.train_source_timesteps": 160, "data.train_n_stream": 2}  # fmt: skip
    asked = {**BASE, "system.device": "cpu", "data.grid_size": 2, "data.train_env_ratio": 0.5, **ppo,
             "training.context_length": 20, "data.data_path": folder, **settings}  # fmt: skip
    config = resolve("ad", preset="tiny", flags=flags(asked)).config
    return prepare(config, Distill(), vocab_limit=5).key


def test_settings_of_ppo_change_its_histories(tmp_path: Path) -> None:
    plain = learnt(tmp_path / "plain", {})
    assert learnt(tmp_path / "again", {}) == plain
    found = {key: learnt(tmp_path / key, {key: value}) for key, value in OF_PPO.items()}
    assert plain not in found.values()
    assert len(set(found.values())) == len(OF_PPO)


def test_validation_is_cut_as_asked_and_measures_the_same(histories: Path, tmp_path: Path) -> None:
    cuts = {None: [4], 3: [3, 1], 1: [1, 1, 1, 1]}
    losses: list[float] = []
    for rows, expected in cuts.items():
        asked = {"training.eval_batch_size": rows} if rows else {}
        parts, _ = run(tmp_path / str(rows), {**BASE, "data.data_path": histories, **asked}, family="ad")
        assert [batch.rows for batch in parts.validation] == expected
        assert parts.val_loss is not None
        losses.append(parts.val_loss)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_there_is_one_policy() -> None:
    with pytest.raises(ConfigError, match="MlpPolicy"):
        resolve("ad", preset="tiny", flags=[("data.policy", "CnnPolicy")])


@pytest.mark.parametrize(("asked", "cores", "threads"), [(1, 4, 1), (3, 4, 3), (8, 4, 4)])
def test_threads_are_as_many_as_asked_and_there_are(
    asked: int, cores: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    pool = collect.ThreadPoolExecutor
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(collect, "ThreadPoolExecutor", lambda count, **how: seen.append(count) or pool(count, **how))
    config = resolve("ad", preset="tiny", flags=flags({"data.data_path": tmp_path, "data.n_process": asked})).config
    prepare(config, Distill(), vocab_limit=5)
    assert seen == [threads]
