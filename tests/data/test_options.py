"""Settings of the data as they are typed: counts with suffixes, and yes or no in every usual word."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from lockstep.data.options import count
from tests.conftest import Outcome

Cli = Callable[..., Outcome]
KEY = "data.max_train_samples"


def shown(outcome: Outcome, key: str) -> str:
    """The value that `config show` prints for a setting."""
    assert outcome.code == 0, outcome.text
    found = re.search(rf"^{re.escape(key)} +(\S+)", outcome.out, re.MULTILINE)
    assert found, outcome.out
    return found[1]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("500k", 500_000),
        ("500K", 500_000),
        ("5M", 5_000_000),
        ("1.5M", 1_500_000),
        ("2b", 2_000_000_000),
        ("1000000", 1_000_000),
        ("1_000_000", 1_000_000),
        ("1,000,000", 1_000_000),
        (" 10k ", 10_000),
    ],
)
def test_a_count_is_typed_as_people_write_it(in_dir: None, lockstep: Cli, typed: str, meant: int) -> None:
    assert shown(lockstep("config", "show", "llama", "tiny", "--max-train-samples", typed), KEY) == str(meant)


@pytest.mark.parametrize(
    "typed", ["abc", "1__0", "_10", "10_", "1_k", "٣k", "٣", "0.5", "0.0005k", "-1k", "", "k", "1,5M", "10kk", "1 000"]
)
def test_what_is_no_count_is_refused(in_dir: None, lockstep: Cli, typed: str) -> None:
    outcome = lockstep("config", "show", "llama", "tiny", f"--max-train-samples={typed}")
    assert outcome.code == 2
    assert outcome.out == ""
    assert "expected a whole number from 2 to" in outcome.err
    assert "500k" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_count_in_python_may_be_a_number_already() -> None:
    assert count(7) == 7
    assert count("9" * 4000) == "9" * 4000  # left to be refused, not converted


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--streaming"], "true"),
        (["--no-streaming"], "false"),
        *(([f"--streaming={word}"], "true") for word in ("true", "TRUE", "1", "yes", "on")),
        *((["--streaming", word], "false") for word in ("false", "False", "0", "no", "off")),
    ],
    ids=" ".join,
)
def test_streaming_in_every_usual_word(in_dir: None, lockstep: Cli, typed: list[str], meant: str) -> None:
    assert shown(lockstep("config", "show", "llama", "tiny", *typed), "data.streaming") == meant


def test_neither_yes_nor_no_is_refused(in_dir: None, lockstep: Cli) -> None:
    outcome = lockstep("config", "show", "llama", "tiny", "--streaming", "maybe")
    assert outcome.code == 2
    assert 'data.streaming: got "maybe", expected true or false' in outcome.err
