"""One reader for JSON, JSON with comments, and YAML 1.2 that knows where every value stands."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from lockstep.errors import ConfigError

MAX_BYTES = 1 << 15  # a full configuration is 5 KB; the scanner needs up to 10 s per MiB, and nobody waits that long
MAX_DEPTH = 16  # without it the scanner's work grows with the cube of the depth
KINDS = {".json": "json", ".jsonc": "json", ".json5": "json", ".yaml": "yaml", ".yml": "yaml"}
INCLUDE = "include"
PathKey = tuple[str, ...]

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|Inf|INF|Infinity)|\.?(nan|NaN|NAN)")
_JSON_PART = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|/\*.*?\*/|//[^\n]*|\t|["\n]|/\*', re.DOTALL)


@dataclass(frozen=True)
class Document:
    """One file: its values, and where each key and each value stands (`file:line:column`)."""

    name: str
    tree: dict[str, Any]
    keys: dict[PathKey, str] = field(default_factory=dict[PathKey, str])
    values: dict[PathKey, str] = field(default_factory=dict[PathKey, str])


def read_file(path: Path) -> list[Document]:
    """The file and everything it includes, in rising precedence: what is included comes first."""
    return _read_chain(path, ())


def _read_chain(path: Path, parents: tuple[Path, ...]) -> list[Document]:
    document = parse(_read_bytes(path), name=str(path), kind=KINDS.get(path.suffix.lower(), "json"))
    included = document.tree.pop(INCLUDE, [])
    where = document.values.get((INCLUDE,), str(path))
    names = cast("list[Any]", included if isinstance(included, list) else [included])
    chain = (*parents, path.resolve())
    documents: list[Document] = []
    for name in names:
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError("include: expected a path or a list of paths", where=where)
        beside = _shortest(path.parent / name)
        target = beside if beside.is_file() or not Path(name).is_file() else Path(name)
        if target.resolve() in chain:
            raise ConfigError(f"include: {name} includes itself", where=where, hint="break the circle")
        if not target.is_file():
            raise ConfigError(f"include: no file {name}", where=where, hint="it counts from that file, or from here")
        documents += _read_chain(target, chain)
    return [*documents, document]


def _shortest(path: Path) -> Path:
    """The name without .. where it is of the same file; behind a link it may be of another."""
    short = Path(os.path.normpath(path))
    return short if path.is_file() and short.is_file() and short.samefile(path) else path


def _read_bytes(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ConfigError("not a regular file", where=str(path), hint="a .json or .yaml file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise ConfigError(what, where=str(path), hint="a file that you may read") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES >> 10} KiB: not a configuration file", where=str(path))
    return data


def parse(data: bytes, *, name: str, kind: str) -> Document:
    """Bytes to values. Whatever is wrong ends in a ConfigError that says where."""
    text = _decode(data, name)
    if kind == "json":
        text = _blank_comments(text, name)
    return _Builder(name, kind).build(text)


def scalar(text: str) -> Any:
    """A plain word by the rules of YAML 1.2 (core schema): null, true, 12, 0x1F, 3e-4, or text."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if len(text) <= 400:  # Python refuses to convert integers of thousands of digits; so would any reader
        if _INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    if _NOT_FINITE.fullmatch(text):
        return math.nan if "n" in text.lower().lstrip("+-.")[:1] else math.inf
    return text


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        where = _place(name, data[: error.start].decode("utf-8-sig", "replace"))
        raise ConfigError("syntax error: not UTF-8", where=where, hint="save it as UTF-8") from None


def _place(name: str, before: str) -> str:
    return f"{name}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def _blank_comments(text: str, name: str) -> str:
    """JSON with // and /* */ comments: put blanks in their place, so that every position stays."""

    def blank(match: re.Match[str]) -> str:
        part = match.group()
        if part in ('"', "/*"):
            where = _place(name, text[: match.start()])
            raise ConfigError(f"syntax error: {part} is not closed", where=where)
        return part if part[0] in '"\n' else re.sub(r"[^\n]", " ", part)

    return _JSON_PART.sub(blank, text)


class _Builder:
    """Builds values from the scanner's events: no recursion, no objects, no second meaning for a key."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.document = Document(name, {})
        self.root: Any = None
        self.containers: list[tuple[Any, PathKey]] = []
        self.pending: list[str | None] = []  # the key of each open mapping that waits for its value

    def build(self, text: str) -> Document:
        for event in self._events(text):
            self._take(event)
        if self.root is None and self.kind == "yaml":
            self.root = {}
        if not isinstance(self.root, dict):
            raise ConfigError(
                "expected settings in sections",
                where=f"{self.name}:1:1",
                hint='{"training": {"max_steps": 10}}' if self.kind == "json" else "training: {max_steps: 10}",
            )
        self.document.tree.update(cast("dict[str, Any]", self.root))
        return self.document

    def _events(self, text: str) -> Iterator[Any]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        scanner: Any = YAML(typ="safe", pure=True)
        try:
            yield from scanner.parse(text)
        except MarkedYAMLError as caught:
            error: Any = caught  # the library is not annotated
            mark = error.problem_mark or error.context_mark
            where = f"{self.name}:{mark.line + 1}:{mark.column + 1}" if mark else self.name
            raise ConfigError(f"syntax error: {error.problem}", where=where) from None
        except (YAMLError, ValueError, IndexError, AssertionError, AttributeError, TypeError) as error:
            # ReaderError (control characters), and what the scanner itself trips over
            at = getattr(error, "position", None)
            where = _place(self.name, text[:at]) if isinstance(at, int) else self.name
            raise ConfigError("syntax error", where=where) from None

    def _take(self, event: Any) -> None:
        kind = type(event).__name__
        is_second = kind == "DocumentStartEvent" and (event.version or event.tags or self.root is not None)
        is_linked = kind == "AliasEvent" or getattr(event, "anchor", None) is not None
        if is_second or is_linked or getattr(event, "tag", None) is not None:
            self._refuse(event, "anchors, tags, directives and a second document are not accepted")
        if kind in ("MappingStartEvent", "SequenceStartEvent"):
            self._open(event, {} if kind == "MappingStartEvent" else [])
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self.containers.pop()
            self.pending.pop()
        elif kind == "ScalarEvent":
            self._scalar(event)

    def _open(self, event: Any, container: Any) -> None:
        if self.kind == "json" and not event.flow_style:
            self._refuse(event, "syntax error: not JSON", "rename the file to .yaml, or start with {")
        if len(self.containers) >= MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH}")
        if self.containers and isinstance(self.containers[-1][0], dict) and self.pending[-1] is None:
            self._refuse(event, "a key must be text")
        path = self._place_value(container, event)
        self.containers.append((container, path))
        self.pending.append(None)

    def _scalar(self, event: Any) -> None:
        text: str = event.value
        plain = event.style is None or event.style == ""
        if self.containers and isinstance(self.containers[-1][0], dict) and self.pending[-1] is None:
            self._key(event, _joined(text) if not plain else text)
            return
        if not plain:
            self._place_value(_joined(text), event)
            return
        value = scalar(text)
        if self.kind == "json" and (text == "" or isinstance(value, str)):
            self._refuse(event, "syntax error: not JSON", 'a "quote", a comma or a value is missing')
        if isinstance(value, float) and not math.isfinite(value):
            self._refuse(event, f"{text[:40]} is not a finite number")
        self._place_value(value, event)

    def _key(self, event: Any, key: str) -> None:
        container, path = self.containers[-1]
        if key in container:
            first = self.document.keys[(*path, key)].removeprefix(f"{self.name}:")
            self._refuse(event, f"{'.'.join((*path, key))[:200]} is set twice (first at {first})", "keep one of them")
        if self.kind == "json" and event.style is None and key == "":
            self._refuse(event, "syntax error: a key is missing")
        self.document.keys[(*path, key)] = self._where(event)
        self.pending[-1] = key

    def _place_value(self, value: Any, event: Any) -> PathKey:
        """Put a value where it belongs; returns its path."""
        if not self.containers:
            self.root = value
            return ()
        container, path = self.containers[-1]
        if isinstance(container, list):
            path = (*path, str(len(container)))  # pyright: ignore[reportUnknownArgumentType]
            container.append(value)  # pyright: ignore[reportUnknownMemberType]
        else:
            key = self.pending[-1]
            assert key is not None
            path = (*path, key)
            container[key] = value
            self.pending[-1] = None
        self.document.values[path] = self._where(event)
        return path

    def _where(self, event: Any) -> str:
        mark = event.start_mark
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}"

    def _refuse(self, event: Any, what: str, hint: str = "") -> None:
        raise ConfigError(what, where=self._where(event), hint=hint)


def _joined(text: str) -> str:
    """JSON writes characters beyond the first plane as two halves; put them together."""
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
