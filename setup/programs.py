"""Programs that some tests need beside Python: SLURM, network namespaces, shellcheck, Chromium. apt-get brings them.

Only root can do that. Where it cannot be, the tests that need them are skipped and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PACKAGES = {  # program -> package
    "slurmctld": "slurm-wlm", "munged": "munge", "ip": "iproute2", "shellcheck": "shellcheck", "chromium": "chromium",
}  # fmt: skip
TIMEOUT_SECONDS = 600
FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> list[str]:
    """The packages whose programs are not on this machine."""
    path = f"{os.environ.get('PATH', '')}:{FOLDERS}"
    return [package for program, package in PACKAGES.items() if shutil.which(program, path=path) is None]


def install() -> str:
    """Install what is missing, if that is possible; what to tell, or ''."""
    wanted = missing()
    if not wanted:
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"programs: {', '.join(wanted)} not here, and only root can apt-get them: their tests are skipped"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *wanted]):
        try:
            done = subprocess.run(
                ["apt-get", *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"programs: apt-get {words[0]} took too long: the tests of {', '.join(wanted)} are skipped"
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            return f"programs: apt-get {words[0]} failed ({reason}): the tests of {', '.join(wanted)} are skipped"
    return f"programs: installed {', '.join(wanted)}"


if __name__ == "__main__":
    if said := install():
        sys.stdout.write(said + "\n")
