"""Every setting of a family in one list: its meaning, what it accepts, how to read it from a command line."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lockstep import families
from lockstep.arguments import is_carried
from lockstep.config import reader
from lockstep.config.schema import FAMILIES, RunConfig

Path = tuple[str, ...]
SWITCH_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
JSON_NAMES = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}


@dataclass(frozen=True)
class Setting:
    """One setting as the schema declares it."""

    path: Path
    description: str
    role: str
    unit: str
    default: Any
    before: Any  # what runs that were saved without it had
    expected: str  # what it accepts, in words
    types: frozenset[str]  # JSON types
    words: tuple[str, ...]  # the words it accepts, for those that take one of a few
    secret: bool

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def as_json(self) -> str:
        """How a file sets it."""
        text = "..."
        for part in reversed(self.path):
            text = f'{{"{part}": {text}}}'
        return text

    def read(self, text: str) -> Any:
        """The value a text on the command line stands for."""
        if "null" in self.types and text == "null":
            return None
        if text in self.words:
            return text
        if "boolean" in self.types and text.lower() in SWITCH_WORDS:
            return SWITCH_WORDS[text.lower()]
        if self.types & {"integer", "number", "boolean"}:
            return reader.scalar(text) if text else text
        if "object" in self.types and is_carried(text):  # else it is refused as it stands
            name = f"--{self.key}"
            return reader.parse(f"x: {text}".encode(), name=name, kind="yaml").tree["x"] if text else {}
        return text


@dataclass(frozen=True)
class Catalog:
    """The settings of one family by path, and its sections."""

    settings: dict[Path, Setting]
    sections: tuple[str, ...]
    family: str = ""

    def by_name(self, name: str) -> list[Setting]:
        """Settings with this last name, in any section."""
        return [setting for setting in self.settings.values() if setting.path[-1] == name]

    def suggest(self, path: Path) -> str:
        """What the user may have meant by an unknown key."""
        dotted = tuple(".".join(path).split("."))
        if len(dotted) > len(path) and len(dotted) > 1:  # {"training.batch_size": 2}
            meant = self.settings.get(dotted[-2:])
            return f"write {meant.as_json()}" if meant else self.suggest(dotted)
        section, name = path[0], path[-1]
        if same := self.by_name(name):
            return f"did you mean {' or '.join(setting.key for setting in same)}?"
        if len(path) > 1 and section in self.sections:
            names = [setting.path[-1] for setting in self.settings.values() if setting.path[0] == section]
            if near := _nearest(name, names):
                return f"did you mean {section}.{near}?"
        if section not in self.sections and (near := _nearest(section, self.sections, cutoff=0.8)):
            return f"did you mean the section {near}?"
        if near := _nearest(name, sorted({setting.path[-1] for setting in self.settings.values()})):
            return f"did you mean {' or '.join(setting.key for setting in self.by_name(near))}?"
        if len(path) == 1:
            return f"sections: {', '.join(self.sections)}; all settings: {self.explanation()}"
        return f"all settings: {self.explanation(section if section in self.sections else '')}"

    def explanation(self, key: str = "") -> str:
        """The command that explains a setting or section of this family, or all of them."""
        words = ("lockstep config explain", key, "" if self.family in ("", "llama") else f"--family {self.family}")
        return " ".join(word for word in words if word)


def _nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


@functools.cache
def catalog(family: str) -> Catalog:
    """The settings of a family."""
    schema = config_class(family).model_json_schema()
    settings: dict[Path, Setting] = {}
    sections: list[str] = []
    for name, entry in schema["properties"].items():
        if "$ref" in entry:
            sections.append(name)
            for key, field in schema["$defs"][entry["$ref"].rpartition("/")[2]]["properties"].items():
                settings[(name, key)] = _setting((name, key), field)
        else:
            settings[(name,)] = _setting((name,), entry)
    return Catalog(settings, tuple(sections), family)


def config_class(family: str) -> type[RunConfig]:
    """The schema of a family, or a refusal."""
    if family not in FAMILIES:
        raise families.refusal(family)
    return FAMILIES[family]


def _setting(path: Path, field: dict[str, Any]) -> Setting:
    choices: list[dict[str, Any]] = field.get("anyOf", [field])
    types: set[str] = set()
    words: list[str] = []
    for choice in choices:
        types.add(choice["type"])
        words += choice.get("enum", [choice["const"]] if "const" in choice else [])
    return Setting(
        path=path,
        description=field.get("description", ""),
        role=field.get("role", ""),
        unit=field.get("unit", ""),
        default=field.get("default"),
        before=field.get("before", field.get("default")),
        expected=_expected(choices, field.get("examples", [])),
        types=frozenset(types),
        words=tuple(words),
        secret=any(choice.get("writeOnly", False) for choice in choices),
    )


def _expected(choices: list[dict[str, Any]], examples: list[str]) -> str:
    if "pattern" in choices[0]:  # which examples say better than words
        return f"text like {' or '.join(examples)}"
    return " or ".join([*(_words(choice) for choice in choices), *examples])


def _words(choice: dict[str, Any]) -> str:
    """What one alternative of a field accepts."""
    if "const" in choice:
        return json.dumps(choice["const"])
    if "enum" in choice:
        return "one of " + ", ".join(choice["enum"])
    kind = choice["type"]
    if kind == "null":
        return "null"
    if kind == "object":
        return "names with texts"
    if "pattern" in choice and "title" in choice:
        return choice["title"]
    if kind == "string":
        limit, least = choice.get("maxLength"), choice.get("minLength")
        length = f"{least} to {limit}" if least else f"at most {limit}"
        return f"text of {length} characters" if limit else "text"
    return JSON_NAMES[kind] + _range(choice)


def _range(choice: dict[str, Any]) -> str:
    low, above = choice.get("minimum"), choice.get("exclusiveMinimum")
    high, below = choice.get("maximum"), choice.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {_number(low)} to {_number(high)}"
    parts = [
        f"{word} {_number(bound)}"
        for word, bound in (("of at least", low), ("above", above), ("at most", high), ("below", below))
        if bound is not None
    ]
    return " " + " and ".join(parts) if parts else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def show_value(value: Any, *, limit: int = 60) -> str:
    """A value as a configuration file would write it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
