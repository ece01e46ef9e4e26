"""The workloads of each level: what they cover, that they fit, that they need no network and no torch to be chosen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.check.records import Workload
from lockstep.check.workloads import GIB, LEVELS, configuration, named, workloads
from lockstep.engine.choices import is_of_hub
from lockstep.errors import ConfigError
from lockstep.models import shapes
from lockstep.models.memory import memory_bytes

H200, A100, T4 = (130 * GIB, (9, 0)), (38 * GIB, (8, 0)), (15 * GIB, (7, 5))
CARDS = {"H200": H200, "A100": A100, "T4": T4}


def of(level: str, card: str) -> dict[str, Workload]:
    memory, capability = CARDS[card]
    return {each.name: each for each in workloads(level, "cuda", memory, capability)}


def test_the_default_level_covers_the_issue() -> None:
    here = of("default", "H200")
    wanted = {"production", "attention", "memory", "pulse", "mlm", "llada", "ad", "fp16", "fp32", "strict_flash"}
    assert set(here) == wanted | {"attention_probe", "fp8_probe"}
    assert next(iter(here)) == "production"
    assert here["production"].settings["model.num_layers"] == 4
    assert here["production"].settings["training.context_length"] == 8192
    assert here["memory"].pattern_bytes > 0.88 * H200[0]
    assert [here[name].settings["training.precision"] for name in ("production", "fp16", "fp32")] == [
        "bf16", "fp16", "fp32",
    ]  # fmt: skip
    assert here["pulse"].pulse_seconds > 0


def test_the_other_levels() -> None:
    quick, deep = of("quick", "H200"), of("deep", "H200")
    assert set(quick) == {"production", "attention_probe", "fp8_probe", "memory"}
    assert quick["production"].settings["training.context_length"] == 2048
    assert deep.keys() == of("default", "H200").keys()
    assert all(deep[name].steps == 10 * each.steps for name, each in of("default", "H200").items())


def test_a_card_is_asked_for_what_it_has() -> None:
    assert "fp8_probe" not in of("default", "A100")
    assert "attention_probe" not in of("default", "T4")
    assert of("default", "T4")["production"].settings["training.precision"] == "fp16"


@pytest.mark.parametrize("card", ["H200", "A100", "T4"])
@pytest.mark.parametrize("level", ["quick", "default"])
def test_all_of_it_fits_by_the_estimate(level: str, card: str) -> None:
    for each in of(level, card).values():
        if each.preset == "production":
            config = configuration(each, Path("data"), device="cuda").config
            length = config.training.context_length
            need = memory_bytes(
                shapes.resolve(config.model, context_length=length),
                batch_size=config.training.batch_size,
                context_length=length,
                dtype_name=config.training.precision,
                checkpointing=False,
                compiled=True,
            )
            assert need.total <= 0.96 * CARDS[card][0], each.name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_configuration_is_whole_and_needs_no_hub(level: str, device: str) -> None:
    for each in workloads(level, device, *H200):
        assert "/" not in str(dict(each.settings)), "a path would make equal checks look different"
        if each.kind in ("train", "memory"):
            config = configuration(each, Path("data"), device=device).config
            assert config.system.deterministic
            assert config.training.max_steps == each.steps
            assert config.model.init == "random"
            assert shapes.known(config.model.model_path) is not None
            if each.family != "ad":
                assert not is_of_hub(config.data.dataset_name)
                assert config.data.tokenizer_name in ("bytes", "wordpiece", None)
                assert (config.data.tokenizer_name is None) == (config.data.dataset_name == "synthetic")
                assert config.data.cache_dir == "data"


def test_some_of_them_by_name() -> None:
    here = workloads("default", "cpu")
    assert [each.name for each in named(here, "memory, llama,memory")] == ["memory", "llama"]
    with pytest.raises(ConfigError, match="no workload 'lama'") as told:
        named(here, "lama")
    assert "llama" in told.value.hint
    with pytest.raises(ConfigError, match="names no workload"):
        named(here, " , ")


def test_choosing_needs_no_torch() -> None:
    words = "import sys; from lockstep.check import errand, workloads; workloads.workloads('default', 'cuda', 1 << 36)"
    subprocess.run([sys.executable, "-c", f"{words}; assert 'torch' not in sys.modules"], check=True)
