"""How the tests of the algorithms compare numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def check() -> Callable[..., None]:
    """Compare a tensor or number with expected numbers; nested lists of the expectation are laid end to end."""

    def compare(actual: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
        if isinstance(expected, list) and expected and isinstance(expected[0], list):
            expected = [value for row in expected for value in row]
        wanted = torch.as_tensor(expected, dtype=torch.float64)
        got = (
            actual.detach() if isinstance(actual, torch.Tensor) else torch.tensor(actual, dtype=torch.float64)
        )
        torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=atol, equal_nan=True)

    return compare
