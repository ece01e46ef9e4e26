"""What a launcher leaves in files: workers' output, heartbeats and stacks in the run folder, logs in their own."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.launch import failure
from lockstep.launch.beats import Beat
from lockstep.launch.children import Child
from lockstep.launch.link import stacks_path
from lockstep.launch.output import LogFile
from lockstep.rundir import RunDir

HEARTBEAT_SECONDS = 2.0


class Records:
    """The files of one node. The run folder becomes known when a worker tells it."""

    def __init__(self, node: int, log_folder: Path | None, complain: Callable[[str], None]) -> None:
        self.run: Path | None = None
        self._node = node
        self._log_folder = log_folder
        self._complain = complain
        self._beat_at = 0.0

    def open_log(self, child: Child) -> None:
        """gpu_<id>.log, from the first line on."""
        if self._log_folder is not None:
            number = re.sub(r"\D", "", child.proc.tag) or str(child.proc.slots[0])
            child.output.add_file(LogFile(self._log_folder / f"gpu_{number}.log", self._complain))

    def learn_run(self, beats: Sequence[Beat], children: Sequence[Child]) -> None:
        """Once a worker has told the run folder: everything its workers print goes there too."""
        told = next((beat.run for beat in beats if beat.run), "")
        if self.run is not None or not told or not Path(told).is_dir():
            return
        self.run = Path(told)
        for child in children:
            file = LogFile(self.worker(child.proc.tag) / "output.txt", self._complain)
            child.output.add_file(file, last=True)

    def worker(self, tag: str) -> Path:
        assert self.run is not None
        return RunDir(self.run).worker(tag, self._node)

    def write_heartbeats(self, beats: Sequence[Beat], tags: Sequence[str], *, last: bool = False) -> None:
        """For `lockstep status`: who is where, every two seconds."""
        now = time.monotonic()
        if self.run is None or (now < self._beat_at + HEARTBEAT_SECONDS and not last):
            return
        self._beat_at = now
        for beat in beats:
            value = {
                "pid": beat.pid,
                "rank": beat.rank,
                "section": beat.section,
                "step": beat.step,
                "age": round(beat.age(time.monotonic_ns()), 3),
                "busy": round(sum(beat.busy) / len(beat.busy), 6) if beat.busy else None,
                "time": time.time(),
            }
            failure.replace_quietly(self.worker(tags[beat.slot]) / "heartbeat", value)

    def keep_stacks(self, work: Path, tags: Sequence[str]) -> None:
        """Copy the stacks that were dumped into the run folder."""
        if self.run is None:
            return
        for slot, tag in enumerate(tags):
            with contextlib.suppress(OSError):
                if stacks_path(work, slot).stat().st_size:
                    folder = self.worker(tag)
                    folder.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(stacks_path(work, slot), folder / "stacks.txt")

    def log_of(self, child: Child) -> str:
        """The best file to read after a failure."""
        return str(child.output.files[0].path) if child.output.files else ""
