"""Runs on a fleet of two servers of their own."""

from collections.abc import Iterator

import pytest

from tests.integration.run.conftest import Server, models, runner, serving

__all__ = ["models", "pair", "runner"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, models: object) -> Iterator[list[Server]]:
    # Elsewhere a trainer has its own machine. Here it would stand still while a busy server has both cores.
    with serving(models, tmp_path_factory.mktemp("pair"), 2, niceness=10) as servers:  # type: ignore[arg-type]
        yield servers
