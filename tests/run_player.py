"""Plays a run: a small process that writes the files of a run folder as the trainer and its launcher do."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG = {"config": {"training": {"max_steps": 100}}}
PLAYER = """
import json, os, signal, sys, time
from pathlib import Path
from lockstep.runtime import owner

root, manner = Path(sys.argv[1]), sys.argv[2]

def tell(**event):
    with (root / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\\n")

def end(number, frame):
    if manner == "deaf":
        return
    time.sleep(0.2)
    saved = root / "checkpoints" / "step_00000005"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    tell(kind="save", step=5, path=str(saved))
    tell(kind="end", step=5, exit_code=143)
    sys.exit(143)

signal.signal(signal.SIGTERM, end)
owner.write(root, ["lockstep", "train", "llama"])
tell(kind="start", step=0)
for step in range(5):
    tell(kind="step", step=step, loss=3.0 - step / 10, tokens=1000, seconds=0.5)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def make(root: Path, *events: dict[str, Any]) -> Path:
    """A run folder that nobody runs."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return root


def heartbeat(root: Path, worker: str, **fields: Any) -> Path:
    """A worker's folder with its last sign of life."""
    folder = root / "workers" / worker
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heartbeat").write_text(json.dumps(fields), encoding="utf-8")
    return folder


@contextlib.contextmanager
def playing(root: Path, manner: str = "good") -> Iterator[subprocess.Popen[str]]:
    """A run in another process, which has written its first events; whatever is left of it at the end is killed."""
    make(root)
    child = subprocess.Popen([sys.executable, "-c", PLAYER, str(root), manner], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()
