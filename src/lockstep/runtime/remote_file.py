"""A file of the hub read where it lies: only the parts that are asked for are fetched, and kept for the next reader.

Each block that was fetched is a file in a folder of ours, with a checksum behind it: reading again, in this process or
after it was killed, fetches only what is missing.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import NotFoundError
from lockstep.runtime import hub

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 4  # fetched at once when a file is read on, and lost if the process is killed meanwhile
BLOCKS_PER_AHEAD = 4  # read in a row for each that is fetched ahead: after a short read little was in vain
KEPT_BLOCKS = 24
CHECKSUM_BYTES = 4


class RemoteFile(io.RawIOBase):
    """Seekable and read-only. Reading on fetches more at a time; jumping about fetches single blocks."""

    def __init__(self, repo: hub.Repo, name: str, *, commit: str, size: int, token: str | None, kept: Path) -> None:
        super().__init__()
        self.name = name
        self._repo, self._size, self._token, self._folder = repo, size, token, kept
        library = hub.client()
        self._url = library.hf_hub_url(
            repo.name, name, repo_type=repo.kind, revision=commit, endpoint=hub.endpoint()
        )  # fmt: skip
        self._headers = library.utils.build_hf_headers(token=hub.bearer(token))
        self._library = library
        self._place = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # in memory: a parquet file is read here and there
        self._next_block, self._in_a_row = 0, 0
        kept.mkdir(parents=True, exist_ok=True)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the start of the file")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if self._place >= self._size or not view:
            return 0
        number, offset = divmod(self._place, BLOCK_BYTES)
        last = min(self._place + len(view), self._size) - 1
        block = self._block(number, wanted=last // BLOCK_BYTES - number + 1)
        part = block[offset : offset + len(view)]
        view[: len(part)] = part
        self._place += len(part)
        return len(part)

    def _block(self, number: int, *, wanted: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        self._in_a_row = self._in_a_row if number == self._next_block else 0
        found = [data] if (data := self._kept(number)) else self._fetched(number, wanted=wanted)
        for place, block in enumerate(found, number):
            self._blocks[place] = block
        while len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        self._next_block, self._in_a_row = number + len(found), self._in_a_row + len(found)
        return self._blocks[number]

    def _fetched(self, number: int, *, wanted: int) -> list[bytes]:
        """A block that nobody has fetched yet, with some that follow it."""
        ahead = min(1 + self._in_a_row // BLOCKS_PER_AHEAD, MAX_BLOCKS)
        count = min(max(ahead, min(wanted, KEPT_BLOCKS)), -(-self._size // BLOCK_BYTES) - number)
        count = next((more for more in range(1, count) if self._path(number + more).exists()), count)
        data = self._fetch(number * BLOCK_BYTES, min((number + count) * BLOCK_BYTES, self._size))
        found = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
        for place, block in enumerate(found, number):
            self._keep(place, block)
        return found

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}"

    def _kept(self, number: int) -> bytes | None:
        """A block that was fetched before; None also where it is damaged, as by a power cut."""
        try:
            content = self._path(number).read_bytes()
        except FileNotFoundError:
            return None
        data, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
        return data if _checksum(data) == checksum else None

    def _keep(self, number: int, data: bytes) -> None:
        """Under its name from the moment it is whole."""
        unfinished = self._path(number).with_suffix(".tmp")
        unfinished.write_bytes(data + _checksum(data))
        unfinished.replace(self._path(number))

    def _fetch(self, start: int, end: int) -> bytes:
        """Bytes start..end, whole or not at all."""
        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}

        def ask() -> bytes:
            response = self._library.utils.http_backoff("GET", self._url, headers=headers)
            self._library.utils.hf_raise_for_status(response)
            return response.content

        content = hub.asking(self._repo, ask, token=self._token, file=self.name)
        if len(content) != end - start:
            what = f"the hub sends {len(content)} bytes of {self.name} where {end - start} were asked for"
            raise NotFoundError(what, where=self._repo.setting, hint=hub.HINT)
        return content


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")
