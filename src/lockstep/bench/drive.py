"""The real step, driven without a run: warmed up, timed, profiled, and held against this machine's matrix products."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lockstep.bench import rows
from lockstep.bench.anatomy import dissect
from lockstep.bench.figures import Figures, Flops, Subject
from lockstep.config.load import Loaded, replaced, to_dict
from lockstep.contracts import Batch
from lockstep.data.loader import Loader
from lockstep.data.options import HistoryOptions
from lockstep.engine import fitting, graphs, micro_batch, present, shortage
from lockstep.engine.build import (
    Plan,
    cut_batches,
    describe,
    kernels,
    make_loader,
    make_stepper,
    plan,
    with_words,
)
from lockstep.engine.prepare import Prepared, prepare
from lockstep.engine.step import Pending, Stepper
from lockstep.engine.timing import Clock
from lockstep.errors import NonFiniteError
from lockstep.models.build import Built
from lockstep.runtime import determinism, env, hardware
from lockstep.runtime.group import Group
from lockstep.runtime.marks import NoMarks
from lockstep.runtime.precision import DTYPES, without_float8

WARM_UP, PROFILED = 3, 3  # steps
PRODUCTS = {  # rows, inner, columns; the small ones first
    "cuda": ((2048, 2048, 2048), (8192, 8192, 8192), (16384, 8192, 4096)),
    "cpu": ((256, 256, 256), (1024, 1024, 1024)),
}
BLOCKS, BLOCK_PRODUCTS, BLOCK_SECONDS = 7, 10, 0.1  # at most
PATIENCE_SECONDS = 5.0  # a shape that would take longer is left out: many CPUs are slow in bf16, many cards in fp64
WIDE = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Ready:
    """All that a step needs."""

    plan: Plan
    stepper: Stepper
    built: Built
    loader: Loader


@dataclass(frozen=True)
class Measured:
    """Steps that were timed."""

    seconds: Sequence[float]
    tokens: float  # of one step, on average
    rows: float
    head_share: float  # of the tokens: those with logits


def measure(loaded: Loaded, *, steps: int, busy: Sequence[str] = ()) -> Figures:
    """Every figure of a configuration, on one device."""
    system = loaded.config.system
    device = hardware.pick_device(system.device, hardware.own_index(env.detect(), system.device_id))
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder,
        determinism.mode(device, deterministic=system.deterministic, threads=system.threads),
    ):
        changed = {**rows.settings(loaded.config, Path(folder)), "training.max_steps": WARM_UP + steps + PROFILED}
        if hasattr(loaded.config.training, "epochs"):
            changed["training.epochs"] = 0
        planned = plan(replaced(loaded.config, changed), device)
        fitting.check_memory(micro_batch.least(planned), planned.shape, device)
        products = product_flops(device, planned.config.training.precision)
        try:
            with ready(planned, Path(folder)) as made:
                return _figures(made, loaded, steps=steps, products=products, busy=busy)
        except Exception as error:
            if not shortage.is_shortage(error):
                raise
            raise shortage.explain(error, shortage.work_of(planned, env.detect())) from error


@contextlib.contextmanager
def ready(planned: Plan, folder: Path) -> Iterator[Ready]:
    """The run that a plan describes, up to its first step, on made rows; what that measures first, this does too."""
    planned, prepared = with_rows(planned, folder)
    alone, about = Group(), describe(planned, prepared.key)
    stepper, built = make_stepper(planned, alone, NoMarks())
    cut = partial(cut_batches, planned, prepared, alone, 0)
    place = micro_batch.Place(planned, built, stepper, alone, about | kernels(planned, built), cut)
    planned, built = micro_batch.settled(place)
    loader = make_loader(planned, prepared, start_step=0)
    try:
        yield Ready(planned, stepper, built, loader)
    finally:
        loader.close()


def with_rows(planned: Plan, folder: Path) -> tuple[Plan, Prepared]:
    """The plan with an objective that knows its rows, and these."""
    config, objective = planned.config, planned.objective
    if isinstance(config.data, HistoryOptions):
        prepared = prepare(config, objective, vocab_limit=planned.shape.vocab_size)
        return with_words(planned, prepared), prepared
    words = rows.vocabulary(planned.shape.vocab_size)
    if told := getattr(objective, "with_vocabulary", None):
        objective = told(words)
    objective = graphs.steadied(objective, planned.shape, planned.device)
    table = rows.make_table(folder / "rows", objective, config, vocab_size=planned.shape.vocab_size)
    prepared = Prepared(table, table, None, "made", folder, "made rows", ())
    return replace(planned, objective=objective), prepared


def _figures(made: Ready, loaded: Loaded, *, steps: int, products: float, busy: Sequence[str]) -> Figures:
    device, stepper, config = made.plan.device, made.stepper, made.plan.config
    since, first = time.perf_counter(), next(made.loader)
    stepper.rehearse(first)
    graphs.choose(stepper, first, compiles=config.model.compile != "off")
    drive(stepper, made.loader, begin=0, steps=WARM_UP)
    synchronize(device)
    warmed = time.perf_counter() - since
    timed = drive(stepper, made.loader, begin=WARM_UP, steps=steps)
    memory = hardware.peak_memory_bytes(device)
    median = statistics.median(timed.seconds)

    def some() -> int:
        drive(stepper, made.loader, begin=WARM_UP + steps, steps=PROFILED)
        return PROFILED

    anatomy = dissect(stepper, some, wall_ms=1e3 * median)
    return Figures(
        subject=subject(made, loaded, busy),
        step_seconds=timed.seconds,
        rows_per_step=timed.rows,
        tokens_per_step=timed.tokens,
        flops=Flops.of(made.plan.shape, config.training.context_length, head_share=timed.head_share),
        peak_flops=hardware.peak_flops(device, without_float8(config.training.precision)),  # as peers count fp8
        measured_flops=products,
        memory_bytes=memory,
        estimated_bytes=present.memory_estimate(config, made.plan.shape, compiled=made.built.compiled).total,
        compile_seconds=max(0.0, warmed - (1 + WARM_UP) * median),
        anatomy=anatomy,
    )


def subject(made: Ready, loaded: Loaded, busy: Sequence[str]) -> Subject:
    """What is measured, in words."""
    config, shape, options = made.plan.config, made.plan.shape, made.plan.config.training
    layers = f"{shape.num_layers} layer{'s' * (shape.num_layers != 1)}"
    found = "" if made.plan.auto_rows is None else " (auto)"
    return Subject(
        family=config.family,
        preset=loaded.preset,
        settings=to_dict(config),
        model=f"{config.model.model_path}, {layers}, width {shape.hidden_size:,}",
        parameters=shape.parameters(),
        batch=f"{options.batch_size} rows x {options.grad_accum_nums} x {options.context_length:,}{found}",
        precision=options.precision,
        attention=made.built.attention,
        compiled=made.built.compiled,
        device=hardware.device_name(made.plan.device),
        on_gpu=made.plan.device.type == "cuda",
        busy=busy,
    )


def drive(stepper: Stepper, batches: Iterator[Sequence[Batch]], *, begin: int, steps: int) -> Measured:
    """Steps as the loop makes them, one in flight; a GPU's own clock times them, or the host's."""
    synchronize(stepper.device)
    clock, flying = Clock(), list[Pending]()
    seconds, tokens, rows_made, places = list[float](), 0, 0, 0
    for step in range(begin, begin + steps):
        step_batches = next(batches)
        flying.append(stepper.launch(step, step_batches))
        tokens += sum(batch.tokens for batch in step_batches)
        rows_made += sum(batch.rows for batch in step_batches)
        places += sum(len(batch.tensors["places"]) if "places" in batch.tensors else batch.tokens
                      for batch in step_batches)  # fmt: skip
        if len(flying) > 1:
            seconds.append(_settle(flying.pop(0), clock))
    seconds += [_settle(pending, clock) for pending in flying]
    return Measured(seconds, tokens / steps, rows_made / steps, places / max(1, tokens))


def _settle(pending: Pending, clock: Clock) -> float:
    if (reading := pending.read()).fatal:
        raise NonFiniteError(
            f"a step of the bench is not finite: loss {reading.loss}, gradient norm {reading.grad_norm}",
            hint="a smaller --lr, or --precision fp32",
        )
    return clock.lap(pending)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_flops(device: torch.device, precision: str) -> float:
    """FLOP/s of matrix products alone: the best of a few large shapes, in the type of the step (fp8: in bf16)."""
    dtype = WIDE.get(precision) or DTYPES.get(precision, torch.bfloat16)
    best = 0.0
    for sizes in PRODUCTS[device.type]:
        if not best or BLOCKS * 2.0 * math.prod(sizes) < PATIENCE_SECONDS * best:
            best = max(best, _product_flops(device, dtype, *sizes))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def _product_flops(device: torch.device, dtype: torch.dtype, count: int, inner: int, columns: int) -> float:
    left = torch.randn(count, inner, device=device, dtype=dtype)
    right = torch.randn(columns, inner, device=device, dtype=dtype).t()  # as a layer's weights lie
    out = torch.empty(count, columns, device=device, dtype=dtype)

    def block(products: int) -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    block(1)
    products = max(1, min(BLOCK_PRODUCTS, int(BLOCK_SECONDS / _timed(partial(block, 1), device))))
    seconds = statistics.median(_timed(partial(block, products), device) for _ in range(BLOCKS))
    return 2.0 * count * inner * columns * products / seconds


def _timed(action: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    since = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - since
