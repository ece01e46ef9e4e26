"""Checkpoints as other programs have written them, in the five documented layouts: imported, trained on, exported."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import legacy
from lockstep.engine.legacy import EXTRA_KEY
from lockstep.errors import DataError
from lockstep.runtime import torch_file
from tests.gates.training import run
from tests.ranks.elastic import FAMILIES, SHARED

pytestmark = pytest.mark.usefixtures("shared_cache")

Content = dict[str, Any]
WIDTH, INNER = 16, 24
DECODER = {
    "tok_embed.weight": (300, WIDTH),
    "layers.0.attention_norm.weight": (WIDTH,),
    "layers.0.attention.wq.weight": (WIDTH, WIDTH),
    "layers.0.attention.wk.weight": (WIDTH // 2, WIDTH),
    "layers.0.attention.wv.weight": (WIDTH // 2, WIDTH),
    "layers.0.attention.wo.weight": (WIDTH, WIDTH),
    "layers.0.mlp_norm.weight": (WIDTH,),
    "layers.0.mlp.w1.weight": (INNER, WIDTH),
    "layers.0.mlp.w2.weight": (WIDTH, INNER),
    "layers.0.mlp.w3.weight": (INNER, WIDTH),
    "norm.weight": (WIDTH,),
    "output.weight": (300, WIDTH),
}
BLOCK = "model.transformer.blocks.0"
DENOISER = {  # LLaDA's own names, in the order in which its program lists them
    "model.transformer.wte.weight": (512, WIDTH),
    "model.transformer.ln_f.weight": (WIDTH,),
    f"{BLOCK}.attn_out.weight": (WIDTH, WIDTH),
    f"{BLOCK}.ff_out.weight": (WIDTH, INNER),
    f"{BLOCK}.attn_norm.weight": (WIDTH,),
    f"{BLOCK}.ff_norm.weight": (WIDTH,),
    f"{BLOCK}.q_proj.weight": (WIDTH, WIDTH),
    f"{BLOCK}.k_proj.weight": (WIDTH, WIDTH),
    f"{BLOCK}.v_proj.weight": (WIDTH, WIDTH),
    f"{BLOCK}.ff_proj.weight": (INNER, WIDTH),
    f"{BLOCK}.up_proj.weight": (INNER, WIDTH),
    "model.transformer.ff_out.weight": (512, WIDTH),
}
AGENT = {
    "tok_embed.weight": (43, 32),
    "layers.0.attention_norm.weight": (32,),
    "layers.0.attention.wqkv.weight": (96, 32),
    "layers.0.attention.wo.weight": (32, 32),
    "layers.0.mlp_norm.weight": (32,),
    "layers.0.mlp.w1.weight": (64, 32),
    "layers.0.mlp.w2.weight": (32, 64),
    "norm.weight": (32,),
    "output.weight": (5, 32),
    "taken_embed.weight": (5, 32),
    "outcome.weight": (34, 32),
}
DONE = 3  # steps that the other program has made
LAST: dict[str, Any] = {"training.max_steps": DONE + 1, "training.learning_rate": 1e-9, "model.dropout": 0.0}


def made_elsewhere(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Content, Content, Content]:
    """Weights, optimizer and scheduler after some steps of plain torch. The moments are large enough to be known by."""
    draws = torch.Generator().manual_seed(7)
    weights = {name: torch.nn.Parameter(0.02 * torch.randn(shape, generator=draws)) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for _ in range(DONE):
        for weight in weights.values():
            weight.grad = 100 * torch.randn(weight.shape, generator=draws)
        optimizer.step()
        scheduler.step()
    told = {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}
    return {name: weight.detach() for name, weight in weights.items()}, optimizer.state_dict(), told


def model_check(weights: Content, optimizer: Content, scheduler: Content) -> Content:
    """.checkpoints/step_<N>.pt, also interrupted.pt, error.pt and nan_grad_step_<N>.pt; no loss was the best yet."""
    return {
        "global_step": DONE, "epoch": 0, "model_state_dict": weights, "optimizer_state_dict": optimizer,
        "scheduler_state_dict": scheduler, "best_loss": float("inf"), "config": {"model": {"hidden_size": WIDTH}},
    }  # fmt: skip


def of_an_epoch(weights: Content, optimizer: Content, scheduler: Content) -> Content:
    """checkpoint_epoch_<N>.pt."""
    return {
        "epoch": 1, "model_state_dict": weights, "optimizer_state_dict": optimizer, "scheduler_state_dict": scheduler,
        "train_losses": [5.0], "val_losses": [float("inf")], "vocab_size": 512, "mask_token": 511,
    }  # fmt: skip


def of_an_agent(weights: Content, optimizer: Content, scheduler: Content) -> Content:
    """ckpt-<step>.pt; accelerate has moved its rate on once for each of 4 processes."""
    moved = {**scheduler, "last_epoch": 4 * DONE}
    return {"step": DONE, "config": {"env": "darkroom"}, "model": weights, "optimizer": optimizer, "lr_sched": moved}


Write = Callable[[Content, Content, Content], Content]
LAYOUTS: dict[str, tuple[Write, Mapping[str, tuple[int, ...]], tuple[str, str], str]] = {
    "llama": (model_check, DECODER, ("model_state_dict", "optimizer_state_dict"), "documented/step_4.pt"),
    "llada": (of_an_epoch, DENOISER, ("model_state_dict", "optimizer_state_dict"), "results/checkpoint_epoch_1.pt"),
    "ad": (of_an_agent, AGENT, ("model", "optimizer"), "documented/ckpt-4.pt"),
}


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("histories")


def trained_on(family: str, folder: Path, histories: Path, point: Path | None, **more: Any) -> None:
    """One step more, and the documented files of it."""
    named, own = FAMILIES[family]
    places = {"training.checkpoint_dir": str(folder / "documented"), "report.results_dir": str(folder / "results")}
    own = {key: value for key, value in own.items() if key != "training.epochs"}
    own |= {"data.data_path": str(histories)} if family == "ad" else {}
    run(folder / "run", {**SHARED, **own, "model.num_layers": 1, **LAST, **places, **more}, family=named, point=point)


@pytest.mark.parametrize("family", ["llama", "llada", pytest.param("ad", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "prefix", ["module._orig_mod.", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", "_orig_mod."))]
)
def test_a_file_of_another_program_is_trained_on_and_written_in_its_own_form(
    family: str, prefix: str, tmp_path: Path, histories: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Contract items 143, 163: every weight at its place, the step, the same keys and shapes again, on the CPU."""
    write, shapes, (models, optimizers), exported = LAYOUTS[family]
    weights, optimizer, scheduler = made_elsewhere(shapes)
    content = write({prefix + name: tensor for name, tensor in weights.items()}, optimizer, scheduler)
    torch.save(content, tmp_path / "theirs.pt")
    with caplog.at_level(logging.WARNING):
        trained_on(family, tmp_path, histories, tmp_path / "theirs.pt")
    assert "its weights and step are used, AdamW's moments begin at zero" in caplog.text

    ours = torch.load(tmp_path / exported, weights_only=True)
    assert ours.keys() - {EXTRA_KEY} == content.keys()
    assert {name: tuple(tensor.shape) for name, tensor in ours[models].items()} == shapes
    assert all(torch.allclose(ours[models][name], weights[name], atol=1e-6) for name in shapes)
    assert ours[EXTRA_KEY]["progress"]["step"] == ours[EXTRA_KEY]["applied_steps"] == DONE + 1
    found = ours[optimizers]["state"]
    assert {int(slot["step"]) for slot in found.values()} == {DONE + 1}
    assert all(float(slot["exp_avg"].abs().max()) < 1 for slot in found.values()), "theirs were about 10"
    back = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(slot["exp_avg"].shape)) for slot in found.values()])
    back.load_state_dict({"state": found, "param_groups": back.state_dict()["param_groups"]})  # plain torch reads it


@pytest.mark.parametrize("prefix", ["module._orig_mod.", pytest.param("", marks=pytest.mark.slow)])
def test_the_weights_of_an_encoder(prefix: str, tmp_path: Path, histories: Path) -> None:
    """mlm_model.pth: a plain state_dict in a folder, which is where a model comes from."""
    trained_on("mlm", tmp_path / "first", histories, None)
    state = torch.load(tmp_path / "first" / "results" / "mlm_model.pth", weights_only=True)
    assert {name.partition(".")[0] for name in state} == {"embedding", "encoder", "mlm_head"}
    draws = torch.Generator().manual_seed(3)
    others = {name: 0.02 * torch.randn(tensor.shape, generator=draws) for name, tensor in state.items()}
    others["mlm_head.weight"] = others["embedding.word_embeddings.weight"]
    folder = tmp_path / "theirs"
    folder.mkdir()
    torch.save({prefix + name: tensor for name, tensor in others.items()}, folder / "mlm_model.pth")
    come_from = {"model.init": "pretrained", "model.model_path": str(folder), "model.num_attention_heads": 2}
    trained_on("mlm", tmp_path / "second", histories, None, **come_from)
    ours = torch.load(tmp_path / "second" / "results" / "mlm_model.pth", weights_only=True)
    assert ours.keys() == others.keys()
    assert all(torch.allclose(ours[name], others[name], atol=1e-6) for name in others)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_state_dict": {"a": torch.zeros(2), "module.a": torch.zeros(2)}}, "a is there twice"),
        ({"model_state_dict": {"a": torch.eye(2).to_sparse()}}, "no plain tensor"),
        ({"model_state_dict": {"a": [1, 2]}}, "no plain tensor"),
        ({"model_state_dict": [1]}, "documented form"),
        ({"global_step": float("inf")}, "documented form"),
        ({"scaler_state_dict": {"scale": "large"}}, "documented form"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_name_of_its_file(change: Content, says: str) -> None:
    content = model_check(*made_elsewhere({"a": (2, 2)})) | change
    with pytest.raises(DataError, match=says) as caught:
        legacy.read(content, Path("theirs.pt"), ["a"])
    assert caught.value.where == "theirs.pt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_state_dict": {"tok_embed.weight": torch.zeros(1).expand(1 << 50)}}, "of another model"),
        ({"global_step": -1, "scheduler_state_dict": None}, "do not agree"),
    ],
)
def test_what_is_of_another_model_too(change: Content, says: str, tmp_path: Path, histories: Path) -> None:
    """It is seen when the state is put into the model, before anything changes; a petabyte takes no memory."""
    torch.save(model_check(*made_elsewhere(DECODER)) | change, tmp_path / "theirs.pt")
    with pytest.raises(DataError, match=says) as caught:
        trained_on("llama", tmp_path, histories, tmp_path / "theirs.pt")
    assert caught.value.where == str(tmp_path / "theirs.pt")
    assert not (tmp_path / "documented").exists()


def test_names_are_unwrapped_wherever_they_were_wrapped() -> None:
    names = ("_orig_mod.a.weight", "module.layers.0._orig_mod.b", "_fsdp_wrapped_module.module.c", "modules.d")
    found = torch_file.unwrapped(dict.fromkeys(names, torch.zeros(1)), where="here")
    assert list(found) == ["a.weight", "layers.0.b", "c", "modules.d"]


def test_a_packed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """A small one of those that fill the memory; the same file as torch writes it is read."""
    torch.save({"a": torch.zeros(1 << 16)}, tmp_path / "plain.pt")
    assert torch_file.read(tmp_path / "plain.pt").keys() == {"a"}
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as old,
        zipfile.ZipFile(tmp_path / "theirs.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(DataError, match="claim to hold") as caught:
        torch_file.read(tmp_path / "theirs.pt")
    assert caught.value.where == str(tmp_path / "theirs.pt")
