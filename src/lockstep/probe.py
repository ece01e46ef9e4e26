"""How long training will take here, and how much memory: some steps of the real kind, in a process of their own.

Torch-free at import. A step is the trainer's own (Stepper, objective, packing) on random tokens. Text that lies on this
machine is looked at, so that its documents have their true lengths; of any other one full row per sample is assumed.
GPUs are taken not to wait for each other. The trainer measures again on the rows themselves.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Batch, Objective
    from lockstep.data.options import DataOptions
    from lockstep.runtime.devices import Gpu

MEASURED_SECONDS = 2.0
FEWEST_STEPS, MOST_STEPS = 3, 50
LIMIT_SECONDS = 120.0
PREPARED_STEPS = 8  # with rows of their own: no two micro-batches of text are alike
LOOKED_AT = 2000  # documents, and
LOOKED_AT_TOKENS = 1 << 20
PIECES = re.compile(r"\w+|[^\w\s]")
TOKENS_A_PIECE = 1.3  # of a tokenizer that cuts words
SPECIALS = {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": 4}


@dataclass(frozen=True)
class Probe:
    """What one worker has shown."""

    step_seconds: float  # of an optimizer step, with its accumulation
    device: str
    on_gpu: bool
    threads: int  # of this worker, on the CPU
    peak_bytes: int  # most memory in use: allocated on the GPU, or resident
    sample_rows: float = 1.0  # rows of one sample
    samples: int = 0  # all there are; 0: not known


def measure(loaded: Loaded, *, workers: int = 1) -> Probe | str:
    """The probe on this machine, as one of so many workers; or why there is none."""
    from lockstep.config.load import to_dict
    from lockstep.runtime import env, signals

    tree = to_dict(loaded.config)
    tree["data"]["hf_token"] = None
    threads = env.get("OMP_NUM_THREADS") or str(max(1, _cores() // workers))  # as the launcher shares them
    with signals.listening():
        child = subprocess.Popen(
            [sys.executable, "-m", "lockstep.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env.child(OMP_NUM_THREADS=threads),
        )
        try:
            answer, complaint = child.communicate(json.dumps(tree).encode(), timeout=LIMIT_SECONDS)
            if child.returncode:
                last = complaint.decode("utf-8", "replace").strip().rpartition("\n")[2]
                return env.redact(f"the probe ended with {child.returncode}: {last[:200]}".rstrip(": "))
            return Probe(**json.loads(answer))
        except subprocess.TimeoutExpired:
            return f"the probe took more than {LIMIT_SECONDS:.0f} s"
        except (ValueError, TypeError) as error:
            return f"the probe said nothing useful: {type(error).__name__}"
        finally:
            child.kill()
            child.wait()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def lines(loaded: Loaded, probe: Probe | str, *, workers: int, gpus: Sequence[Gpu] = ()) -> list[str]:
    """The documented lines: measured here and now, or not given. `gpus`: those to be used, as the driver has them."""
    from lockstep.report.words import format_about

    if isinstance(probe, str):
        times = [f"Estimated time per epoch: n/a ({probe})", f"Estimated total time: n/a ({probe})"]
        return [*times, *_memory_lines(probe, gpus)]
    training, data = loaded.config.training, loaded.config.data
    rows = training.batch_size * training.grad_accum_nums
    at_once = workers if probe.on_gpu else min(workers, max(1, _cores() // probe.threads))
    rate = rows / probe.step_seconds * at_once
    there = min(data.max_train_samples, probe.samples or data.max_train_samples)
    samples = round(there * (1 - data.validation_fraction))
    epoch_seconds = samples * probe.sample_rows / rate
    epochs: float = getattr(training, "epochs", 0)
    total = training.max_steps * rows * workers / rate  # with epochs: a limit, which may be out of reach
    total = min(total, epochs * epoch_seconds) if epochs else total
    count = f"{samples:,} samples" if probe.samples else f"at most {samples:,} samples"
    each = "" if probe.sample_rows == 1 else f" of {probe.sample_rows:.1f} rows"
    where = f"{workers} x {probe.device}" if probe.on_gpu else probe.device
    return [
        f"Estimated time per epoch: {format_about(epoch_seconds)} "
        f"({count}{each} at {rate / probe.sample_rows:,.0f}/s, measured on {where})",
        f"Estimated total time: {format_about(total)}",
        *_memory_lines(probe, gpus),
    ]


def _memory_lines(probe: Probe | str, gpus: Sequence[Gpu]) -> list[str]:
    """What a worker needs beside what its GPU has: the smallest of them, since all do the same."""
    from lockstep.report.words import format_bytes

    if gpus:
        least = min(gpus, key=lambda gpu: gpu.memory_bytes)
        needed = format_bytes(probe.peak_bytes) if isinstance(probe, Probe) and probe.on_gpu else "n/a"
        has = format_bytes(least.memory_bytes) if least.memory_bytes else "n/a"  # not every driver says it
        return [f"Estimated memory per GPU: {needed} of {has} ({least.name})"]
    return [f"Estimated memory per worker: {format_bytes(probe.peak_bytes)}"] if isinstance(probe, Probe) else []


# ------------------------------------------------------------------------------------------- in the process of its own


def probe(config: RunConfig) -> Probe:
    """Some steps of the model that the configuration means."""
    import torch

    from lockstep.config.load import Loaded
    from lockstep.engine.build import plan
    from lockstep.engine.step import Stepper
    from lockstep.models.build import build
    from lockstep.runtime import determinism, faults, hardware
    from lockstep.runtime.precision import Precision, without_float8

    device = hardware.pick_device(config.system.device, config.system.device_id)
    planned = plan(Loaded(config, {}, (), "", config.family), device)
    training = planned.config.training.model_copy(update={"max_steps": MOST_STEPS + 1, "warmup_steps": 0})
    with determinism.mode(device, deterministic=config.system.deterministic, threads=config.system.threads):
        model = build(
            config.model.model_copy(update={"init": "random"}), planned.shape, device=device, seed=0,
            dtype_name=without_float8(training.precision), debug=True,  # and float8 is slow if not compiled
            checkpointing=config.system.gradient_checkpointing, deterministic=bool(config.system.deterministic),
            documents_apart=config.data.documents in ("masked", "padded"),
        ).model  # fmt: skip
        precision = Precision(training.precision, device)
        lengths, is_all = look(config.data)
        text = Text(planned.objective, planned.shape.vocab_size, config, lengths)
        stepper = Stepper(model, text.objective, training, precision=precision, seed=0, faults=faults.Plan())
        seconds = _time(stepper, text.steps())
        return Probe(
            step_seconds=seconds,
            device=hardware.device_name(device),
            on_gpu=device.type == "cuda",
            threads=torch.get_num_threads(),
            peak_bytes=hardware.peak_memory_bytes(device),
            sample_rows=text.sample_rows,
            samples=len(lengths) if is_all else 0,
        )


def _time(stepper: Any, steps: Sequence[Sequence[Batch]]) -> float:
    """Seconds of a step, after one that warms up memory, kernels and caches."""
    stepper.launch(0, steps[0]).read()
    began, made = time.perf_counter(), 0
    while made < FEWEST_STEPS or (time.perf_counter() - began < MEASURED_SECONDS and made < MOST_STEPS):
        made += 1
        stepper.launch(made, steps[made % len(steps)]).read()
    return (time.perf_counter() - began) / made


def look(options: DataOptions) -> tuple[list[int], bool]:
    """The tokens of each document, as far as that can be seen here in a moment; and whether these are all."""
    from lockstep import registry
    from lockstep.engine.building import has_words
    from lockstep.engine.choices import choose_source
    from lockstep.errors import LockstepError

    name = "text" if options.data_path else options.dataset_name
    if options.data_path == "-" or name == "hf" or name not in registry.names("sources"):
        return [], False  # the hub's, standard input, a user's own: to be read once, and not by us
    lengths: list[int] = []
    tokens, most = 0, min(LOOKED_AT, options.max_train_samples)
    try:
        documents = choose_source(options.model_copy(update={"dataset_name": name})).documents()
        for document in (each for each in documents if has_words(each, options.min_words)):
            if len(lengths) >= most or tokens >= LOOKED_AT_TOKENS:
                return lengths, False
            lengths.append(_tokens(document, options.tokenizer_name))
            tokens += lengths[-1]
    except LockstepError:
        return [], False  # the trainer will say it
    return lengths, bool(lengths)


def _tokens(document: Any, tokenizer: str | None) -> int:
    if not isinstance(document, str):
        return len(document)
    if tokenizer == "bytes":
        return len(document.encode())
    pieces = sum(1 for _ in PIECES.finditer(document))
    return pieces if tokenizer == "word" else round(pieces * TOKENS_A_PIECE)


class Text:
    """Random tokens in documents of given lengths, packed and collated by the objective itself."""

    def __init__(self, objective: Objective, vocab_size: int, config: RunConfig, lengths: Sequence[int]) -> None:
        import numpy as np

        from lockstep.contracts import Vocabulary

        vocabulary = Vocabulary(vocab_size, SPECIALS, np.zeros(vocab_size, bool))
        bind: Callable[[Vocabulary], Objective] = getattr(objective, "with_vocabulary", lambda _: objective)
        self.objective = bind(vocabulary)
        self.training, length = config.training, config.training.context_length
        separator = -1 if config.data.documents == "joined" else SPECIALS["sep"]
        full = [length - 2] * (PREPARED_STEPS * self.training.batch_size)
        random = np.random.default_rng(0)
        documents = (random.integers(len(SPECIALS), vocab_size, count) for count in lengths or full)
        blocks = [
            block["tokens"] for block in self.objective.pack(documents, context_length=length, separator=separator)
        ]
        self.rows = np.concatenate(blocks)
        self.sample_rows = len(self.rows) / len(lengths) if lengths else 1.0

    def steps(self) -> list[list[Batch]]:
        """The micro-batches of some steps, in an order without order, as the trainer's."""
        import numpy as np

        from lockstep.contracts import Draw, Rows

        count, parts = self.training.batch_size, self.training.grad_accum_nums
        order = itertools.cycle(np.random.default_rng(1).permutation(len(self.rows)).tolist())
        made: list[list[Batch]] = []
        for step in range(PREPARED_STEPS):
            draw = Draw(0, step, count * parts, PREPARED_STEPS)
            batches: list[Batch] = []
            for part in range(parts):
                ids = np.fromiter(itertools.islice(order, count), np.int64)
                slots = np.arange(part * count, (part + 1) * count)
                rows = Rows(ids, np.full(count, step), slots, {"tokens": self.rows[ids]})
                batches.append(self.objective.collate(rows, draw))
            made.append(batches)
        return made


def _main() -> None:
    from lockstep.config.load import from_dict

    sys.stdout.write(json.dumps(asdict(probe(from_dict(json.load(sys.stdin))))))


if __name__ == "__main__":
    _main()
