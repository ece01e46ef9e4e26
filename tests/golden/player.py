"""Runs lockstep commands where their bits do not depend on the machine: torch is loaded once, then a fork for each."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import Outcome
from tests.golden.make_runs import SAME_BITS

ONCE = ("lockstep.cli", "lockstep.engine.train", "tensorboard.summary.writer.event_file_writer", "sympy", "h5py")


class Player:
    """One process that forks for each command, with a folder for all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("LOCKSTEP_", "DATASET_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.golden.player"],
            cwd=Path(__file__).parents[2], env={**kept, **SAME_BITS},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, *words: str, **variables: str) -> Outcome:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([str(self.folder), words, variables]) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        out, err = ((self.folder / name).read_text(encoding="utf-8") for name in ("out.txt", "err.txt"))
        return Outcome(code, out, err)

    def close(self) -> None:
        self.process.communicate()


def child(folder: str, words: list[str], variables: dict[str, str]) -> None:
    from lockstep.cli import main

    os.chdir(folder)
    os.environ.update(variables)
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["lockstep", *words]
    code = main(words)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    for name in ONCE:
        importlib.import_module(name)

    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            child(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
