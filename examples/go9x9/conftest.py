"""What the tests share; this file's place also makes `fever_go` importable without installing it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fever_go.env import GNUGO
from fever_go.gtp import Engine, EngineError


@pytest.fixture
def gnugo() -> Iterator[Engine]:
    """GNU Go at level 0. Without it tests are skipped, or fail where FEVER_REQUIRE is set."""
    try:
        engine = Engine(GNUGO, timeout=20)
    except EngineError as error:
        if os.environ.get("FEVER_REQUIRE"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield engine
    engine.close()
