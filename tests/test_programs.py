"""setup/programs.py: what tests need beside Python is installed where that can be, and told where it cannot."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_setup import ROOT, load_script

SCRIPT = ROOT / "setup" / "programs.py"
WANTED = ["slurm-wlm", "munge", "iproute2", "shellcheck", "chromium"]


class Machine:
    """A PATH of its own, as root or not, with an apt-get that writes down what it was asked and may fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = load_script("programs")
        self.folder, self._patch = folder, monkeypatch
        self.be_root(True)
        monkeypatch.setattr(self.module, "FOLDERS", str(folder / "nowhere"))
        monkeypatch.setenv("PATH", str(folder))

    def be_root(self, root: bool) -> None:
        self._patch.setattr(self.module.os, "geteuid", lambda: 0 if root else 1000)

    def plant(self, *names: str, text: str = "") -> None:
        for name in names:
            path = self.folder / name
            path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            path.chmod(0o755)

    def plant_apt(self, text: str = "") -> None:
        note = f'echo "$DEBIAN_FRONTEND $*" >> {shlex.quote(str(self.folder / "asked"))}'
        self.plant("apt-get", text=f"{note}\n{text}")

    @property
    def asked(self) -> list[list[str]]:
        path = self.folder / "asked"
        return [line.split() for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_root_installs_what_is_missing_and_only_that(machine: Machine) -> None:
    machine.plant("ip")
    machine.plant_apt()
    wanted = [name for name in WANTED if name != "iproute2"]
    assert machine.module.missing() == wanted
    assert machine.module.install() == f"programs: installed {', '.join(wanted)}"
    update, install = machine.asked
    assert update[:2] == ["noninteractive", "update"], "it never asks a question"
    assert (install[:3], install[-len(wanted) :]) == (["noninteractive", "install", "-y"], wanted)
    assert "--no-install-recommends" in install


def test_nothing_missing_asks_nobody(machine: Machine) -> None:
    machine.plant(*machine.module.PACKAGES)
    machine.plant_apt()
    assert (machine.module.install(), machine.asked) == ("", [])


def test_a_program_outside_of_path_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmctld lies in /usr/sbin, which is not on everybody's PATH."""
    machine.plant(*machine.module.PACKAGES)
    monkeypatch.setenv("PATH", str(machine.folder / "nowhere"))
    assert machine.module.missing() == WANTED
    monkeypatch.setattr(machine.module, "FOLDERS", str(machine.folder))
    assert machine.module.missing() == []


@pytest.mark.parametrize("why", ["not root", "no apt-get"])
def test_where_it_cannot_be_installed_that_is_told(why: str, machine: Machine) -> None:
    if why == "not root":
        machine.plant_apt()
        machine.be_root(False)
    said = machine.module.install()
    assert all(name in said for name in WANTED)
    assert said.endswith("their tests are skipped")
    assert "\n" not in said
    assert machine.asked == [], "nothing was tried"


@pytest.mark.parametrize("step", ["update", "install"])
def test_a_failing_apt_get_is_told_with_its_last_words(step: str, machine: Machine) -> None:
    machine.plant_apt(f'[ "$1" = {step} ] && {{ echo first >&2; echo "E: no network" >&2; exit 100; }}; exit 0')
    said = machine.module.install()
    assert said.startswith(f"programs: apt-get {step} failed (E: no network)")
    assert len(machine.asked) == (1 if step == "update" else 2), "not tried again"
    assert all(name in said for name in WANTED)


def test_an_apt_get_that_stands_still_is_left(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.plant_apt("exec /bin/sleep 30")
    monkeypatch.setattr(machine.module, "TIMEOUT_SECONDS", 0.3)
    assert "apt-get update took too long" in machine.module.install()


def test_as_a_script(tmp_path: Path) -> None:
    """One line, and no failure: tests that can run are run."""
    code = f"import os, runpy; os.geteuid = lambda: 1000; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert len(answer.stdout.splitlines()) <= 1
