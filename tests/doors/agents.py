"""A small folder of Algorithm Distillation: a YAML file as the documented ones, and histories to learn from."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AD = ROOT / "doors" / "ad"
RUN = "runs/AD-darkroom-seed0"
STEPS, ROWS, SAVES, WARM_UP = 20, 8, 5, 2
SMALL = f"""include: {AD}/config/model/ad_dr.yaml
grid_size: 5
alg: PSRL
n_stream: 8
total_source_timesteps: 800
train_source_timesteps: 100
train_n_stream: 8
train_batch_size: {ROWS}
test_batch_size: 16
num_workers: 0
tf_n_embd: 32
tf_n_layer: 2
tf_n_head: 2
tf_n_inner: 64
n_transit: 80
train_timesteps: {STEPS}
num_warmup_steps: {WARM_UP}
lr: 3e-3
eval_interval: 10
ckpt_interval: {SAVES}
summary_interval: 1
"""
QUICK = ("--config", "small.yaml", "--device", "cpu", "system.threads=1", "debug.digest_interval=1",
         "training.gen_episodes=0")  # fmt: skip


def make(folder: Path, histories: Path | None = None, *, more: str = "") -> Path:
    """The file, and histories that were collected before."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.yaml").write_text(SMALL + more, encoding="utf-8")
    if histories:
        shutil.copytree(histories, folder / "datasets")
    return folder


def collected(folder: Path) -> Path:
    """Histories of all goals of the small room."""
    from lockstep.compat_ad import COLLECT
    from lockstep.compat_door import parse, resolve
    from lockstep.engine.histories import gather

    make(folder)
    words = ["--config", str(folder / "small.yaml"), "--set", f"traj_dir={folder}/datasets", "--device", "cpu"]
    gather(resolve(COLLECT, *parse(COLLECT, words)).config)
    return folder / "datasets"
