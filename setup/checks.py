"""Run the checks of test.sh: format, lint, types, floors and tests; with --full also the long proofs, in slices.

A slice is a test file with slow tests, or a node id. A slice that has passed is stamped in .slices/ with a hash of
the tree, and is not run again until a file changes: an interrupted `bash test.sh --full` goes on where it was.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import programs

ROOT = Path(__file__).resolve().parent.parent
STAMPS = ROOT / ".slices"
NONE_FOUND = 5  # what pytest says where no test is left to run
BIN = Path(sys.executable).parent
PYTEST = [sys.executable, "-m", "pytest", "-q"]
# Folders that compute rather than wait for processes: the second core of two has them, beside all the others.
BESIDE = (
    "config", "contracts", "data", "engine", "formats", "gates", "golden", "health", "hub", "kernels", "learners",
    "models", "objectives", "report", "science", "sources",
)  # fmt: skip
USAGE = """usage: bash test.sh [PYTEST ARGUMENTS]     every check; arguments go to pytest
       bash test.sh --full                 every check, then the long proofs that have not passed on this tree
       bash test.sh --full SLICE...        only these long proofs (files or node ids)
       bash test.sh --list                 the slices and whether they have passed on this tree"""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def stages() -> dict[str, list[str]]:
    """Name -> command of what is checked before the tests. None imports torch."""
    return {
        "format": [str(BIN / "ruff"), "format", "--check", "--quiet", "--diff", "."],
        "lint": [str(BIN / "ruff"), "check", "--quiet", "."],
        "types": [str(BIN / "basedpyright"), "--pythonpath", sys.executable],
        "floors": [str(BIN / "lint-imports"), "--no-cache"],
    }


def run_stage(name: str, command: list[str]) -> bool:
    """One line per stage; what it says is shown only if it fails."""
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        say(done.stdout.rstrip())
    return told(name, started, good=done.returncode == 0)


def run_tests(arguments: list[str]) -> bool:
    """What is asked for, shown as it runs. The whole suite in two processes, of which one is shown afterwards."""
    started = time.monotonic()
    if arguments:
        return told("tests", started, good=subprocess.run([*PYTEST, *arguments], cwd=ROOT).returncode == 0)
    folders = [f"tests/{name}" for name in BESIDE]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        beside = subprocess.Popen([*PYTEST, *folders], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            others = subprocess.run([*PYTEST, *(f"--ignore={folder}" for folder in folders)], cwd=ROOT)
            beside.wait()
        finally:
            beside.kill()
        said.seek(0)
        say(said.read().rstrip())
    return told("tests", started, good=others.returncode == beside.returncode == 0)


def told(name: str, started: float, *, good: bool) -> bool:
    say(f"{name:<8}{'ok' if good else 'FAILED':<8}{time.monotonic() - started:.1f} s")
    return good


def tree_hash() -> str:
    """A hash of every file git tracks or would track, as it lies in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return f"not a git checkout, {time.time()}"  # equal to no stamp: nothing is skipped
    digest = hashlib.sha256(sys.version.encode())
    for name in sorted(set(listed.decode().split("\0")) - {""}):
        path = ROOT / name
        if path.is_file():
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def slices() -> list[str]:
    """Every test file that has slow tests, as pytest finds them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "--full", "-m", "slow"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.findall(r"^(tests/[^\s:]+\.py)\b", listed.stdout, re.MULTILINE)
    if listed.returncode or not found:
        raise SystemExit(f"cannot list the long proofs:\n{listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    return sorted(set(found))


def stamp(name: str) -> Path:
    return STAMPS / re.sub(r"[^\w.-]+", "_", name)


def passed(name: str, tree: str) -> bool:
    return stamp(name).is_file() and stamp(name).read_text(encoding="utf-8") == tree


def run_slices(names: list[str]) -> bool:
    """Run the slices that have not passed on this tree; True if all have in the end."""
    tree = tree_hash()
    STAMPS.mkdir(exist_ok=True)
    good = True
    for number, name in enumerate(names, start=1):
        place = f"slice {number}/{len(names)} {name}"
        if passed(name, tree):
            say(f"{place}: passed before on this tree")
            continue
        started = time.monotonic()
        command = [*PYTEST, "--full", "-m", "slow", "--timeout", "7200", name]
        if code := subprocess.run(command, cwd=ROOT).returncode:
            short = f"has no long proof; its tests: bash test.sh {name}"
            say(f"{place}: {short if code == NONE_FOUND else f'FAILED after {time.monotonic() - started:.0f} s'}")
            good = False
        else:
            stamp(name).write_text(tree, encoding="utf-8")
            say(f"{place}: ok, {time.monotonic() - started:.0f} s")
    return good


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["--help"], ["-h"]):
        say(USAGE)
        return 0
    if arguments[:1] == ["--list"]:
        tree = tree_hash()
        for name in slices():
            say(f"{'passed' if passed(name, tree) else 'to run'}  {name}")
        return 0
    if said := programs.install():
        say(said)
    full = arguments[:1] == ["--full"]
    if full and len(arguments) > 1:
        return 0 if run_slices(arguments[1:]) else 1
    failed = [name for name, command in stages().items() if not run_stage(name, command)]
    if not run_tests([] if full else arguments):
        failed.append("tests")
    if full and not run_slices(slices()):
        failed.append("slices")
    say(f"FAILED: {', '.join(failed)}" if failed else "All checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
