"""Every kind of file, packed and not, down to a training step."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.report.jsonl import read_events
from tests.conftest import Outcome
from tests.formats.samples import pack

TEXTS = [f"Document {number}: some words that a model of bytes can learn. " * 3 for number in range(40)]
QUICK = (
    "--device", "cpu", "training.max_steps=1", "training.context_length=32", "training.eval_batches=1",
    "report.sample_prompt=", "report.tensorboard=false", "system.threads=1", "data.tokenizer_name=bytes",
)  # fmt: skip


def content(kind: str) -> bytes:
    """The texts as a file of that kind."""
    if kind == "parquet":
        return table()
    rows = io.StringIO(newline="")
    csv.writer(rows).writerows([["id", "text"], *enumerate(TEXTS)])
    written = {
        "txt": "\n\n".join(TEXTS),
        "jsonl": "\n".join(json.dumps({"text": text}) for text in TEXTS),
        "json": json.dumps(TEXTS),
        "csv": rows.getvalue(),
    }
    return written[kind].encode()


def table() -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": TEXTS}), out)
    return out.getvalue()


@pytest.mark.parametrize("packing", ["", "gz"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "parquet"])
def test_a_step_is_trained_on_it(
    in_dir: Path, lockstep: Callable[..., Outcome], shared_cache: Path, kind: str, packing: str
) -> None:
    path = in_dir / (f"corpus.{kind}.{packing}" if packing else f"corpus.{kind}")
    path.write_bytes(pack(content(kind), packing))
    outcome = lockstep("train", "llama", "tiny", "--data-path", str(path), *QUICK)
    if kind == "parquet" and packing:  # it is packed inside, and read in parts
        assert outcome.code == 65
        assert "try: unpack it" in outcome.err
        return
    assert outcome.code == 0, outcome.text
    events = read_events(in_dir / "runs" / "latest" / "events.jsonl")
    (step,) = [event for event in events if event["kind"] == "step"]
    assert 5 < step["loss"] < 7  # of some 512 ids, of which nothing is known yet
