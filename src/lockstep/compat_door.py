"""A documented script as data: whose it is, which flags it has, and what it sets where the user has not. Torch-free."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep import api
from lockstep.arguments import Parser, Setting, understand
from lockstep.families import doors_folder

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.contracts import Sink


@dataclass(frozen=True)
class Door:
    """A documented script: what it is for and what it sets where the user has not."""

    script: str
    summary: str
    log_prefix: Literal["bracket", "colon", "none"] = "colon"
    launcher: bool = False  # writes /tmp/model_check_logs_*, labels every line
    prepares: bool = False  # only prepares the dataset
    family: str = "llama"
    preset: str | None = None  # what it starts from; None: what suits the machine

    def parser(self) -> Parser:
        """The flags of the script; with those of every setting."""
        return self.with_usual(self.new_parser(), debug="the debug preset, or debug output for another one")

    def with_usual(self, parser: Parser, *, debug: str) -> Parser:
        """The same with what every script that trains takes."""
        self.with_settings(parser, debug=debug)
        parser.add_launch()
        return parser

    def with_settings(self, parser: Parser, *, debug: str, shown: Sequence[str] | None = None) -> Parser:
        """The same with what every script of a configuration takes; `shown` of the short words stand in the help."""
        parser.flag("--config", "a .json or .yaml file over the preset", metavar="FILE")
        usual = self.preset or "production; demo where there is no GPU"
        parser.flag("--preset", f"settings to start from ({usual})", metavar="NAME")
        parser.flag("--debug", debug)
        parser.flag("--dry-run", "show the resolved configuration, and stop")
        parser.add_shorts(shown)
        return parser

    def new_parser(self) -> Parser:
        """A parser that calls itself as the user called the script."""
        parser = Parser("", self.summary)
        parser.prog = f"bash {self.script}" if self.script.endswith(".sh") else f"python3 {self.script}"
        return parser

    def defaults(self, asked: Namespace, first: Loaded) -> Mapping[str, str]:
        """Settings of the script itself, by native name: over the preset, under the file and the flags (`first`)."""
        del asked, first
        places = {"training.checkpoint_dir": "./.checkpoints", "system.output_dir": "./.outputs"}
        every = {"report.log_all_ranks": "true"} if self.launcher else {}
        return places | every | {"report.log_prefix": self.log_prefix}

    def complete(self, argv: Sequence[str]) -> list[str]:
        """The command line as every worker is to understand it, wherever it was typed."""
        return [*argv]

    def words(self, asked: Namespace) -> list[Setting]:
        """Settings that were given by a flag of the script itself, as strong as flags."""
        del asked
        return []

    def switches(self, asked: Namespace, first: Loaded) -> Mapping[str, str]:
        """Settings that flags of the script itself stand for: over the file, under a flag of the setting's own name."""
        del asked, first
        return {}

    def ready(self, asked: Namespace, loaded: Loaded) -> None:
        """What has to be so before any worker starts."""
        del asked, loaded

    def opening(self, loaded: Loaded) -> list[str]:
        """Lines of the first worker before it trains."""
        del loaded
        return []

    def listeners(self, loaded: Loaded) -> list[Sink]:
        """Who else hears of the first worker's steps and events."""
        del loaded
        return []


def parse(door: Door, argv: Sequence[str]) -> tuple[Namespace, list[Setting]]:
    """The script's own flags, and the settings: `--section.key value`, `section.key=value`, or a short word."""
    return understand(door.parser(), argv, api.setting_words)


def resolve(door: Door, asked: Namespace, settings: Sequence[Setting]) -> Loaded:
    """The configuration of a command line: preset < the script's own defaults < file < flags."""
    from lockstep.config.load import Origin

    preset, flags = asked.preset or door.preset, [*door.words(asked), *settings]
    if asked.debug:
        preset, flags = api.with_debug(preset, flags)
    file, notices = _find_config(asked.config)
    first = api.resolve(door.family, preset=preset, file=file, flags=flags, check=False)  # may lack what is ours
    taken = {key for key, origin in first.origins.items() if origin.layer in ("file", "flag")}
    own = {key: value for key, value in door.defaults(asked, first).items() if key not in taken}
    meant = door.switches(asked, first).items()
    loaded = api.resolve(door.family, preset=first.preset, file=file, flags=[*own.items(), *meant, *flags])
    origins = {**loaded.origins, **{key: Origin("script", door.script) for key in own if key in loaded.origins}}
    said = tuple(notice for notice in first.notices if notice not in loaded.notices)
    return replace(loaded, origins=origins, notices=(*notices, *said, *loaded.notices))


def _find_config(name: str | None) -> tuple[Path | None, tuple[str, ...]]:
    """The file of --config: as given, else the example of that name that lies beside the documented scripts."""
    if name is None:
        return None, ()
    examples = doors_folder() / "model_check"
    if name in {path.name for path in examples.glob("*.json")} and not Path(name).exists():
        return examples / name, (f"No {name} in this folder: using the example {examples / name}",)
    return Path(name), ()
