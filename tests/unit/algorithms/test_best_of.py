"""Choosing among responses by a critic's values, and by vote."""

import numpy as np
import pytest

from asyppo_async.algorithms.best_of import SCORES, choose_best, keep_best, majority, score_of

VALUES = [np.array(row, dtype=np.float32) for row in ([0.5, -0.9, 0.4], [0.1, 0.2, 0.3], [-0.1, 0.9, 0.2])]


@pytest.mark.parametrize(("how", "best"), list(zip(SCORES, (0, 2, 1), strict=True)))
def test_each_score_prefers_another_response(how: str, best: int) -> None:
    assert choose_best(VALUES, how) == best  # type: ignore[arg-type]
    assert choose_best([VALUES[1], VALUES[1]], how) == 0, "of equals the first"  # type: ignore[arg-type]


def test_scores_are_of_hand_numbers_and_an_empty_response_has_none() -> None:
    assert [score_of(VALUES[0], how) for how in SCORES] == pytest.approx([0.4, 0.0, -0.9], abs=1e-6)
    with pytest.raises(ValueError, match="without tokens"):
        score_of(np.zeros(0, dtype=np.float32), "last")


def test_majority_ignores_who_gave_no_answer_and_takes_the_earliest_of_equals() -> None:
    assert majority(["3", "4", None, "4", None, None]) == 1
    assert majority(["3", "4", "4", "3"]) == 0
    assert majority([None, None]) == 0


def test_keep_best_is_in_order_of_score() -> None:
    assert keep_best([0.1, 0.5, 0.5, -1.0], 3) == [1, 2, 0]
