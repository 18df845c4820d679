"""Alarms of a run: raised when they should be, once, and not otherwise."""

import pytest

from asyppo_async.trainer.alarms import Alarms


def feed(alarms: Alarms, steps: int, **row: float) -> list[str]:
    names = {"length": "response/length_mean_tokens", "tilt": "advantage/correlation_with_position"}
    return [
        word for _ in range(steps) for word in alarms.after({names.get(key, key): row[key] for key in row})
    ]


def test_alarm_when_answers_shrink_and_the_advantage_depends_on_the_position_is_raised_once() -> None:
    alarms = Alarms()
    assert feed(alarms, 10, length=100.0, tilt=0.2) == []
    (words,) = feed(alarms, 30, length=60.0, tilt=-0.2)
    assert "shorter by 3" in words and "pretrain-critics" in words and alarms.raised == {"length"}
    assert feed(alarms, 20, length=100.0, tilt=-0.2) == [] and not alarms.raised
    assert len(feed(alarms, 20, length=50.0, tilt=0.2)) == 1, "again after it had ended"


@pytest.mark.parametrize(("length", "tilt"), [(71.0, 0.5), (50.0, 0.05)])
def test_no_alarm_when_only_one_of_the_two_holds(length: float, tilt: float) -> None:
    alarms = Alarms()
    assert feed(alarms, 10, length=100.0, tilt=tilt) + feed(alarms, 40, length=length, tilt=tilt) == []


@pytest.mark.report("P61")
def test_alarm_when_a_critic_stays_below_zero_names_it_and_a_single_good_step_resets_it() -> None:
    name = "critic_1/explained_variance_used"
    alarms = Alarms()
    assert (
        feed(alarms, 19, **{name: -0.1}) + feed(alarms, 1, **{name: 0.1}) + feed(alarms, 19, **{name: -0.1})
        == []
    )
    assert feed(alarms, 1, **{name: float("nan")}) == [], "returns that do not vary say nothing"
    (words,) = feed(alarms, 5, **{name: -0.25})
    assert words.startswith("critic 1 has explained less than nothing") and "-0.25" in words


@pytest.mark.report("P36")
def test_alarm_when_most_responses_are_cut_off_says_where_the_limit_is() -> None:
    name = "response/stopped_share"
    alarms = Alarms()
    assert feed(alarms, 5, **{name: 0.5}) == [], "half of them may be"
    (words,) = feed(alarms, 9, **{name: 0.03})
    assert words.startswith("5") and "cut off at sampling.max_tokens" in words and alarms.raised == {"cut"}
    assert feed(Alarms(), 1, **{name: 0.02})[0].startswith("98% of the responses"), "from the first step on"
    assert feed(alarms, 10, **{name: 0.9}) == [] and not alarms.raised


@pytest.mark.report("P36")
def test_alarm_when_nearly_all_groups_earn_the_same_points_at_the_samples() -> None:
    row = {"reward/groups_all_equal": 0.95, "batch/groups": 20, "batch/responses": 80}
    alarms = Alarms()
    (words,) = feed(alarms, 12, **row)
    assert (
        words.startswith("in 95% of the groups") and "samples.jsonl" in words and alarms.raised == {"equal"}
    )
    assert feed(Alarms(), 12, **{**row, "reward/groups_all_equal": 0.9}) == []
    assert feed(Alarms(), 12, **{**row, "batch/responses": 20}) == [], "groups of one are always equal"
