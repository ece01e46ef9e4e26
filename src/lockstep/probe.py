"""How long training will take here: a few steps on random tokens, in a process of their own. Torch-free at import.

Nothing of the data is known yet: one row per sample is assumed, and GPUs that do not wait for each other. The trainer
measures again on the rows themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig

MEASURED_SECONDS = 2.0
FEWEST_STEPS, MOST_STEPS = 3, 50
LIMIT_SECONDS = 120.0
CHOSEN = 0.15  # of the tokens get a target


@dataclass(frozen=True)
class Probe:
    """What one worker has shown."""

    step_seconds: float  # of an optimizer step, with its accumulation
    device: str
    memory_bytes: int  # of the device, as its driver says; 0: it has none of its own
    on_gpu: bool


def measure(loaded: Loaded) -> Probe | str:
    """The probe on this machine, or why there is none."""
    from lockstep.config.load import to_dict
    from lockstep.runtime import env, signals

    tree = to_dict(loaded.config)
    tree["data"]["hf_token"] = None
    with signals.listening():
        child = subprocess.Popen(
            [sys.executable, "-m", "lockstep.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env.child(),
        )
        try:
            answer, _ = child.communicate(json.dumps(tree).encode(), timeout=LIMIT_SECONDS)
            return Probe(**json.loads(answer)) if child.returncode == 0 else f"the probe ended with {child.returncode}"
        except subprocess.TimeoutExpired:
            return f"the probe took more than {LIMIT_SECONDS:.0f} s"
        except (ValueError, TypeError) as error:
            return f"the probe said nothing useful: {type(error).__name__}"
        finally:
            child.kill()
            child.wait()


def lines(loaded: Loaded, probe: Probe | str, *, workers: int) -> list[str]:
    """The documented lines: measured here and now, or not given."""
    from lockstep.report.words import format_about

    if isinstance(probe, str):
        return [f"Estimated time per epoch: n/a ({probe})", f"Estimated total time: n/a ({probe})"]
    training, data = loaded.config.training, loaded.config.data
    rows = training.batch_size * training.grad_accum_nums
    rate = rows / probe.step_seconds * (workers if probe.on_gpu else 1)  # workers on a CPU share its cores
    samples = round(data.max_train_samples * (1 - data.validation_fraction))  # if there are so many
    epoch_seconds = samples / rate
    epochs: float = getattr(training, "epochs", 0)
    step_rows = rows * workers
    total = training.max_steps * step_rows / rate  # with epochs: a limit, which may be out of reach
    total = min(total, epochs * epoch_seconds) if epochs else total
    memory = f", {probe.memory_bytes / 2**30:.1f} GiB" if probe.memory_bytes else ""
    where = f"{workers} x {probe.device}{memory}" if probe.on_gpu else probe.device
    return [
        f"Estimated time per epoch: {format_about(epoch_seconds)} "
        f"(at most {samples:,} samples at {rate:,.0f}/s, measured on {where})",
        f"Estimated total time: {format_about(total)}",
    ]


def probe(config: RunConfig) -> Probe:
    """In the process of its own: some steps of the model that the configuration means."""
    import torch

    from lockstep.config.load import Loaded
    from lockstep.engine.build import plan
    from lockstep.models.build import build
    from lockstep.runtime import hardware
    from lockstep.runtime.precision import Precision

    device = hardware.pick_device(config.system.device, config.system.device_id)
    planned = plan(Loaded(config, {}, (), "", config.family), device)
    options, training = config.model.model_copy(update={"init": "random"}), planned.config.training
    model = build(
        options, planned.shape, device=device, dtype_name=training.precision, seed=0,
        checkpointing=config.system.gradient_checkpointing, deterministic=False, debug=True,
    ).model  # fmt: skip
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    shape, length = (training.batch_size, training.context_length), training.context_length
    inputs = torch.randint(5, planned.shape.vocab_size, shape, device=device)
    places = torch.arange(0, training.batch_size * length, round(1 / CHOSEN), device=device)
    precision = Precision(training.precision, device)

    def step() -> None:
        for _ in range(training.grad_accum_nums):
            with precision.context():
                loss: Any = model(inputs, inputs.view(-1)[places], places_M=places)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    step()  # memory, kernels, caches
    began, steps = time.perf_counter(), 0
    while steps < FEWEST_STEPS or (time.perf_counter() - began < MEASURED_SECONDS and steps < MOST_STEPS):
        step()
        steps += 1
    seconds = (time.perf_counter() - began) / steps
    memory = hardware.total_memory_bytes(device) if device.type == "cuda" else 0
    return Probe(seconds, hardware.device_name(device), memory or 0, device.type == "cuda")


def _main() -> None:
    from lockstep.config.load import from_dict

    sys.stdout.write(json.dumps(asdict(probe(from_dict(json.load(sys.stdin))))))


if __name__ == "__main__":
    _main()
