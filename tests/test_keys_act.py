"""Every setting changes what happens (contract item 23): a probe here, or a test elsewhere that is named here."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config.catalog import catalog
from lockstep.config.load import Loaded, load
from lockstep.engine import build, loop, train
from lockstep.report.jsonl import read_events
from lockstep.report.logs import close_logging
from lockstep.runtime import determinism, hardware
from lockstep.runtime.marks import NoMarks
from tests.config.test_documented_keys import ACTS, REFUSED
from tests.conftest import Outcome
from tests.gates.training import flags, run

Cli = Callable[..., Outcome]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

# A short run that has room for every change below: clipping that bites, decay and epsilon that matter, few documents.
BASE: dict[str, Any] = {
    "training.max_steps": 4, "training.context_length": 32, "training.learning_rate": 0.01, "training.warmup_steps": 1,
    "training.max_grad_norm": 0.5, "training.weight_decay": 0.1, "training.eval_interval": 0,
    "training.save_interval": 0, "training.eval_batches": 1, "training.grad_accum_nums": 2, "training.batch_size": 2,
    "data.max_train_samples": 40, "data.num_workers": 0, "debug.digest_interval": 1, "system.threads": 1,
}  # fmt: skip

# Setting -> a value with which the weights after four steps are others.
NUMBERS: dict[str, Any] = {
    "model.model_path": "lockstep/demo",
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1,
    "model.head_dim": 8,
    "model.intermediate_size": 100,
    "model.vocab_size": 300,
    "model.rope_theta": 50.0,
    "model.tie_word_embeddings": True,
    "model.init_std": 0.01,
    "model.head_init_std": 0.01,
    "model.depth_scaled_init": True,
    "model.dropout": 0.1,
    "training.batch_size": 1,
    "training.grad_accum_nums": 1,
    "training.context_length": 16,
    "training.learning_rate": 0.02,
    "training.warmup_steps": 3,
    "training.schedule": "linear",
    "training.min_lr_ratio": 0.3,
    "training.weight_decay": 0.5,
    "training.adam_beta1": 0.5,
    "training.adam_beta2": 0.5,
    "training.adam_epsilon": 0.001,
    "training.optimizer_states": "bf16",
    "training.max_grad_norm": 0,
    "training.precision": "bf16",
    "data.dataset_name": "synthetic",
    "data.max_train_samples": 30,
    "data.min_words": 300,
    "data.documents": "joined",
    "data.validation_fraction": 0.5,
    "system.seed": 7,
}

# Setting -> the test that shows what it does; its file must speak of the setting.
ELSEWHERE: dict[str, str] = {
    "family": "test_the_families_table_names_every_documented_command",
    "model.model_type": "test_it_is_refused_unless_it_says_what_is_so_anyway",
    "model.init": "test_pretrained_and_truncated",
    "model.max_position_embeddings": "test_overrides_act_and_layers_always_come_from_the_options",
    "model.rope_scaling": "test_overrides_act_and_layers_always_come_from_the_options",
    "model.attention_backend": "test_what_was_asked_for_is_built_and_said",
    "model.use_flash_attention": "test_refused_on_the_cpu",
    "model.compile": "test_compile_is_per_block_in_place",
    "objective.name": "test_an_objective_of_ones_own",
    "training.patience": "test_early_stopping_is_off_by_default_and_says_so_when_on",
    "training.min_delta": "test_patience_counts_steps_without_improvement_of_the_smoothed_loss",
    "training.max_steps": "test_max_steps_is_exact",
    "data.data_path": "test_each_kind_of_file_becomes_rows",
    "data.text_column": "test_what_changes_the_key_and_what_does_not",
    "data.streaming": "test_a_stream_fetches_only_what_is_asked_for",
    "data.tokenizer_name": "test_a_model_folder_brings_its_tokenizer",
    "data.tokenizer_vocab_size": "test_what_changes_the_key_and_what_does_not",
    "data.num_workers": "test_the_loader_works_ahead_as_told",
    "data.prefetch_factor": "test_the_loader_works_ahead_as_told",
    "data.pin_memory": "test_every_batch_is_pinned_where_asked",
    "data.cache_dir": "test_where_caches_lie",
    "data.hf_token": "test_a_hub_tokenizer_is_used_and_the_token_reaches_only_the_hub",
    "system.gradient_checkpointing": "test_models_are_built_as_asked",
    "checkpoint.resume": "test_resume_from_a_documented_file_and_auto",
    "checkpoint.allow_mismatch": "test_a_foreign_configuration_is_refused_with_the_difference",
    "report.progress": "test_plain_lines_on_a_terminal",
    **dict.fromkeys(
        ("system.gpus", "system.mode", "system.hang_seconds", "system.slow_factor", "report.log_all_ranks"),
        "test_settings_reach_the_workers",
    ),
    "report.profile": "test_logs_profile_and_settings_that_act",
    "report.profile_steps": "test_a_profile_is_written",
    "checkpoint.on_full": "test_a_full_disk_stops_or_is_tried_again",
    "report.results_dir": "test_other_families_have_results_too",
    # below, in this file
    "system.device": "test_the_device_is_the_one_that_was_named",
    "system.device_id": "test_the_device_is_the_one_that_was_named",
    "system.deterministic": "test_deterministic_and_threads_reach_torch",
    "system.threads": "test_deterministic_and_threads_reach_torch",
    "system.empty_cache_interval": "test_the_cache_is_emptied_when_due",
    "debug.enabled": "test_debug_names_the_gradient",
    "debug.bundle": "test_what_is_kept_can_be_chosen",
    "debug.log_level": "test_the_log_level",
    "debug.digest_interval": "test_fingerprints_when_due",
    "debug.agree_interval": "test_a_rank_that_drifts_is_named_within_the_interval",
    **dict.fromkeys((
        "training.save_interval", "training.eval_interval", "training.checkpoint_dir", "checkpoint.keep_last",
        "checkpoint.keep_files", "system.output_dir", "system.log_dir", "report.log_interval", "report.log_prefix",
        "report.log_file", "report.tensorboard", "report.sample_prompt", "run.name", "run.out", "run.experiment_name",
        "run.tags",
    ), "test_files_and_words"),
    "training.eval_batches": "test_more_validation_is_another_figure",
    "report.sample_tokens": "test_the_sample_is_as_long_as_asked",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("shared_cache")


def loaded(settings: dict[str, Any]) -> Loaded:
    return load("llama", preset="tiny", flags=flags({"system.device": "cpu", **settings}))


def test_no_setting_is_forgotten() -> None:
    settings = {setting.key for setting in catalog("llama").settings.values()}
    assert settings - NUMBERS.keys() - ELSEWHERE.keys() == set(), "neither probed here nor named"
    assert (NUMBERS.keys() | ELSEWHERE.keys()) - settings == set(), "probed, and not there"
    assert NUMBERS.keys() & ELSEWHERE.keys() == set()


def test_every_documented_key_leads_to_a_probed_setting() -> None:
    """Table 1.2 of the contract: each key acts through a setting that is probed, or is refused."""
    reached = {setting for _, setting, _ in ACTS.values()}
    assert reached <= NUMBERS.keys() | ELSEWHERE.keys()
    assert len(ACTS) + len(REFUSED) == 62


def named_tests() -> dict[str, list[str]]:
    """Test -> the texts of the files that have it."""
    found: dict[str, list[str]] = {}
    for path in Path(__file__).parent.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(text)
    return found


def test_the_tests_that_are_named_exist() -> None:
    known = named_tests()
    assert len(known) > 300
    assert sorted({name for name in ELSEWHERE.values() if name not in known}) == []
    silent = []
    for setting, name in ELSEWHERE.items():
        leaf = setting.rpartition(".")[2]
        if not any(word in text for text in known[name] for word in (leaf, leaf.replace("_", "-"))):
            silent.append(setting)
    assert silent == [], "the file of the test does not even speak of it"


@pytest.fixture(scope="module")
def base_digest(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        return run(tmp_path_factory.mktemp("base"), BASE)[1].records[-1].digest


@pytest.mark.parametrize("key", NUMBERS)
def test_it_changes_the_numbers(key: str, base_digest: str, tmp_path: Path) -> None:
    assert run(tmp_path, {**BASE, key: NUMBERS[key]})[1].records[-1].digest not in ("", base_digest)


def test_the_same_settings_give_the_same_numbers(base_digest: str, tmp_path: Path) -> None:
    """What the probes above compare with is stable, also under settings that must not change it."""
    cosmetic = {"data.num_workers": 1, "data.prefetch_factor": 5, "report.log_interval": 3}
    assert run(tmp_path, {**BASE, **cosmetic})[1].records[-1].digest == base_digest


def test_the_last_rate_is_the_share_that_was_asked_for(tmp_path: Path) -> None:
    settings = {**BASE, "training.max_steps": 12, "training.min_lr_ratio": 0.3, "training.warmup_steps": 2}
    rates = [record.lr for record in run(tmp_path, settings)[1].records]
    assert max(rates) == pytest.approx(0.01)
    assert 0.003 <= rates[-1] < 0.0036
    assert rates[-1] == min(rates[2:])


def test_models_are_built_as_asked() -> None:
    """system.gradient_checkpointing and debug.enabled reach the model that is built."""
    asked = {"system.gradient_checkpointing": True, "model.use_flash_attention": False}
    built = build.make_model(build.plan(loaded({**BASE, **asked}), CPU), hooks=False)
    usual = build.make_model(build.plan(loaded(BASE), CPU), hooks=False)
    assert (built.model.checkpointing, built.attention) == (True, "native_math")
    assert (usual.model.checkpointing, usual.attention) == (False, "native_flash")


def test_the_loader_is_built_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(device: torch.device, **settings: Any) -> tuple[int, int, bool]:
        plan = build.plan(loaded({"training.precision": "fp32", **{f"data.{k}": v for k, v in settings.items()}}), CPU)
        rows: Any = SimpleNamespace(train=None)
        made: Any = build.make_loader(replace(plan, device=device), rows, start_step=3)
        assert (made["start_step"], made["micro_rows"]) == (3, 4)
        return made["workers"], made["prefetch"], made["pin"]

    monkeypatch.setattr(build, "Loader", lambda *_, **options: options)
    assert told(GPU) == (1, 2, True)
    assert told(GPU, num_workers=0) == (0, 2, True)
    assert told(GPU, num_workers=3, prefetch_factor=7) == (3, 7, True)
    assert told(GPU, pin_memory=False) == (1, 2, False)
    assert told(CPU) == (0, 2, False), "nothing to pin for, and rows are cut sooner than handed over"
    assert told(CPU, num_workers=1) == (1, 2, False)


def test_an_objective_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """objective.name: the same loss, counted twice."""
    code = "from lockstep.objectives.causal import Causal\n\n\nclass Twice(Causal):\n    terms = {'loss': 2.0}\n"
    (tmp_path / "my_objective.py").write_text(f"{code}\n\ndef make(options):\n    return Twice()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = run(tmp_path / "own", {**BASE, "objective.name": "my_objective:make"})[1].records
    usual = run(tmp_path / "usual", BASE)[1].records
    assert own[0].loss == pytest.approx(2 * usual[0].loss)


class Enough(Exception):
    """The probe has seen what it wanted."""


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda", 3), ("auto", 1), ("cpu", 0)])
def test_the_device_is_the_one_that_was_named(device: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/runtime/test_hardware.py shows what is made of it."""
    asked: list[tuple[str, int]] = []

    def pick(*words: Any) -> torch.device:
        asked.append(words)
        raise Enough

    monkeypatch.setattr(hardware, "pick_device", pick)
    with pytest.raises(Enough):
        train.train(loaded({"system.device": device, "system.device_id": number}))
    assert asked == [(device, number)]


@pytest.mark.parametrize(("deterministic", "threads"), [(True, 1), (False, 2)])
def test_deterministic_and_threads_reach_torch(
    deterministic: bool, threads: int, monkeypatch: pytest.MonkeyPatch, logging_closed: None
) -> None:
    switched: list[bool] = []
    seen: list[int] = []

    def plan(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise Enough

    monkeypatch.setattr(hardware, "pick_device", lambda *_: GPU)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", switched.append)
    monkeypatch.setattr(determinism, "_make_inductor_deterministic", lambda _: None)
    monkeypatch.setattr(train, "plan", plan)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "GPU_RANK"):  # whatever is set meanwhile is taken back
        monkeypatch.setenv(name, "0")
    with pytest.raises(Enough):
        train.train(loaded({"system.deterministic": deterministic, "system.threads": threads}))
    assert switched == ([True, False] if deterministic else [])
    assert seen == [threads]


@pytest.mark.parametrize(("interval", "device", "times"), [(3, GPU, 4), (5, GPU, 2), (0, GPU, 0), (3, CPU, 0)])
def test_the_cache_is_emptied_when_due(
    interval: int, device: torch.device, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    council = SimpleNamespace(
        fetch=lambda *_: [], agreed=SimpleNamespace(stop=None, tokens=0, weights={}), look_ahead=lambda *_, **__: None
    )
    parts: Any = SimpleNamespace(
        config=loaded({"system.empty_cache_interval": interval}).config,
        device=device,
        faults=SimpleNamespace(armed=False),
        batches=iter([[]] * 10),
        council=council,
        link=NoMarks(),
        stop=None,
        stopping=False,
        stepper=SimpleNamespace(launch=lambda *_: None, waited_seconds=0.0),
        pace=SimpleNamespace(own=0.0),
        saver=SimpleNamespace(ended=0),
        is_over=lambda done: done >= 10,
    )
    for step in range(10):
        loop.launch(parts, step)
    assert len(emptied) == times


@pytest.mark.parametrize("enabled", [True, False])
def test_debug_names_the_gradient(
    enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_grad@step=1,tensor=layers.0.attention.wq.weight")
    monkeypatch.setattr(logging.getLogger("lockstep"), "propagate", True)
    with pytest.raises(Exception, match="gradient norm is nan"):
        run(tmp_path, {**BASE, "debug.enabled": enabled})
    assert ("NaN in gradient: layers.0.attention.wq.weight" in caplog.messages) == enabled


@pytest.fixture
def logging_closed() -> Iterator[None]:
    yield
    close_logging()


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR"])
def test_the_log_level(level: str, logging_closed: None, capfd: pytest.CaptureFixture[str]) -> None:
    train.start_log(loaded({"debug.log_level": level}), None)
    logger, names = logging.getLogger("lockstep.probe"), ["DEBUG", "INFO", "WARNING", "ERROR"]
    for name in names:
        logger.log(getattr(logging, name), "said %s", name)
    close_logging()
    said = capfd.readouterr()
    heard = [name for name in names if f"said {name}" in said.out + said.err]
    assert heard == names[names.index(level) :]


def test_fingerprints_when_due(tmp_path: Path) -> None:
    records = run(tmp_path, {**BASE, "training.max_steps": 5, "debug.digest_interval": 2})[1].records
    assert [bool(record.digest) for record in records] == [False, True, False, True, False]


def test_more_validation_is_another_figure(tmp_path: Path) -> None:
    def told(batches: int) -> list[float]:
        settings = {**BASE, "training.eval_batches": batches, "training.eval_interval": 2}
        events = run(tmp_path / str(batches), settings)[1].events
        return [fields["val_loss"] for kind, fields in events if kind == "eval"]

    one, three = told(1), told(3)
    assert len(one) == len(three) == 2
    assert one != three


@pytest.mark.parametrize("tokens", [3, 9])
def test_the_sample_is_as_long_as_asked(tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("lockstep.engine.inference.continue_text", lambda *words: asked.append(words) or "x")
    parts, _ = run(tmp_path, {**BASE, "training.max_steps": 1, "report.sample_tokens": tokens})
    assembled: Any = SimpleNamespace(prepared=SimpleNamespace(words=SimpleNamespace(separator=0)))
    train.draw_sample(parts, assembled, NoMarks())
    assert asked[0][3] == "The"
    assert asked[0][4].tokens == tokens


def test_files_and_words(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run with all of them, one with none: where things are written and what the lines look like."""
    monkeypatch.setenv("GPU_RANK", "2")
    quick = [f"{key}={value}" for key, value in flags({**BASE, "training.max_steps": 4})]
    plain = lockstep("train", "llama", "tiny", "--device", "cpu", *quick)
    assert plain.code == 0, plain.text
    usual = next((in_dir / "runs").glob("llama-tiny-*"))
    assert sorted(path.name for path in in_dir.iterdir()) == ["runs"], "nothing is written that was not asked for"
    assert [path.name for path in (usual / "checkpoints").iterdir()] == ["step_00000004"]
    assert [event["step"] for event in read_events(usual / "events.jsonl") if event["kind"] == "eval"] == [4]
    assert plain.out.count("[GPU2] Step [") == 4
    assert (usual / "tb").is_dir()

    told = {
        "training.save_interval": 1, "training.eval_interval": 2, "training.checkpoint_dir": "pt",
        "checkpoint.keep_last": 3, "checkpoint.keep_files": 2, "system.output_dir": "outputs", "system.log_dir": "logs",
        "report.log_interval": 3, "report.log_prefix": "colon", "report.log_file": "my.log", "run.name": "mine",
        "report.tensorboard": False, "report.sample_prompt": "def ", "run.out": "elsewhere",
        "run.experiment_name": "trial", "run.tags": '{"who": "me"}',
    }  # fmt: skip
    done = lockstep("train", "llama", "tiny", "--device", "cpu", *quick, *(f"{k}={v}" for k, v in flags(told)))
    assert done.code == 0, done.text
    mine = in_dir / "elsewhere" / "mine"
    assert len(list((mine / "checkpoints").iterdir())) == 3
    assert [event["step"] for event in read_events(mine / "events.jsonl") if event["kind"] == "eval"] == [2, 4]
    assert sorted(path.name for path in (in_dir / "pt").glob("*.pt")) == ["step_3.pt", "step_4.pt"]
    assert json.loads((in_dir / "outputs" / "trial_config.json").read_text())["run"]["tags"] == {"who": "me"}
    assert json.loads((mine / "config.json").read_text())["config"]["run"]["tags"] == {"who": "me"}
    assert [path.name for path in (in_dir / "logs" / "mine").iterdir()] == ["gpu2.log"]
    assert done.out.count("GPU2:INFO | [GPU 2] Step [") == 2  # steps 0 and 3
    assert "Step [" in (in_dir / "my.log").read_text()
    assert not (mine / "tb").exists()
    assert "def " in done.out
    assert "def " not in plain.out
