"""A process of its own that asks the driver how the cards do: one that hangs there must not hold up the check.

`python -m lockstep.check.observe FILE SECONDS UUID...` writes a line of JSON for each card at once, then every so many
seconds, and a last one when it is asked to end. Errors the driver reports meanwhile (Xid) stand in the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from lockstep.check import cards
from lockstep.check.records import Card
from lockstep.runtime import devices

BEFORE, BETWEEN, AFTER = "before", "between", "after"


def main(argv: Sequence[str]) -> int:
    file, period, uuids = Path(argv[0]), float(argv[1]), list(argv[2:])
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with _errors_of(uuids) as errors:
        _write(file, BEFORE, cards.ask(uuids))
        while not ended.wait(period):
            _write(file, BETWEEN, cards.ask(uuids))
        found = cards.ask(uuids)
        seen = errors()
        _write(
            file, AFTER, {uuid: facts | ({"xid": seen[uuid]} if uuid in seen else {}) for uuid, facts in found.items()}
        )
    return 0


def _write(file: Path, when: str, found: dict[str, dict[str, Any]]) -> None:
    now = round(time.time(), 3)
    lines = [json.dumps({"uuid": uuid, "when": when, "time": now, **facts}) for uuid, facts in found.items()]
    with file.open("a", encoding="utf-8") as out:
        out.write("".join(f"{line}\n" for line in lines))


@contextlib.contextmanager
def _errors_of(uuids: Sequence[str]) -> Generator[Any]:
    """A function that gives the Xid errors since the beginning: UUID -> numbers; of cards that can tell."""
    with devices.nvml() as library:
        if library is None:
            yield dict[str, list[int]]
            return
        seen: dict[str, list[int]] = {}
        try:
            listening = library.nvmlEventSetCreate()
        except library.NVMLError:
            yield dict[str, list[int]]
            return
        for uuid in uuids:
            with contextlib.suppress(library.NVMLError):
                handle = library.nvmlDeviceGetHandleByUUID(uuid)
                library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, listening)
                seen[uuid] = []

        def take() -> dict[str, list[int]]:
            with contextlib.suppress(library.NVMLError):  # the wait ends with one: no more events
                while True:
                    event = library.nvmlEventSetWait_v2(listening, 0)
                    uuid = str(library.nvmlDeviceGetUUID(event.device))
                    seen.setdefault(uuid, []).append(int(event.eventData))
            return seen

        try:
            yield take
        finally:
            library.nvmlEventSetFree(listening)


def read(file: Path, card: Card) -> dict[str, Any]:
    """What a Replica holds of it: before, after and samples of one card, as far as they were told."""
    told: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # cut short
                told.append(json.loads(line))
    mine = [facts for facts in told if facts.pop("uuid", "") == card.uuid]
    stages = {stage: [facts for facts in mine if facts.get("when") == stage] for stage in (BEFORE, BETWEEN, AFTER)}
    plain = {
        stage: [{key: value for key, value in facts.items() if key != "when"} for facts in found]
        for stage, found in stages.items()
    }
    last = plain[AFTER] or plain[BETWEEN][-1:]
    return {
        "before": plain[BEFORE][0] if plain[BEFORE] else {},
        "after": last[-1] if last else {},
        "samples": tuple(plain[BETWEEN]),
    }


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread of the driver must not keep it
