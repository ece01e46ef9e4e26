"""A launcher of stub workers: `python -m tests.launch.launcher WORKERS RUN [key=value of Watch ...]`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lockstep.guard import say
from lockstep.launch import team, workers
from lockstep.launch.supervise import Proc, Watch, supervise


class NoReaper:
    """Nobody clears up after a launcher that was killed."""

    def __init__(self, *_: object) -> None: ...

    add = remove = close = __init__


def stub_procs(count: int, run: Path, work: Path, **environ: str) -> list[Proc]:
    """The plan of so many stub workers."""
    place = workers.Meeting(node=0, nodes=1, address="127.0.0.1", port=1)
    variables = {**os.environ, **environ, "STUB_RUN": str(run)}
    module = ("tests.launch.stub",)
    return workers.plan(module, range(count), cpu=True, environ=variables, work=work, meeting=place)


def main(words: list[str]) -> int:
    count, run = int(words[0]), Path(words[1])
    given: dict[str, Any] = {}
    for word in words[2:]:
        name, _, value = word.partition("=")
        given[name] = Path(value) if name == "log_folder" else value if name in ("show", "prefix") else float(value)
    if given.pop("no_reaper", None):
        setattr(team, "Reaper", NoReaper)  # noqa: B010 - a control: the launcher without its second line of defence
    run.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="lockstep-"))
    outcome = supervise(stub_procs(count, run, work), Watch(**({"show": "all"} | given)), work, say)
    told = f"outcome: code {outcome.exit_code}, slow {list(outcome.slow)}, leaked {len(outcome.leaked)}\n"
    sys.stderr.write(told)  # whoever reads the output may stand still
    return outcome.exit_code


if __name__ == "__main__":
    from lockstep import guard

    sys.exit(guard.run(lambda: main(sys.argv[1:]), sys.argv[1:]))
