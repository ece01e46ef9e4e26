"""The command line as words: which verbs and flags there are, and which words are settings. Imports nothing heavy."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import ConfigError

Setting = tuple[str, str | None]  # (key, text); None: a bare switch


@dataclass(frozen=True)
class Short:
    """A flag that is a shorter word for a setting."""

    name: str
    help: str
    metavar: str = ""  # "": a switch
    bare: str = ""  # what it means without a value, if that is allowed


SHORTS = (
    Short("--max-steps", "optimizer steps", "N"),
    Short("--resume", "go on from a run, or from the newest like it", "[auto|RUN]", "auto"),
    Short("--checkpoint", "the same, for one checkpoint or .pt file", "PATH"),
    Short("--name", "name of the run folder", "NAME"),
    Short("--out", "folder of the run folders (runs)", "DIR"),
    Short("--seed", "decides weights, order and noise", "N"),
    Short("--device", "auto, cuda or cpu", "DEVICE"),
    Short("--gpus", "all, N, 0,2, auto or auto:memory; on the CPU N workers", "WHICH"),
    Short("--mode", "ddp, fsdp, hsdp or replicas", "MODE"),
    Short("--precision", "auto, fp32, bf16, fp16 or fp8", "TYPE"),
    Short("--batch-size", "rows of a micro-batch; auto: the most that fit", "N"),
    Short("--lr", "peak learning rate", "RATE"),
    Short("--model-path", "shape by name, folder or hub id", "NAME"),
    Short("--data-path", "local text to train on; ad: folder of histories", "PATH"),
    Short("--gradient-checkpointing", "less memory, more work"),
    Short("--deterministic", "same bits in every run"),
    Short("--canonical", "also on 1, 2, 4 and 8 workers"),
    Short("--profile", "trace a few steps"),
    Short("--experiment-name", "for file names and logs", "NAME"),
    Short("--log-all-ranks", "show the lines of every worker"),
    Short("--log-level", "DEBUG, INFO, WARNING or ERROR", "LEVEL"),
    Short("--log-file", "also write the log here", "FILE"),
    Short("--log-dir", "also write logs here", "DIR"),
    Short("--log-prefix", "bracket, colon or none", "STYLE"),
    Short("--hf-token", "Hugging Face token ($HF_TOKEN); never written", "TOKEN"),
)
OF_COLLECTIONS = ("--device", "--data-path", "--log-level")  # the short words that mean something to them
NOT_CARRIED = "holds a character that no file name or log can carry"
LAUNCHES = ("auto", "workers", "torchrun", "accelerate")
REMOVED = {  # a flag, a flag with its value, a verb's flag or argument that lockstep had -> (why, what to type)
    "--launch inline": ("one worker trains in this process without being asked to", "leave out --launch"),
    "--launch slurm": ("jobs are submitted by sbatch", "lockstep script slurm FAMILY PRESET | sbatch"),
    "lockstep bench --anyway": ("a busy machine is a warning line", "lockstep bench FAMILY PRESET"),
    "lockstep bench scaling --anyway": ("a busy machine is a warning line", "lockstep bench scaling FAMILY PRESET"),
    "lockstep check --audit": ("--deterministic names the operation", "lockstep train FAMILY PRESET --deterministic"),
    "lockstep eval --labels": (
        "scikit-learn classifies the states of an exported encoder",
        "lockstep export RUN --to hf, then the recipe in docs/mlm.md#what-an-encoder-is-worth",
    ),
    "lockstep replay --eager-attention": ("plain attention is always tried", "lockstep replay BUNDLE"),
    "lockstep replay --fp32": ("fp32 is always tried", "lockstep replay BUNDLE"),
    "lockstep replay --no-compile": ("the step is always tried without the compiler", "lockstep replay BUNDLE"),
    "lockstep script torchrun": (
        "one command line does it",
        "torchrun --nproc_per_node=N -m lockstep train FAMILY PRESET",
    ),
    "lockstep script accelerate": (
        "one command line does it",
        "accelerate launch --multi_gpu --num_processes N -m lockstep train FAMILY PRESET",
    ),
    "multi_gpu_configs.py estimate": (
        "a generated script measures before it trains",
        "multi_gpu_configs.py generate NAME; ./train_NAME.sh",
    ),
}
EVERY_SETTING = "Every other setting works as --section.key VALUE or section.key=VALUE: lockstep config explain"


class Parser(argparse.ArgumentParser):
    """argparse that raises our errors, and knows which of its flags take a value."""

    def __init__(self, verb: str, about: str) -> None:
        super().__init__(
            prog=f"lockstep {verb}",
            description=about,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.settings = False  # whether words may be settings
        self.takes_value = {"--help": False}
        self.shorts: dict[str, Short] = {}

    def flag(self, name: str, about: str, *, metavar: str = "", group: Any = None, **options: Any) -> None:
        """A flag of the verb itself; without a metavar it is a switch."""
        self.takes_value[name] = bool(metavar)
        if metavar:
            (group or self).add_argument(name, metavar=metavar, help=about, **options)
        else:
            (group or self).add_argument(name, action="store_true", help=about)

    def add_shorts(self, shown: Sequence[str] | None = None) -> None:
        """Accept settings; their short words stand in the help, `split` takes them out before argparse sees them.

        `shown`: only these stand there. The others are accepted, so that one command line fits several verbs.
        """
        self.settings = True
        self.epilog = EVERY_SETTING
        group = self.add_argument_group("short words for settings")
        for short in SHORTS:
            if short.name not in self.shorts:  # a documented script may have explained it in its own words
                self.add_short(short, group, shown=shown is None or short.name in shown)

    def add_short(self, short: Short, group: Any = None, *, shown: bool = True) -> None:
        """One such word."""
        group = group or self
        self.shorts[short.name] = short
        about = short.help if shown else argparse.SUPPRESS
        metavar = short.metavar.replace("%", "%%") or None
        if metavar:
            group.add_argument(short.name, metavar=metavar, help=about)
        else:
            group.add_argument(short.name, action="store_true", help=about)

    def add_launch(self) -> None:
        """How the workers are started: not a setting of the run, but of this start."""
        group = self.add_argument_group("starting workers")
        self.flag("--launch", "auto, workers, torchrun or accelerate", metavar="HOW", default="auto",
                  choices=LAUNCHES, group=group)  # fmt: skip
        self.flag("--nodes", "machines in this run (1)", metavar="N", type=whole(1), group=group)
        self.flag("--node-rank", "which of them this is, from 0", metavar="N", type=whole(0), group=group)
        self.flag("--master-addr", "address of the first machine", metavar="HOST", group=group)
        self.flag("--master-port", "its port (a free one)", metavar="PORT", type=whole(1), group=group)
        self.flag("--restarts", "after a crash or hang go on from the last checkpoint, so often at most (0)",
                  metavar="N", type=whole(0), default=0, group=group)  # fmt: skip

    def no_such_flag(self, flag: str, others: Sequence[str] = ()) -> ConfigError:
        """A refusal that names the flag most like it."""
        refuse_removed(flag)
        refuse_removed(f"{self.prog} {flag}")
        near = difflib.get_close_matches(flag, [*self.takes_value, *self.shorts, *others], n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help"
        return ConfigError(f"no such flag of {self.prog}", where=flag[:200], hint=hint)

    def error(self, message: str) -> NoReturn:
        more = message.removeprefix("unrecognized arguments: ")
        is_file = more != message and Path(more).suffix in (".json", ".yaml", ".yml") and "--config" in self.takes_value
        raise ConfigError(message, where=self.prog, hint=f"--config {more}" if is_file else f"{self.prog} --help")


def understand(
    parser: Parser, words: Sequence[str], setting_words: Callable[[], set[str]]
) -> tuple[argparse.Namespace, list[Setting]]:
    """A command line as the parser's own arguments and settings; a word that is neither is a slip in a flag."""
    flags, settings = split(parser, words)
    for word in flags:
        refuse_removed(word.replace("=", " ", 1) if word.startswith("--") else f"{parser.prog} {word}")
    for word, _ in settings:
        flag = f"--{word.replace('_', '-')}"
        if "." not in word and flag not in parser.shorts and word.replace("-", "_") not in (known := setting_words()):
            raise parser.no_such_flag(flag, [f"--{name.replace('_', '-')}" for name in known])
    return parser.parse_args(flags), settings


def refuse_removed(words: str) -> None:
    """Say what took the place of something that is gone."""
    if words in REMOVED:
        why, instead = REMOVED[words]
        raise ConfigError(f"was removed: {why}", where=words, hint=instead)


def split(parser: Parser, words: Sequence[str]) -> tuple[list[str], list[Setting]]:
    """The words for argparse, flags first, and the settings among them."""
    flags: list[str] = []
    plain: list[str] = []
    settings: list[Setting] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            plain += rest
            break
        if word.startswith("--"):
            _take_flag(parser, word, rest, flags, settings)
        elif word == "-h":
            flags.append(word)
        elif parser.settings and _is_assignment(word):
            key, _, text = word.partition("=")
            settings.append((key, text))
        else:
            plain.append(word)
    return [*flags, *(["--"] if any(word.startswith("-") for word in plain) else []), *plain], settings


def _take_flag(parser: Parser, word: str, rest: list[str], flags: list[str], settings: list[Setting]) -> None:
    name, equals, text = word.partition("=")
    name = name.replace("_", "-")
    if name in parser.takes_value:
        flags.append(name + equals + text)
        if parser.takes_value[name] and not equals:
            if not rest:
                raise ConfigError("needs a value", where=name, hint=f"{parser.prog} --help")
            flags[-1] = f"{name}={rest.pop(0)}"
        return
    short = parser.shorts.get(name)
    if short is None and not parser.settings:
        raise parser.no_such_flag(name)
    value: str | None = text if equals else None
    if value is None and _follows(short, rest):
        value = rest.pop(0)
    if value is None and short and short.bare:
        value = short.bare
    settings.append((word.partition("=")[0][2:], value))


def _follows(short: Short | None, rest: list[str]) -> bool:
    """Whether the next word is the value of this flag."""
    if not rest or rest[0].startswith("--"):
        return False
    if short and not short.metavar:  # a switch: --deterministic false
        return rest[0] in ("true", "false")
    return not (short and short.bare and _is_assignment(rest[0]))


def _is_assignment(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and all(part.replace("-", "_").isidentifier() for part in key.split("."))


def without(words: Sequence[str], *flags: str) -> list[str]:
    """The words without these flags and their values."""
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") in flags:
            rest = rest if equals else rest[1:]
        else:
            kept.append(word)
    return kept


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argument that is a whole number of at least `low`, and of at most `high` if there is one."""
    bounds = f"of at least {low}" if high is None else f"from {low:,} to {high:,}"

    def read(text: str) -> int:
        if (
            not text.removeprefix("-").isdecimal()
            or len(text) > 18
            or not low <= int(text) <= (int(text) if high is None else high)
        ):
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text[:40]!r}")
        return int(text)

    return read


def real(low: float, high: float) -> Callable[[str], float]:
    """An argument that is a number between two bounds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a number from {low:g} to {high:g}, got {text[:40]!r}")
        return value

    return read


def plain_text(word: str) -> str:
    """An argument that is a text, and not bytes of some other code."""
    if not is_carried(word):
        raise argparse.ArgumentTypeError(f"{NOT_CARRIED}; retype it")
    return word


def is_carried(word: str) -> bool:
    """Whether every program can be given this text: it has no zero in it and is UTF-8."""
    return "\0" not in word and not any("\ud800" <= letter <= "\udfff" for letter in word)
