"""Several hosts on one machine: network namespaces on one bridge, each with a name and an address of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NAMED = ("unshare", "--uts", "bash", "-c", 'hostname "$0" && exec "$@"')


def why_not() -> str:
    """What keeps this machine from having them, or ''."""
    if os.geteuid() != 0:
        return "NOT ROOT: no network namespaces, many machines and a cut cable are not shown"
    reason = "NO `ip`: many machines are not shown; apt-get install -y --no-install-recommends iproute2"
    return "" if shutil.which("ip") else reason


@dataclass
class Hosts:
    """Host number n (from 0) has address(n) and can be cut off."""

    count: int
    mark: str = field(default_factory=lambda: f"ls{os.getpid() % 10_000}")

    def name(self, number: int) -> str:
        return f"{self.mark}h{number}"

    def address(self, number: int) -> str:
        return f"10.77.{os.getpid() % 200}.{number + 1}"

    def up(self) -> None:
        ip("link", "add", f"{self.mark}b", "type", "bridge")
        ip("link", "set", f"{self.mark}b", "up")
        for number in range(self.count):
            name = self.name(number)
            ip("netns", "add", name)
            ip("link", "add", f"{self.mark}v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{self.mark}v{number}", "master", f"{self.mark}b", "up")
            ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
            folder = Path("/etc/netns") / name  # torch looks up the host's own name
            folder.mkdir(parents=True)
            known = [f"{self.address(other)} {self.name(other)}" for other in range(self.count)]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))

    def down(self) -> None:
        for number in range(self.count):
            subprocess.run(["ip", "netns", "delete", self.name(number)], check=False)
            shutil.rmtree(Path("/etc/netns") / self.name(number), ignore_errors=True)
        subprocess.run(["ip", "link", "delete", f"{self.mark}b"], check=False)

    def cut(self, number: int) -> None:
        """Pull the cable."""
        ip("link", "set", f"{self.mark}v{number}", "down")

    def join(self, number: int) -> None:
        ip("link", "set", f"{self.mark}v{number}", "up")

    def start(
        self, number: int, *command: str, cwd: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A Python command on a host, in its own session, its output in one pipe."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name(number), *NAMED, self.name(number), sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=os.environ | dict(variables or {}),
            start_new_session=True,
        )


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def finish(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """(exit code, output) of each; whoever is late is killed and has -9."""
    ended: list[tuple[int, str]] = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        ended.append((process.returncode, output))
    return ended
