"""mlm_pretrain_v3.py, the documented trainer of masked-LM: its flags, its defaults, its lines. Torch-free at import."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep import named_configs
from lockstep.arguments import Parser, Short, whole
from lockstep.compat_door import Door
from lockstep.errors import ConfigError
from lockstep.named_configs import CONFIGS
from lockstep.registry import suggest

if TYPE_CHECKING:
    from lockstep.config.load import Loaded

TRAINER, NAMED = "mlm_pretrain_v3.py", "multi_gpu_configs.py"
RESULTS = ".mlm_pretrained_v3"
DOCUMENTED = (
    Short("--dataset", "Dataset choice (default: hf); any other name of a dataset works too", "{imdb,hf}"),
    Short("--streaming", "Streaming mode (default: true)", "{true,false}", "true"),
    Short("--batch-size", "Batch size per GPU (default: 32)", "INT"),
    Short("--epochs", "Number of training epochs (default: 5)", "INT"),
    Short("--lr", "Learning rate (default: 3e-5)", "FLOAT"),
    Short("--max-samples", "Maximum number of samples to load (e.g., 500k, 5M, 50M, 500M) (default: 500k)", "STR"),
)
OWN = (
    Short("--n-layers", "Layers (default: 6; imdb: 4)", "INT"),
    Short("--n-heads", "Attention heads (default: 8; imdb: 4)", "INT"),
    Short("--n-embed", "Width (default: 16; imdb: 8)", "INT"),
    Short("--max-seq-len", "Tokens of a row (default: 128)", "INT"),
    Short("--min-words", "Shorter samples are left out (default: 5)", "INT"),
    Short("--grad-accum", "Micro-batches per optimizer step (default: 1)", "INT"),
    Short("--gradient-clip", "Longest gradient (default: 1.0)", "FLOAT"),
    Short("--warmup-ratio", "Warm-up as a share of all steps (default: 0.1)", "FLOAT"),
    Short("--weight-decay", "AdamW decay (default: 0.01)", "FLOAT"),
    Short("--mixed-precision", "true: bf16 where the GPU has it; false; or bf16, fp16, fp32 (default: true)", "TYPE"),
)
SIZES = ("model.num_layers", "model.num_attention_heads", "model.hidden_size", "training.context_length")
IMDB_SIZES = dict(zip(SIZES[:3], ("4", "4", "8"), strict=True))


@dataclass(frozen=True)
class MlmDoor(Door):
    """mlm_pretrain_v3.py."""

    def parser(self) -> Parser:
        parser = self.new_parser()
        for short in DOCUMENTED:
            parser.add_short(short)
        parser.takes_value["--local-rank"] = True
        parser.add_argument(
            "--local_rank", "--local-rank", metavar="INT", type=whole(0),
            help="Local rank for distributed training (auto-detected); the launcher's environment counts more",
        )  # fmt: skip
        for short in OWN:
            parser.add_short(short)
        parser.flag("--config-name", "a named configuration: its values, where not given here", metavar="NAME")
        parser.flag("--overwrite", "train anew, although a run with these settings is there")
        return self.with_usual(parser, debug="debug output; full tracebacks")

    def defaults(self, asked: Namespace, first: Loaded) -> Mapping[str, str]:
        """What the script sets itself: its files, going on where it stopped, and the model of imdb or of a name."""
        from lockstep.runtime import env

        must_train(first)
        own = {"report.results_dir": RESULTS, "run.experiment_name": asked.config_name or "mlm_pretrain_v3"}
        if not first.config.report.log_all_ranks:
            own["report.log_prefix"] = self.log_prefix
        if not asked.overwrite:
            own["checkpoint.resume"] = "auto"
        if asked.local_rank and env.detect().launcher == "none":
            own["system.device_id"] = str(asked.local_rank)
        if asked.config_name in CONFIGS:
            return own | _native(named_configs.flags("", CONFIGS[asked.config_name])[2:])
        if asked.config_name:
            _must_be_whole(asked.config_name, first)
        elif first.preset == self.preset and first.config.data.dataset_name.partition("@")[0] == "imdb":
            own |= IMDB_SIZES
        return own

    def opening(self, loaded: Loaded) -> list[str]:
        """The documented lines before training, of the main process."""
        from lockstep.runtime import env, hardware

        config, place = loaded.config, env.detect()
        training, data = config.training, config.data
        total, accumulated = training.batch_size * place.world, training.grad_accum_nums
        device = hardware.pick_device(config.system.device, hardware.own_index(place, config.system.device_id))
        of = f" ({total} x {accumulated} accumulated)" if accumulated > 1 else ""
        facts = {
            "World Size": place.world,
            "Local Rank": place.local_rank,
            "Device": device,
            "Dataset": data.dataset_name,
            "Streaming": data.streaming,
            "Batch Size per GPU": training.batch_size,
            "Total Batch Size": f"{total * accumulated}{of}",
            "Epochs": epochs_text(loaded),
            "Learning Rate": training.learning_rate,
            "Max Samples": f"{data.max_train_samples:,}",
        }
        return ["Multi-GPU MLM Training Setup:", *(f"  - {name}: {value}" for name, value in facts.items())]


DOOR = MlmDoor(TRAINER, "Pre-train an encoder by masked-LM.", log_prefix="none", family="mlm", preset="microbert")


def epochs_text(loaded: Loaded) -> str:
    """How long it trains: 5, or so many steps."""
    epochs: float = getattr(loaded.config.training, "epochs", 0)
    return f"{epochs:g}" if epochs else f"by steps ({loaded.config.training.max_steps:,})"


def _native(words: Sequence[str]) -> dict[str, str]:
    """Flags and their values by the names of the settings."""
    from lockstep.config import renames
    from lockstep.config.catalog import catalog
    from lockstep.config.given import from_flag

    known, native = catalog("mlm"), dict[str, str]()
    for flag, value in zip(words[::2], words[1::2], strict=True):
        path = from_flag(flag.removeprefix("--"), value, known).path
        native[".".join(path if path in known.settings else renames.moved(path) or path)] = value
    if (word := native.get("training.precision", "").lower()) in ("true", "false"):
        native["training.precision"] = renames.precision_word(word, word="mixed_precision")
    return native


def must_train(first: Loaded) -> None:
    """0 epochs mean that steps decide, which is said by whoever means it: else it is a slip, not 100 steps."""
    slip = "training.epochs" in given(first) and "training.max_steps" not in given(first)
    if slip and getattr(first.config.training, "epochs", 0) <= 0:
        hint = "a number above 0, or --max-steps N as well: then steps decide"
        raise ConfigError("0 epochs train nothing", where="--epochs", hint=hint)


def _must_be_whole(name: str, first: Loaded) -> None:
    """A name that is not known here is a label, where the flags carry all that it stands for."""
    if not given(first).issuperset(SIZES):
        raise ConfigError(
            f"no configuration {name[:80]!r}",
            where="--config-name",
            hint=f"{suggest(name, list(CONFIGS))}; for one of your own: python {NAMED} generate NAME",
        )


def given(loaded: Loaded) -> set[str]:
    """The settings that the user has made, in a file or on the command line."""
    return {key for key, origin in loaded.origins.items() if origin.layer in ("file", "flag")}
