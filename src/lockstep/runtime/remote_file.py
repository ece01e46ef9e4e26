"""A file of the hub read where it lies: only the parts that are asked for are fetched."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from lockstep.runtime import errand, hub

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 8  # fetched at once, when a file is read from front to back
KEPT_BLOCKS = 24


class RemoteFile(io.RawIOBase):
    """Seekable and read-only. Reading on fetches more at a time; jumping about fetches single blocks."""

    def __init__(self, repo: hub.Repo, name: str, *, commit: str, size: int, token: str | None) -> None:
        super().__init__()
        self.name = name
        self._repo, self._size, self._token = repo, size, token
        library = hub.client()
        self._url = library.hf_hub_url(
            repo.name, name, repo_type=repo.kind, revision=commit, endpoint=hub.endpoint()
        )  # fmt: skip
        self._headers = library.utils.build_hf_headers(token=hub.bearer(token))
        self._library = library
        self._place = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._next_block: int = 0
        self._ahead: int = 1  # blocks to fetch if reading goes on at that one

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
        self._ahead = min(self._ahead * 2, MAX_BLOCKS) if number == self._next_block and number else 1
        last = -(-self._size // BLOCK_BYTES)
        count = min(max(self._ahead, min(wanted, KEPT_BLOCKS)), last - number)
        data = self._fetch(number * BLOCK_BYTES, min((number + count) * BLOCK_BYTES, self._size))
        for place in range(count):
            self._blocks[number + place] = data[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
        while len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        self._next_block = number + count
        return self._blocks[number]

    def _fetch(self, start: int, end: int) -> bytes:
        """Bytes start..end, whole or not at all."""
        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}

        def ask() -> bytes:
            response = self._library.get_session().get(self._url, headers=headers)
            self._library.utils.hf_raise_for_status(response)
            return self._checked(response, end - start)

        what = f"Reading {self.name}"
        return hub.asking(self._repo, ask, token=self._token, what=what, file=self.name)

    def _checked(self, response: Any, size: int) -> bytes:
        assert response.status_code == 206, "others were refused before their body was read"
        if len(response.content) != size:
            raise errand.GaveUp(f"sends {len(response.content)} bytes where {size} were asked for")
        return response.content
