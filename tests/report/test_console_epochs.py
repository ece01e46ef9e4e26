"""What is shown of a run that counts in epochs, and of several workers."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from lockstep.report.console import ConsoleSink
from lockstep.report.words import format_estimate
from tests.report.test_console import BANNER, EPOCHS, SUMMARY


def test_lines_of_a_run_in_epochs(screen: io.StringIO, record) -> None:
    sink = ConsoleSink(10_000_000, clip=True, log_interval=1000)
    sink.event("start", replace(BANNER, **EPOCHS).fields())
    sink.write(record(6))  # the last one has a line, by the number the start has told
    sink.event("eval", {"step": 7, "val_loss": 2.0, "val_accuracy": 0.4512, "val_accuracy_kept": 0.9})
    estimate = {"steps": 7, "max_steps": 7, "epochs": 2, "epoch_steps": 3.5}
    sink.event("estimate", {**estimate, "seconds": 721.0})
    sink.event("estimate", {**estimate, "seconds": 0.2, "steps": 3, "epochs": 1})
    sink.event("estimate", {**estimate, "seconds": 11_000.0, "epochs": 1, "epoch_steps": 1.0})
    sink.event("results", {"step": 7, "path": ".mlm_pretrained_v3", "family": "mlm"})
    text = screen.getvalue()
    assert "2 epochs, 7 steps of 65,536 tokens" in text
    assert "Step [6/7]" in text
    assert text.splitlines()[-6:] == [
        "Validation | Step 7 | Loss: 2.0000 | Perplexity: 7.39 | Accuracy: 0.4512",
        "   | 163,840 tokens/s | GPU n/a",
        "Estimated time: about 12 min (2 epochs of 4 steps)",
        "Estimated time: about 1 s (3 of 7 steps left)",
        "Estimated time: about 3 h 03 min (1 epoch of 1 step)",
        "MLM model saved to .mlm_pretrained_v3",
    ]


def test_other_workers_leave_the_results_to_the_first(screen: io.StringIO) -> None:
    sink = ConsoleSink(7, clip=True, brief=True)
    sink.event("results", {"path": "x", "family": "mlm"})
    sink.event("estimate", {"seconds": 1.0, "steps": 7, "max_steps": 7, "epochs": 2, "epoch_steps": 3.5})
    assert screen.getvalue() == ""


def test_a_row_for_each_worker() -> None:
    workers = [
        {"name": f"node 1{n} GPU 1{n}", "seconds": 7505.0 + n, "samples_per_second": 1234.56,
         "peak_memory_bytes": 3 << 29, "utilisation": 97.4 if n else None}
        for n in range(2)
    ]  # fmt: skip
    lines = replace(SUMMARY, workers=tuple(workers)).lines(80)
    at = next(number for number, line in enumerate(lines) if line.startswith("  worker"))
    assert [line.split() for line in lines[at : at + 3]] == [
        ["worker", "time", "samples/s", "peak", "memory", "GPU", "use"],
        ["node", "10", "GPU", "10", "2", "h", "05", "min", "05", "s", "1,234.6", "1.50", "GiB", "n/a"],
        ["node", "11", "GPU", "11", "2", "h", "05", "min", "06", "s", "1,234.6", "1.50", "GiB", "97", "%"],
    ]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 107, "max_steps": 107, "epochs": 2, "epoch_steps": 53.3}, "(2 epochs of 54 steps)"),
        ({"steps": 61, "max_steps": 107, "epochs": 2, "epoch_steps": 53.3}, "(61 of 107 steps left)"),
        ({"steps": 3, "max_steps": 3, "epochs": 5, "epoch_steps": 23.8}, "(3 steps)"),
    ],
)
def test_the_estimate_speaks_of_the_steps_there_will_be(fields: dict[str, Any], said: str) -> None:
    assert format_estimate({"seconds": 10.0, **fields}).endswith(said)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("llada", {"step": 1041, "epoch": 1, "whole": True}, "Epoch 1/5 completed in 0.54s"),
        ("llada", {"step": 30, "epoch": 1, "whole": False}, "Epoch 1/5 ended after 30 of 1,041 steps in 0.54s"),
        ("mlm", {"step": 1041, "epoch": 1, "whole": True}, "Epoch 1/5 | 0.5 s | GPU n/a"),
        ("mlm", {"step": 2081, "epoch": 2, "whole": False}, "Epoch 2/5 ended after 1,040 of 1,041 steps | 0.5 s"),
    ],
)
def test_an_epoch_that_was_cut_is_not_called_whole(
    family: str, fields: dict[str, Any], said: str, screen: io.StringIO
) -> None:
    sink = ConsoleSink(5205, clip=True, family=family)
    told = {"epochs": 5, "epoch_steps": 1041.0, "max_steps": 5205, "seconds": 0.54, "train_loss": 1.0, "val_loss": 2.0}
    sink.event("epoch", {**told, **fields})
    assert screen.getvalue().splitlines()[0].startswith(said)
