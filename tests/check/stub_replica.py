"""A replica without torch, for tests of the conductor: it "trains" one weight tensor of integers, with the real faults.

The record, its digests and the kept tensor have the form of the real ones; only the training is simpler.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lockstep.check import errand as errands
from lockstep.check.errand import Errand
from lockstep.check.locate import keys
from lockstep.check.records import Workload
from lockstep.health.records import line
from lockstep.runtime import faults

TENSOR = "weights:w"
STEP_SECONDS = 0.01


def digest(tensor: np.ndarray) -> str:
    words = tensor.astype(np.int64).view(np.uint64).reshape(-1)
    return f"{int(words.sum()):016x}{int((keys(0, words.size) * words).sum()):016x}"


def work(workload: Workload, errand: Errand, out: list[str]) -> None:
    planned = faults.plan(rank=errand.card.index, workload=workload.name)
    weights = np.arange(12, dtype=np.int32).reshape(3, 4)
    about = {"tensors": [TENSOR], "shapes": [[3, 4]], "dtypes": ["int32"], "facts": {"attention": "none"}}
    tell(out, errand, line("workload", workload=workload.name, **about))
    for step in range(workload.steps if errand.until is None else errand.until + 1):
        planned.at("forward", step)
        weights += step
        for fault in planned.faults:
            if fault.kind == "flip_weight" and fault.step == step:
                weights.reshape(-1)[fault.index or 0] ^= np.int32(1 << (fault.bit or 0))
        dump = errand.dump
        if dump is not None and (dump.workload, dump.step, dump.tensor) == (workload.name, step, TENSOR):
            save_file({"tensor": weights}, errand.dump_file)
        slow = max((fault.factor for fault in planned.faults if fault.kind == "slow"), default=1.0)
        stamp = {"loss": (1.0 / (step + 1)).hex(), "norm": "0x1p+0", "seconds": STEP_SECONDS * slow}
        tell(out, errand, line("step", step=step, sums=digest(weights), **stamp))
    tell(out, errand, line("done", facts=about["facts"]))


def tell(out: list[str], errand: Errand, text: str) -> None:
    out.append(text)
    errand.record.write_text("".join(f"{each}\n" for each in out))


def main(path: Path) -> None:
    errand = errands.read(path)
    out: list[str] = []
    tell(out, errand, line("about", versions={"torch": "0.0 (stub)"}))
    for workload in errand.workloads:
        work(workload, errand, out)


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
