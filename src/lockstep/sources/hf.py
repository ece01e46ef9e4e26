"""Datasets of the hub: `wikitext`, `c4`, `imdb`, their mixture `hf`, or any `owner/name[:config[:split]][@revision]`.

Files are fetched one by one when reading reaches them, or with `data.streaming` in parts, as far as they are read. What
a name stands for is pinned to a commit when it is first used.

`hf` is the text of seed C: `c4` alone where more than a million documents are asked for, else `MIXTURE` in that order,
each read to its end before the next begins. A part that cannot be had is an error; none is left out or replaced.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lockstep import formats
from lockstep.errors import ConfigError, NotFoundError
from lockstep.formats.txt import cut_limit
from lockstep.registry import nearest
from lockstep.rundir import sha256
from lockstep.runtime import hub, pins
from lockstep.runtime.pins import HubFile, Pin, Reference
from lockstep.runtime.remote_file import RemoteFile

if TYPE_CHECKING:
    from lockstep.contracts import Document
    from lockstep.data.options import DataOptions

logger = logging.getLogger(__name__)

SHORT_NAMES = {
    "wikitext": Reference("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "c4": Reference("allenai/c4", "en"),
    "imdb": Reference("stanfordnlp/imdb"),
}
MIXTURE = (
    SHORT_NAMES["wikitext"],
    Reference("rajpurkar/squad"),
    SHORT_NAMES["imdb"],
    Reference("fancyzhx/ag_news"),
    Reference("fancyzhx/yelp_polarity"),
    Reference("fancyzhx/dbpedia_14"),
)
KNOWN = ("auto", "builtin", "text", "synthetic", *SHORT_NAMES, "hf")  # names without an owner, for a slip in one
COMMITS = re.compile(r"@[0-9a-f]{40}(,[0-9a-f]{40})*$")
C4_ALONE_DOCUMENTS = 1_000_000  # above so many the mixture is c4
COLUMNS = {"rajpurkar/squad": "context", "fancyzhx/dbpedia_14": "content"}  # where the choice would not be clear
IMDB_FILE = Path("imdb_train.json")  # of seed C; in the working directory it takes the place of the hub's
TITLE = re.compile(r" = (?!= ).*[^=\s] = ?\n?")  # of an article; those of its sections have two signs and more
BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class Member:
    """One dataset, or one local file that stands for it."""

    title: str
    pin: Pin | None
    files: tuple[HubFile, ...]
    column: str | None

    @property
    def records(self) -> str:
        """How records make a document: lines an article, neighbours that are alike one, or each its own."""
        dataset = self.pin.dataset if self.pin else ""
        return {"Salesforce/wikitext": "articles", "rajpurkar/squad": "distinct"}.get(dataset, "each")

    def fingerprint(self) -> dict[str, Any]:
        listed = json.dumps([astuple(file) for file in self.files])
        content = {
            "files": len(self.files),
            "bytes": sum(file.size for file in self.files),
            "sha256": hashlib.sha256(listed.encode()).hexdigest(),
            "text_column": self.column,
            "records": self.records,
        }
        if self.pin is None:
            return {"dataset": self.title, **content}
        pinned = {"dataset": self.pin.dataset, "config": self.pin.config, "split": self.pin.split}
        return {**pinned, "commit": self.pin.commit, **content}


class HfSource:
    """Documents of one or several datasets of the hub, one file after another."""

    def __init__(
        self, name: str, members: Iterable[Member], *, streaming: bool = False, token: str | None = None,
        conversations: bool = False,
    ) -> None:  # fmt: skip
        self.name = COMMITS.sub("", name)
        self.members = tuple(members)
        self._streaming, self._token, self._conversations = streaming, token, conversations
        self._parts: Path | None = None  # folder for what is fetched of files

    def fingerprint(self) -> Mapping[str, Any]:
        return {"members": [member.fingerprint() for member in self.members]}

    def fetch_to(self, folder: Path) -> None:
        """Where streaming keeps what it has fetched: whoever reads again, also after a kill, fetches only the rest."""
        self._parts = folder

    def documents(self) -> Iterator[Document]:
        for member in self.members:
            for number in range(len(member.files)):
                yield from self._read(member, number)

    def _read(self, member: Member, number: int) -> Iterator[Document]:
        file = member.files[number]
        kind = formats.kind_of(file.name)
        assert kind is not None, file.name
        cut = cut_limit(sum(other.size for other in member.files))  # a single long text is many documents
        where, talk = f"{member.title}/{file.name}", self._conversations
        how = formats.Reading(kind, where, member.column, cut, conversations=talk)
        with self._open(member, number) as opened:
            records = formats.walk(opened, how)
            if member.records == "articles":
                yield from articles(records)
            else:
                documents = (document for _, document in records)
                yield from documents if member.records == "each" else distinct(documents)

    def _open(self, member: Member, number: int) -> BinaryIO:
        file, pin = member.files[number], member.pin
        if pin is None:
            return Path(file.name).open("rb")
        repo = hub.dataset(pin.dataset)
        if self._streaming:
            assert self._parts, "fetch_to comes first"
            kept = self._parts / pin.commit / f"{number:05d}"
            remote = RemoteFile(repo, file.name, commit=pin.commit, size=file.size, token=self._token, kept=kept)
            return io.BufferedReader(remote, BUFFER_BYTES)
        what = f"Downloading {member.title}/{file.name} ({number + 1} of {len(member.files)})"
        path = hub.fetch(repo, file.name, revision=pin.commit, token=self._token, what=what)
        return path.open("rb")


def articles(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    """Lines, each with its number, joined into articles."""
    held: list[str] = []
    last = 0
    for number, line in lines:
        stands_alone = number - last > 1  # empty lines are left out, so they show as a gap
        if held and stands_alone and TITLE.fullmatch(line):
            yield "".join(held)
            held.clear()
        held.append(line if line.endswith("\n") else f"{line}\n")
        last = number
    if held:
        yield "".join(held)


def distinct(texts: Iterator[Document]) -> Iterator[Document]:
    """Of neighbours that are alike one."""
    return (text for text, _ in groupby(texts))


def build(options: DataOptions) -> HfSource:
    name, token = options.dataset_name, hub.token_of(options.hf_token)
    if _is_local(name):
        members = [_local(IMDB_FILE, options.text_column)]
    else:
        roots = pins.cache_roots(options.cache_dir)
        pinned = [pins.pin(reference, roots, token=token) for reference in references(options)]
        members = [_member(pin, options.text_column) for pin in pinned]
    talk = options.documents == "answers"
    return HfSource(name, members, streaming=options.streaming, token=token, conversations=talk)


def pinned_name(options: DataOptions) -> str:
    """The name with the commits it stands for now: name@commit, of a mixture hf@commit,commit,..."""
    if _is_local(options.dataset_name):
        return options.dataset_name
    roots, token = pins.cache_roots(options.cache_dir), hub.token_of(options.hf_token)
    commits = [pins.pin(reference, roots, token=token).commit for reference in references(options)]
    return f"{options.dataset_name.partition('@')[0]}@{','.join(commits)}"


def references(options: DataOptions) -> tuple[Reference, ...]:
    """The datasets a name stands for."""
    name, _, commits = options.dataset_name.partition("@")
    if name != "hf":
        return (_reference(options.dataset_name),)
    if options.text_column is not None:
        raise ConfigError("the parts of 'hf' have their own text fields", where="data.text_column", hint="null")
    parts = MIXTURE if options.max_train_samples <= C4_ALONE_DOCUMENTS else (SHORT_NAMES["c4"],)
    if "@" not in options.dataset_name:
        return parts
    listed = commits.split(",")
    if len(listed) != len(parts) or not all(hub.COMMIT.fullmatch(commit) for commit in listed):
        raise ConfigError(
            f"{name!r} has {len(parts)} parts here, each with a commit", where="data.dataset_name", hint=name
        )
    return tuple(replace(part, revision=commit) for part, commit in zip(parts, listed, strict=True))


def _reference(name: str) -> Reference:
    short = re.split("[:@]", name, maxsplit=1)[0]
    if short not in SHORT_NAMES and "/" not in name and (near := nearest(short, list(KNOWN))):
        raise ConfigError(
            f"{name[:80]!r} names no dataset",
            where="data.dataset_name",
            hint=f"did you mean {near}? Else {pins.SPELLING}",
        )
    if short not in SHORT_NAMES:
        return Reference.parse(name)
    known = SHORT_NAMES[short]
    given = Reference.parse(known.dataset + name.removeprefix(short))
    return replace(given, config=given.config or known.config)


def _member(pin: Pin, column: str | None) -> Member:
    """A dataset with those of its files that hold documents: all of the kind that most are of."""
    kinds = {file.name: formats.kind_of(file.name) for file in pin.files}
    counted = Counter(kind.name.removesuffix("l") for kind in kinds.values() if kind)
    if not counted:
        suffixes = sorted({Path(file.name).suffix or file.name for file in pin.files})
        raise NotFoundError(
            f"dataset {pin.dataset!r} has no text that can be read: its files are {', '.join(suffixes[:12])}",
            where="data.dataset_name",
            hint=f"a dataset of {formats.suffixes()}",
        )
    common = min(counted, key=lambda kind: (-counted[kind], kind))
    files = [file for file in pin.files if (kind := kinds[file.name]) and kind.name.removesuffix("l") == common]
    if len(files) < len(pin.files):
        logger.info("%s: %d of %d files hold documents (.%s)", pin.dataset, len(files), len(pin.files), common)
    title = f"{pin.dataset}:{pin.config}:{pin.split}"
    return Member(title, pin, tuple(files), column or COLUMNS.get(pin.dataset))


def _is_local(name: str) -> bool:
    return name == "imdb" and IMDB_FILE.is_file()


def _local(path: Path, column: str | None) -> Member:
    logger.info("imdb: %s of the working directory is used", path)
    return Member("imdb", None, (HubFile(str(path), path.stat().st_size, sha256(path)),), column)


def is_pinned(options: DataOptions) -> bool:
    """Whether what a name stands for is known without asking the hub."""
    roots = pins.cache_roots(options.cache_dir)
    return _is_local(options.dataset_name) or all(pins.recorded(part, roots) for part in references(options))


def reachable(options: DataOptions) -> str:
    """'' if wikitext can be had (pinned already, or the hub gives it), else the reason."""
    roots = pins.cache_roots(options.cache_dir)
    return pins.reachable(SHORT_NAMES["wikitext"], roots, token=hub.token_of(options.hf_token))
