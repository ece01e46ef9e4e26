"""Configurations on the command line: presets, files, sizes, and the device that will be used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.report.logs import close_logging
from tests.test_cli import shown

Run = Callable[..., Any]


def test_debug_is_preset_debug(lockstep: Run) -> None:
    """Contract item 11."""
    one, two = (lockstep("config", "show", "llama", *words, "--json") for words in (["--debug"], ["--preset", "debug"]))
    assert one.out == two.out
    config = json.loads(one.out)
    assert (config["model"]["num_layers"], config["training"]["max_steps"]) == (2, 10)
    assert (config["training"]["context_length"], config["training"]["learning_rate"]) == (512, 1e-7)
    assert config["debug"]["enabled"] is True


def test_debug_over_another_preset_keeps_the_preset(lockstep: Run) -> None:
    rows = shown(lockstep("config", "show", "llama", "tiny", "--debug", "--log-level", "ERROR").out)
    assert rows["debug.enabled"][0] == "true"
    assert rows["training.max_steps"] == ["20", "preset", "tiny"]
    assert rows["debug.log_level"][0] == '"ERROR"'


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[str]) -> None:
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_no_flag_is_production_where_there_is_a_gpu(
    lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract item 12."""
    fake_smi(in_dir, monkeypatch, ["0, GPU-x, NVIDIA H200, 143771, 143000, 0"])
    bare = lockstep("config", "show", "llama")
    named = lockstep("config", "show", "llama", "production", "--json")
    assert "production preset" in bare.out
    assert lockstep("config", "show", "llama", "--json").out == named.out
    config = json.loads(named.out)
    training = config["training"]
    assert (config["model"]["num_layers"], training["max_steps"], training["context_length"]) == (4, 100, 8192)
    assert (training["learning_rate"], config["debug"]["enabled"]) == (1e-5, False)
    cpu = lockstep("config", "show", "llama", "--device", "cpu")
    assert "The CPU was asked for: running the demo preset" in cpu.out


def test_no_flag_is_demo_where_there_is_none(lockstep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = lockstep("config", "show", "llama")
    assert "No GPUs detected: running the demo preset on the CPU" in result.out
    assert shown(result.out)["training.max_steps"][1:] == ["preset", "demo"]
    assert "preset production" in lockstep("config", "show", "llama", "--device", "cuda").out


def test_files_by_position_or_flag(lockstep: Run, in_dir: Path) -> None:
    (in_dir / "c.yaml").write_text("training: {max_steps: 3}\n")
    for words in (["c.yaml"], ["--config", "c.yaml"], ["tiny", "--config=c.yaml"], ["c.yaml", "--preset", "tiny"]):
        rows = shown(lockstep("config", "show", "llama", *words).out)
        assert rows["training.max_steps"] == ["3", "file", "c.yaml:1:23"]
    assert shown(lockstep("config", "show", "llama", "./c.yaml").out)["training.max_steps"][0] == "3"


def test_presets_of_one_family_by_word_or_flag(lockstep: Run) -> None:
    ours = lockstep("config", "list", "ad").out
    assert ours == lockstep("config", "list", "--family", "ad").out
    assert [line for line in ours.splitlines() if line.endswith(":")] == ["ad:"]


def test_a_file_beside_a_preset_is_told_its_flag(lockstep: Run) -> None:
    assert "  try: --config mine.json\n" in lockstep("train", "llama", "tiny", "mine.json").err
    assert "  try: lockstep train --help\n" in lockstep("train", "llama", "tiny", "mine").err


def test_show_json_can_be_loaded_again(lockstep: Run, in_dir: Path) -> None:
    text = lockstep("config", "show", "llama", "demo", "seed=9", "--json").out
    (in_dir / "again.json").write_text(text)
    assert lockstep("config", "show", "llama", "--config", "again.json", "--json").out == text


def test_a_second_preset_or_file_is_to_be_left_out(lockstep: Run) -> None:
    for word, *flags in (["tiny", "--preset", "demo"], ["a.json", "--config", "b.json"]):
        said = lockstep("train", "llama", word, *flags).err
        assert f"a second preset or file {word!r}\n  try: leave one out, it or {flags[-1]!r}\n" in said


def test_validate_says_what_it_found(lockstep: Run, in_dir: Path) -> None:
    (in_dir / "c.json").write_text('{"training": {"num_workers": 2}}')
    result = lockstep("config", "validate", "c.json", "--preset", "tiny")
    assert result.code == 0
    assert "training.num_workers is read as data.num_workers" in result.out
    assert "c.json: fine" in result.out
    assert "parameters        158,016" in result.out


def test_dry_run_shows_provenance_and_sizes_and_writes_nothing(lockstep: Run, in_dir: Path) -> None:
    """Contract item 13 for `full`: parameters and the memory of weights, gradients and moments."""
    result = lockstep("train", "llama", "full", "--dry-run")
    assert result.code == 0
    assert "parameters        8,030,261,248" in result.out
    assert "119.7 GiB of it weights" in result.out
    assert "tokens per step   65,536" in result.out
    assert not list(in_dir.iterdir())


def test_a_dry_run_gives_the_memory_of_the_run_itself(lockstep: Run, in_dir: Path, shared_cache: Path) -> None:
    from lockstep.config.show import _size

    words = ["train", "llama", "tiny", "--device", "cpu", "--max-steps", "1", "report.tensorboard=false"]
    assert lockstep(*words, "--name", "x").code == 0
    close_logging()
    start = json.loads((in_dir / "runs" / "x" / "events.jsonl").read_text().splitlines()[0])
    memory = _size(sum(start["memory_bytes"].values()))
    assert f"memory per GPU    {memory} estimated" in lockstep(*words, "--dry-run").out
    assert memory not in lockstep(*words, "--dry-run", "--precision", "bf16").out, "the figure tells them apart"


def test_sizes_are_those_of_the_device_that_will_be_used(
    lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(in_dir, monkeypatch, ["0, GPU-x, NVIDIA H200, 143771, 143000, 0"])
    on_gpu, on_cpu = (lockstep("train", "llama", "tiny", "--dry-run", *more).out for more in ([], ["--device", "cpu"]))
    assert "(bf16, GPU)" in on_gpu
    assert "(fp32, CPU)" in on_cpu
    assert "(fp16, CPU)" in lockstep("train", "llama", "tiny", "--dry-run", "--device", "cpu", "--precision=fp16").out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "(fp32, CPU)" in lockstep("train", "llama", "tiny", "--dry-run").out


@pytest.mark.parametrize("visible", ["9", "9,0", "GPU-z", "2,1"])
def test_a_gpu_that_is_not_there_never_becomes_the_cpu(
    lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    fake_smi(in_dir, monkeypatch, [f"{index}, GPU-{index}, H200, 143771, 143000, 0" for index in (0, 1)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for words in (["tiny"], [], ["tiny", "--dry-run"]):
        result = lockstep("train", "llama", *words)
        assert result.code == 2
        assert f"CUDA_VISIBLE_DEVICES={visible} names none of the GPUs 0-1" in result.err
    assert lockstep("train", "llama", "tiny", "--dry-run", "--device", "cpu").code == 0
    (in_dir / "c.json").write_text('{"system": {"device": "cpu"}}')
    assert lockstep("train", "llama", "c.json", "--preset", "tiny", "--dry-run").code == 0


@pytest.mark.parametrize("visible", ["", "-1", "0", "1,9", "GPU-1", "NoDevFiles", "MIG-4711"])
def test_these_values_choose_a_gpu_or_the_cpu_on_purpose(
    lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    fake_smi(in_dir, monkeypatch, [f"{index}, GPU-{index}, H200, 143771, 143000, 0" for index in (0, 1)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert lockstep("train", "llama", "tiny", "--dry-run").code == 0


def test_a_device_number_without_a_gpu_is_refused(lockstep: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (in_dir / "c.json").write_text('{"system": {"device_id": 1}}')
    for words in (["--config", "c.json"], ["--system.device-id", "3"], ["device_id=1", "--device", "cpu"]):
        result = lockstep("train", "llama", "tiny", "--dry-run", *words)
        assert result.code == 2
        assert "needs a GPU" in result.err
    assert lockstep("train", "llama", "tiny", "--dry-run", "device_id=0").code == 0
    fake_smi(in_dir, monkeypatch, [f"{index}, GPU-{index}, H200, 143771, 143000, 0" for index in (0, 1)])
    assert lockstep("train", "llama", "tiny", "--dry-run", "device_id=1").code == 0


def test_explain_knows_the_shapes(lockstep: Run) -> None:
    assert "lockstep/tiny" in lockstep("config", "explain", "model.model_path").out


def test_schema_is_json(lockstep: Run) -> None:
    assert json.loads(lockstep("config", "schema").out)["properties"]["training"]
