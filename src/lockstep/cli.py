"""The command `lockstep`: verbs only. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import __version__, guard
from lockstep.api import setting_words
from lockstep.arguments import Setting
from lockstep.errors import ConfigError, ExitCode
from lockstep.guard import say
from lockstep.registry import nearest, suggest
from lockstep.rundir import expanded
from lockstep.trained import evaluate, export, sample
from lockstep.verb_arguments import parse

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.start import Start

Verb = Callable[[Namespace, list[Setting]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code and never raises for the user's mistakes."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guard.run(lambda: _run(words), words)


def entry() -> None:
    """The program `lockstep`."""
    guard.leave(main)


def _run(words: list[str]) -> int:
    if not words:
        from lockstep.home import home

        say(home())
        return ExitCode.DONE
    if words[0] in ("--version", "-V"):
        say(f"lockstep {__version__}")
        return ExitCode.DONE
    if words[0] in ("--help", "-h", "help"):
        say(usage())
        return ExitCode.DONE
    verb, rest = words[0], words[1:]
    if verb == "config" and (not rest or rest[0] in ("--help", "-h")):
        say(usage("config "))
        return ExitCode.DONE if rest else ExitCode.USAGE
    if verb == "config" or (rest and _is_second(verb, rest[0])):
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    if verb not in VERBS:
        raise ConfigError(f"no command {verb[:80]!r}", hint=suggest(verb, sorted(VERBS)))
    about, run = VERBS[verb]
    arguments, settings = parse(verb, about, rest, setting_words)
    arguments.argv = words  # a worker is started with the same command line
    return run(arguments, settings)


def _is_second(verb: str, word: str) -> bool:
    """Whether this command is one of two words, or is meant to be: what does not exist is refused by its whole name."""
    seconds = [known.removeprefix(f"{verb} ") for known in VERBS if known.startswith(f"{verb} ")]
    return word in seconds or nearest(word, seconds, cutoff=0.8) != ""


def usage(start: str = "") -> str:
    """What `lockstep --help` prints."""
    lines = ["usage: lockstep COMMAND ... (each has --help)", ""]
    lines += [f"  {verb:<17} {about}" for verb, (about, _) in VERBS.items() if verb.startswith(start)]
    lines += ["", "  lockstep --version, or lockstep alone for the devices, the last runs and commands to try"]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ verbs


def train(arguments: Namespace, settings: list[Setting]) -> int:
    """Train, or show what would be trained."""
    from lockstep.planning import show_plan
    from lockstep.runtime.devices import check_asked

    loaded = _resolve(arguments, settings)
    check_asked(loaded.config.system)
    return show_plan(loaded, _asked(arguments)) if arguments.dry_run else _start(loaded, arguments)


def resume(arguments: Namespace, settings: list[Setting]) -> int:
    """Go on with a run, with the settings it was started with; or only prove that this gives the same bits."""
    if arguments.prove:
        from lockstep.proving import prove

        return prove(arguments, settings)
    if arguments.steps is not None:
        raise ConfigError("is for a proof", where="--steps", hint="--prove too, or --max-steps")
    for key, _ in settings:
        if key.removeprefix("checkpoint.") in ("resume", "checkpoint"):
            hint = "lockstep resume PATH, a run or one checkpoint of it"
            raise ConfigError("RUN says already where to go on from", where=f"--{key}", hint=hint)
    from lockstep.api import check_fits
    from lockstep.config.load import load_run
    from lockstep.home import find_run, root_of, saved_identity
    from lockstep.rundir import refuse_streamed
    from lockstep.runtime.devices import check_asked

    path = find_run(arguments.run)
    told = [*settings, ("checkpoint.resume", str(path))]
    loaded = load_run(root_of(path), told, since=saved_identity(path))
    refuse_streamed(root_of(path), loaded.family)
    check_fits(loaded)
    check_asked(loaded.config.system)
    return _start(loaded, arguments)


def _start(loaded: Loaded, arguments: Namespace) -> int:
    from lockstep.start import start

    return start(loaded, _asked(arguments))


def _asked(arguments: Namespace) -> Start:
    from lockstep.start import Start

    return Start.of(("lockstep",), arguments.argv, arguments)


def prepare(arguments: Namespace, settings: list[Setting]) -> int:
    """Prepare the dataset of a configuration, or look after those that are there."""
    from lockstep import preparing
    from lockstep.planning import show_plan

    if arguments.family is None:
        if not (arguments.list or arguments.verify or arguments.clean):
            raise ConfigError("which FAMILY?", where="lockstep prepare", hint="lockstep prepare llama tiny")
        arguments.family = "llama"  # the settings of the cache are those of every family
    loaded = _resolve(arguments, settings)
    if arguments.list or arguments.verify:
        return preparing.show_datasets(loaded, verify=arguments.verify)
    if arguments.clean:
        return preparing.remove_datasets(loaded, dry_run=arguments.dry_run)
    if arguments.dry_run:
        return show_plan(loaded)
    from lockstep.report.logs import setup_logging

    setup_logging(level=loaded.config.debug.log_level)
    for notice in loaded.notices:
        say(notice)
    return preparing.prepare_data(loaded, expanded(arguments.to, where="--to") if arguments.to else None)


def collect(arguments: Namespace, settings: list[Setting]) -> int:
    """Let source learners make the histories that an agent learns from."""
    from lockstep.preparing import collect_histories
    from lockstep.report.logs import setup_logging
    from lockstep.runtime.devices import check_asked

    loaded = _resolve(arguments, settings)
    check_asked(loaded.config.system)
    setup_logging(level=loaded.config.debug.log_level)
    return collect_histories(loaded, overwrite=arguments.overwrite, dry_run=arguments.dry_run)


def status(arguments: Namespace, _: list[Setting]) -> int:
    """Show how runs stand, from their files alone."""
    from lockstep.status import status as show_status

    say(show_status(_found(arguments.run) if arguments.run else None))
    return ExitCode.DONE


def logs(arguments: Namespace, _: list[Setting]) -> int:
    """Show what the workers of a run have said."""
    from lockstep.status import logs as show_logs

    path = _found(arguments.run)
    return show_logs(path, gpu=arguments.gpu, follow=arguments.follow, lines=arguments.lines, say=say)


def stop(arguments: Namespace, _: list[Setting]) -> int:
    """Ask a run to save and end, and wait for it."""
    from lockstep.status import stop as stop_run

    text, code = stop_run(_found(arguments.run), timeout=arguments.timeout)
    say(text)
    return code


def check(arguments: Namespace, _: list[Setting]) -> int:
    """Let every card do the same and compare the bits."""
    if arguments.schema:
        import json

        from lockstep.check.schema import schema

        say(json.dumps(schema(), indent=1))
        return ExitCode.DONE
    from lockstep.check.conduct import Asked
    from lockstep.check.conduct import check as conduct

    return conduct(
        Asked(
            level="quick" if arguments.quick else "deep" if arguments.deep else "default",
            device=arguments.device,
            gpus=arguments.gpus,
            workload=arguments.workload,
            golden=expanded(arguments.golden, where="--golden") if arguments.golden else None,
            slow_ratio=arguments.slow,
            out=expanded(arguments.out, where="--out"),
            name=arguments.name,
            json=arguments.json,
            timeout_seconds=arguments.timeout,
        )
    )


def bench(arguments: Namespace, settings: list[Setting]) -> int:
    """Measure how fast a configuration trains here and where a step goes, or what more workers bring."""
    from lockstep.bench.conduct import bench as measure
    from lockstep.planning import show_plan
    from lockstep.runtime.devices import check_asked

    loaded = _resolve(arguments, settings)
    check_asked(loaded.config.system)
    return show_plan(loaded) if arguments.dry_run else measure(loaded, arguments)


def diff(arguments: Namespace, _: list[Setting]) -> int:
    """Say in what two runs differ, and since when."""
    from lockstep.comparing import diff as compare
    from lockstep.home import find_run

    return compare(find_run(arguments.run_a), find_run(arguments.run_b), json=arguments.json)


def doctor(arguments: Namespace, _: list[Setting]) -> int:
    """Check whether this machine can train."""
    from lockstep.doctor import doctor as examine

    text, code = examine(json=arguments.json, network=arguments.network)
    say(text)
    return code


def replay(arguments: Namespace, _: list[Setting]) -> int:
    """Run a bad step again from what was kept of it, and say what makes it go away."""
    from lockstep.replaying import replay as run_again

    return run_again(arguments)


def script(arguments: Namespace, settings: list[Setting]) -> int:
    """Print a job script."""
    from lockstep.arguments import without
    from lockstep.launch.scripts import script as write
    from lockstep.runtime.devices import choose, visible_gpus

    loaded = _resolve(arguments, settings)  # what cannot be trained gets no script
    system = loaded.config.system
    if loaded.config.data.hf_token:
        raise ConfigError("a token has no place in a script", where="--hf-token", hint="export HF_TOKEN where it runs")
    count = system.gpus.strip()
    if not count.isdecimal():  # a list has its length, `all` means what this machine has
        on_cpu = system.device == "cpu"
        count = str(len(choose(count, cpu=on_cpu)) if on_cpu or visible_gpus() else 1)
    words = without(arguments.argv[2:], "--nodes", "--time")
    name = loaded.config.run.name or ""
    say(
        write(
            arguments.kind, words, nodes=arguments.nodes, gpus=int(count), name=name, time_limit=arguments.time
        ).rstrip()
    )
    return ExitCode.DONE


def _found(run: str) -> Path:
    from lockstep.home import find_run, root_of

    return root_of(find_run(run))


def config_list(arguments: Namespace, _: list[Setting]) -> int:
    """Show the presets."""
    from lockstep.config.show import list_presets

    say(list_presets(arguments.only or arguments.family))
    return ExitCode.DONE


def config_show(arguments: Namespace, settings: list[Setting]) -> int:
    """Show every value of a configuration and where it comes from."""
    from lockstep.config.show import show, show_json

    loaded = _resolve(arguments, settings)
    say(show_json(loaded) if arguments.json else show(loaded, only_set=arguments.set))
    return ExitCode.DONE


def config_explain(arguments: Namespace, _: list[Setting]) -> int:
    """Say what a setting means and accepts."""
    from lockstep.config.catalog import config_class
    from lockstep.config.show import explain, family_of
    from lockstep.models.shapes import names

    family = arguments.family or family_of(arguments.key)
    options = type(config_class(family)().model)  # pyright: ignore[reportCallIssue] - families have defaults
    say(explain(arguments.key, family, known_models=names(options)))
    return ExitCode.DONE


def config_validate(arguments: Namespace, settings: list[Setting]) -> int:
    """Check a file without running it."""
    from lockstep.api import resolve, sizes

    loaded = resolve(arguments.family, preset=arguments.preset, file=Path(arguments.file), flags=settings)
    say(*loaded.notices, f"{arguments.file}: fine over preset {loaded.preset}", sizes(loaded))
    return ExitCode.DONE


def config_schema(arguments: Namespace, _: list[Setting]) -> int:
    """Print the JSON Schema of configuration files, for editors."""
    from lockstep.config.show import schema

    say(schema(arguments.family))
    return ExitCode.DONE


def init(arguments: Namespace, _: list[Setting]) -> int:
    """Put the documented scripts of a family into a folder."""
    from lockstep.families import FAMILIES
    from lockstep.families import init as put_scripts

    folder = Path(arguments.folder)
    if written := put_scripts(arguments.family, folder):
        go_there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
        say(*map(str, written), f"next: {go_there}{FAMILIES[arguments.family].try_first}")
    else:
        say(f"Everything is already in {folder}")
    return ExitCode.DONE


def families(_: Namespace, __: list[Setting]) -> int:
    """List the families, which work today, and the commands their guides document."""
    from lockstep.families import families_table

    say(families_table().rstrip())
    return ExitCode.DONE


VERBS: dict[str, tuple[str, Verb]] = {
    "train": ("train a model: lockstep train llama demo", train),
    "resume": ("go on with a run, exactly where it stopped; --prove: show that the bits are the same", resume),
    "prepare": ("prepare a dataset; --list, --verify, --clean", prepare),
    "collect": ("make the histories that agents learn from: lockstep collect ad demo", collect),
    "status": ("show how runs stand, without touching them", status),
    "logs": ("show what the workers said: --gpu 2 --follow", logs),
    "stop": ("let a run save and end", stop),
    "check": ("let every GPU train the same and compare the bits: PASS, FAIL or UNDECIDED for each", check),
    "bench": ("measure throughput, MFU, memory and where a step goes: lockstep bench llama production", bench),
    "bench scaling": ("measure what more workers bring: --workers 1,2,4", bench),
    "diff": ("say in what two runs differ: settings, versions, data, first step and tensor", diff),
    "doctor": ("check whether this machine can train", doctor),
    "replay": ("run a step that was NaN again, from its bundle, and say why", replay),
    "script": ("print a job script for slurm or k8s", script),
    "sample": ("let a trained model continue a text or fill its [MASK]s; an agent walks", sample),
    "eval": ("measure a trained model; --answer TEXT: its likelihood", evaluate),
    "export": ("write a trained model for transformers", export),
    "config list": ("show the presets", config_list),
    "config show": ("show every value and where it comes from", config_show),
    "config explain": ("say what a setting means", config_explain),
    "config validate": ("check a configuration file", config_validate),
    "config schema": ("JSON Schema of the files, for editors", config_schema),
    "init": ("put the documented scripts into a folder", init),
    "families": ("list the families and their documented commands", families),
}


# ------------------------------------------------------------------------------------------------ what verbs share


def _resolve(arguments: Namespace, settings: list[Setting]) -> Loaded:
    """The configuration of `FAMILY [PRESET|FILE] --preset --config --debug` and the settings."""
    from lockstep.api import preset_or_file, resolve, with_debug

    preset: str | None = arguments.preset
    file = Path(arguments.config) if arguments.config is not None else None
    if arguments.what is not None:
        preset, file = preset_or_file(arguments.family, arguments.what, preset=preset, file=file)
    if arguments.debug:
        preset, settings = with_debug(preset, settings)
    return resolve(arguments.family, preset=preset, file=file, flags=settings)
