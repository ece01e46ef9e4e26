"""The words of each verb: its arguments and flags. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from lockstep.arguments import OF_COLLECTIONS, SHORTS, Parser, Setting, plain_text, real, understand, whole


def parse(
    verb: str, about: str, words: Sequence[str], setting_words: Callable[[], set[str]]
) -> tuple[argparse.Namespace, list[Setting]]:
    """The words after a verb, understood: its own arguments, and settings."""
    parser = Parser(verb, about)
    ARGUMENTS[verb](parser)
    return understand(parser, words, setting_words)


def _configuration(
    parser: Parser, *, needed: bool = True, shown: Sequence[str] | None = None, dry_run: bool = True
) -> None:
    parser.add_argument(
        "family", metavar="FAMILY", nargs=None if needed else "?", help="what is trained: llama, mlm, llada or ad"
    )
    parser.add_argument("what", metavar="PRESET|FILE", nargs="?", help="a preset (lockstep config list) or a file")
    parser.flag("--preset", "settings to start from", metavar="NAME")
    parser.flag("--config", "a .json or .yaml file over the preset", metavar="FILE")
    parser.flag("--debug", "the debug preset, or debug output for another one; full tracebacks")
    if dry_run:
        parser.flag("--dry-run", "show the resolved configuration and sizes, and stop")
    parser.add_shorts(shown)


def _train(parser: Parser) -> None:
    _configuration(parser)
    parser.add_launch()


def _resume(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, its name, latest, or one checkpoint of it")
    parser.flag("--debug", "full tracebacks")
    group = parser.add_argument_group("a proof, which only reads the run")
    parser.flag("--prove", "make the steps before the checkpoint again and compare every bit: 0 equal, 1 not",
                group=group)  # fmt: skip
    parser.flag("--steps", "at least so many (those since the checkpoint before)", metavar="K", type=whole(1),
                group=group)  # fmt: skip
    parser.add_shorts([short.name for short in SHORTS if short.name not in ("--resume", "--checkpoint")])  # RUN says it
    parser.add_launch()


def _prepare(parser: Parser) -> None:
    _configuration(parser, needed=False)
    group = parser.add_mutually_exclusive_group()
    parser.flag("--list", "show the prepared datasets", group=group)
    parser.flag("--verify", "check every byte of them", group=group)
    parser.flag("--clean", "remove them", group=group)
    parser.flag("--to", "llada: also write train_data.npy, val_data.npy, metadata.json", metavar="DIR", group=group)


def _collect(parser: Parser) -> None:
    _configuration(parser, shown=OF_COLLECTIONS)
    parser.flag("--overwrite", "also where there are some, of these settings or others")


def _sample(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run, its name, latest, or one checkpoint")
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        type=plain_text,
        help="what the model continues, or a text with [MASK]s to fill",
    )
    parser.flag("--tokens", "how many at most (64; a [MASK] is one)", metavar="N", type=whole(1))
    parser.flag(
        "--temperature", "0 is greedy (0.8; for [MASK]s and answers 0, for agents 0.5)", metavar="T", type=real(0, 100)
    )
    parser.flag("--top-k", "draw from the K likeliest, 0 from all (50)", metavar="K", type=whole(0))
    parser.flag("--seed", "another seed, another text or walk (0)", metavar="N", type=whole(0))
    group = parser.add_argument_group("masked diffusion (family llada)")
    parser.flag("--steps", "forward passes (one for each token)", metavar="N", type=whole(1), group=group)
    parser.flag("--block-length", "tokens filled before the next ones (all)", metavar="N", type=whole(1), group=group)
    parser.flag("--remasking", "what stays hidden: low_confidence, or random (for a text that goes on)", metavar="HOW",
                choices=("low_confidence", "random"), group=group)  # fmt: skip
    parser.flag("--cfg-scale", "how much more the prompt counts (0)", metavar="S", type=real(-1, 100), group=group)
    parser.flag("--threshold", "keep all that are as sure, in fewer passes", metavar="P", type=real(0, 1), group=group)
    parser.flag("--no-eos", "never end the text", group=group)
    parser.flag("--delay-eos", "end only where nothing else is left", group=group)
    group = parser.add_argument_group("agents (family ad), which walk and need no PROMPT")
    parser.flag("--goal-idx", "in which unseen task (0)", metavar="N", type=whole(0), group=group)
    parser.flag("--episodes", "how many one after another (20)", metavar="N", type=whole(1), group=group)


def _eval(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run, its name, latest, or one checkpoint")
    parser.flag("--json", "as JSON")
    group = parser.add_argument_group("how likely an answer is (family llada)")
    parser.flag("--answer", "the text that is scored", metavar="TEXT", type=plain_text, group=group)
    parser.flag("--prompt", "what stands before it (nothing)", metavar="TEXT", type=plain_text, group=group)
    parser.flag("--samples", "ways to hide it (128)", metavar="N", type=whole(1), group=group)
    parser.flag("--cfg-scale", "how much more the prompt counts (0)", metavar="S", type=real(-1, 100), group=group)
    group = parser.add_argument_group("walks of an agent in its unseen tasks (family ad)")
    parser.flag("--goal-idx", "in one of them only (all)", metavar="N", type=whole(0), group=group)
    parser.flag("--episodes", "one after another in each walk (100)", metavar="N", type=whole(1), group=group)
    parser.flag("--repeats", "walks in each task (4)", metavar="N", type=whole(1), group=group)
    parser.flag(
        "--temperature", "of the choice of actions, 0 is greedy (0.5)", metavar="T", type=real(0, 100), group=group
    )
    parser.flag("--seed", "another seed, other walks (0)", metavar="N", type=whole(0), group=group)


def _export(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run, its name, latest, or one checkpoint")
    parser.add_argument("folder", metavar="DIR", nargs="?", help="where to write (RUN/hf, RUN/peft)")
    parser.flag("--to", "form: hf (transformers), or peft (a LoRA run's adapter)", metavar="FORM",
                choices=["hf", "peft"], required=True)  # fmt: skip
    parser.flag("--dtype", "fp32, bf16 or fp16 (fp32)", metavar="TYPE", default="fp32")


def _status(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run, its name, or latest (all runs)")


def _logs(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run, its name, or latest")
    parser.flag("--gpu", "only this worker's", metavar="N", type=whole(0))
    parser.flag("--lines", "only the last N of each (50; 0: all)", metavar="N", type=whole(0), default=50)
    parser.flag("--follow", "go on until the run ends")


def _stop(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run, its name, or latest")
    parser.flag(
        "--timeout", "seconds to wait for it to save and end (600)", metavar="S", type=real(0, 1e7), default=600.0
    )


def _check(parser: Parser) -> None:
    group = parser.add_mutually_exclusive_group()
    parser.flag("--quick", "about a minute: fewer kernels", group=group)
    parser.flag("--deep", "ten times as many steps", group=group)
    parser.flag("--gpus", "which cards: all, a count, or numbers with commas (all)", metavar="WHICH", default="all")
    parser.flag("--device", "cuda, or cpu: workers that stand for cards", metavar="DEVICE", default="auto")
    parser.flag("--workload", "only these, with commas", metavar="NAMES", default="")
    parser.flag("--golden", "known bits: compared with, and written by a check that passes", metavar="FILE")
    parser.flag("--slow", "a card is slow beyond this ratio to the others (1.05; CPU workers: 1.5)", metavar="RATIO",
                type=real(1.0, 100.0))  # fmt: skip
    parser.flag("--timeout", "seconds without a sign of life after which a card fails (300, 600 or 1200)", metavar="S",
                type=real(1.0, 1e7))  # fmt: skip
    parser.flag("--out", "folder of the runs (runs)", metavar="DIR", default="runs")
    parser.flag("--name", "of this check (check-TIME)", metavar="NAME", default="")
    parser.flag("--json", "print check.json and nothing else")
    parser.flag("--schema", "print the JSON Schema of check.json")


MOST_TIMED = 1_000_000  # steps of a bench: days
OF_BENCHES = ("--device", "--seed", "--precision", "--batch-size", "--model-path", "--gradient-checkpointing",
              "--deterministic")  # fmt: skip


def _bench(parser: Parser) -> None:
    _short_runs(parser)
    parser.flag("--find-batch", "instead: the largest batch size that fits one GPU")


def _bench_scaling(parser: Parser) -> None:
    _short_runs(parser)
    parser.flag("--workers", "numbers of workers (1,2,4)", metavar="N,N", default="1,2,4")


def _short_runs(parser: Parser) -> None:
    """Rows are made here and nothing is written but FILE, so most of the short words mean nothing to it."""
    _configuration(parser, shown=OF_BENCHES)
    parser.flag("--steps", "steps that are timed, after some that warm up (20)", metavar="N",
                type=whole(1, MOST_TIMED), default=20)  # fmt: skip
    parser.flag("--json", "also write the figures to this file", metavar="FILE")


def _diff(parser: Parser) -> None:
    for place in ("a", "b"):
        parser.add_argument(f"run_{place}", metavar=f"RUN_{place.upper()}", help="a run, its name, or latest")
    parser.flag("--json", "as JSON")


def _doctor(parser: Parser) -> None:
    parser.flag("--json", "as JSON")
    parser.flag("--network", "also ask whether the hub answers")


def _replay(parser: Parser) -> None:
    about = "what a run kept of a step, RUN/workers/n0-GPU3/faults/step_000012; or the run, its name, latest"
    parser.add_argument("bundle", metavar="BUNDLE|RUN", help=about)
    parser.flag("--device", "auto, cpu or cuda (auto)", metavar="KIND", default="auto", choices=("auto", "cpu", "cuda"))
    parser.flag("--json", "as JSON")
    parser.flag("--drop-sample", "also without the I-th row of the step, from 0", metavar="I", type=whole(0))


def _script(parser: Parser) -> None:
    parser.add_argument("kind", metavar="KIND", choices=("slurm", "k8s"), help="slurm or k8s")
    _configuration(parser, dry_run=False)  # the words go into the job, which would then train nothing
    parser.flag("--nodes", "machines (1)", metavar="N", type=whole(1), default=1)
    parser.flag("--time", "time limit of the job (24:00:00)", metavar="TIME", default="24:00:00")


def _presets(parser: Parser) -> None:
    parser.add_argument("only", metavar="FAMILY", nargs="?", help="whose presets (all)")
    parser.flag("--family", "the same", metavar="FAMILY")


def _show(parser: Parser) -> None:
    _configuration(parser)
    parser.flag("--json", "as a file that can be loaded again")
    parser.flag("--set", "only what differs from the defaults")


def _explain(parser: Parser) -> None:
    parser.add_argument("key", metavar="KEY", nargs="?", default="", help="a setting, a section, or nothing for all")
    parser.flag("--family", "whose settings (the first that has it: llama, mlm, llada, ad)", metavar="FAMILY")


def _validate(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE")
    parser.flag("--family", "whose settings (llama)", metavar="FAMILY", default="llama")
    parser.flag("--preset", "settings to start from (production)", metavar="NAME")
    parser.add_shorts()


def _schema(parser: Parser) -> None:
    parser.add_argument("family", metavar="FAMILY", nargs="?", default="llama")


def _init(parser: Parser) -> None:
    parser.add_argument("family", metavar="FAMILY")
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".")


ARGUMENTS: dict[str, Callable[[Parser], None]] = {
    "train": _train,
    "resume": _resume,
    "prepare": _prepare,
    "collect": _collect,
    "status": _status,
    "logs": _logs,
    "stop": _stop,
    "check": _check,
    "bench": _bench,
    "bench scaling": _bench_scaling,
    "diff": _diff,
    "doctor": _doctor,
    "replay": _replay,
    "script": _script,
    "sample": _sample,
    "eval": _eval,
    "export": _export,
    "config list": _presets,
    "config show": _show,
    "config explain": _explain,
    "config validate": _validate,
    "config schema": _schema,
    "init": _init,
    "families": lambda _: None,  # takes nothing
}
