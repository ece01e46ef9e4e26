"""check/report.py, document.py and schema.py: one screen, and a check.json that is what its schema says."""

from __future__ import annotations

import dataclasses
import json
import math
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.check import report, schema
from lockstep.check.document import document
from lockstep.check.outcome import CardVerdict, Checked, Difference, Status, labels
from lockstep.check.records import Card
from lockstep.errors import DataError, LockstepError, NotFoundError
from lockstep.health.records import Stamp
from tests.check import made_up

HOSTILE = "\x1b[31mH200\x1b]0;owned\x07 \u202eevil\u200b\x00\x9b31m\r\n\ud800<img src=x>"


def screen(checked: Checked, **shown: Any) -> str:
    return "\n".join(report.lines(document(checked), **shown))


def with_card(checked: Checked, place: int, **changes: str) -> Checked:
    """The same check, where one card says something else of itself."""
    old = checked.judgement.verdicts[place].card
    new = dataclasses.replace(old, **changes)
    verdicts = tuple(dataclasses.replace(v, card=new) if v.card == old else v for v in checked.judgement.verdicts)
    replicas = tuple(dataclasses.replace(r, card=new) if r.card == old else r for r in checked.replicas)
    judgement = dataclasses.replace(checked.judgement, verdicts=verdicts)
    return dataclasses.replace(checked, judgement=judgement, replicas=replicas)


# ------------------------------------------------------------------------------------------------ the screen


@pytest.mark.parametrize("width", [40, 80, 100, 120, 500])
def test_eight_cards_fit_on_one_screen(width: int) -> None:
    lines = report.lines(document(made_up.seven_pass_one_fails()), width=width)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= max(80, min(120, width))


def test_the_table_says_who_when_where_and_what_next() -> None:
    text = screen(made_up.seven_pass_one_fails(), width=120, folder=Path("runs/check-1"))
    assert text.startswith("FAIL: 7 of 8 pass; GPU 3 fails")
    assert text.count(" PASS ") == 7
    assert "GPU 3  21636369  FAIL     212.2 ms  215.5 ms  71 °C  115/152  production: other bits than 7 of 8" in text
    for words in (
        "GPU 3 (GPU-21636369-8b52-9b4a-97b7-50923ceb3ffd, serial 1653223000003)",
        "from step 23 on, first in gradients:layers.1.feed_forward.w2.weight",
        "1 element differs, at [1187, 2003]: 0x3c9e here, 0x3c1e on the others",
        "persistent (a second run made the same error)",
        "try: train without it (--gpus 0,1,2,4,5,6,7) and have it looked at",
        "note: 3 corrected ECC errors during the check",
        "not covered: cuDNN attention backward",
        "limits: Equal bits prove agreement, not correctness",
        "runs/check-1/report.html",
    ):
        assert words in text


def test_a_tie_is_explained_once_and_blames_nobody() -> None:
    text = screen(made_up.two_undecided(), width=120)
    assert text.startswith("UNDECIDED: GPU 0 and GPU 1 are undecided")
    assert text.count("no majority says which are right") == 1
    assert "try: three cards can outvote one" in text
    assert "FAIL" not in text


def test_a_pass_is_short() -> None:
    card = made_up.card(0)
    text = screen(made_up.checked([CardVerdict(card, Status.PASS, paces=made_up.paces())], [made_up.replica(card)]))
    assert text.startswith("PASS: the GPU agrees with itself bit for bit")
    assert "try:" not in text
    assert len(text.splitlines()) <= 9


def test_many_cards_show_those_that_do_not_pass() -> None:
    cards = [made_up.card(index % 8, node=index // 8, host=f"host{index // 8}") for index in range(64)]
    verdicts = [CardVerdict(each, Status.PASS) for each in cards]
    verdicts[42] = CardVerdict(cards[42], Status.FAIL, ("production: ended after step 7: killed by signal 9",))
    text = screen(made_up.checked(verdicts, [made_up.replica(each, steps=3) for each in cards]), width=120)
    assert "FAIL: 63 of 64 pass; host5 GPU 2 fails" in text
    assert "host5 GPU 2" in text
    assert "... and 63 cards more: see report.html" in text
    assert len(text.splitlines()) <= 24


def test_eight_failures_name_each_and_explain_some() -> None:
    cards = [made_up.card(index) for index in range(8)]
    verdicts = [CardVerdict(each, Status.FAIL, (f"production: ended after step {each.index}",)) for each in cards]
    text = screen(made_up.checked(verdicts, [made_up.replica(each, steps=3) for each in cards]))
    assert all(f"GPU {index}  " in text for index in range(8))
    assert "... and 5 more: see report.html" in text


def test_columns_that_nobody_fills_are_left_out() -> None:
    workers = [Card(index, index, model="AMD EPYC") for index in range(2)]
    replicas = [dataclasses.replace(made_up.replica(each), samples=(), before={}, after={}) for each in workers]
    text = screen(made_up.checked([CardVerdict(each, Status.PASS) for each in workers], replicas, device="cpu"))
    assert "both CPU workers agree bit for bit" in text
    assert "worker 0" in text
    assert "uuid" not in text
    assert "peak  " not in text
    assert "AMD EPYC" in text  # once, in the head


def test_what_is_not_covered_is_never_cut_off() -> None:
    """The limits of a check are no decoration: on a narrow terminal they take another line."""
    reach = tuple(f"{word} kernels" for word in ("first", "second", "third", "fourth", "fifth", "sixth", "seventh"))
    checked = dataclasses.replace(made_up.seven_pass_one_fails(), not_covered=reach)
    lines = report.lines(document(checked), width=80)
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert "fifth kernels; sixth kernels; seventh kernels" in text


@pytest.mark.parametrize(
    ("golden", "words"),
    [
        ({"file": "g{0}.json", "state": "used"}, "golden: compared with g{0}.json"),
        ({"file": "g.json", "state": "written"}, "golden: written to g.json"),
        ({"file": f"{'long' * 9}.json", "state": "used"}, f"\ngolden: compared with {'long' * 9}.json"),
        ({"file": "g.json", "state": "no entry"}, "golden: no entry in g.json"),
        ({}, ""),
    ],
)
def test_the_screen_says_what_came_of_the_golden_file(golden: dict[str, str], words: str) -> None:
    text = screen(dataclasses.replace(made_up.seven_pass_one_fails(), golden=golden), width=80)
    assert words in text
    assert ("golden" in text) == bool(golden)
    assert max(map(len, text.splitlines())) <= 80


def test_a_card_that_differs_in_everything_still_fits_on_the_screen() -> None:
    checked = made_up.seven_pass_one_fails()
    wrong = checked.judgement.verdicts[3]
    many = dataclasses.replace(wrong, reasons=tuple(f"workload {place}: {wrong.reasons[0]}" for place in range(12)))
    verdicts = (*checked.judgement.verdicts[:3], many, *checked.judgement.verdicts[4:])
    judgement = dataclasses.replace(checked.judgement, verdicts=verdicts)
    text = screen(dataclasses.replace(checked, judgement=judgement), width=120)
    assert "workload 2: " in text
    assert "workload 3: " not in text
    assert "... and 9 reasons more in the report" in text
    assert "1 element differs" in text


def test_different_models_have_a_column() -> None:
    assert "A100" in screen(with_card(made_up.seven_pass_one_fails(), 1, model="A100"))


def test_colours_are_for_terminals() -> None:
    checked = made_up.seven_pass_one_fails()
    assert "\x1b" not in screen(checked)
    coloured = screen(checked, colour=True)
    assert "\x1b[31mFAIL\x1b[0m" in coloured
    assert "\x1b[32mPASS\x1b[0m" in coloured


@pytest.mark.parametrize("field", ["model", "uuid", "serial", "host", "driver"])
def test_a_card_cannot_steer_the_terminal(field: str) -> None:
    checked = with_card(made_up.seven_pass_one_fails(), 3, **{field: HOSTILE})
    text = screen(checked) + document(checked, name=HOSTILE).model_dump_json()
    assert not {unicodedata.category(letter) for letter in text.replace("\n", "")} & {"Cc", "Cf", "Cs"}
    assert "owned" not in text
    assert document(checked, name=HOSTILE).name == "H200 evil <img src=x>"


@pytest.mark.parametrize(
    ("difference", "failed", "words"),
    [
        (dataclasses.replace(made_up.FLIP, nature="transient"), False, "lockstep check --deep"),
        (made_up.FLIP, False, "--gpus 0,2"),
        (None, True, "nvidia-smi -q -i 1"),
        (None, False, "nvidia-smi -q -d CLOCK"),
    ],
)
def test_what_to_do_next(difference: Difference | None, failed: bool, words: str) -> None:
    cards = [made_up.card(index) for index in range(3)]
    verdicts = [CardVerdict(each, Status.PASS) for each in cards]
    slow = made_up.paces(1.3, slow=True)
    verdicts[1] = CardVerdict(cards[1], Status.FAIL, ("why",), difference=difference, paces=slow)
    replicas = [made_up.replica(each, steps=3) for each in cards]
    replicas[1] = dataclasses.replace(replicas[1], error="killed by signal 9" if failed else "")
    told = document(made_up.checked(verdicts, replicas))
    assert words in told.gpus[1].advice
    assert [told.gpus[place].advice for place in (0, 2)] == ["", ""]


def test_where_all_differ_from_the_golden_file_it_is_not_said_to_train_without_them() -> None:
    cards = [made_up.card(index) for index in range(2)]
    differ = [CardVerdict(each, Status.FAIL, ("other bits",), difference=made_up.FLIP) for each in cards]
    replicas = [made_up.replica(each, steps=3) for each in cards]
    advice = document(made_up.checked(differ, replicas)).gpus[0].advice
    assert "were the bits in golden.json made on a machine you trust?" in advice
    assert "lockstep check --golden ANOTHER" in advice
    one = [differ[0], CardVerdict(cards[1], Status.PASS)]
    assert "train without it" in document(made_up.checked(one, replicas)).gpus[0].advice


# ------------------------------------------------------------------------------------------------ check.json


@pytest.mark.parametrize("made", [made_up.seven_pass_one_fails, made_up.two_undecided])
def test_check_json_comes_back_as_it_was(made: Callable[[], Checked], tmp_path: Path) -> None:
    told = report.write(tmp_path, made())
    assert schema.read(tmp_path / schema.FILE) == told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.json", "report.html"]


def test_check_json_holds_what_the_contract_asks_of_each_gpu(tmp_path: Path) -> None:
    report.write(tmp_path, made_up.seven_pass_one_fails())
    told = json.loads((tmp_path / schema.FILE).read_text())
    assert (told["status"], told["exit_code"], told["config_hash"]) == ("FAIL", 3, "9f86d081884c7d65")
    assert [gpu["status"] for gpu in told["gpus"]] == ["PASS"] * 3 + ["FAIL"] + ["PASS"] * 4
    for gpu in told["gpus"]:
        assert gpu["exit_code"] == 0
        assert gpu["versions"] == {"torch": "2.11.0"}
        work = gpu["works"][0]
        assert len(work["losses"]) == len(work["seconds"]) == len(work["bits"]) == len(work["agreement"]) == 60
        assert work["losses"][0] == 7.6 + 0.1
        assert work["pace"]["median_seconds"] > 0
    hashes = [gpu["weight_hash"] for gpu in told["gpus"]]
    assert len(set(hashes)) == 2
    assert hashes.count(hashes[3]) == 1
    assert told["gpus"][3]["difference"] | {"positions": 0, "tensor": ""} == {
        "workload": "production", "step": 23, "tensor": "", "elements": 1, "positions": 0, "right": ["3c1e"],
        "wrong": ["3c9e"], "nature": "persistent",
    }  # fmt: skip
    assert told["coverage"]["limits"]


def test_the_schema_names_every_field_and_no_other() -> None:
    published = schema.schema()
    told = document(made_up.seven_pass_one_fails()).model_dump(mode="json")

    def fits(value: object, rule: dict[str, Any]) -> None:
        if "$ref" in rule:
            rule = published["$defs"][str(rule["$ref"]).rpartition("/")[2]]
        if isinstance(value, dict) and "properties" in rule:
            assert rule["additionalProperties"] is False
            assert set(value) == set(rule["properties"])
            for name, each in value.items():
                fits(each, rule["properties"][name])
        elif isinstance(value, list) and "items" in rule:
            for each in value:
                fits(each, rule["items"])

    fits(told, published)
    assert "gpus" in published["properties"]
    assert published["properties"]["config_hash"]["description"]


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    checked = made_up.two_undecided()
    replica = checked.replicas[0]
    stamps = (Stamp(0, "nan", "inf", "", math.nan), Stamp(1, "", "", "", math.inf), Stamp(2, "0x1p+9999", "-inf", ""))
    work = dataclasses.replace(replica.works[0], stamps=stamps, facts={"dq": math.nan, "limit": [math.inf, 1]})
    samples = ({"time": math.nan, "gpu_temperature_c": math.inf}, {})
    replica = dataclasses.replace(replica, works=(work,), samples=samples, before={"power_watts": math.nan})
    told = report.write(
        tmp_path, dataclasses.replace(checked, replicas=(replica, checked.replicas[1]), seconds=math.nan)
    )
    assert schema.read(tmp_path / schema.FILE) == told
    assert told.gpus[0].works[0].losses == (None, None, None)
    assert told.gpus[0].works[0].facts == {"dq": "nan", "limit": ["inf", 1]}


def test_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretvalue")
    checked = made_up.seven_pass_one_fails()
    hidden = "hf_very\u200bsecretvalue and hf_verysec\x1b[0mretvalue"
    replicas = (dataclasses.replace(checked.replicas[0], error=f"401 for {hidden}"), *checked.replicas[1:])
    report.write(tmp_path, dataclasses.replace(checked, replicas=replicas, golden={"file": hidden}))
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "401 for *** and ***" in written
    assert "secretvalue" not in written


def test_long_texts_are_cut() -> None:
    checked = made_up.two_undecided()
    replicas = (dataclasses.replace(checked.replicas[0], error="x" * 100_000), checked.replicas[1])
    assert len(document(dataclasses.replace(checked, replicas=replicas)).gpus[0].error) == 2000


def test_a_card_without_a_record_is_still_there() -> None:
    checked = made_up.two_undecided()
    told = document(dataclasses.replace(checked, replicas=checked.replicas[:1]))
    assert [len(gpu.works) for gpu in told.gpus] == [4, 0]
    assert told.gpus[1].exit_code is None


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[1]", '{"format": 1, "status": "GOOD"}'])
def test_what_is_no_check_json_is_one_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"is no check\.json"):
        schema.read(path)


def test_no_check_json_at_all(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        schema.read(tmp_path / "check.json")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LockstepError, match="writing the report failed"):
        report.write(tmp_path / "file", made_up.two_undecided())


def test_no_two_cards_have_one_name() -> None:
    shared = [Card(0, slot, uuid="GPU-a") for slot in range(2)]
    assert labels(shared) == ("GPU 0 (slot 0)", "GPU 0 (slot 1)")
    nodes = [Card(0, 0, node, host, uuid=f"GPU-{node}") for node, host in enumerate(("a", "b", ""))]
    assert labels(nodes) == ("a GPU 0", "b GPU 0", "node 2 GPU 0")
    twins = [Card(0, 0, node, "same", uuid=f"GPU-{node}") for node in range(2)]
    assert len(set(labels(twins))) == 2
