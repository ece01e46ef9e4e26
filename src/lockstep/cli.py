"""The command `lockstep`: verbs only. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import __version__
from lockstep.arguments import Setting, parse
from lockstep.errors import ConfigError, ExitCode, LockstepError, Stopped
from lockstep.registry import suggest
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.config.load import Loaded

BROKEN_PIPE = 141  # what a shell reports for a command whose reader went away
Verb = Callable[[Namespace, list[Setting]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code and never raises for the user's mistakes."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _speak_utf8()
        _hide_tokens(words)
        code = _run(words)
        sys.stdout.flush()
        return code
    except Stopped as stopped:
        _complain(str(stopped), kind="")
        return int(stopped.exit_code)
    except LockstepError as error:
        _complain(str(error))
        return int(error.exit_code)
    except SystemExit as done:  # argparse has shown its help
        return done.code if isinstance(done.code, int) else int(ExitCode.DONE)
    except KeyboardInterrupt:
        _complain("interrupted", kind="")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return BROKEN_PIPE
    except ModuleNotFoundError as error:
        if (error.name or "lockstep").partition(".")[0] == "lockstep":
            return _report_crash(error, words)
        _complain(
            f"{sys.executable} has no package {error.name!r}\n  try: {sys.executable} -m pip install lockstep-train"
        )
        return int(ExitCode.FAILED)
    except Exception as error:
        return _report_crash(error, words)


def _run(words: list[str]) -> int:
    if not words:
        from lockstep.home import home

        print(home())
        return ExitCode.DONE
    if words[0] in ("--version", "-V"):
        print(f"lockstep {__version__}")
        return ExitCode.DONE
    if words[0] in ("--help", "-h", "help"):
        print(usage())
        return ExitCode.DONE
    verb, rest = words[0], words[1:]
    if verb == "config":
        if not rest or rest[0] in ("--help", "-h"):
            print(usage("config "))
            return ExitCode.DONE if rest else ExitCode.USAGE
        verb, rest = f"config {rest[0]}", rest[1:]
    if verb not in VERBS:
        raise ConfigError(f"no command {verb[:80]!r}", hint=suggest(verb, sorted(VERBS)))
    about, run = VERBS[verb]
    return run(*parse(verb, about, rest))


def usage(start: str = "") -> str:
    """What `lockstep --help` prints."""
    lines = ["usage: lockstep COMMAND ... (each has --help)", ""]
    lines += [f"  {verb:<17} {about}" for verb, (about, _) in VERBS.items() if verb.startswith(start)]
    lines += ["", "  lockstep --version, or lockstep alone for the devices, the last runs and three commands to try"]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ verbs


def train(arguments: Namespace, settings: list[Setting]) -> int:
    """Train, or show what would be trained."""
    loaded = _resolve(arguments, settings)
    if arguments.dry_run:
        from lockstep.config.show import show

        print(show(loaded, only_set=True), _sizes(loaded), sep="\n\n")
        return ExitCode.DONE
    return _start(loaded)


def resume(arguments: Namespace, settings: list[Setting]) -> int:
    """Go on with a run, with the settings it was started with."""
    from lockstep.config.load import load_run
    from lockstep.home import find_run, root_of

    path = find_run(arguments.run)
    return _start(load_run(root_of(path), [*settings, ("checkpoint.resume", str(path))]))


def _start(loaded: Loaded) -> int:
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lockstep.engine.train import train as train_loaded

    return int(train_loaded(loaded).exit_code)


def prepare(arguments: Namespace, settings: list[Setting]) -> int:
    """Prepare the dataset of a configuration, or look after those that are there."""
    loaded = _resolve(arguments, settings)
    from lockstep.engine.prepare import cache_roots

    roots = cache_roots(loaded.config.data)
    if arguments.clean:
        from lockstep.data import cache

        removed = [f"{root / name}" for root in roots for name in cache.clean(root)]
        print("\n".join(f"Removed {name}" for name in removed) or "Nothing to remove")
        return ExitCode.DONE
    if arguments.list or arguments.verify:
        return _show_datasets(roots, verify=arguments.verify)
    import torch

    from lockstep.engine.build import plan
    from lockstep.engine.prepare import prepare as prepare_data
    from lockstep.report.logs import setup_logging

    setup_logging(level=loaded.config.debug.log_level)
    for notice in loaded.notices:
        print(notice)
    planned = plan(loaded, torch.device("cpu"))
    prepare_data(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
    return ExitCode.DONE


def _show_datasets(roots: list[Path], *, verify: bool) -> int:
    from lockstep.data import cache

    found = [entry for root in roots for entry in cache.entries(root)]
    damaged = 0
    for entry in found:
        state = ""
        if verify:
            try:
                cache.check(entry.folder, full=True)
                state = "  intact"
            except LockstepError as error:
                damaged += 1
                state = f"  DAMAGED: {error}"
        print(f"{entry.folder}  {entry.bytes / 2**20:.1f} MiB  {entry.meta.get('source', '')}{state}")
    if not found:
        print(f"No prepared dataset in {' or '.join(str(root) for root in roots)}")
    return ExitCode.DATA if damaged else ExitCode.DONE


def sample(arguments: Namespace, _: list[Setting]) -> int:
    """Let a trained model speak."""
    from lockstep.contracts import SampleOptions
    from lockstep.home import find_run

    path = find_run(arguments.run)
    options = SampleOptions(arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed)
    from lockstep.engine.inference import sample_run

    print(sample_run(path, arguments.prompt, options))
    return ExitCode.DONE


def export(arguments: Namespace, _: list[Setting]) -> int:
    """Hand a trained model to other programs."""
    from lockstep.config.renames import DTYPES, dtype
    from lockstep.home import find_run, root_of

    path, kind = find_run(arguments.run), dtype(arguments.dtype)
    if kind is None:
        raise ConfigError(f"got {arguments.dtype[:40]!r}", where="--dtype", hint=suggest(arguments.dtype, list(DTYPES)))
    folder = Path(arguments.folder) if arguments.folder else root_of(path) / "hf"
    from lockstep.engine.inference import export_run

    print(f"Exported to {export_run(path, folder, kind)}")
    return ExitCode.DONE


def config_list(_: Namespace, __: list[Setting]) -> int:
    """Show the presets."""
    from lockstep.config.show import list_presets

    print(list_presets())
    return ExitCode.DONE


def config_show(arguments: Namespace, settings: list[Setting]) -> int:
    """Show every value of a configuration and where it comes from."""
    from lockstep.config.show import show, show_json

    loaded = _resolve(arguments, settings)
    print(show_json(loaded) if arguments.json else show(loaded, only_set=arguments.set))
    return ExitCode.DONE


def config_explain(arguments: Namespace, _: list[Setting]) -> int:
    """Say what a setting means and accepts."""
    from lockstep.config.show import explain
    from lockstep.models.shapes import KNOWN

    print(explain(arguments.key, arguments.family, known_models=tuple(KNOWN)))
    return ExitCode.DONE


def config_validate(arguments: Namespace, settings: list[Setting]) -> int:
    """Check a file without running it."""
    from lockstep.api import resolve

    loaded = resolve(arguments.family, preset=arguments.preset, file=Path(arguments.file), flags=settings)
    print(*loaded.notices, f"{arguments.file}: fine over preset {loaded.preset}", _sizes(loaded), sep="\n")
    return ExitCode.DONE


def config_schema(arguments: Namespace, _: list[Setting]) -> int:
    """Print the JSON Schema of configuration files, for editors."""
    from lockstep.config.show import schema

    print(schema(arguments.family))
    return ExitCode.DONE


def init(arguments: Namespace, _: list[Setting]) -> int:
    """Put the documented scripts of a family into a folder."""
    from lockstep.families import init as put_scripts

    for path in put_scripts(arguments.family, Path(arguments.folder)):
        print(path)
    return ExitCode.DONE


def families(_: Namespace, __: list[Setting]) -> int:
    """List the families, which work today, and the commands their guides document."""
    from lockstep.families import families_table

    print(families_table().rstrip())
    return ExitCode.DONE


VERBS: dict[str, tuple[str, Verb]] = {
    "train": ("train a model: lockstep train llama demo", train),
    "resume": ("go on with a run, exactly where it stopped", resume),
    "prepare": ("prepare a dataset; --list, --verify, --clean", prepare),
    "sample": ("let a trained model continue a text", sample),
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
    from lockstep.api import resolve
    from lockstep.config.catalog import config_class
    from lockstep.config.load import presets
    from lockstep.config.reader import KINDS

    config_class(arguments.family)
    preset: str | None = arguments.preset
    file = Path(arguments.config) if arguments.config is not None else None
    if (what := arguments.what) is not None:
        names = presets(arguments.family)
        if what in names and preset in (None, what):
            preset = what
        elif file is None and (Path(what).suffix.lower() in KINDS or os.sep in what):
            file = Path(what)
        else:
            problem = "a second preset or file" if what in names or file else "no preset or file"
            raise ConfigError(f"{problem} {what[:200]!r}", where="PRESET|FILE", hint=suggest(what, names))
    if arguments.debug:
        if preset not in (None, "debug"):
            settings = [("debug.enabled", "true"), ("debug.log_level", "DEBUG"), *settings]
        preset = preset or "debug"
    return resolve(arguments.family, preset=preset, file=file, flags=settings)


def _sizes(loaded: Loaded) -> str:
    """The resolved sizes; asks no hub."""
    from lockstep.config.show import sizes
    from lockstep.models import shapes

    config, training = loaded.config, loaded.config.training
    if shapes.known(config.model.model_path) is None and not Path(config.model.model_path).is_dir():
        return "sizes: known once the model's own configuration has been fetched"
    shape = shapes.resolve(config.model, context_length=training.context_length)
    memory = shapes.memory_bytes(
        shape,
        batch_size=training.batch_size,
        context_length=training.context_length,
        dtype_name=training.precision if training.precision in shapes.ITEM_BYTES else "bf16",
        checkpointing=config.system.gradient_checkpointing,
        compiled=False,
    )
    return sizes(
        parameters=shape.parameters(),
        tokens_per_step=training.batch_size * training.grad_accum_nums * training.context_length,
        memory_bytes=memory.total,
        state_bytes=memory.states,
    )


def _speak_utf8() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _hide_tokens(words: Sequence[str]) -> None:
    """A token on the command line is a secret from the first moment."""
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name.lstrip("-").replace("-", "_").rpartition(".")[2] == "hf_token":
            env.hide(text if equals else "".join(words[index + 1 : index + 2]))


def _complain(text: str, *, kind: str = "error: ") -> None:
    print(env.redact(f"lockstep: {kind}{text}"), file=sys.stderr)


def _report_crash(error: Exception, words: Sequence[str]) -> int:
    """An error nobody foresaw: a short block for the user, the traceback in a file for whoever mends it."""
    text = env.redact("".join(traceback.format_exception(error)))
    if "--debug" in words or env.get("LOCKSTEP_TRACEBACK") == "1":
        print(text, file=sys.stderr)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = [
        f"unexpected {type(error).__name__}: {str(error)[:300]}",
        f"  at {frame.filename}:{frame.lineno} ({frame.name})",
    ]
    try:
        descriptor, path = tempfile.mkstemp(prefix="lockstep-crash-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"lockstep {__version__}, Python {sys.version}\n{env.redact(' '.join(words))}\n\n{text}")
        lines.append(f"  full traceback: {path}")
    except OSError:
        lines.append("  LOCKSTEP_TRACEBACK=1 shows the full traceback")
    lines.append("  this is a fault of lockstep, not of your settings: please report it with that traceback")
    _complain("\n".join(lines), kind="")
    return int(ExitCode.FAILED)
