"""Which steps are traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import load
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "traced"),
    [
        ({}, (2, 3)),
        ({"profile_steps": "5"}, (2, 5)),
        ({"profile_steps": "100-104"}, (100, 5)),
        ({"profile_steps": 5}, (2, 5)),
    ],
)
def test_which_steps_are_traced(words: dict[str, Any], traced: tuple[int, int]) -> None:
    assert load("llama", preset="tiny", overrides={"report": words}).config.report.traced == traced


def test_who_names_steps_wants_their_trace(tmp_path: Path) -> None:
    def traces(**given: Any) -> bool:
        return load("llama", preset="tiny", **given).config.report.profile

    (off := tmp_path / "off.json").write_text('{"report": {"profile": false}}')
    (both := tmp_path / "both.json").write_text('{"report": {"profile": false, "profile_steps": "4"}}')
    assert not traces()
    assert traces(flags=[("profile-steps", "2-3")])
    assert traces(flags=[("profile-steps", "2-3")], file=off), "the later word"
    assert not traces(flags=[("profile-steps", "2-3"), ("profile", "false")])
    assert not traces(file=both), "as whole configurations are written"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"profile_steps": "5-4"}, "expected text like 3 or 100-104"),
        ({"profile_steps": "0"}, "expected text like 3 or 100-104"),
        ({"profile_steps": "0-1000"}, "expected text like 3 or 100-104"),
        ({"profile_steps": True}, "got true"),
        ({"profile_from": 7}, "report.profile_from: 7 was removed"),
    ],
)
def test_steps_that_cannot_be_traced(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("llama", preset="tiny", overrides={"report": words})
    assert said in str(caught.value)
