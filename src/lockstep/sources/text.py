"""Your own text: .txt, .jsonl, .json and .parquet; a file, a folder or a glob (`data.data_path`).

What a document is: a line of .jsonl, an item of .json, a row of .parquet, a .txt file. A .txt file longer than a
fortieth of all the text (at least 1 KiB, at most 1 MiB) is cut into documents of that size at blank lines, else at
line ends, else at blanks, so that even one single file can be split into training and validation.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import time
from collections.abc import Generator, Iterator, Mapping
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from lockstep.errors import ConfigError, DataError, LockstepError, NotFoundError
from lockstep.rundir import sha256, write_json

if TYPE_CHECKING:
    from lockstep.data.options import DataOptions

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
COLUMNS = ("text", "content")  # looked for when data.text_column is null
SHARE_OF_DOCUMENT = 40
MIN_CUT_CHARACTERS, MAX_CUT_CHARACTERS = 1 << 10, 1 << 20
READ_CHARACTERS = 1 << 22
MEMO_BYTES = 1 << 24  # hashes of files from this size on are remembered
MEMO_AGE_SECONDS = 2.0  # a younger file may still be written to within one tick of its clock


def find_files(pattern: str) -> list[tuple[str, Path]]:
    """(name, file) of everything a path, folder or glob stands for, sorted by name."""
    try:
        return _find_files(pattern)
    except (OSError, RuntimeError, ValueError) as error:  # too long, not permitted, home of an unknown user, bad glob
        raise NotFoundError(f"cannot be looked up: {error}", where=pattern) from error


def _find_files(pattern: str) -> list[tuple[str, Path]]:
    path = Path(pattern).expanduser()
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path.suffix or 'no suffix'} is no kind of text", where=pattern, hint=", ".join(SUFFIXES))
        return [(path.name, path)]
    plain = list(takewhile(lambda part: not glob.has_magic(part), path.parts))
    base, rest = Path(*plain), Path(*path.parts[len(plain) :])
    if path.is_dir():
        candidates = path.rglob("*")
    elif rest.parts:
        candidates = base.glob(str(rest))
    else:
        raise NotFoundError("no such file or folder", where=pattern, hint="data.data_path=FILE, FOLDER or 'GLOB'")
    named = ((file.relative_to(path if path.is_dir() else base).as_posix(), file) for file in candidates)
    kept = [(name, file) for name, file in named if file.suffix.lower() in SUFFIXES and file.is_file()]
    visible = sorted((name, file) for name, file in kept if not any(part[0] == "." for part in name.split("/")))
    if not visible:
        raise NotFoundError(f"no {', '.join(SUFFIXES)} file", where=pattern)
    return visible


def cut(file: TextIO, limit: int) -> Iterator[str]:
    """The text of a file in pieces of at most `limit` characters that, joined, are the text."""
    rest = ""
    while block := file.read(READ_CHARACTERS):
        rest += block
        start = 0
        while len(rest) - start > limit:
            end = _boundary(rest, start, start + limit)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    yield rest


def _boundary(text: str, start: int, end: int) -> int:
    """The best place to cut in start..end: after the last blank line, else line, else blank, else at the end."""
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, start + (end - start) // 2, end)
        if found >= 0:
            return found + len(mark)
    return end


@contextlib.contextmanager
def _reading(file: Path) -> Generator[None]:
    """Whatever keeps a file from being read, as one message that names it."""
    try:
        yield
    except FileNotFoundError:
        raise NotFoundError("the file has gone", where=str(file)) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})",
            where=str(file),
            hint=f"iconv -f LATIN1 -t UTF-8 {file.name} > utf8{file.suffix}, if it is Latin-1",
        ) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(file)) from error


class TextSource:
    """Documents of local files."""

    name = "text"

    def __init__(self, pattern: str, *, column: str | None = None, memo: Path | None = None) -> None:
        self.pattern = pattern
        self.column = column
        self.files = find_files(pattern)
        self._memo = memo
        total = sum(_size(file) for _, file in self.files if file.suffix.lower() == ".txt")
        self._limit = min(max(total // SHARE_OF_DOCUMENT, MIN_CUT_CHARACTERS), MAX_CUT_CHARACTERS)

    def fingerprint(self) -> Mapping[str, Any]:
        """Names, sizes and SHA-256 of the files. A large file is read again only when its size or time changed."""
        known = _read_memo(self._memo)
        entries: list[tuple[str, int, str]] = []
        learnt: dict[str, list[Any]] = {}
        for name, file in self.files:
            with _reading(file):
                status = file.stat()
                seen = [status.st_size, status.st_mtime_ns, status.st_ino]
                place = str(file.resolve())
                digest: str = known[place][1] if place in known and known[place][0] == seen else sha256(file)
            entries.append((name, status.st_size, digest))
            if status.st_size >= MEMO_BYTES and time.time() - status.st_mtime > MEMO_AGE_SECONDS:
                learnt[place] = [seen, digest]
        if self._memo and not learnt.items() <= known.items():
            _write_memo(self._memo, known | learnt)
        content = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
        return {"files": len(entries), "bytes": sum(entry[1] for entry in entries), "sha256": content,
                "text_column": self.column}  # fmt: skip

    def documents(self) -> Iterator[str]:
        readers = {".txt": self._txt, ".jsonl": self._jsonl, ".json": self._json, ".parquet": self._parquet}
        for _, file in self.files:
            with _reading(file):
                for text in readers[file.suffix.lower()](file):
                    if text.strip():
                        yield _encodable(text)

    def _txt(self, file: Path) -> Iterator[str]:
        with file.open(encoding="utf-8-sig") as opened:
            yield from cut(opened, self._limit)

    def _jsonl(self, file: Path) -> Iterator[str]:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{file}:{number}"
                    yield self._text(_parse(line.rstrip("\r\n"), where), where)

    def _json(self, file: Path) -> Iterator[str]:
        where = str(file)
        items = _parse(file.read_text(encoding="utf-8-sig"), where)
        if isinstance(items, dict):
            inside = cast("dict[str, Any]", items).items()
            lists = {name: cast("list[Any]", value) for name, value in inside if isinstance(value, list)}
            name = self.column if self.column in lists else next((name for name in COLUMNS if name in lists), None)
            if name is None and len(lists) != 1:
                raise DataError(f"an object with {len(lists)} lists: which holds the documents?", where=where)
            items = lists[name] if name is not None else next(iter(lists.values()))
        if not isinstance(items, list):
            raise DataError(f"a list was expected, got {type(items).__name__}", where=where)
        for index, item in enumerate(cast("list[Any]", items)):
            yield self._text(item, f"{where}: item {index}")

    def _parquet(self, file: Path) -> Iterator[str]:
        try:
            arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ImportError as error:
            raise LockstepError(
                "pyarrow, which reads .parquet, is not installed", hint="pip install pyarrow"
            ) from error
        try:
            with parquet.ParquetFile(file) as opened:
                fields = [field.name for field in opened.schema_arrow if str(field.type).endswith("string")]
                column = self._choose(fields, str(file))
                for batch in opened.iter_batches(columns=[column]):
                    for text in batch.column(0).to_pylist():
                        yield text or ""
        except arrow.ArrowException as error:
            raise DataError(f"not a readable parquet file: {error}", where=str(file)) from error

    def _text(self, item: object, where: str) -> str:
        """The text of one item: itself, or its text field."""
        if isinstance(item, str):
            return item
        if not isinstance(item, dict):
            raise DataError(f"text or an object was expected, got {type(item).__name__}", where=where)
        texts = {
            key: value or ""
            for key, value in cast("dict[str, Any]", item).items()
            if isinstance(value, str) or (value is None and key in (self.column, *COLUMNS))  # null: no text
        }
        return texts[self._choose(list(texts), where)]

    def _choose(self, fields: list[str], where: str) -> str:
        """The field that holds the text, among those that hold any."""
        if self.column is not None:
            if self.column in fields:
                return self.column
            raise DataError(f"no text field {self.column!r}: {_listing(fields)}", where=where, hint="data.text_column")
        for name in COLUMNS:
            if name in fields:
                return name
        if len(fields) == 1:
            return fields[0]
        raise DataError(f"which field holds the text? {_listing(fields)}", where=where, hint="data.text_column=NAME")


def _listing(fields: list[str]) -> str:
    return "text fields are " + ", ".join(sorted(fields)) if fields else "there is no text field"


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = "" if error.lineno == 1 else f" line {error.lineno},"
        raise DataError(f"not JSON:{line} column {error.colno}: {error.msg}", where=where) from None
    except ValueError as error:  # a number of more digits than Python turns into one
        raise DataError(f"not readable JSON: {error}", where=where) from None
    except RecursionError:
        raise DataError("JSON nested too deeply", where=where) from None


def _encodable(text: str) -> str:
    """JSON can hold half a surrogate pair, which is no character: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _size(file: Path) -> int:
    with _reading(file):
        return file.stat().st_size


def _read_memo(memo: Path | None) -> dict[str, list[Any]]:
    """Remembered [size, time and inode, hash] of files; what is not of this form is no loss."""
    try:
        known = json.loads(memo.read_text(encoding="utf-8")) if memo else None
    except (OSError, ValueError, RecursionError):
        return {}
    entries = cast("dict[str, Any]", known).items() if isinstance(known, dict) else ()
    return {place: entry for place, entry in entries if _is_memo_entry(entry)}


def _is_memo_entry(entry: Any) -> bool:
    return isinstance(entry, list) and [type(part) for part in cast("list[Any]", entry)] == [list, str]


def _write_memo(memo: Path, known: Mapping[str, Any]) -> None:
    try:
        write_json(memo, known)
    except OSError:  # a read-only cache folder: hash again next time
        return


def build(options: DataOptions) -> TextSource:
    if options.data_path is None:
        raise ConfigError("no text to read", where="data.data_path", hint="data.data_path=FILE, FOLDER or 'GLOB'")
    memo = Path(options.cache_dir).expanduser() / "lockstep-hashes.json"
    return TextSource(options.data_path, column=options.text_column, memo=memo)
