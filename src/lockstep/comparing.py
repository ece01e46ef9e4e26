"""The verb `diff`: in what two runs differ, from their folders alone. Nothing heavy is imported before it is needed.

Settings by their role, versions and device, data, the determinism label, the first step with other bits, the first
tensor with other bits. Cosmetic settings are shown and do not count: two runs that differ only in their name are equal.
"""

from __future__ import annotations

import contextlib
import json as json_format
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, ExitCode
from lockstep.guard import say
from lockstep.home import root_of
from lockstep.report.logs import COLUMNS
from lockstep.rundir import MANIFEST, RunDir, read_json
from lockstep.runtime.scrub import scrubber

if TYPE_CHECKING:
    from lockstep.engine.likeness import Likeness

ROLES = ("identity", "layout", "cosmetic")
VARIABLES = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")  # of the environment: what decides bits
FACTS = ("device_name", "threads", "world", "batch_rows", "attention", "compiled", "cpu_kernels")  # of a state
OF_START = {"device_name": "device", "attention": "attention"}  # the same, as the beginning of a run tells them


@dataclass(frozen=True)
class Pair:
    """One thing in which the runs differ."""

    key: str
    a: Any
    b: Any

    def text(self) -> str:
        from lockstep.config.catalog import show_value

        return f"{self.key}: {show_value(self.a)} | {show_value(self.b)}"

    def lines(self) -> list[str]:
        """Under a heading; values that do not fit side by side stand one above the other."""
        from lockstep.config.catalog import show_value

        if len(line := f"  {self.text()}") <= COLUMNS:
            return [line]
        return [f"  {self.key}", f"    A  {show_value(self.a)}", f"    B  {show_value(self.b)}"]


@dataclass(frozen=True)
class Told:
    """What the files of one run say."""

    root: Path
    family: str
    config: Mapping[str, Any]
    about: Mapping[str, Any]  # what its newest checkpoint belongs to; {}: it has none
    started: Mapping[str, Any]  # what it said when it last began
    place: Mapping[str, Any]  # env.json
    steps: Mapping[int, Mapping[str, Any]]
    checkpoints: Mapping[int, Path]

    @property
    def facts(self) -> dict[str, Any]:
        """Versions, device, threads, kernels, and the variables that decide bits."""
        if not self.about:  # it has saved nothing
            told = {key: self.started.get(name) for key, name in OF_START.items()}
            told |= _object(self.place.get("versions"))
        else:
            told = facts_of(self.about)
        variables = _object(self.place.get("variables"))
        return told | {name: variables.get(name) for name in VARIABLES}

    @property
    def determinism(self) -> str:
        """What the run promises of its bits."""
        return str(self.about.get("determinism") or self.started.get("determinism") or "not on record")


@dataclass(frozen=True)
class FirstTensor:
    """The first tensor with other bits, as the fingerprints of the steps or a checkpoint show it."""

    step: int  # after which, counted from 0
    text: str
    name: str = ""  # "": only what the host counts differs
    differing_elements: int | None = None  # a fingerprint does not say
    elements: int | None = None
    differing_tensors: int | None = None
    tensors: int | None = None


@dataclass(frozen=True)
class Comparison:
    """All differences of two runs, in the order in which they matter."""

    a: str
    b: str
    configuration: Mapping[str, Sequence[Pair]]  # by role
    environment: Sequence[Pair]
    data: Pair | None
    determinism: Pair | None
    label: str  # the determinism label, where it is the same
    steps: tuple[int, int]  # on record
    compared_steps: int
    first_step: Mapping[str, Any] | None
    compared_checkpoints: Sequence[int] = field(default=())
    first_tensor: FirstTensor | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs that could matter; the bits are equal as far as both are on record."""
        settings = any(self.configuration[role] for role in ("identity", "layout"))
        around = self.environment or self.data or self.determinism
        return not (settings or around or self.first_step or self.first_tensor or self.steps[0] != self.steps[1])


def diff(one: Path, other: Path, *, json: bool = False) -> int:
    """0: equal; 1: different."""
    for path in (one, other):
        _refuse_checkpoint(path)
    found = compare(read(one), read(other))
    if json:
        say(json_format.dumps({"equal": found.equal, **asdict(found)}, indent=1, default=str))
    else:
        scrub = scrubber()  # a run may come from anywhere
        say(*(part for line in lines(found) for part in _folded(scrub(line))))
    return ExitCode.DONE if found.equal else ExitCode.FAILED


def _refuse_checkpoint(path: Path) -> None:
    """It is not taken for its run."""
    if (path / MANIFEST).is_file():
        root = shlex.quote(str(root_of(path)))
        hint = f"{root} and another run: of both all checkpoints are compared; or lockstep resume {root} --prove"
        raise ConfigError("is a checkpoint, and runs are compared", where=str(path), hint=hint)


# ------------------------------------------------------------------------------------------------ reading


def read(root: Path) -> Told:
    """The files of a run, and of its newest checkpoint."""
    from lockstep.config.load import load_run, to_dict
    from lockstep.report import losses
    from lockstep.report.jsonl import read_events

    run = RunDir(root)
    loaded = load_run(root)
    checkpoints = {
        int(path.parent.name.removeprefix("step_")): path.parent
        for path in run.checkpoints.glob(f"step_*/{MANIFEST}")
        if path.parent.name.removeprefix("step_").isdecimal()
    }
    about = _object(_json(checkpoints[max(checkpoints)] / "run.json").get("about")) if checkpoints else {}
    events = read_events(run.events) if run.events.is_file() else []
    started = [event for event in events if event["kind"] == "start"]
    return Told(
        root=root,
        family=loaded.family,
        config=_object(about.get("config")) or to_dict(loaded.config),
        about=about,
        started=started[-1] if started else {},
        place=_json(run.env),
        steps=losses.steps_of(run.events),
        checkpoints=checkpoints,
    )


def _json(path: Path) -> dict[str, Any]:
    """An object; {} where there is none to be read."""
    try:
        return _object(read_json(path))
    except (OSError, ValueError):
        return {}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def facts_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the bits of a state and is no setting: versions, device, threads, kernels."""
    return {**{key: about.get(key) for key in FACTS}, **_object(about.get("versions"))}


# ------------------------------------------------------------------------------------------------ comparing


def compare(one: Told, other: Told) -> Comparison:
    """All in which they differ."""
    from lockstep.report import losses

    keys = [told.about.get("data_key") for told in (one, other)]
    steps = losses.compare(one.steps, other.steps)
    common = sorted(one.checkpoints.keys() & other.checkpoints.keys())
    return Comparison(
        a=str(one.root),
        b=str(other.root),
        configuration=settings(one, other),
        environment=pairs(one.facts, other.facts),
        data=Pair("data key", *keys) if keys[0] != keys[1] else None,
        determinism=(
            Pair("label", one.determinism, other.determinism) if one.determinism != other.determinism else None
        ),
        label=one.determinism if one.determinism == other.determinism else "",
        steps=(len(one.steps), len(other.steps)),
        compared_steps=steps.steps,
        first_step=asdict(steps.first) if steps.first else None,
        compared_checkpoints=common,
        first_tensor=first_tensor(one, other, common),
    )


def settings(one: Told, other: Told) -> dict[str, list[Pair]]:
    """The settings that differ, by role. What only one family knows has the role it has there."""
    from lockstep.config.catalog import catalog

    roles = {setting.key: setting.role for told in (one, other) for setting in catalog(told.family).settings.values()}
    found: dict[str, list[Pair]] = {role: [] for role in ROLES}
    for pair in pairs(_flat(one.config), _flat(other.config)):
        found[roles.get(pair.key, "identity")].append(pair)
    return found


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration by dotted keys."""
    flat: dict[str, Any] = {}
    for section, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{section}.{name}": inner for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
        else:
            flat[section] = value
    return flat


def pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Pair]:
    """The keys whose values differ; what one of them lacks is null there."""
    keys = dict.fromkeys([*one, *other])
    return [Pair(key, one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def first_tensor(one: Told, other: Told, common: Iterable[int]) -> FirstTensor | None:
    """Of the fingerprints and the checkpoints of the same steps, whichever shows a difference first."""
    stamped = _by_fingerprints(one.root, other.root)
    for step in common:
        if stamped and stamped.step < step - 1:
            break
        from lockstep.engine import likeness

        alike = likeness.compare(one.checkpoints[step], other.checkpoints[step])
        if not alike.equal:
            return _of_checkpoint(step - 1, alike)
    return stamped


def _of_checkpoint(step: int, alike: Likeness) -> FirstTensor:
    if not alike.differing:
        return FirstTensor(step, alike.text())
    first = alike.differing[0]
    counts = (first.differing, first.elements, len(alike.differing), alike.tensors)
    return FirstTensor(step, alike.text(), f"{first.kind}:{first.name}", *counts)


def _by_fingerprints(one: Path, other: Path) -> FirstTensor | None:
    """What the first workers of both have written of every tensor, where they have."""
    from lockstep.health import records

    found: list[tuple[list[str], dict[int, records.Stamp]]] = []
    for root in (one, other):
        files = sorted(root.glob(f"workers/*/{records.FILE}"))
        names: list[str] = []
        stamps: dict[int, records.Stamp] = {}
        for _, content in records.read_lines(files[0]) if files else ():
            kind = content.pop("kind", "") if content else ""
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a line of whoever wrote the run
                if content and kind == "workload":
                    names = list(content["tensors"])
                elif content and kind == "step":
                    stamps[int(content["step"])] = records.Stamp(**content)
        found.append((names, stamps))
    (names, ours), (their_names, theirs) = found
    for step in sorted(ours.keys() & theirs.keys()) if names == their_names else ():
        if ours[step].sums != theirs[step].sums:
            name = records.first_tensor(ours[step], theirs[step], names)
            return FirstTensor(step, f"{name}, by its fingerprint", name)
    return None


# ------------------------------------------------------------------------------------------------ words


def lines(found: Comparison) -> list[str]:
    """For the screen: what differs, A before the bar and B behind it."""
    told = [f"A  {found.a}", f"B  {found.b}"]
    for role in ROLES:
        told += _section(role, found.configuration[role])
    told += _section("environment", found.environment)
    told += _section("data", [found.data] if found.data else [])
    label = [f"  {found.label}"] if found.label else []
    told += (
        ["determinism", *label] if label else _section("determinism", [found.determinism] if found.determinism else [])
    )
    return [*told, "steps", *_step_lines(found), *_tensor_lines(found), _verdict(found)]


def _folded(line: str) -> list[str]:
    """What stands under a heading goes on in a line further in; the paths of the runs can be copied."""
    if not line.startswith(" "):
        return [line]
    return textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _section(name: str, differences: Sequence[Pair]) -> list[str]:
    return [name, *(line for pair in differences for line in pair.lines())] if differences else [f"{name}: equal"]


def _step_lines(found: Comparison) -> list[str]:
    a, b = found.steps
    length = "" if a == b else f" (A has {a}, B has {b})"
    if not found.compared_steps:
        return [f"  none on record in both{length}"]
    if first := found.first_step:
        return [
            f"  first difference at step {first['step']}: {first['what']} {first['one']} | {first['other']}{length}"
        ]
    return [f"  {found.compared_steps} compared, losses and gradient norms equal to the bit{length}"]


def _tensor_lines(found: Comparison) -> list[str]:
    if found.first_tensor:
        return ["tensors", f"  after step {found.first_tensor.step}: {found.first_tensor.text}"]
    if not found.compared_checkpoints:
        return ["tensors", "  no checkpoint of the same step in both"]
    numbers = ", ".join(str(step) for step in found.compared_checkpoints)
    return ["tensors", f"  equal in the checkpoints after {numbers} steps"]


def _verdict(found: Comparison) -> str:
    if found.equal:
        return "Equal"
    bits = found.first_step or found.first_tensor
    shown = found.compared_steps or found.compared_checkpoints
    return "Different" + ("" if bits or not shown else ", with the same bits as far as both are on record")
