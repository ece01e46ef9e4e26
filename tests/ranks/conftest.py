"""Ranks for every test of this folder: started once, at the first use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import Pool, shared


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """`ranks(3, function, *args)`: the results of `function(group, *args)` on three ranks."""
    pool = shared(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
