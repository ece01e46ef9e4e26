"""A loopback hub for a test, and a process that believes it is the only one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.runtime import hub
from tests.hub.server import LoopbackHub

UNSET = (
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE",
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT",
)  # fmt: skip


@pytest.fixture
def loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub of its own for this test, whose library does not sleep between retries; HF_ENDPOINT leads to it."""
    loopback = LoopbackHub()
    point_at(loopback.url, tmp_path / "hf_home", monkeypatch)
    awake = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", awake)
    monkeypatch.setattr("huggingface_hub.file_download.time", awake)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [])  # of the stderr of the first test
    yield loopback
    from huggingface_hub.utils import close_session

    close_session()
    loopback.stop()


def point_at(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had been started with these variables: the library reads them only once."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(home))
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    changed = {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
    }
    for name, value in changed.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hub, "_answered", set())
