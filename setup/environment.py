"""Give this checkout a Python environment, once. Prints the interpreter to use on stdout, progress on stderr.

Standard library only: it runs before anything is installed. Called by run.sh and test.sh through environment.sh:
`python3 setup/environment.py requirements.lock [requirements-dev.lock]`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
LARGE_BYTES = 20e6
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "__PYVENV_LAUNCHER__")


class SetupError(Exception):
    """Set-up failed; the text is all the user needs."""


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def lacking(extras: list[str]) -> list[str]:
    """Direct requirements of pyproject.toml that the running interpreter does not have, without importing any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return [line for line in wanted if not present(line)]


def present(requirement: str) -> bool:
    """Is `name>=version` installed? (The only form pyproject.toml uses.)"""
    name, _, least = requirement.partition(">=")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return numbers(version) >= numbers(least)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def active_environment(extras: list[str]) -> Path | None:
    """The interpreter of an activated environment, if it has everything; it is then used as it is."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        python = Path(os.environ.get(variable, "/nowhere")) / "bin" / "python"
        if python.is_file() and python.parent.resolve() != PYTHON.parent.resolve():
            answer = subprocess.run([python, __file__, "--lacking", *extras], capture_output=True, text=True)
            if answer.returncode == 0 and not answer.stdout.strip():
                return python
    return None


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """One set-up at a time in this checkout; the lock is on the folder and dies with its holder."""
    descriptor = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("Another set-up is running in this checkout: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def digest(*paths: Path) -> str:
    """What a stamp holds: the content of the files and the place of the checkout (a moved one is set up again)."""
    parts = [path.read_bytes() for path in paths] + [str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def stamp(path: Path) -> Path:
    return VENV / f".installed-{path.name}"


def outdated(path: Path) -> bool:
    return not stamp(path).is_file() or stamp(path).read_text(encoding="utf-8") != digest(path)


def clean_environment() -> dict[str, str]:
    """The environment without what would send pip's files anywhere but into .venv."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return kept | {"PIP_USER": "0", "PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def make_venv() -> None:
    """A new .venv, unless a whole one is there: one without a working pip is a set-up that was interrupted."""
    if PYTHON.exists() and subprocess.run([PYTHON, "-c", "import pip"], capture_output=True).returncode == 0:
        return
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    shutil.rmtree(VENV, ignore_errors=True)
    say(f"Making .venv with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True, env=clean_environment())
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(f"Cannot make {VENV}:\n{made.stdout}{made.stderr}")


def pip(*arguments: str, packages: int) -> None:
    """Run pip in .venv, its wall of text condensed; everything goes to install.log, and to the screen if it fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--progress-bar", "off", "--no-color", *arguments]
    progress = Progress(packages)
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(), text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                log.write(line)
                lines.append(line)
                progress.read(line)
        finally:
            progress.close()
            process.stdout.close()
            if sys.exc_info()[0] is not None:  # interrupted: pip must not go on without us
                process.terminate()
                process.wait()
        if process.wait():
            shown = [line for line in lines if not line.startswith(("Requirement already", "WARNING: Location"))]
            raise SetupError(f"{''.join(shown)}\npip failed (exit {process.returncode}); all of it is in {LOG}")


class Progress:
    """Turns pip's lines into the few worth reading: large downloads, a count, and the quiet unpacking."""

    def __init__(self, packages: int) -> None:
        self.packages = packages
        self.seen = 0
        self.unpacked = threading.Event()
        self.watcher: threading.Thread | None = None

    def read(self, line: str) -> None:
        if found := re.match(r"(?:Collecting|Processing) (?:\S*/)?([\w.]+)", line):
            self.seen += 1
            if self.seen % 20 == 0:
                say(f"  {self.seen} of {self.packages} packages found ({found[1]})")
        elif found := re.match(r"\s+(Downloading|Using cached) (\S+?)-(\d[^-]*)-\S+ \(([\d.]+) ([kMG]?B)\)", line):
            if float(found[4]) * UNITS[found[5]] >= LARGE_BYTES:
                verb = "downloading" if found[1] == "Downloading" else "from pip's cache:"
                name = found[2].rpartition("/")[2]
                say(f"  {verb} {name} {found[3]} ({found[4]} {found[5]})")
        elif line.startswith("Installing collected packages:") and self.packages > 1:
            total = line.count(",") + 1
            say(f"  unpacking {total} packages")
            before = self.count()
            self.watcher = threading.Thread(target=self.watch, args=(total, before), daemon=True)
            self.watcher.start()

    def watch(self, total: int, before: int) -> None:
        while not self.unpacked.wait(timeout=15):
            say(f"  {min(self.count() - before, total)} of {total} unpacked")

    def count(self) -> int:
        return sum(1 for _ in VENV.glob("lib/python3*/site-packages/*.dist-info"))

    def close(self) -> None:
        self.unpacked.set()
        if self.watcher:
            self.watcher.join()


def pins(lock: Path) -> int:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return sum(1 for line in lines if line.strip() and not line.startswith("#"))


def install(locks: list[Path]) -> None:
    """Install what the stamps say is missing; a stamp is written only after its install has succeeded."""
    project = ROOT / "pyproject.toml"
    started = time.monotonic()
    make_venv()
    for lock in filter(outdated, locks):
        stamp(lock).unlink(missing_ok=True)
        size = "about 1.6 GB, more with CUDA; 2 to 5 minutes, once" if lock.name == "requirements.lock" else "once"
        say(f"Installing {pins(lock)} packages of {lock.name} ({size})")
        pip("-r", str(lock), packages=pins(lock))
        stamp(lock).write_text(digest(lock), encoding="utf-8")
    if outdated(project):
        say("Installing lockstep itself (editable)")
        pip("--no-deps", "--no-build-isolation", "-e", str(ROOT), packages=1)
        stamp(project).write_text(digest(project), encoding="utf-8")
    say(f"Ready in {time.monotonic() - started:.0f} s\n")


def prepare(locks: list[Path]) -> Path:
    """The interpreter to use: the activated one that has everything, else .venv's, installed if need be."""
    extras = ["dev"] if len(locks) > 1 else []
    if active := active_environment(extras):
        return active
    wanted = [*locks, ROOT / "pyproject.toml"]
    if not PYTHON.exists() or any(map(outdated, wanted)):
        with only_one():
            if not PYTHON.exists() or any(map(outdated, wanted)):
                install(locks)
    return PYTHON


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--lacking"]:
        sys.stdout.write("\n".join(lacking(arguments[1:])))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.stdout.write(f"{prepare([ROOT / name for name in arguments])}\n")
    except (SetupError, OSError) as error:
        say(f"Set-up failed. {error}")
        return 1
    except KeyboardInterrupt:
        say("Set-up interrupted: run the command again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
