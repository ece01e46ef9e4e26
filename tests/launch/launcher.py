"""A launcher of stub workers: `python -m tests.launch.launcher WORKERS RUN [key=value of Watch, restarts=N ...]`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.guard import say
from lockstep.launch import restarting, team, workers
from lockstep.launch.supervise import Outcome, Proc, Watch, supervise
from lockstep.runtime import signals


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
    restarts = int(given.pop("restarts", 0))
    restarting.PAUSE_SECONDS = given.pop("pause", restarting.PAUSE_SECONDS)
    watch = Watch(**({"show": "all"} | given))
    run.mkdir(exist_ok=True)

    def attempt(variables: Mapping[str, str]) -> Outcome:
        work = Path(tempfile.mkdtemp(prefix="lockstep-"))
        procs = stub_procs(count, run, work, **variables)
        outcome = supervise(procs, watch, work, say)
        told = f"outcome: code {outcome.exit_code}, slow {list(outcome.slow)}, leaked {len(outcome.leaked)}\n"
        sys.stderr.write(told)  # whoever reads the output may stand still
        return outcome

    with signals.listening():
        return restarting.keep_running(attempt, most=restarts, node=0, say=say)


if __name__ == "__main__":
    from lockstep import guard

    sys.exit(guard.run(lambda: main(sys.argv[1:]), sys.argv[1:]))
