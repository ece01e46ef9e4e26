"""What the loop costs: CPU time per step of lockstep, HF Trainer and Lightning over a bare PyTorch loop.

The same model (2 layers, width 64), the same batch (4 x 64 tokens), AdamW, clip 1.0, a log line every step, in one
process, interleaved. Usage: python benchmarks/loop.py [--steps 200] [--rounds 5] [--limit MS]
The exit code is 1 when lockstep costs more than the limit over bare PyTorch.
Needs the extra `bench` (pip install lightning); a contender that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn

from lockstep.config.load import load
from lockstep.engine.build import plan
from lockstep.engine.prepare import prepare
from lockstep.engine.train import train
from lockstep.models.build import build

ROWS, CONTEXT, LR = 4, 64, 1e-3
LIMIT_MS = 0.3  # of CPU time per step over the bare loop


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Setting:
    """One model and one table of rows for all contenders."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.flags = [
            ("training.max_steps", str(steps)),
            ("training.batch_size", str(ROWS)),
            ("training.context_length", str(CONTEXT)),
            ("training.grad_accum_nums", "1"),
            ("training.learning_rate", str(LR)),
            ("training.eval_interval", "0"),
            ("training.eval_batches", "1"),
            ("training.save_interval", "0"),
            ("report.sample_prompt", ""),
            ("system.device", "cpu"),
            ("system.threads", "1"),
            ("data.cache_dir", str(folder / "cache")),
            ("run.out", str(folder / "runs")),
        ]
        self.plan = plan(load("llama", preset="tiny", flags=self.flags), torch.device("cpu"))
        prepared = prepare(self.plan.config, self.plan.objective, vocab_limit=self.plan.shape.vocab_size)
        self.tokens = torch.from_numpy(prepared.train.columns["tokens"][: ROWS * 256].astype("int64"))

    def model(self) -> nn.Module:
        return build(
            self.plan.config.model, self.plan.shape, device=torch.device("cpu"), dtype_name="fp32", seed=1,
            checkpointing=False, deterministic=False, debug=False,
        ).model  # fmt: skip

    def batch(self, step: int) -> torch.Tensor:
        start = step * ROWS % (len(self.tokens) - ROWS)
        return self.tokens[start : start + ROWS]


def mean_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], tokens[:, 1:]) / (tokens.shape[0] * (tokens.shape[1] - 1))


def bare(setting: Setting) -> None:
    """What one would write by hand: prefetched batches, loss printed every step."""
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
    for step in range(setting.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model, setting.batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print(f"step {step} loss {loss.item():.4f} norm {norm.item():.4f}")


def ours(setting: Setting) -> None:
    """The product as users run it: step lines, events.jsonl and TensorBoard on."""
    train(load("llama", preset="tiny", flags=setting.flags))


def hf_trainer(setting: Setting) -> None:
    from transformers import Trainer, TrainingArguments

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = setting.model()

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            del labels
            return {"loss": mean_loss(self.inner, tokens)}

    rows = [{"tokens": row, "labels": row[:1]} for row in setting.tokens]
    arguments = TrainingArguments(
        output_dir=str(setting.folder / "hf"), max_steps=setting.steps, per_device_train_batch_size=ROWS,
        learning_rate=LR, lr_scheduler_type="cosine", logging_steps=1, save_strategy="no", report_to=["tensorboard"],
        use_cpu=True, disable_tqdm=True, optim="adamw_torch_fused", remove_unused_columns=False,
    )  # fmt: skip
    Trainer(model=Wrapped(), args=arguments, train_dataset=rows).train()


def lightning(setting: Setting) -> None:
    import lightning as pl
    from lightning.pytorch.loggers import CSVLogger

    class Wrapped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = setting.model()

        def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
            loss = mean_loss(self.inner, tokens)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> dict[str, object]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LR, fused=True)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    loader = torch.utils.data.DataLoader(list(setting.tokens), batch_size=ROWS)
    trainer = pl.Trainer(
        max_steps=setting.steps, accelerator="cpu", log_every_n_steps=1, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, gradient_clip_val=1.0,
        logger=CSVLogger(str(setting.folder / "pl")),
    )  # fmt: skip
    trainer.fit(Wrapped(), loader)


def cpu_of(contender: Callable[[Setting], None], setting: Setting) -> float:
    """CPU seconds of one run."""
    before = cpu_seconds()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        contender(setting)
    return cpu_seconds() - before


def per_step_ms(runs: list[tuple[float, float]], steps: int) -> float:
    """Of long runs less short ones, so that set-up cancels; of each the quickest, as neighbours only ever slow it."""
    long, short = (min(seconds) for seconds in zip(*runs, strict=True))
    return 1e3 * (long - short) / steps


def verdict(over_ms: float, limit_ms: float) -> int:
    """Say whether the limit is kept; the exit code."""
    good = over_ms <= limit_ms
    print(
        f"{'ok' if good else 'TOO SLOW'}: lockstep costs {over_ms:+.3f} ms a step over bare PyTorch, limit {limit_ms}"
    )
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=LIMIT_MS, metavar="MS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    contenders: dict[str, Callable[[Setting], None]] = {"bare PyTorch": bare, "lockstep": ours}
    for name, package, contender in (("HF Trainer", "transformers", hf_trainer), ("Lightning", "lightning", lightning)):
        if importlib.util.find_spec(package):
            contenders[name] = contender
        else:
            print(f"{name} is left out: pip install {package}")
    with tempfile.TemporaryDirectory() as folder:
        long, short = Setting(Path(folder), options.steps), Setting(Path(folder), options.steps // 5)
        for contender in contenders.values():  # imports and first calls are nobody's step
            cpu_of(contender, short)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, contender in contenders.items():
                runs[name].append((cpu_of(contender, long), cpu_of(contender, short)))
    load_average = os.getloadavg()[0]
    print(
        f"python {sys.version.split()[0]}, torch {torch.__version__}, load {load_average:.1f} on {os.cpu_count()} cores"
    )
    times = {name: per_step_ms(found, long.steps - short.steps) for name, found in runs.items()}
    base = times["bare PyTorch"]
    print(f"{'':14}{'ms CPU/step':>12}{'over bare':>12}{'ratio':>8}")
    for name, ms in times.items():
        print(f"{name:14}{ms:12.3f}{ms - base:+12.3f}{ms / base:8.2f}")
    return verdict(times["lockstep"] - base, options.limit)


if __name__ == "__main__":
    sys.exit(main())
