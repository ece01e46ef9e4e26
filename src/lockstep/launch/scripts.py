"""Scripts to read, keep and submit: the same training for SLURM or Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError

# our launchers end each other; srun killing one that still saves or requeues would only do harm
SRUN_PATIENCE = ("--kill-on-bad-exit=0", "--wait=600")
WARNING_SECONDS = 120  # how long before the time limit SLURM says so
STORE_PORT = 29_500  # inside a pod of its own no other job can hold it


@dataclass(frozen=True)
class Job:
    """What every kind of script is made from. words: what follows `lockstep train`."""

    words: tuple[str, ...]
    nodes: int
    gpus: int
    name: str
    time_limit: str

    @property
    def on_cpu(self) -> bool:
        joined = " ".join(self.words)
        return re.search(r"(--|^| )((system\.)?device)[ =]cpu\b", joined) is not None

    def has(self, flag: str) -> bool:
        return any(word == flag or word.startswith(f"{flag}=") for word in self.words)

    def train(self) -> list[str]:
        """The command of each node's launcher: the user's words, and what the script adds where they do not say it."""
        added: list[str] = []
        for flag, value in (("--gpus", str(self.gpus)), ("--resume", "auto"), ("--name", self.name)):
            if value and not self.has(flag):
                added += [flag, value]
        return ["lockstep", "train", *self.words, *added, "--launch", "workers"]

    def meant_literally(self) -> list[str]:
        """For shellcheck, which asks whether a `$` or `\\` between single quotes is a slip."""
        doubtful = any(sign in word for word in (*self.words, self.name) for sign in "$`\\")
        return ["# shellcheck disable=SC1003,SC2016 # the words are quoted on purpose"] if doubtful else []

    def title(self) -> str:
        places = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        device = "CPU worker" if self.on_cpu else "GPU"
        shown = plain(" ".join(self.words), "A-Za-z0-9 ._=,:/+-", 80)
        return f"lockstep train {shown}: {places} with {self.gpus} {device}{'s' * (self.gpus > 1)} each"


def script(
    kind: str, words: Sequence[str], *, nodes: int = 1, gpus: int = 1, name: str = "", time_limit: str = ""
) -> str:
    """The text of a script. `gpus` is per node; on the CPU it is the number of workers."""
    writers = {"slurm": slurm, "k8s": kubernetes}
    if kind not in writers:
        raise ConfigError(f"no script of kind {kind!r}", hint=f"lockstep script {'|'.join(writers)} FAMILY PRESET")
    if nodes < 1 or gpus < 1:
        raise ConfigError(f"a script needs nodes and GPUs, not {nodes} x {gpus}", hint="--nodes 1 --gpus 1")
    time_limit = time_limit or "24:00:00"
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d?){0,2}", time_limit):
        raise ConfigError(f"{time_limit!r} is no time limit", hint="--time 24:00:00, or 2-12:00:00 for days")
    return writers[kind](Job(tuple(words), nodes, gpus, name, time_limit))


def plain(text: str, allowed: str = "A-Za-z0-9._-", longest: int = 60) -> str:
    """The text where only letters and digits may stand: a scheduler's directive, a comment, a DNS name."""
    return re.sub(rf"[^{allowed}]+", "_", text).strip("_.-")[:longest]


def quoted(word: str) -> str:
    """One word for bash, on one line: no line of a script begins with what the user wrote."""
    if word.isprintable():
        return shlex.quote(word)
    codes = [rf"\u{ord(sign):04x}" if sign in "\\'" or not sign.isprintable() else sign for sign in word]
    return f"$'{''.join(codes)}'"


def shell_words(words: Sequence[str], per_line: int = 100) -> str:
    """Quoted words, broken into lines of a shell command."""
    lines, width = [""], 0
    for word in map(quoted, words):
        if width and width + len(word) > per_line:
            lines, width = [*lines, ""], 0
        lines[-1] += f"{' ' if width else ''}{word}"
        width += len(word) + 1
    return " \\\n    ".join(lines)


def slurm(job: Job) -> str:
    """sbatch FILE: one launcher per node; asked to stop before the time limit it saves, requeues itself and resumes."""
    directives = [
        f"--job-name={plain(job.name or job.words[0] if job.words else 'train') or 'lockstep'}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.gpus}" if job.on_cpu else f"--gpus-per-node={job.gpus}",
        f"--time={job.time_limit}",
        f"--signal=USR1@{WARNING_SECONDS}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    command = [sys.executable, "-m", *job.train()]  # each finds its node in SLURM's variables
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *[f"#SBATCH {directive}" for directive in directives],
            f"# {job.title()}. Submit with: sbatch FILE",
            f"# {WARNING_SECONDS} s before the time limit it saves, goes back to the queue and resumes.",
            "# scancel makes it save and end.",
            *job.meant_literally(),
            "set -euo pipefail",
            "# module load cuda    # what your site needs, if anything",
            f"exec srun {shell_words(SRUN_PATIENCE)} \\",
            f"    {shell_words(command)}",
            "",
        ]
    )


def kubernetes(job: Job) -> str:
    """kubectl apply -f FILE: one pod per node. No shell reads the words; `$$(` is Kubernetes' own quoting of `$(`."""
    name = (
        plain(job.name or "-".join(job.words[:2]), "A-Za-z0-9", 40).lower().replace("_", "-").strip("-") or "lockstep"
    )
    meeting = [
        "--node-rank",
        "$(JOB_COMPLETION_INDEX)",
        "--master-addr",
        f"{name}-0.{name}",
        "--master-port",
        str(STORE_PORT),
    ]
    several = ["--nodes", str(job.nodes), *meeting] if job.nodes > 1 else []
    words = [word.replace("$(", "$$(") for word in job.train()]
    command = ["python", "-m", *words, *several]
    gpus = {} if job.on_cpu else {"nvidia.com/gpu": job.gpus}
    container = {
        "name": "train",
        "image": "lockstep:latest",
        "command": command,
        "resources": {"limits": gpus},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "data", "mountPath": "/data"}],
        "workingDir": "/data",
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": WARNING_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": f"{name}-data"}},
        ],
    }
    training = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": 3 * job.nodes,
            "activeDeadlineSeconds": seconds(job.time_limit),
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": {"app": name}, "publishNotReadyAddresses": True},
    }
    head = [
        f"# {job.title()}",
        "# kubectl apply -f FILE. Edit: the image (with lockstep in it) and the volume claim (runs and data).",
    ]
    return "\n".join([*head, *_yaml(service), "---", *_yaml(training), ""])


def seconds(time_limit: str) -> int:
    """SLURM's time limit in seconds: m, m:s, h:m:s, d-h, d-h:m or d-h:m:s."""
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _yaml(value: object, indent: str = "") -> list[str]:
    """Block YAML of plain data; every text is a JSON string, which YAML 1.2 reads as it is."""
    lines: list[str] = []
    if isinstance(value, dict):
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType] - plain data
            lines += _entry(f"{indent}{_scalar(key)}:", inner, indent + "  ")
    elif isinstance(value, list):
        for inner in value:  # pyright: ignore[reportUnknownVariableType] - plain data
            if isinstance(inner, dict):
                block = _yaml(inner, indent + "  ")
                lines += [f"{indent}- {block[0].lstrip()}", *block[1:]]
            else:
                lines.append(f"{indent}- {_scalar(inner)}")
    return lines


def _entry(head: str, value: object, indent: str) -> list[str]:
    if isinstance(value, dict | list) and value:
        return [head, *_yaml(value, indent)]
    return [f"{head} {_scalar(value)}"]


def _scalar(value: object) -> str:
    """Words of ours stay bare; what kubectl (YAML 1.1) could take for a number or a truth value does not."""
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9./-]{2,}", value) is not None
    truths = ("true", "false", "null", "yes", "off")
    return str(value) if is_word and str(value).lower() not in truths else json.dumps(value)
