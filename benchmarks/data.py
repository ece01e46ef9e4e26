"""What data costs: tokenise and pack beside datasets.map and the bare tokenizer; the loader beside HF's; its memory.

Usage: python benchmarks/data.py [--rounds 5] [--megabytes 20] [--only pack|load|memory|builtin]
[--anyway]
Five limits, and exit code 1 when one is not kept: wall time of tokenise+pack, at least 1.4 times faster than
datasets.map and at most 10 % over the bare tokenizer; tokens per CPU second of the loader, at least 50 times the best
of HF's ways; the private memory of a process that reads rows, the same for a corpus 16 times as large; and CPU time of
the built-in corpus, at most twice what parsing its files takes.
The corpus is the Python files of this environment, the tokenizer a byte-level BPE of 16,384 ids trained on it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles lockstep, as nobody else's does
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import busy

MAP_TIMES = 1.4  # tokenise+pack: how many times faster than datasets.map
RAW_SHARE = 1.10  # tokenise+pack: wall time over the bare tokenizer's
LOADER_TIMES = 50.0  # tokens per CPU second over HF's best
GROWTH_MIB = 2.0  # private memory of a reader, for a corpus 16 times as large
BUILTIN_TIMES = 2.0  # CPU time of the built-in corpus over a bare ast.parse of its files
CONTEXT, ROWS = 1024, 8
CORES = len(os.sched_getaffinity(0))


def cpu_seconds() -> float:
    """Of this process and of those it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_corpus(path: Path, megabytes: int) -> None:
    """A line of JSON per Python file."""
    size = 0
    with path.open("w", encoding="utf-8") as corpus:
        for file in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            with contextlib.suppress(UnicodeDecodeError):
                text = file.read_text(encoding="utf-8")
                corpus.write(json.dumps({"text": text}) + "\n")
                size += len(text)
            if size > megabytes * 1_000_000:
                return
    print(f"only {size / 1e6:.1f} MB of Python files were found")


def read_texts(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


# ------------------------------------------------------------------------------------------------ tokenise and pack


def bare(corpus: Path, tokenizer: Path, _: Path) -> int:
    """The library alone, on all cores: reads the texts, encodes them, and lets go of the result."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts, tokens = read_texts(corpus), 0
    for start in range(0, len(texts), 100):
        tokens += sum(map(len, library.encode_batch_fast(texts[start : start + 100], add_special_tokens=False)))
    return tokens


def ours(corpus: Path, tokenizer: Path, folder: Path) -> int:
    """`lockstep prepare`, within this process: split, rows of both sides, checksums, all on the disk."""
    import torch

    from lockstep.config.load import load
    from lockstep.engine.build import plan
    from lockstep.engine.prepare import prepare

    flags = {
        "data.data_path": corpus, "data.dataset_name": "text", "data.tokenizer_name": tokenizer,
        "data.cache_dir": folder, "training.context_length": CONTEXT, "model.vocab_size": 16_384,
    }  # fmt: skip
    loaded = load("llama", preset="tiny", flags=[(name, str(value)) for name, value in flags.items()])
    planned = plan(loaded, torch.device("cpu"))
    made = prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
    return (made.train.rows + made.validation.rows) * CONTEXT


def hugging_face(corpus: Path, tokenizer: Path, folder: Path) -> int:
    """datasets.map twice, as its examples do: tokenise in batches, then group into rows."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    datasets.disable_progress_bars()
    texts = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": fast(batch["text"], return_attention_mask=False)["input_ids"]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = [token for ids in batch["input_ids"] for token in ids]
        return {"input_ids": [joined[at : at + CONTEXT] for at in range(0, len(joined) - CONTEXT + 1, CONTEXT)]}

    encoded = texts.map(encode, batched=True, remove_columns=["text"], num_proc=CORES)
    return len(encoded.map(group, batched=True, num_proc=CORES)) * CONTEXT


CONTENDERS: dict[str, Callable[[Path, Path, Path], int]] = {"bare": bare, "lockstep": ours, "datasets": hugging_face}


def contend(name: str, corpus: str, tokenizer: str, folder: str) -> None:
    """In a process of its own: what is imported beforehand is not counted, nor is anything left over for the next."""
    logging.disable(logging.WARNING)
    contender = CONTENDERS[name]
    with contextlib.redirect_stderr(io.StringIO()):
        for module in (
            ("datasets", "transformers.tokenization_utils_fast") if name == "datasets" else ("lockstep.engine.build",)
        ):
            import_module(module)
        began, spent = time.perf_counter(), cpu_seconds()
        tokens = contender(Path(corpus), Path(tokenizer), Path(folder))
    print(json.dumps([time.perf_counter() - began, cpu_seconds() - spent, tokens]))


def contended(name: str, corpus: Path, tokenizer: Path) -> tuple[float, float, int]:
    """(seconds, CPU seconds, tokens) of one contender."""
    serial = {"TOKENIZERS_PARALLELISM": "true" if name == "bare" else "false"}  # datasets has processes, we threads
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--contend", name, str(corpus), str(tokenizer), folder]
        place = {**os.environ, **serial, "HF_HOME": folder, "HF_DATASETS_CACHE": f"{folder}/hf"}
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=place)
    seconds, spent, tokens = json.loads(told.stdout.splitlines()[-1])
    return seconds, spent, tokens


def show_packing(corpus: Path, tokenizer: Path, rounds: int) -> bool:
    walls: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    spents: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    counted: dict[str, int] = {}
    for _ in range(rounds):
        for name in CONTENDERS:
            wall, spent, counted[name] = contended(name, corpus, tokenizer)
            walls[name].append(wall)
            spents[name].append(spent)
    for name in CONTENDERS:
        wall, spent = statistics.median(walls[name]), statistics.median(spents[name])
        speed = corpus.stat().st_size / 1e6 / spent
        print(f"{name:10}{wall:8.2f} s {spent:8.2f} CPU s {speed:8.2f} MB/CPU s {counted[name]:12,} tokens")
    wall, bare_wall, map_wall = (statistics.median(walls[name]) for name in ("lockstep", "bare", "datasets"))
    fast = verdict("tokenise+pack over datasets.map", map_wall / wall, MAP_TIMES, "times faster")
    return (
        verdict("tokenise+pack over the bare tokenizer", wall / bare_wall, RAW_SHARE, "of its time", most=True) and fast
    )


# ------------------------------------------------------------------------------------------------------- the loader


def tokens_per_cpu_second(batches: Iterator[int], seconds: float = 1.0) -> float:
    """Of an endless iterator over the tokens of each batch, once it is warm."""
    for _ in range(20):
        next(batches)
    tokens, began = 0, cpu_seconds()
    while cpu_seconds() - began < seconds:
        tokens += sum(islice(batches, 50))  # asking for the time costs as much as a batch of ours
    return tokens / (cpu_seconds() - began)


def our_loader(folder: Path) -> Iterator[int]:
    from lockstep.data.cache import Table
    from lockstep.data.loader import Loader
    from lockstep.objectives.causal import Causal

    with Loader(Table(folder), Causal(), seed=1, micro_rows=ROWS, micro_batches=1) as loader:
        while True:
            yield next(loader)[0].tokens


def their_loaders(folder: Path) -> dict[str, Callable[[], Iterator[int]]]:
    """HF's ways to batches for a causal model: the columns that its own example (run_clm) makes, and input_ids alone,
    which is enough (labels=input_ids) and the fastest.
    """
    import datasets
    import numpy as np
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    rows = np.load(folder / "tokens.npy", mmap_mode="r")[:, :CONTEXT].astype(np.int64)
    saved = folder.parent / "hf"
    datasets.disable_progress_bars()
    if not saved.exists():
        columns = {"input_ids": rows, "attention_mask": np.ones_like(rows, np.int8), "labels": rows}
        datasets.Dataset.from_dict(columns).save_to_disk(saved)
    table = datasets.load_from_disk(saved)
    alone = table.select_columns("input_ids")

    def endless(data: object, **settings: object) -> Iterator[int]:
        while True:
            for batch in DataLoader(data, batch_size=ROWS, shuffle=True, **settings):
                yield batch["input_ids"].numel()

    return {
        "plain lists, default_data_collator": lambda: endless(table, collate_fn=default_data_collator),
        "with_format torch": lambda: endless(table.with_format("torch")),
        "with_format numpy": lambda: endless(table.with_format("numpy")),
        "with_format torch, 2 workers": lambda: endless(table.with_format("torch"), num_workers=2),
        "with_format numpy, input_ids alone": lambda: endless(alone.with_format("numpy")),
    }


def show_loading(folder: Path, rounds: int) -> bool:
    ways: dict[str, Callable[[], Iterator[int]]] = {"lockstep": lambda: our_loader(folder), **their_loaders(folder)}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, make in ways.items():
            batches = make()
            speeds[name].append(tokens_per_cpu_second(batches))
            batches.close()
    found = {name: statistics.median(values) for name, values in speeds.items()}
    for name, speed in found.items():
        print(f"{name:36}{speed / 1e6:10.2f} million tokens/CPU s")
    best = max(speed for name, speed in found.items() if name != "lockstep")
    return verdict("the loader over HF's best", found["lockstep"] / best, LOADER_TIMES, "times the tokens")


# ------------------------------------------------------------------------------------------------------ its memory

READER = """
import sys
from pathlib import Path
from lockstep.data.cache import Table
from lockstep.data.loader import Loader
from lockstep.objectives.causal import Causal
table = Table(Path(sys.argv[1]))
with Loader(table, Causal(), seed=1, micro_rows=8, micro_batches=1, workers=2) as loader:
    for step in range(2000):
        next(loader)
fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
print(int(fields["Anonymous"].split()[0]), int(fields["Rss"].split()[0]), table.rows)
"""


def show_memory(folder: Path) -> bool:
    import numpy as np

    from lockstep.data.cache import Table, write_table

    small = Table(folder)
    rows = np.asarray(small.columns["tokens"])
    large = folder.parent / "large"
    if not large.exists():
        blocks = ({"tokens": rows} for _ in range(16))
        write_table(large, blocks, columns=small.dtypes, stored={"tokens": str(rows.dtype)})
    found: list[float] = []
    for name, place in (("corpus", folder), ("16 times the corpus", large)):
        told = subprocess.run([sys.executable, "-c", READER, str(place)], check=True, capture_output=True, text=True)
        private, resident, count = (int(word) for word in told.stdout.split())
        found.append(private / 1024)
        pages = f"{resident / 1024:8.1f} MiB with the file's pages"
        print(f"{name:22}{count:9,} rows {private / 1024:8.1f} MiB private {pages}")
    return verdict("a reader of 16 times the rows", found[1] - found[0], GROWTH_MIB, "MiB more", most=True)


# -------------------------------------------------------------------------------------------------- the built-in corpus


def show_builtin(rounds: int) -> bool:
    import ast
    import warnings

    from lockstep.sources import builtin

    root = builtin.BuiltinSource().root
    files = [path for _, path, _ in builtin.library_files(root)]

    def parse() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in somebody else's strings
            for path in files:
                with contextlib.suppress(SyntaxError, UnicodeDecodeError):
                    ast.parse(path.read_text(encoding="utf-8"))

    times: list[list[float]] = []
    for _ in range(rounds):
        marks = [cpu_seconds()]
        for work in (lambda: list(builtin._documents(root)), parse):
            work()
            marks.append(cpu_seconds())
        times.append([later - earlier for earlier, later in pairwise(marks)])
    ours, bare = (statistics.median(each) for each in zip(*times, strict=True))
    print(f"{'built-in corpus':36}{ours:10.2f} CPU s; ast.parse of its files {bare:.2f}")
    return verdict("the built-in corpus over ast.parse", ours / bare, BUILTIN_TIMES, "times the CPU time", most=True)


# ------------------------------------------------------------------------------------------------------------ verdict


def verdict(what: str, figure: float, limit: float, unit: str, *, most: bool = False) -> bool:
    """Say whether a limit is kept."""
    good = figure <= limit if most else figure >= limit
    print(f"{'ok' if good else 'TOO SLOW'}: {what}: {figure:.2f} {unit}, limit {limit}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--only", choices=["pack", "load", "memory", "builtin"])
    parser.add_argument("--contend", nargs=4, help=argparse.SUPPRESS)
    busy.add_anyway(parser)
    options = parser.parse_args()
    if options.contend:
        contend(*options.contend)
        return 0
    busy.ensure_quiet(parser, options)
    logging.disable(logging.WARNING)
    print(f"python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f} on {CORES} cores")
    good = [show_builtin(options.rounds)] if options.only in (None, "builtin") else list[bool]()
    if options.only != "builtin":
        good += show_files(options.only, options.megabytes, options.rounds)
    return 0 if all(good) else 1


def show_files(only: str | None, megabytes: int, rounds: int) -> list[bool]:
    """Packing, loading and memory, on the Python files of this environment."""
    from lockstep.data.tokenize import train_bpe

    with tempfile.TemporaryDirectory() as top:
        corpus, tokenizer, cache = Path(top) / "corpus.jsonl", Path(top) / "tokenizer", Path(top) / "cache"
        write_corpus(corpus, megabytes)
        tokenizer.mkdir()
        train_bpe(read_texts(corpus), 16_384).save(tokenizer)
        good: list[bool] = []
        if only in (None, "pack"):
            good.append(show_packing(corpus, tokenizer, rounds))
        if only in (None, "load", "memory"):
            ours(corpus, tokenizer, cache)
            (rows,) = cache.glob("*/train")
            copied = Path(top) / "train"
            rows.rename(copied)
            if only != "memory":
                good.append(show_loading(copied, rounds))
            if only != "load":
                good.append(show_memory(copied))
    return good


if __name__ == "__main__":
    sys.exit(main())
