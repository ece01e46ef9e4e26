"""What the loop costs: CPU time per step of lockstep, HF Trainer and Lightning over a bare PyTorch loop.

The same model (2 layers, width 64), the same batch (4 x 64 tokens), AdamW, clip 1.0, a log line every step, in one
thread. After every four steps of a contender the bare loop makes four of its own, so that both meet the machine in the
same mood; a run gives the median of the differences of a turn from the bare ones before and after it. Where a model
lies in memory is worth 0.1 ms, so there are several runs, in half of which the bare loop makes its model first; the
figure is their median.
Usage: python benchmarks/loop.py [--runs 8] [--rounds 60] [--limit MS] [--anyway] [--burden MS]
The exit code is 1 when lockstep costs more than the limit over bare PyTorch, and when the machine is busy.
Needs the extra `bench` (pip install lightning); a contender that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import busy
import torch
from torch import nn

from lockstep.config.load import load
from lockstep.contracts import StepRecord
from lockstep.engine.build import plan
from lockstep.engine.prepare import prepare
from lockstep.engine.train import train
from lockstep.errors import LockstepError
from lockstep.models.build import build

ROWS, CONTEXT, LR = 4, 64, 1e-3
LIMIT_MS = 0.3  # of CPU time per step over the bare loop
TURN_STEPS = 4  # of one, nobody's caches are warm; of many, the machine has changed meanwhile
WARM_UP_TURNS = 10
REST_SECONDS = 0.002  # at the end of a turn: what threads beside it still do for it is part of it
Hook = Callable[[], None]  # to be called after each step


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


Contender = Callable[[Setting, Hook], None]


def mean_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], tokens[:, 1:]) / (tokens.shape[0] * (tokens.shape[1] - 1))


def bare(setting: Setting) -> Iterator[None]:
    """What one would write by hand, a step at a time: prefetched batches, loss printed every step."""
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
    for step in itertools.count():
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(model, setting.batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print(f"step {step} loss {loss.item():.4f} norm {norm.item():.4f}")
        yield


class Listener:
    """Hears of each step of ours, where its records are written."""

    def __init__(self, step_done: Hook) -> None:
        self.step_done = step_done

    def write(self, record: StepRecord) -> None:
        del record
        self.step_done()

    def event(self, kind: str, fields: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def ours(setting: Setting, step_done: Hook) -> None:
    """The product as users run it: step lines, events.jsonl and TensorBoard on."""
    train(load("llama", preset="tiny", flags=setting.flags), [Listener(step_done)])


def hf_trainer(setting: Setting, step_done: Hook) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Told(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            step_done()

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
    Trainer(model=Wrapped(), args=arguments, train_dataset=rows, callbacks=[Told()]).train()


def lightning(setting: Setting, step_done: Hook) -> None:
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

        def on_train_batch_end(self, *_: object) -> None:
            step_done()

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


class Turns:
    """The bare loop, woken after each turn of a contender; CPU time of the whole process in the turns of both."""

    def __init__(self, setting: Setting) -> None:
        self.bare = bare(setting)
        self.steps, self.since = 0, time.process_time()
        self.own_ms, self.bare_ms = list[float](), list[float]()  # a step

    def step_done(self) -> None:
        self.steps += 1
        if self.steps % TURN_STEPS == 0:
            self.own_ms.append(self._lap())
            for _ in range(TURN_STEPS):
                next(self.bare)
            self.bare_ms.append(self._lap())

    def _lap(self) -> float:
        time.sleep(REST_SECONDS)
        since, self.since = self.since, time.process_time()
        return 1e3 * (self.since - since) / TURN_STEPS


class Figures(NamedTuple):
    """Milliseconds of a step in one run, medians of its turns; or in several runs, the medians of theirs."""

    own: float
    bare: float
    over: float


def figures(own: Sequence[float], beside: Sequence[float]) -> Figures:
    """Of turns that alternate: a turn less the one after it, and less the one before it, so that a drift cancels.

    Less the mean of both would be less than it is, since a hiccup of the machine is in two turns rather than in one.
    """
    neighbours = [*zip(own, beside, strict=True), *zip(own[1:], beside, strict=False)]
    over = statistics.median(mine - other for mine, other in neighbours)
    return Figures(statistics.median(own), statistics.median(beside), over)


def compare(contender: Contender, setting: Setting, *, bare_first: bool, burden_ms: float = 0.0) -> Figures:
    """One run of a contender, with the bare loop in between. The burden is CPU time added to each of its steps."""
    turns = Turns(setting)

    def step_done() -> None:
        until = time.thread_time() + burden_ms / 1e3
        while burden_ms and time.thread_time() < until:
            pass
        turns.step_done()

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if bare_first:
            next(turns.bare)
        contender(setting, step_done)
    counted = slice(WARM_UP_TURNS, -1)  # ours tells of its last two steps at once
    return figures(turns.own_ms[counted], turns.bare_ms[counted])


def show(name: str, runs: Sequence[Figures]) -> float:
    """A row of the table; what a step costs over the bare loop."""
    own, beside, over = (statistics.median(column) for column in zip(*runs, strict=True))
    low, *_, high = sorted(run.over for run in runs)
    print(f"{name:14}{own:9.3f}{beside:9.3f}{own / beside:7.2f}{over:+11.3f}   {low:+.3f} to {high:+.3f}")
    return over


def verdict(over_ms: float, limit_ms: float) -> int:
    """Say whether the limit is kept; the exit code."""
    good = over_ms <= limit_ms
    print(
        f"{'ok' if good else 'TOO SLOW'}: lockstep costs {over_ms:+.3f} ms a step over bare PyTorch, limit {limit_ms}"
    )
    return 0 if good else 1


def installed() -> dict[str, Contender]:
    """Who competes with the bare loop."""
    contenders: dict[str, Contender] = {"lockstep": ours}
    for name, package, contender in (("HF Trainer", "transformers", hf_trainer), ("Lightning", "lightning", lightning)):
        if importlib.util.find_spec(package):
            contenders[name] = contender
        else:
            print(f"{name} is left out: pip install {package}")
    return contenders


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8, help="of each contender")
    parser.add_argument("--rounds", type=int, default=60, help=f"of a run: turns of {TURN_STEPS} steps")
    parser.add_argument("--limit", type=float, default=LIMIT_MS, metavar="MS")
    busy.add_anyway(parser)
    parser.add_argument(
        "--burden", type=float, default=0.0, metavar="MS", help="add CPU time to each of our steps, to see it found"
    )
    options = parser.parse_args(arguments)
    if min(options.runs, options.rounds) < 2:
        parser.error("--runs and --rounds: at least 2")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, list[Figures]] = {}
    try:
        busy.check_quiet([], anyway=options.anyway)
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(Path(folder), TURN_STEPS * (WARM_UP_TURNS + options.rounds + 1))
            for name, contender in installed().items():
                burden = options.burden if contender is ours else 0.0
                found[name] = [
                    compare(contender, setting, bare_first=run % 2 == 1, burden_ms=burden)
                    for run in range(options.runs)
                ]
        noises = busy.check_quiet([], anyway=options.anyway)  # it may have become busy on the way
    except LockstepError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}; {'; '.join(noises) or 'the machine was quiet'}")
    print(f"{'ms CPU a step':14}{'own':>9}{'bare':>9}{'ratio':>7}{'over bare':>11}   runs")
    over = {name: show(name, runs) for name, runs in found.items()}
    return verdict(over["lockstep"], options.limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
