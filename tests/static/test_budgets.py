"""The time budgets of the quick tests: what is too slow, on which machine."""

import pytest

from tests.conftest import AREA_BUDGETS_S, TOTAL_BUDGET_S, Budgets


@pytest.mark.parametrize(
    ("areas", "told", "fails"),
    [
        ({"simulation": 100.0}, 0, False),
        ({"simulation": 120.0}, 1, False),
        ({"simulation": 170.0}, 1, True),
        ({"other": 1.0}, 1, True),
        ({area: 1.05 * budget_s for area, budget_s in AREA_BUDGETS_S.items()}, len(AREA_BUDGETS_S), True),
    ],
)
def test_budget_when_an_area_or_all_of_them_take_too_long_then_the_session_fails(
    areas: dict[str, float], told: int, fails: bool
) -> None:
    budgets = Budgets("not long and not gpu")
    budgets.areas.update(areas)
    assert (len(budgets.overruns()), budgets.is_too_slow) == (told, fails)


def test_budgets_together_are_the_total() -> None:
    assert sum(AREA_BUDGETS_S.values()) == TOTAL_BUDGET_S


def test_budget_when_long_tests_run_then_there_is_none() -> None:
    budgets = Budgets("long")
    budgets.areas["simulation"] = 10_000.0
    assert not budgets.is_too_slow
