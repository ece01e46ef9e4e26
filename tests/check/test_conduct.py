"""The conductor: whole checks with replicas that need no torch; the slow ones with the real replica."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.check import conduct, rounds, schema
from lockstep.check.crew import Crew, Ending, Task
from lockstep.check.records import Replica
from lockstep.runtime import faults
from tests import fake_smi
from tests.check import stub_replica

ROOT = Path(__file__).parents[2]
Check = Callable[..., dict[str, Any]]


class QuickCrew(Crew):
    """Lets the stub replicas run one after the other in this process, which is as good for all but their dying."""

    def run(self, tasks: Sequence[Task], **_: Any) -> list[Ending]:
        for task in tasks:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(faults.REPLICA, task.environ[faults.REPLICA])
                stub_replica.main(Path(task.command[-1]))
        return [Ending(0) for _ in tasks]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean folder, and replicas that are quick to start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "REPLICA", "tests.check.stub_replica")
    monkeypatch.setattr(rounds, "is_prepared", lambda *_: True)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    return tmp_path


@pytest.fixture
def check_in_processes(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    def run(*words: str, fault: str = "", code: int, name: str = "run") -> dict[str, Any]:
        monkeypatch.setenv("LOCKSTEP_FAULT", fault)
        found = cli.main(["check", "--device", "cpu", "--quick", "--workload", "llama", "--name", "run", *words])
        screen = capsys.readouterr()
        assert found == code, screen.out + screen.err
        told = schema.read(place / "runs" / name / "check.json").model_dump(mode="json")
        assert told["exit_code"] == code
        assert not (place / "runs" / name / conduct.UNFINISHED).exists()
        return told | {"screen": screen.out}

    return run


@pytest.fixture
def check(check_in_processes: Check, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setattr(conduct, "Crew", QuickCrew)
    return check_in_processes


def statuses(told: dict[str, Any]) -> list[str]:
    return [card["status"] for card in told["gpus"]]


def test_cards_that_agree_pass(check: Check, place: Path) -> None:
    told = check("--gpus", "3", code=0)
    assert statuses(told) == ["PASS"] * 3
    assert "Checking 3 CPU workers: llama" in told["screen"]
    assert "how fast it loads data" in " ".join(told["coverage"]["not_covered"])
    assert (place / "runs/run/report.html").is_file()
    workers = sorted(path.name for path in (place / "runs/run/workers").iterdir())
    assert workers == ["n0-CPU0", "n0-CPU1", "n0-CPU2"]


def test_a_transient_flip_is_named_and_located(check: Check) -> None:
    fault = "flip_weight@rank=1,round=0,step=4,bit=7,index=6"
    told = check("--gpus", "4", fault=fault, code=3)
    assert statuses(told) == ["PASS", "FAIL", "PASS", "PASS"]
    difference = told["gpus"][1]["difference"]
    assert (difference["workload"], difference["step"], difference["tensor"]) == ("llama", 4, "weights:w")
    assert difference["nature"] == "transient"
    assert difference["elements"] == 1
    assert difference["positions"] == [[1, 2]]
    right = 6 + 0 + 1 + 2 + 3 + 4
    assert (difference["right"], difference["wrong"]) == ([f"0x{right:08x}"], [f"0x{right ^ 128:08x}"])
    assert "Run again: worker 1 (llama to step 4), worker 0 (llama to step 4)" in told["screen"]


def test_a_persistent_fault_is_called_so(check: Check) -> None:
    told = check("--gpus", "3", fault="flip_weight@rank=2,step=4,bit=0;flip_weight@rank=2,step=4,bit=8", code=3)
    difference = told["gpus"][2]["difference"]
    assert (difference["nature"], difference["elements"]) == ("persistent", 1)


def test_two_alike_of_four_are_undecided(check: Check) -> None:
    fault = "flip_weight@rank=0,step=4,bit=3;flip_weight@rank=2,step=4,bit=3"
    told = check("--gpus", "4", fault=fault, code=3)
    assert set(statuses(told)) == {"UNDECIDED"}


def test_of_two_the_one_that_does_not_repeat_itself_is_named(check: Check) -> None:
    told = check("--gpus", "2", fault="flip_weight@rank=1,round=0,step=4,bit=3", code=3)
    assert statuses(told) == ["PASS", "FAIL"]


def test_two_that_differ_and_repeat_themselves_are_undecided(check: Check) -> None:
    told = check("--gpus", "2", fault="flip_weight@rank=1,step=4,bit=3", code=3)
    assert set(statuses(told)) == {"UNDECIDED"}


def test_golden_bits_decide_between_two(check: Check, place: Path) -> None:
    told = check("--gpus", "3", "--golden", "golden.json", code=0)
    assert told["golden"]["state"] == "written"
    (place / "runs/run").rename(place / "runs/first")
    told = check("--gpus", "2", "--golden", "golden.json", fault="flip_weight@rank=1,step=4,bit=3", code=3)
    assert told["golden"]["state"] == "used"
    assert statuses(told) == ["PASS", "FAIL"]


def test_a_golden_file_that_is_lost_meanwhile_costs_no_verdict(
    check: Check, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it was read before; where nothing can be written any more, that is said."""
    folder = place / "gold"
    folder.mkdir()
    words = ("--gpus", "2", "--golden", str(folder / "golden.json"))
    first = rounds.Rounds.first

    def lose_it_first(own: rounds.Rounds) -> list[Replica]:
        shutil.rmtree(folder)
        folder.write_text("a file where the folder was")
        return first(own)

    monkeypatch.setattr(rounds.Rounds, "first", lose_it_first)
    told = check(*words, code=0)
    assert told["golden"]["state"] == "not written"
    assert "golden: not written to" in told["screen"]
    monkeypatch.setattr(rounds.Rounds, "first", first)
    folder.unlink()
    folder.mkdir()
    assert check(*words, "--name", "second", code=0, name="second")["golden"]["state"] == "written"
    monkeypatch.setattr(rounds.Rounds, "first", lose_it_first)
    fault = "flip_weight@rank=1,step=3,bit=3"
    assert statuses(check(*words, "--name", "third", fault=fault, code=3, name="third")) == ["PASS", "FAIL"]


def test_a_clock_that_is_set_back_during_the_check_shortens_nothing(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(1.8e9, -3600.0)
    monkeypatch.setattr(time, "time", lambda: next(now))
    assert 0 < check("--gpus", "2", code=0)["seconds"] < 3600


@pytest.mark.usefixtures("place")
def test_checks_that_begin_in_one_second_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct.rundir, "timestamp", lambda: "20260101-000000")
    one, other = (conduct._folder(conduct.Asked()) for _ in range(2))
    assert one != other
    assert other.is_dir()


def test_one_card_is_compared_with_itself(check: Check, place: Path) -> None:
    told = check("--gpus", "1", code=0)
    assert "one card has only itself to be compared with" in told["screen"]
    (place / "runs/run").rename(place / "runs/first")
    told = check("--gpus", "1", fault="flip_weight@round=1,step=4,bit=3", code=3)
    assert statuses(told) != ["PASS"]


@pytest.mark.slow
def test_those_that_die_or_hang_fail_alone(check_in_processes: Check) -> None:
    fault = "kill@rank=1,step=5;kill@rank=2,step=5,signal=19;exit@rank=4,step=5;kill@rank=5,step=5,signal=11"
    told = check_in_processes("--gpus", "7", "--timeout", "5", fault=fault, code=3)
    assert statuses(told) == ["PASS", "FAIL", "FAIL", "PASS", "FAIL", "FAIL", "PASS"]
    reasons = [" ".join(card["reasons"]) for card in told["gpus"]]
    assert "killed by SIGKILL" in reasons[1]
    assert "hangs in llama at step 5" in reasons[2]
    assert "exited with code 1" in reasons[4]
    assert "killed by SIGSEGV" in reasons[5]
    assert "3 of 7 done, 4 not" in told["screen"]


def test_a_slow_card_is_named(check: Check, place: Path) -> None:
    told = check("--gpus", "4", fault="slow@rank=3,factor=3", code=3)
    assert statuses(told) == ["PASS", "PASS", "PASS", "FAIL"]
    assert "slow" in told["gpus"][3]["reasons"][0]
    (place / "runs/run").rename(place / "runs/first")
    told = check("--gpus", "4", "--slow", "5", fault="slow@rank=3,factor=3", code=0)
    assert statuses(told) == ["PASS"] * 4, "the threshold is the user's"


def test_json_is_all_that_is_printed(check: Check) -> None:
    told = check("--gpus", "2", "--json", code=0)
    assert json.loads(told["screen"])["status"] == "PASS"


def test_a_name_that_a_check_has_is_no_run_to_go_on_with(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--device", "cpu", "--quick", "--name", "chk1"]
    (place / "runs" / "chk1").mkdir(parents=True)
    assert cli.main(words) == 2
    assert capsys.readouterr().err.endswith("run 'chk1' exists already in runs\n  try: another --name\n")
    (place / "runs" / "chk1" / "config.json").write_text("{}")
    assert cli.main(words) == 2
    assert "try: lockstep resume runs/chk1, or another --name" in capsys.readouterr().err, "a run's"


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--workload", "lama"), 2, "did you mean 'llama'"),
        (("--golden", "nowhere/golden.json"), 2, "mkdir -p nowhere"),
        (("--golden", "."), 2, "is a folder"),
        (("--gpus", "0,x"), 2, "'x' is not understood"),
        (("--gpus", "0,0"), 2, "named twice"),
        (("--device", "tpu"), 2, "no device"),
        (("--name", "a/b"), 2, "is not allowed"),
        (("--slow", "0.5"), 2, "from 1 to 100"),
        (("--quick", "--deep"), 2, "not allowed with"),
        (("--audit",), 2, "--deterministic names the operation"),
        (("--out", "/proc/nothing"), 73, "cannot create the run folder"),
    ],
)
def test_bad_words_are_refused_with_one_error(
    words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--device", "cpu", "--quick", *words]) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("error:") == 1
    assert "Traceback" not in shown.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("tail", "code", "told"),
    [
        (["writing failed: No space left (0.1 MiB free)", "  try: free some space", ""], 74,
         "cannot be prepared: writing failed: No space left (0.1 MiB free)\n  try: free some space\n"),
        (["Traceback ...", "RuntimeError: no idea"], 1, "cannot be prepared: RuntimeError: no idea\n"),
        (["  try: "], 137, "cannot be prepared: try:\n"),
        ([], -9, "cannot be prepared: killed\n"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("place")
def test_data_that_cannot_be_made_is_told_as_the_child_told_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tail: list[str], code: int, told: str
) -> None:
    """Its error, its hint and its exit code, where that is one of ours."""

    class FailingCrew(Crew):
        def run(self, tasks: Sequence[Task], **_: Any) -> list[Ending]:
            return [Ending(code, "killed", tuple(tail)) for _ in tasks]

    monkeypatch.setattr(conduct, "Crew", FailingCrew)
    monkeypatch.setattr(rounds, "is_prepared", lambda *_: False)
    found = cli.main(["check", "--device", "cpu", "--quick", "--gpus", "2", "--workload", "llama"])
    assert found == (74 if code == 74 else 1)
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.usefixtures("place")
def test_a_golden_file_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("golden.json").write_text("[1, 2]")
    assert cli.main(["check", "--device", "cpu", "--golden", "golden.json"]) in (2, 65)
    assert "golden.json" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.usefixtures("place")
def test_without_a_gpu_the_cpu_is_offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lockstep.runtime.devices.all_gpus", list)
    assert cli.main(["check"]) == 2
    assert "lockstep check --device cpu" in capsys.readouterr().err


def test_a_held_gpu_and_one_that_is_not_there(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apps = {1: [{"pid": os.getpid(), "used_memory": 2048}]}
    fake_smi.plant(place / "bin", monkeypatch, [fake_smi.gpu(0), fake_smi.gpu(1)], apps=apps)
    assert cli.main(["check", "--quick"]) == 1
    assert f"GPU 1 is in use: pid {os.getpid()}" in capsys.readouterr().err
    assert cli.main(["check", "--gpus", "99"]) == 2
    assert "99 are too many" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_gpus_are_given_one_each_and_their_facts_are_kept(
    check_in_processes: Check, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way of a GPU check but for CUDA: the replicas of this test need none."""
    rows = [fake_smi.gpu(index) | {"temperature.gpu": 40 + index, "serial": f"S{index}"} for index in range(3)]
    fake_smi.plant(place / "bin", monkeypatch, rows)
    monkeypatch.setattr("lockstep.check.conduct.workloads", lambda *_: conduct_workloads())
    told = check_in_processes("--device", "cuda", "--gpus", "0,2,1", code=0)
    assert [card["uuid"] for card in told["gpus"]] == ["GPU-0000", "GPU-0002", "GPU-0001"]
    assert [card["serial"] for card in told["gpus"]] == ["S0", "S2", "S1"]
    assert [card["after"]["temperature_c"] for card in told["gpus"]] == [40, 42, 41]


def conduct_workloads() -> tuple[Any, ...]:
    from lockstep.check.workloads import workloads

    return workloads("quick", "cpu")


@pytest.mark.slow
def test_a_check_that_is_stopped_is_marked_unfinished(place: Path) -> None:
    words = ["check", "--device", "cpu", "--quick", "--workload", "llama", "--gpus", "2", "--name", "run"]
    code = "import sys; from lockstep.check import rounds; rounds.REPLICA = 'tests.check.stub_replica'"
    code += f"; rounds.is_prepared = lambda *_: True; from lockstep.cli import main; sys.exit(main({words!r}))"
    variables = os.environ | {"LOCKSTEP_FAULT": "hang@rank=1,step=3"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True) as running:
        record = place / "runs/run/workers/n0-CPU1/fingerprint.jsonl"
        while '"step"' not in (record.read_text() if record.exists() else "").replace("\\", ""):
            assert running.poll() is None, running.communicate()
        running.terminate()
        _, said = running.communicate(timeout=30)
    assert running.returncode == 143
    assert "stopped by SIGTERM" in said
    assert "Traceback" not in said
    assert "stopped by SIGTERM" in (place / "runs/run" / conduct.UNFINISHED).read_text()
    assert not (place / "runs/run/check.json").exists()
