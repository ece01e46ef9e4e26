"""A LLaDA of the hub: its weights, its shape and its tokenizer by name, nothing of it run, and the hub asked once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from lockstep.data.tokenize import load_tokenizer
from lockstep.errors import ExitCode
from tests.conftest import Outcome
from tests.data.small_llada import EOS, EOT, MASK, START, write_tokenizer
from tests.data.stories import story
from tests.hub.server import LoopbackHub
from tests.hub.test_models import CANARY

NAME = "acme/llada"
ROWS, WIDTH, INNER, LAYERS = 288, 32, 64, 2
QUICK = (
    "training.max_steps=3", "training.eval_batches=1", "training.context_length=32", "report.tensorboard=false",
    "data.data_path=input.txt", "data.tokenizer_name=null", f"model.model_path={NAME}", "model.init=pretrained",
)  # fmt: skip
Cli = Callable[..., Outcome]


def weights() -> dict[str, torch.Tensor]:
    """Under LLaDA's names."""
    made = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made) * 0.02

    start = "model.transformer"
    found = {f"{start}.wte.weight": drawn(ROWS, WIDTH), f"{start}.ln_f.weight": torch.ones(WIDTH),
             f"{start}.ff_out.weight": drawn(ROWS, WIDTH)}  # fmt: skip
    for layer in range(LAYERS):
        block = f"{start}.blocks.{layer}"
        found |= {f"{block}.{name}.weight": torch.ones(WIDTH) for name in ("attn_norm", "ff_norm")}
        found |= {f"{block}.{name}.weight": drawn(WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        found |= {f"{block}.{name}.weight": drawn(INNER, WIDTH) for name in ("ff_proj", "up_proj")}
        found[f"{block}.ff_out.weight"] = drawn(WIDTH, INNER)
    return found


def add_llada(loopback: LoopbackHub, folder: Path, **tokenizer: Any) -> Path:
    """A repository as LLaDA's are; returns the file that its code would write, were it ever run."""
    touched = folder / "touched"
    config = {
        "model_type": "llada", "architectures": ["LLaDAModelLM"], "auto_map": {"AutoModel": "modeling_llada.LLaDA"},
        "d_model": WIDTH, "n_heads": 2, "n_kv_heads": 2, "n_layers": LAYERS, "mlp_hidden_size": INNER,
        "vocab_size": ROWS, "embedding_size": ROWS, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "weight_tying": False, "include_bias": False,
        "max_sequence_length": 128, "layer_norm_type": "rms", "activation_type": "silu", "block_type": "llama",
        "rope": True, "alibi": False, "scale_logits": False,
    }  # fmt: skip
    files: dict[str, str | bytes] = {
        "config.json": json.dumps(config),
        "model.safetensors": save(weights()),
        "modeling_llada.py": f"import pathlib; pathlib.Path({str(touched)!r}).touch()",
    }
    if tokenizer.pop("with_tokenizer", True):
        made = write_tokenizer(folder / "tokenizer", **tokenizer)
        files |= {path.name: path.read_bytes() for path in made.iterdir()}
    loopback.add(NAME, files, kind="models")
    return touched


@pytest.fixture
def text(in_dir: Path) -> Path:
    (in_dir / "input.txt").write_text("\n".join(story(index) for index in range(60)), encoding="utf-8")
    return in_dir


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event["loss"] for event in events if event["kind"] == "step"]


def test_it_trains_by_its_name_and_the_second_time_without_the_hub(
    lockstep: Cli, loopback: LoopbackHub, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = add_llada(loopback, tmp_path)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    first = lockstep("train", "llada", "tiny", "--name", "one", *QUICK)
    assert first.code == ExitCode.DONE, first.text
    assert "asks for code of its own (auto_map), which is never run" in first.text
    assert not touched.exists()
    fetched = " ".join(loopback.fetched(NAME))
    assert "modeling_llada.py" not in fetched
    assert "tokenizer.json" in fetched
    found = losses(text / "runs/one")
    about = json.loads((text / "runs/one/config.json").read_text(encoding="utf-8"))["config"]
    assert about["data"]["tokenizer_name"] == NAME
    for path in (path for path in text.rglob("*") if path.is_file()):
        assert CANARY.encode() not in path.read_bytes(), path
    loopback.stop()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = lockstep("train", "llada", "tiny", "--name", "two", *QUICK)
    assert again.code == ExitCode.DONE, again.text
    assert losses(text / "runs/two") == found
    other = lockstep("train", "llada", "tiny", "--name", "three", *QUICK, "model.init=random")
    assert other.code == ExitCode.DONE, other.text
    assert losses(text / "runs/three") != found, "the control: the weights of the hub were used"


def test_windows_in_the_ids_of_the_model(lockstep: Cli, loopback: LoopbackHub, text: Path, tmp_path: Path) -> None:
    """Item 109: the model's own tokenizer."""
    add_llada(loopback, tmp_path)
    words = ("--data-path", "input.txt", "--model-path", NAME, "--tokenizer-name", "null", "--init", "pretrained")
    made = lockstep("prepare", "llada", "tiny", "--to", "shakespeare_processed", *words)
    assert made.code == ExitCode.DONE, made.text
    folder = text / "shakespeare_processed"
    about = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    expected = {"vocab_size": ROWS, "mask_token": MASK, "eos_token": EOS, "pad_token": EOS, "model": NAME}
    assert expected.items() <= about.items()
    own = load_tokenizer(tmp_path / "tokenizer")
    assert about["tokenizer"] == own.definition()
    read = "".join(own.decode(row) for row in np.load(folder / "val_data.npy").tolist())
    assert any(read[start : start + 40] in (text / "input.txt").read_text() for start in range(20))
    (text / "input.txt").unlink()
    loopback.forget()
    ended = lockstep("train", "llada", "tiny", *QUICK, f"data.data_path={folder}", "training.context_length=64")
    assert ended.code == ExitCode.DONE, ended.text
    assert "tokenizer" not in " ".join(loopback.fetched(NAME)), "it lies in the folder"


def test_without_its_tokenizer_weights_are_not_trained(
    lockstep: Cli, loopback: LoopbackHub, text: Path, tmp_path: Path
) -> None:
    add_llada(loopback, tmp_path, with_tokenizer=False)
    refused = lockstep("train", "llada", "tiny", *QUICK)
    assert refused.code == ExitCode.NOT_FOUND
    assert f"no tokenizer of {NAME}" in refused.err
    assert "other ids mean other words" in refused.err
    assert not (text / "runs").exists()


@pytest.mark.parametrize("template", ["in the configuration", "in a file of its own", "none"])
def test_conversations_by_the_template_of_the_model(
    lockstep: Cli, loopback: LoopbackHub, text: Path, tmp_path: Path, template: str
) -> None:
    plain = {"template": None} if template == "none" else {}
    add_llada(loopback, tmp_path, alone=template == "in a file of its own", **plain)
    lines = [json.dumps({"prompt": f"What is {number}?", "answer": f"It is {number}."}) for number in range(40)]
    (text / "talk.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = (*QUICK, "data.data_path=talk.jsonl", "data.documents=answers", "training.context_length=128")
    made = lockstep("prepare", "llada", "tiny", "--to", "w", *words)
    assert made.code == ExitCode.DONE, made.text
    rows = np.load(text / "w" / "train_data.npy")
    for token in (START, EOT):
        assert (rows == token).any() == (template != "none")
    loopback.forget()
    assert lockstep("prepare", "llada", "tiny", "--to", "w", *words).code == ExitCode.DONE
    assert loopback.asked == []


def test_conversations_of_the_hub(lockstep: Cli, loopback: LoopbackHub, text: Path) -> None:
    turns = [
        [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "So."}] for number in range(40)
    ]
    loopback.add("acme/talks", {"train.jsonl": "\n".join(json.dumps({"messages": each}) for each in turns)})
    words = ("data.dataset_name=acme/talks", "data.documents=answers")
    made = lockstep("prepare", "llada", "tiny", "--to", "w", *words)
    assert made.code == ExitCode.DONE, made.text
    rows, prompts = (np.load(text / "w" / f"train_{name}.npy") for name in ("data", "prompt_lengths"))
    assert len(rows) == 38
    for row, prompt in zip(rows.tolist(), prompts.tolist(), strict=True):
        assert bytes(row[prompt : prompt + 3]) == b"So."
        assert bytes(row[:prompt]).decode().strip().endswith("?")
    loopback.add("acme/texts", {"train.jsonl": "\n".join(json.dumps({"text": str(each)}) for each in turns)})
    refused = lockstep("prepare", "llada", "tiny", "data.dataset_name=acme/texts", "data.documents=answers")
    assert refused.code == ExitCode.DATA
    assert "train.jsonl:1: no prompt with its answer: its fields are text" in refused.err
