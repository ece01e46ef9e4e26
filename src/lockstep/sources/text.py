"""Your own text: files, folders and globs (`data.data_path`) of every kind in formats/.

What a document is: a line of .jsonl, an item of .json, a row of .csv or .parquet, a .txt file. A .txt file longer than
a fortieth of all the text (at least 1 Ki, at most 256 Ki characters) is cut into documents of that size at blank lines,
else at line ends, else at blanks, so that even one single file can be split into training and validation.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import time
from collections.abc import Generator, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, cast

from lockstep import formats
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.formats.txt import cut_limit
from lockstep.rundir import sha256, write_json

if TYPE_CHECKING:
    from lockstep.contracts import Document
    from lockstep.data.options import DataOptions

MEMO_BYTES = 1 << 24  # hashes of files from this size on are remembered
MEMO_AGE_SECONDS = 2.0  # a younger file may still be written to within one tick of its clock
FILES_NAMED = 3  # of a dataset, for people
HINT = "data.data_path=FILE, FOLDER or 'GLOB'"
UNPACK = {".bz2": "bunzip2", ".xz": "unxz"}  # of packings that are not read
TO_WINDOWS = (
    "mkdir -p windows && python3 -c 'import sys, numpy as np; length = 512; ids = np.load(sys.argv[1]).reshape(-1); "
    "rows = ids[: len(ids) // length * length].reshape(-1, length); "
    'np.save("windows/val_data", rows[::20]); np.save("windows/train_data", np.delete(rows, np.s_[::20], 0)); '
    """open("windows/metadata.json", "w").write("{\\"sequence_length\\": %d}" % length)'"""
)


def find_files(pattern: str) -> list[tuple[str, Path]]:
    """(name, file) of everything a path, folder or glob stands for, sorted by name."""
    try:
        return _find_files(pattern)
    except (OSError, RuntimeError, ValueError) as error:  # too long, not permitted, home of an unknown user, bad glob
        raise NotFoundError(f"cannot be looked up: {error}", where=pattern) from error


def _find_files(pattern: str) -> list[tuple[str, Path]]:
    path = Path(pattern).expanduser()
    if path.is_file():
        if not formats.kind_of(path.name):
            what = f"{path.suffix or 'no suffix'} is no kind of text"
            raise DataError(what, where=pattern, hint=_conversion(path) or f"a file called {formats.suffixes()}")
        return [(path.name, path)]
    plain = list(takewhile(lambda part: not glob.has_magic(part), path.parts))
    base, rest = Path(*plain), Path(*path.parts[len(plain) :])
    if path.is_dir():
        candidates = path.rglob("*")
    elif rest.parts:
        candidates = base.glob(str(rest))
    elif path.exists():
        raise NotFoundError("neither a file nor a folder", where=pattern, hint="cat PIPE > corpus.txt")
    else:
        raise NotFoundError("no such file or folder", where=pattern, hint=HINT)
    named = ((file.relative_to(path if path.is_dir() else base).as_posix(), file) for file in candidates)
    visible = sorted((name, file) for name, file in named if not any(part[0] == "." for part in name.split("/")))
    kept = [(name, file) for name, file in visible if formats.kind_of(name) and file.is_file()]
    for _, file in visible:
        if (hint := _conversion(file)) and file.is_file():  # left out, a run would silently train on less
            raise DataError(f"{file.suffix} is no kind of text", where=str(file), hint=hint)
    if not kept:
        raise NotFoundError("no file of text here", where=pattern, hint=f"files called {formats.suffixes()}")
    return kept


def _conversion(file: Path) -> str:
    """The shell line after which what such a file holds can be read; "": there is none."""
    if file.suffix in UNPACK and formats.kind_of(file.stem):
        return f"{UNPACK[file.suffix]} {quote(str(file))}"
    if file.suffix == ".npy":
        return f"{TO_WINDOWS} {quote(str(file))}, then --data-path windows, with the tokenizer.json of these ids in it"
    return ""


@contextlib.contextmanager
def reading(file: Path) -> Generator[None]:
    """Whatever keeps a file from being read, as one message that names it."""
    try:
        yield
    except FileNotFoundError:
        raise NotFoundError("the file has gone", where=str(file), hint="once more, when nobody moves files") from None
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise DataError(what, where=str(file), hint="files that you may read") from error


def content_of(files: list[tuple[str, Path]], memo: Path | None) -> dict[str, Any]:
    """What files hold, by name, size and SHA-256 of each; those of large ones are remembered in a file."""
    known = _read_memo(memo)
    entries: list[tuple[str, int, str]] = []
    learnt: dict[str, list[Any]] = {}
    for name, file in files:
        with reading(file):
            status = file.stat()
            seen = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            place = str(file.resolve()).encode("utf-8", "backslashreplace").decode()  # a name may be any bytes
            digest: str = known[place][1] if place in known and known[place][0] == seen else sha256(file)
        entries.append((name, status.st_size, digest))
        if status.st_size >= MEMO_BYTES and time.time() - status.st_mtime > MEMO_AGE_SECONDS:
            learnt[place] = [seen, digest]
    if memo and not learnt.items() <= known.items():
        _write_memo(memo, known | learnt)
    content = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    return {"files": len(entries), "bytes": sum(entry[1] for entry in entries), "sha256": content}


class TextSource:
    """Documents of local files."""

    name = "text"

    def __init__(
        self, pattern: str, *, column: str | None = None, memo: Path | None = None, conversations: bool = False
    ) -> None:
        self.pattern = pattern
        self.column = column
        self.conversations = conversations
        self.files = find_files(pattern)
        self._memo = memo
        self._kinds = [cast("formats.Kind", formats.kind_of(name)) for name, _ in self.files]
        plain = zip(self.files, self._kinds, strict=True)
        self._cut_characters = cut_limit(sum(_size(file) for (_, file), kind in plain if kind.name == "txt"))

    @property
    def made_of(self) -> str:
        """The first files by name, and how many more there are. The fingerprint fixes it: no folder is named."""
        named = ", ".join(name for name, _ in self.files[:FILES_NAMED])
        more = f" and {len(self.files) - FILES_NAMED:,} more" if len(self.files) > FILES_NAMED else ""
        return named.encode("utf-8", "backslashreplace").decode() + more  # a name may be any bytes

    def fingerprint(self) -> Mapping[str, Any]:
        """Names, sizes and SHA-256 of the files. A large file is read again only when its size or a time changed."""
        return {**content_of(self.files, self._memo), "text_column": self.column}

    def documents(self) -> Iterator[Document]:
        for number, (_, file) in enumerate(self.files):
            how = formats.Reading(
                self._kinds[number],
                str(file),
                column=self.column,
                cut_characters=self._cut_characters,
                conversations=self.conversations,
            )
            with reading(file), file.open("rb") as opened:
                for _, document in formats.walk(opened, how):
                    yield document


def _size(file: Path) -> int:
    with reading(file):
        return file.stat().st_size


def _read_memo(memo: Path | None) -> dict[str, list[Any]]:
    """Remembered [size, times and inode, hash] of files; what is not of this form is no loss."""
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


def memo_of(options: DataOptions) -> Path:
    """Where hashes of large files are remembered."""
    return Path(options.cache_dir).expanduser() / "lockstep-hashes.json"


def build(options: DataOptions) -> TextSource:
    if options.data_path is None:
        raise ConfigError("no text to read", where="data.data_path", hint=HINT)
    talk = options.documents == "answers"
    return TextSource(options.data_path, column=options.text_column, memo=memo_of(options), conversations=talk)
