"""Other words for the settings: those of documented files and of other families, and those that retired."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

Path = tuple[str, ...]

# An old path or a plain word -> the setting. A plain word is accepted at the top of a file, as a flag,
# and in the section of its setting.
_MOVED = {
    "training.num_workers": "data.num_workers",
    "hf_token": "data.hf_token",
    "max_train_samples": "data.max_train_samples",
    "max_samples": "data.max_train_samples",
    "dataset": "data.dataset_name",
    "experiment_name": "run.experiment_name",
    "run_name": "run.name",
    "tags": "run.tags",
    "train_batch_size": "training.batch_size",
    "batch_size_per_gpu": "training.batch_size",
    "gradient_accumulation_steps": "training.grad_accum_nums",
    "lr": "training.learning_rate",
    "train_timesteps": "training.max_steps",
    "n_transit": "training.context_length",
    "max_seq_len": "training.context_length",
    "sequence_length": "training.context_length",
    "tf_n_layer": "model.num_layers",
    "n_layers": "model.num_layers",
    "tf_n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "tf_n_embd": "model.hidden_size",
    "n_embed": "model.hidden_size",
    "tf_n_inner": "model.intermediate_size",
    "mixed_precision": "training.precision",
    "gradient_clip": "training.max_grad_norm",
    "grad_accum": "training.grad_accum_nums",
    "summary_interval": "report.log_interval",
    "ckpt_interval": "training.save_interval",
    "data_dir": "data.data_path",
    "model_name": "model.model_path",
    "save_dir": "report.results_dir",
    "d_model": "model.hidden_size",
    "n_kv_heads": "model.num_key_value_heads",
    "mlp_hidden_size": "model.intermediate_size",
    "fp16": "training.precision",
    "no_fp16": "training.precision",
    "bf16": "training.precision",
}
# The words of one family's own files, which may mean something else elsewhere: at the top of a file, of `--set`, and as
# a flag where no setting has that name.
_OF_FAMILY = {
    "ad": {
        "test_batch_size": "training.eval_batch_size",
        "beta1": "training.adam_beta1",
        "beta2": "training.adam_beta2",
        "weight_decay": "training.weight_decay",
        "num_warmup_steps": "training.warmup_steps",
        "eval_interval": "training.eval_interval",
        "gen_interval": "training.gen_interval",
        "tf_dropout": "model.dropout",
        "tf_attn_dropout": "model.attention_dropout",
        "use_compressed_context": "model.compressed",
        "compress_interval": "model.region",
        "dynamics": "model.dynamics",
        "dynamics_strength": "model.dynamics_strength",
        "flash_attn": "model.use_flash_attention",
        "label_smoothing": "objective.label_smoothing",
        "num_workers": "data.num_workers",
        "traj_dir": "data.data_path",
        "batch_size": "data.source_batch_size",
        "device": "system.device",
        **{
            name: f"data.{name}"
            for name in (
                "env", "grid_size", "horizon", "max_reward", "env_split_seed", "train_env_ratio", "alg", "policy",
                "n_steps", "n_epochs", "alg_seed", "total_source_timesteps", "n_stream", "source_lr", "n_process",
                "train_source_timesteps", "train_n_stream",
            )
        },
    }
}  # fmt: skip
RUN_FOLDER = {"ad": "log_dir"}  # the word for the whole path of the run folder
QUIET = frozenset(
    {"hf_token", "max_train_samples", "max_samples", "dataset", "experiment_name", "run_name", "tags"}
)  # documented places: no notice
SWITCHES = {  # words for a precision that are a plain yes or no -> what each means
    "mixed_precision": ("auto", "fp32"),
    "fp16": ("fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "no_fp16": ("fp32", "auto"),
}

DTYPES = {
    "bfloat16": "bf16", "bf16": "bf16",
    "float16": "fp16", "fp16": "fp16", "half": "fp16",
    "float32": "fp32", "fp32": "fp32", "float": "fp32", "full": "fp32", "no": "fp32",
}  # fmt: skip

# Read together at the end, because two of them may stand in different layers.
USE_AMP: Path = ("training", "use_amp")
AMP_DTYPE: Path = ("training", "amp_dtype")
MAX_SEQ_LENGTH: Path = ("data", "max_seq_length")
JOINT: dict[Path, Path] = {  # -> the setting that has their say now
    USE_AMP: ("training", "precision"),
    AMP_DTYPE: ("training", "precision"),
    MAX_SEQ_LENGTH: ("training", "context_length"),
}


@dataclass(frozen=True)
class Retired:
    """A key that lockstep has no use for: its inert values pass with a notice, all others are refused."""

    inert: tuple[Any, ...]
    reason: str
    hint: str = "remove the key"
    quiet: bool = False  # no notice: a documented file says it, and it is so


_NO_AUGMENTATION = "text is never augmented"
_NO_RANKS = "lockstep itself decides how many processes run"
RETIRED: dict[Path, Retired] = {
    ("data", "use_augmentation"): Retired((False,), _NO_AUGMENTATION),
    ("data", "augmentation_prob"): Retired((0, 0.0, 0.1), _NO_AUGMENTATION),
    ("system", "use_distributed"): Retired((False,), _NO_RANKS),
    ("system", "world_size"): Retired((1,), _NO_RANKS),
    ("system", "rank"): Retired((0,), _NO_RANKS),
    ("system", "backend"): Retired(("nccl", "gloo"), _NO_RANKS),
    ("trust_remote_code",): Retired(
        (False,), "lockstep never runs code from a model repository", "false, or no such key"
    ),
    ("$schema",): Retired((), ""),  # editors put it there
}
_GRID = "every world is a grid"
_AS_IT_IS: dict[str, dict[Path, Retired]] = {  # what a family's own files say, and nobody can choose
    "ad": {
        ("model",): Retired(("AD",), "Algorithm Distillation is the model", "AD", quiet=True),
        ("dim_states",): Retired((2,), f"{_GRID}, a cell has two coordinates", "2", quiet=True),
        ("dim_actions",): Retired((1,), f"{_GRID}, an action is one number", "1", quiet=True),
        ("num_actions",): Retired((5,), f"{_GRID} with five actions", "5", quiet=True),
    }
}


def moved(path: Path, family: str = "") -> Path | None:
    """Where a setting lives now; None if it never moved. A family's own words come first."""
    target = _OF_FAMILY.get(family, {}).get(".".join(path)) or _MOVED.get(".".join(path))
    if target is None and len(path) == 2:
        target = _MOVED.get(path[1])
        if target is not None and not target.startswith(f"{path[0]}."):
            target = None
    return tuple(target.split(".")) if target else None


def retired(path: Path, family: str = "") -> Retired | None:
    """Why a key has no use; None: it has one."""
    return _AS_IT_IS.get(family, {}).get(path) or RETIRED.get(path)


def is_quiet(path: Path, family: str) -> bool:
    """Whether such a word stands where it is documented: nobody need be told how it is read."""
    return path[-1] in QUIET or (len(path) == 1 and family in _OF_FAMILY)


def plain_words(family: str = "") -> set[str]:
    """The words that are read as a setting without naming a section."""
    own = {*_OF_FAMILY.get(family, {}), *(path[0] for path in _AS_IT_IS.get(family, {}))}
    return {word for word in _MOVED if "." not in word} | own


def of_family(family: str) -> set[str]:
    """The words that only this family has."""
    return plain_words(family) - plain_words()


def run_folder(path: Path, value: Any, family: str) -> dict[Path, str] | None:
    """The settings that a path of the whole run folder stands for; None: it is none."""
    if path != (RUN_FOLDER.get(family),) or not isinstance(value, str) or not PurePath(value).name:
        return None
    return {("run", "out"): str(PurePath(value).parent), ("run", "name"): PurePath(value).name}


def former_words(key: str, family: str = "") -> list[str]:
    """The other words that are read as this setting."""
    words = [word for word, target in (_MOVED | _OF_FAMILY.get(family, {})).items() if target == key]
    if key == "training.precision":
        words += ["training.use_amp", "training.amp_dtype"]
    if key == "training.context_length":
        words.append("data.max_seq_length (must be equal)")
    return words


def dtype(value: Any) -> str | None:
    """`torch.bfloat16`, `half`, ... as a precision of ours; None if it is no such word."""
    return DTYPES.get(value.removeprefix("torch.").lower()) if isinstance(value, str) else None


def precision_word(value: Any, *, word: str) -> Any:
    """A precision as we call it; some words may also be a plain yes or no."""
    if word in SWITCHES and str(value).lower() in ("true", "false"):
        yes, no = SWITCHES[word]
        return no if str(value).lower() == "false" else yes
    return dtype(value) or value


def precision_of(use_amp: bool | None, amp_dtype: str | None) -> str:
    """What the documented pair means: no autocast is fp32; autocast without a type is left to the machine."""
    if use_amp is False:
        return "fp32"
    return amp_dtype or "auto"
