"""Log files as they grow: the last lines, then what is added, through cuts and replacements."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.rundir import open_plain

BLOCK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20  # what has no end after that is shown as it is


class Growing:
    """A file that somebody appends to, and may cut or replace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self._open_line = b""

    def last(self, count: int) -> list[str]:
        """The last whole lines (0: all); `added` goes on from there."""
        with open_plain(self._path) as file:
            self._inode = os.fstat(file.fileno()).st_ino
            start = end = file.seek(0, 2)
            blocks, ends = list[bytes](), 0
            while start > 0 and (count == 0 or (ends <= count and end - start <= count * LONGEST_LINE_BYTES)):
                begin = max(0, start - BLOCK_BYTES) if count else 0
                file.seek(begin)
                blocks.append(file.read(start - begin))
                ends += blocks[-1].count(b"\n")
                start = begin
        self._offset = end
        text = b"".join(reversed(blocks))
        *whole, self._open_line = text.split(b"\n")
        return _texts(whole[-count:] if count else whole)

    def added(self) -> list[str]:
        try:
            file = open_plain(self._path)
        except OSError:  # between two files of this name
            return []
        with file:
            if os.fstat(file.fileno()).st_ino != self._inode or file.seek(0, 2) < self._offset:
                self._inode, self._offset, self._open_line = os.fstat(file.fileno()).st_ino, 0, b""
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *whole, self._open_line = (self._open_line + new).split(b"\n")
        if len(self._open_line) > LONGEST_LINE_BYTES:
            whole, self._open_line = [*whole, self._open_line], b""
        return _texts(whole)

    def rest(self) -> list[str]:
        open_line, self._open_line = self._open_line, b""
        return _texts([open_line]) if open_line else []


def _texts(lines: Sequence[bytes]) -> list[str]:
    return [line.decode("utf-8", "replace") for line in lines]
