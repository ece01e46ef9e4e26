"""The families of models, and their documented scripts put into any folder."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError, NotFoundError, OutputError
from lockstep.registry import suggest

INTERPRETER_FILE = ".lockstep-python"  # tells the copied shell scripts which interpreter has lockstep


@dataclass(frozen=True)
class Family:
    """A family of models, and the scripts its guide names."""

    name: str
    what: str
    folder: str
    commands: tuple[str, ...]
    preset: str = "production"  # where none is named; without a GPU it is demo
    try_first: str = ""  # of the scripts, in a new folder of them
    examples: tuple[str, ...] = ()  # configuration files among them

    def example_files(self) -> str:
        """Where a configuration file can be had."""
        if not self.examples:
            return f"lockstep config show {self.name} {self.preset} --json > my.json writes one"
        return f"lockstep init {self.name} DIR puts examples into a folder: {', '.join(self.examples)}"


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LLaMA, next-token prediction",
            "model_check",
            (
                "bash run.sh [--debug] [--config my_config.json]",
                "bash run_training.sh [--debug] [--config test_config.json]",
                "python3 pretrain_main.py [--debug | --preset NAME] [--config custom_config.json] [--max-steps 10]",
                "python3 prepare_dataset.py",
                "./train_gpu.sh 3 [--debug]",
                "./train_auto_gpu.sh",
            ),
            try_first="bash run.sh --config test_config.json",
            examples=(
                "custom_config.json",
                "test_config.json",
                "single_gpu.json",
                "debug_config.json",
                "my_config.json",
                "config_stable.json",
            ),
        ),
        Family(
            "mlm",
            "encoders, masked-LM",
            "mlm",
            (
                "python multi_gpu_configs.py list | info NAME | generate NAME",
                "./train_h200_8gpu_standard.sh (after generate)",
                "./run_multi_gpu_training.sh [hf 32 5 3e-5 true 500k]",
                "python mlm_pretrain_v3.py [--dataset imdb] [--config-name NAME] [--overwrite]",
                "torchrun --nproc_per_node=8 mlm_pretrain_v3.py [--dataset hf --batch-size 32 --epochs 5 --lr 3e-5]",
            ),
            preset="mlm_small",
            try_first="python multi_gpu_configs.py list",
        ),
        Family(
            "llada",
            "LLaDA, masked diffusion",
            "llada",
            (
                "./launch_training.sh [2] [shakespeare_processed]",
                "torchrun --nproc_per_node=2 train_llada_pretrained.py --data_dir shakespeare_processed [--fp16]",
                "python train_llada_pretrained.py --data_dir shakespeare_processed [--batch_size 1 --epochs 5 --fp16]",
            ),
            preset="llada_small",
            try_first="python train_llada_pretrained.py --help",
        ),
        Family(
            "ad",
            "Algorithm Distillation, in-context reinforcement learning",
            "ad",
            (
                "python collect.py",
                "python train.py [--config config/model/ad_dr.yaml] [--set tf_n_embd=32]",
                "accelerate launch [--num_processes 2] [--mixed_precision fp16] train.py",
                "torchrun --nproc_per_node=2 train.py",
                "./train_multi_gpu.sh",
                "sbatch multi_gpu_train.slurm",
                "python evaluate.py [--goal_idx 3] [--ckpt_dir runs/AD-darkroom-seed0]",
            ),
            preset="darkroom",
            try_first="python collect.py --help",
            examples=("config/model/ad_dr.yaml", "config/model/ad_dr_compressed.yaml"),
        ),
    )
}


def refusal(family: str) -> ConfigError:
    """Why a family cannot be used: nobody has heard of it."""
    return ConfigError(f"unknown family {family[:80]!r}", where="FAMILY", hint=suggest(family, list(FAMILIES)))


def doors_folder() -> Path:
    """Where the documented scripts lie: in the wheel beside this file, or in the checkout."""
    beside = Path(__file__).parent / "doors"
    return beside if beside.is_dir() else Path(__file__).parents[2] / "doors"


def init(family: str, folder: Path) -> list[Path]:
    """Copy the scripts of a family into a folder; returns the new files. Refuses to change a file that is there."""
    known = FAMILIES.get(family)
    if known is None:
        raise refusal(family)
    source = doors_folder() / known.folder
    if not source.is_dir():
        raise NotFoundError("the scripts are missing from this installation", where=str(source))
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    pairs = [(path, folder / path.relative_to(source)) for path in files]
    clashes = [str(new) for path, new in pairs if new.exists() and new.read_bytes() != path.read_bytes()]
    if clashes:
        raise ConfigError(f"would change {', '.join(clashes)}", hint="an empty folder, or move these files away")
    written: list[Path] = []
    try:
        for path, new in pairs:
            if not new.exists():
                new.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, new)
                new.chmod(0o755 if new.suffix == ".sh" else 0o644)
                written.append(new)
        (folder / INTERPRETER_FILE).write_text(sys.executable + "\n", encoding="utf-8")
    except OSError as error:
        hint = f"lockstep init {family} DIR, a folder you can write to"
        raise OutputError(f"cannot write: {error.strerror or error}", where=str(folder), hint=hint) from error
    return written


def families_table() -> str:
    """The families, and the commands their guides document."""
    lines: list[str] = []
    for family in FAMILIES.values():
        lines.append(f"{family.name:<8}{family.what}")
        lines += [f"          {command}" for command in family.commands]
    lines.append(f"`lockstep init {'|'.join(FAMILIES)} DIR` puts the scripts of a family into a folder.")
    return "\n".join(lines) + "\n"
