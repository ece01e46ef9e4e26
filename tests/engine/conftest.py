"""Runs that a bad number ends, in every family: what they need, what was found, and whether it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import NonFiniteError
from lockstep.health.finding import Finding, from_json
from tests.engine.bad_steps import OF_FAMILY
from tests.gates.training import run


@pytest.fixture(scope="session")
def agents_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the histories of a source learner are made, once."""
    return tmp_path_factory.mktemp("histories")


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Train with a fault until it stops the run; what was found."""

    def until(fault: str, family: str = "llama", **settings: Any) -> Finding:
        own = {} if family != "ad" else {"data.data_path": str(request.getfixturevalue("agents_data"))}
        monkeypatch.setenv("LOCKSTEP_FAULT", fault)
        with pytest.raises(NonFiniteError) as caught:
            run(tmp_path / "run", {**OF_FAMILY[family], **own, **settings}, family=family)
        monkeypatch.delenv("LOCKSTEP_FAULT")
        assert int(caught.value.exit_code) == 71
        return from_json(caught.value.finding)

    return until
