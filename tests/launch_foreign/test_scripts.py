"""Generated scripts: readable, clean, and nothing in a name or a flag is ever executed."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from lockstep.errors import ConfigError
from lockstep.launch.scripts import script, seconds

NASTY = (
    "$(touch hit)",
    "`touch hit`",
    "a'b\"c",
    "x; touch hit",
    "x\ntouch hit\n#SBATCH --nodes=9",
    "a && touch hit",
    "$HOME",
    "\\",
)
WORDS = ("llama", "tiny", "--device", "cpu", "--training.max_steps", "7")


def checked(text: str, folder: Path) -> Path:
    """The script as a file that bash has read."""
    path = folder / "job.sh"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)
    return path


def received(path: Path, folder: Path) -> list[str]:
    """Run a script with a stand-in for srun that writes down its words."""
    seen = folder / "seen"
    stand_in = folder / "bin" / "srun"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {seen}\n')
    stand_in.chmod(0o755)
    variables = {"PATH": f"{stand_in.parent}:/usr/bin:/bin"}
    subprocess.run(["bash", path], check=True, cwd=folder, env=variables)
    return seen.read_text().split("\0")[:-1]


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_word_arrives_and_nothing_is_executed(nodes: int, tmp_path: Path) -> None:
    for word in NASTY:
        text = script("slurm", [*WORDS, "--data.name", word], nodes=nodes, gpus=2, name=word)
        words = received(checked(text, tmp_path), tmp_path)
        assert words.count(word) == 2, "as a value and as the name"
        assert [words[words.index(flag) + 1] for flag in ("train", "--resume", "--data.name")] == [
            "llama",
            "auto",
            word,
        ]
        assert not list(tmp_path.glob("**/hit"))
        directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        assert len(directives) == 9


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here: apt-get install -y shellcheck")
@pytest.mark.parametrize("nodes", [1, 2])
def test_shellcheck_has_nothing_to_say(nodes: int, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.sh" for number in range(len(NASTY) + 1)]
    for path, word in zip(paths, ("plain", *NASTY), strict=True):
        path.write_text(script("slurm", [*WORDS, "--data.name", word], nodes=nodes, gpus=2, name=word))
    answer = subprocess.run(["shellcheck", *paths], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout
    paths[0].write_text(paths[0].read_text() + "echo $unquoted\n")  # the control
    assert subprocess.run(["shellcheck", paths[0]], capture_output=True).returncode == 1


def test_the_checks_see_what_is_not_quoted(tmp_path: Path) -> None:
    """The control: the same harness notices a script that executes its words."""
    path = tmp_path / "job.sh"
    path.write_text("exec srun train $(touch hit)\n")
    received(path, tmp_path)
    assert list(tmp_path.glob("hit"))


def test_slurm_asks_for_what_the_run_needs() -> None:
    text = script("slurm", ["llama", "production"], nodes=2, gpus=4, name="big run", time_limit="2-12:00:00")
    for line in (
        "--job-name=big_run", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--time=2-12:00:00",
        "--signal=USR1@120", "--requeue",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert "--gpus 4 --resume" in text
    assert "--launch workers" in text
    cpu = script("slurm", WORDS, gpus=3)
    assert "--cpus-per-task=3" in cpu
    assert "gpus-per-node" not in cpu


def test_the_users_own_words_win() -> None:
    text = script("slurm", [*WORDS, "--gpus", "0,2", "--resume=runs/x", "--name", "mine"], gpus=4, name="theirs")
    command = text[text.index("exec") :]
    assert [command.count(flag) for flag in ("--gpus ", "--resume", "--name")] == [1, 1, 1]


@pytest.mark.parametrize("nodes", [1, 3])
def test_kubernetes_reads_what_was_meant(nodes: int) -> None:
    for name in ("my run", *NASTY):
        text = script(
            "k8s", [*WORDS, "--data.name", name, "no", "1e3"], nodes=nodes, gpus=2, name=name, time_limit="1:30:00"
        )
        service, job = YAML(typ="safe").load_all(io.StringIO(text))
        assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
        spec, pod = job["spec"], job["spec"]["template"]["spec"]
        assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", nodes, nodes)
        assert spec["activeDeadlineSeconds"] == 5400
        assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
        words = [word.replace("$$(", "$(") for word in pod["containers"][0]["command"]]
        assert words.count(name) == 2
        assert {"no", "1e3"} <= set(words)
        assert ("$(JOB_COMPLETION_INDEX)" in words) == (nodes > 1)


def test_gpus_of_a_pod() -> None:
    _, job = YAML(typ="safe").load_all(io.StringIO(script("k8s", ["llama", "production"], gpus=8)))
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_what_is_no_script() -> None:
    for bad in ({"kind": "pbs"}, {"nodes": 0}, {"gpus": 0}, {"time_limit": "1h"}, {"time_limit": "1:00\n#SBATCH -x"}):
        arguments = {"kind": "slurm", "nodes": 1, "gpus": 1, "time_limit": ""} | bad
        with pytest.raises(ConfigError):
            script(arguments.pop("kind"), WORDS, **arguments)  # pyright: ignore[reportArgumentType] - on purpose


def test_time_limits() -> None:
    limits = {"90": 5400, "90:30": 5430, "1:30:00": 5400, "1-2": 93_600, "1-2:03": 93_780, "1-2:03:04": 93_784}
    assert {text: seconds(text) for text in limits} == limits
