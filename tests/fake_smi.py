"""A fake nvidia-smi that answers as the real one does: --query-gpu, -remapped-rows and -compute-apps, and --id."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

TOOL = """#!{python} -SE
import sys, time
rows, apps, delay = {rows!r}, {apps!r}, {delay!r}
time.sleep(delay)
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
chosen = [row for row in rows if options.get("id") in (None, str(row["index"]), row["uuid"])]
if not chosen:
    sys.exit(6)
kind = next((kind for kind in ("query-gpu", "query-remapped-rows") if kind in options), "")
if kind:
    found, names = chosen, options[kind]
else:
    found, names = [app for row in chosen for app in apps.get(row["index"], [])], options["query-compute-apps"]
for row in found:
    print(", ".join(str(row.get(name, "[N/A]")) for name in names.split(",")))
"""


def gpu(index: int, **fields: object) -> dict[str, object]:
    """A row of the fake tool; dots in names are written as two underscores."""
    usual: dict[str, object] = {
        "index": index, "uuid": f"GPU-{index:04d}", "gpu_uuid": f"GPU-{index:04d}", "name": "NVIDIA Fake",
        "memory.total": 81559, "memory.free": 80000, "utilization.gpu": 0, "driver_version": "999.1",
    }  # fmt: skip
    return usual | {name.replace("__", "."): value for name, value in fields.items()}


def plant(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: Sequence[Mapping[str, object]],
    *,
    apps: Mapping[int, Sequence[Mapping[str, object]]] | None = None,
    delay: float = 0.0,
) -> Path:
    """Put the fake first on PATH; NVML has no driver and no variable hides a GPU."""
    folder.mkdir(exist_ok=True)
    tool = folder / "nvidia-smi"
    text = TOOL.format(python=sys.executable, rows=list(map(dict, rows)), apps=dict(apps or {}), delay=delay)
    tool.write_text(text, encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tool
