"""The decision core, transition by transition."""

from dataclasses import replace

import pytest

from asyppo_async.errors import ConfigError, Stalled, TaskError
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.decisions import CoreState, DecisionSettings
from asyppo_async.trainer.coordinator.draws import Draw, TokenUse
from asyppo_async.trainer.coordinator.order import Chosen, Waiting
from asyppo_async.trainer.coordinator.sampler import Candidate, EpochSampler

SETTINGS = DecisionSettings(
    batch_size=2,
    group_size=4,
    num_critics=2,
    max_staleness=1,
    on_stale="wait",
    lead="saturated",
    max_attempts=2,
    max_concurrent_groups=100,
    max_replacements_per_step=100,
    num_steps=None,
)


def sampler_of(num_prompts: int = 10, num_epochs: int | None = None) -> EpochSampler:
    return EpochSampler(
        prompt_ids=[f"p{index}" for index in range(num_prompts)], seed=0, num_epochs=num_epochs
    )


def core_of(*, sampler: EpochSampler | None = None, **changes: object) -> DecisionCore:
    core = DecisionCore(settings=replace(SETTINGS, **changes), sampler=sampler or sampler_of(), debug=True)
    core.served(0)
    return core


def finish(
    core: DecisionCore, draw: Draw, *, num_members: int = 4, num_tokens: int = 10, now_s: float = 0.0
) -> str:
    version = draw.admission_version
    return core.finish(
        draw,
        num_members=num_members,
        num_tokens=num_tokens,
        oldest_version=version,
        newest_version=version,
        now_s=now_s,
    )


def chosen_ids(batch: Chosen | Waiting | None) -> list[int]:
    assert isinstance(batch, Chosen)
    return [chosen.draw.draw_id for chosen in batch.draws]


def train(core: DecisionCore, now_s: float = 0.0) -> None:
    batch = core.choose_batch(now_s)
    assert isinstance(batch, Chosen)
    core.begin_step(now_s)
    core.end_step(now_s, TokenUse(trained=batch.num_tokens, stale=0, rejected=0))


def test_admission_when_nothing_is_served_gives_nothing() -> None:
    core = DecisionCore(settings=SETTINGS, sampler=sampler_of(), debug=True)
    assert core.admit(0.0) == []
    assert core.served(0)
    assert [draw.admission_version for draw in core.admit(0.0)] == [0] * 4
    assert core.admit(0.0) == []


def test_admission_when_a_step_has_ended_waits_for_its_publication() -> None:
    core = core_of()
    for draw in core.admit(0.0):
        finish(core, draw)
    train(core)
    assert core.admit(0.0) == []
    core.served(1)
    assert [draw.admission_version for draw in core.admit(0.0)] == [1, 1]


def test_admission_when_a_group_is_filtered_between_step_and_publication_stays_on_the_old_version() -> None:
    core = core_of()
    draws = core.admit(0.0)
    for draw in draws[:2]:
        finish(core, draw)
    train(core)
    assert core.filter(draws[2], reason="all_right", now_s=0.0) == "filtered"
    assert [draw.admission_version for draw in core.admit(0.0)] == [0]


def test_served_when_sent_again_changes_nothing_and_when_ahead_is_refused() -> None:
    core = core_of()
    assert not core.served(0)
    with pytest.raises(ValueError, match="version 1 cannot be served, the trainer is at 0"):
        core.served(1)


def test_admission_when_the_run_ends_starts_no_group_that_cannot_be_trained() -> None:
    core = core_of(num_steps=2, max_staleness=4)
    draws = core.admit(0.0)
    assert len(draws) == 4
    for draw in draws:
        finish(core, draw)
    train(core)
    core.served(1)
    assert core.admit(0.0) == []
    train(core)
    assert core.finished
    with pytest.raises(ValueError, match="the run has ended at version 2"):
        core.choose_batch(0.0)


def test_admission_when_an_unfinished_group_is_past_its_due_step_does_not_count_on_it() -> None:
    """`drop`: the straggler of version 0 cannot be in the last batch (step 2), so another group is started for it."""
    core = core_of(on_stale="drop", num_steps=3)
    straggler = core.admit(0.0)[0]
    for step in range(2):
        for record in core.live():
            if record.draw_id != straggler.draw_id:
                finish(core, record.draw)
        train(core)
        core.served(step + 1)
        core.admit(0.0)
    last = [record.draw_id for record in core.live() if record.draw_id != straggler.draw_id]
    assert len(last) == 2
    for record in core.live():
        if record.draw_id in last:
            finish(core, record.draw)
    train(core)
    assert core.finished
    assert [(fate.draw, fate.reason) for fate in core.close(0.0).fates] == [(straggler, "run_ended")]


def test_batch_when_prompts_are_used_up_is_short_and_the_run_ends() -> None:
    core = core_of(sampler=sampler_of(num_prompts=3, num_epochs=1))
    draws = core.admit(0.0)
    assert len(draws) == 3
    for draw in draws:
        finish(core, draw)
    train(core)
    assert chosen_ids(core.choose_batch(0.0)) == [2]
    train(core)
    assert core.finished
    assert core.counts().trained == 3


def test_batch_when_a_group_is_due_waits_for_it_by_name() -> None:
    core = core_of()
    draws = core.admit(0.0)
    for draw in draws[1:]:
        finish(core, draw)
    assert chosen_ids(core.choose_batch(0.0)) == [1, 2]
    train(core)
    core.served(1)
    for draw in core.admit(0.0):
        finish(core, draw)
    waiting = core.choose_batch(5.0)
    assert isinstance(waiting, Waiting)
    assert waiting.due == (draws[0],)
    finish(core, draws[0])
    batch = core.choose_batch(7.0)
    assert chosen_ids(batch) == [3, 0]
    assert isinstance(batch, Chosen)
    assert batch.waited_s == 2.0
    assert core.choose_batch(9.0) is batch


def test_message_when_late_or_doubled_is_counted_and_changes_nothing() -> None:
    core = core_of()
    draw = core.admit(0.0)[0]
    assert finish(core, draw) == "queued"
    assert finish(core, draw) == "late"
    assert core.fail(draw, reason="lost", now_s=0.0) == "returned"
    (again,) = core.admit(0.0)
    assert (again.draw_id, again.attempt) == (draw.draw_id, 1)
    assert finish(core, draw) == core.fail(draw, reason="lost", now_s=0.0) == "late"
    core.record_tokens(draw, 1000)
    assert core.token_counts().generated == 10
    assert core.counts().late_messages == 4


def test_draw_when_it_fails_on_every_attempt_is_dropped_with_its_reason() -> None:
    core = core_of()
    draw = core.admit(0.0)[0]
    core.record_tokens(draw, 7)
    assert core.fail(draw, reason="lost", now_s=0.0) == "returned"
    (again,) = core.admit(0.0)
    core.record_tokens(again, 5)
    core.record_tokens(again, 3)
    assert core.fail(again, reason="timeout", now_s=0.0) == "dropped"
    assert core.counts().dropped_by_reason == {"timeout": 1}
    assert core.token_counts().dropped_by_reason == {"lost": 7, "timeout": 5}
    assert len(core.admit(0.0)) == 1


@pytest.mark.parametrize(
    ("num_members", "oldest", "newest", "reason"),
    [(1, 0, 0, "too_few_members"), (4, 0, 1, "rolled_back"), (4, -1, 0, "older_than_admission")],
)
def test_group_when_it_cannot_be_trained_fails(
    num_members: int, oldest: int, newest: int, reason: str
) -> None:
    core = core_of()
    draw = core.admit(0.0)[0]
    answer = core.finish(
        draw, num_members=num_members, num_tokens=9, oldest_version=oldest, newest_version=newest, now_s=0.0
    )
    assert answer == "returned"
    assert core.counts().returned_by_reason == {reason: 1}
    assert core.token_counts().dropped_by_reason == {reason: 9}


def test_group_when_reduced_counts_the_tokens_of_lost_members_as_waste() -> None:
    core = core_of()
    draw = core.admit(0.0)[0]
    core.record_tokens(draw, 30)
    assert finish(core, draw, num_members=2, num_tokens=12) == "queued"
    assert core.counts().reduced == 1
    tokens = core.token_counts()
    assert (tokens.generated, tokens.queued, tokens.dropped_by_reason) == (30, 12, {"lost_member": 18})


def test_step_when_used_out_of_order_is_refused() -> None:
    core = core_of()
    use = TokenUse(trained=20, stale=0, rejected=0)
    with pytest.raises(ValueError, match="no batch"):
        core.begin_step(0.0)
    for draw in core.admit(0.0):
        finish(core, draw)
    core.choose_batch(0.0)
    with pytest.raises(ValueError, match="has not begun"):
        core.end_step(0.0, use)
    core.begin_step(0.0)
    with pytest.raises(ValueError, match="begun already"):
        core.begin_step(0.0)
    with pytest.raises(ValueError, match="has 20 tokens, got the use of 19"):
        core.end_step(0.0, TokenUse(trained=19, stale=0, rejected=0))


def test_step_when_nothing_is_trainable_adds_a_version_all_the_same() -> None:
    core = core_of()
    for draw in core.admit(0.0):
        finish(core, draw)
    core.choose_batch(1.0)
    core.begin_step(2.0)
    report = core.end_step(5.0, TokenUse(trained=0, stale=0, rejected=20))
    assert core.version == 1
    assert (report.step, report.step_s, report.use.rejected) == (0, 3.0, 20)
    assert [(fate.outcome, fate.draw.draw_id) for fate in report.news.fates] == [
        ("trained", 0),
        ("trained", 1),
    ]


def test_batch_ahead_when_chosen_is_kept_for_its_step_and_uses_its_order_rule() -> None:
    core = core_of(max_staleness=2)
    with pytest.raises(ValueError, match="needs max_staleness >= 1"):
        core.choose_ahead(0.0)
    draws = core.admit(0.0)
    for draw in draws[1:]:
        finish(core, draw)
    assert chosen_ids(core.choose_batch(0.0)) == [1, 2]
    ahead = core.choose_ahead(0.0)
    assert isinstance(ahead, Chosen)
    assert (ahead.step, ahead.token_bound, chosen_ids(ahead)) == (1, -1, [3, 4])
    core.begin_step(0.0)
    core.end_step(0.0, TokenUse(trained=20, stale=0, rejected=0))
    assert core.choose_batch(0.0) is ahead
    waiting = core.choose_ahead(0.0)
    assert isinstance(waiting, Waiting)
    assert (waiting.step, waiting.num_ready) == (2, 1)


def test_batch_ahead_when_a_short_lead_was_learned_without_it_finds_room() -> None:
    """The step ends only when its critics have had the batch ahead: a lead of one batch would stop the run."""
    settings = replace(SETTINGS, lead="auto", max_staleness=2)
    state = replace(core_of(lead="auto", max_staleness=2).state(), lead_limit=SETTINGS.batch_size)
    core = DecisionCore.from_state(
        state, settings=settings, sampler=sampler_of(), restored_draw_ids=(), now_s=0.0, debug=True
    )
    core.served(0)
    for draw in core.admit(0.0):
        finish(core, draw)
    assert chosen_ids(core.choose_batch(0.0)) == [0, 1]
    assert isinstance(core.choose_ahead(0.0), Waiting)
    for draw in core.admit(0.0):
        finish(core, draw)
    assert chosen_ids(core.choose_ahead(0.0)) == [2, 3]


def test_batch_ahead_when_the_run_ends_with_this_step_is_none() -> None:
    core = core_of(num_steps=1)
    for draw in core.admit(0.0):
        finish(core, draw)
    core.choose_batch(0.0)
    assert core.choose_ahead(0.0) is None


def test_batch_when_nothing_survives_ends_with_the_causes() -> None:
    core = core_of(max_replacements_per_step=3)
    for _ in range(2):
        for draw in core.admit(0.0):
            core.filter(draw, reason="all_wrong", now_s=0.0)
    with pytest.raises(Stalled, match="4 groups in a row were filtered or dropped \\(all_wrong 4\\)"):
        core.choose_batch(0.0)


def test_checkpoint_when_restored_continues_with_the_same_fates_and_new_attempts() -> None:
    core = core_of()
    draws = core.admit(0.0)
    for draw in draws[:3]:
        finish(core, draw)
    core.record_tokens(draws[3], 4)
    train(core)
    core.served(1)
    more = core.admit(0.0)
    finish(core, more[0])
    state = CoreState.from_json(core.state().to_json())
    assert state == core.state()
    kept = {draws[2].draw_id}
    resumed = DecisionCore.from_state(
        state, settings=SETTINGS, sampler=sampler_of(), restored_draw_ids=kept, now_s=0.0, debug=True
    )
    assert resumed.version == 1
    assert resumed.served_version == -1
    assert resumed.admit(0.0) == []
    assert resumed.counts().returned_by_reason == {"interrupted": 2, "not_restored": 1}
    assert resumed.token_counts().dropped_by_reason == {"interrupted": 4, "not_restored": 10}
    resumed.served(1)
    again = resumed.admit(0.0)
    assert sorted((draw.draw_id, draw.attempt) for draw in again) == [(3, 1), (4, 1), (5, 1)]
    assert {draw.admission_version for draw in again} == {1}
    for draw in again:
        finish(resumed, draw)
    assert chosen_ids(resumed.choose_batch(0.0))[0] == draws[2].draw_id


def test_checkpoint_when_tokens_of_draws_in_flight_are_restored_lets_them_go_on() -> None:
    """As the same attempt, under the version at which they began, with the tokens that are counted already."""
    core = core_of()
    draws = core.admit(0.0)
    for draw in draws[:2]:
        finish(core, draw)
    for draw in draws[2:]:
        core.record_tokens(draw, 4)
    train(core)
    resumed = DecisionCore.from_state(
        core.state(),
        settings=SETTINGS,
        sampler=sampler_of(),
        restored_draw_ids=[draws[2].draw_id],
        now_s=0.0,
        debug=True,
    )
    assert resumed.counts().returned_by_reason == {"interrupted": 1}
    assert resumed.token_counts().dropped_by_reason == {"interrupted": 4}
    resumed.served(1)
    again = resumed.admit(0.0)
    assert (again[0].draw_id, again[0].attempt, again[0].admission_version) == (draws[3].draw_id, 1, 1)
    assert finish(resumed, draws[2]) == "queued"
    for draw in again:
        finish(resumed, draw)
    assert chosen_ids(resumed.choose_batch(0.0))[0] == draws[2].draw_id


@pytest.mark.parametrize(
    ("changes", "num_kept"),
    [({}, 2), ({"max_concurrent_groups": 1}, 1), ({"max_staleness": 2}, 0), ({"batch_size": 1}, 0)],
)
def test_checkpoint_when_settings_change_lets_as_many_go_on_as_may(
    changes: dict[str, int], num_kept: int
) -> None:
    core = core_of()
    draws = core.admit(0.0)
    for draw in draws[:2]:
        finish(core, draw)
    train(core)
    resumed = DecisionCore.from_state(
        core.state(),
        settings=replace(SETTINGS, **changes),
        sampler=sampler_of(),
        restored_draw_ids=[draw.draw_id for draw in draws],
        now_s=0.0,
        debug=True,
    )
    assert resumed.counts().in_flight == num_kept


def test_checkpoint_when_the_step_of_a_draw_in_flight_is_past_draws_it_again() -> None:
    """Under `mask` steps do not wait for it, and all that it has is too old."""
    core = core_of(on_stale="mask", max_staleness=0)
    draws = core.admit(0.0)
    finish(core, draws[0])
    core.record_tokens(draws[1], 4)
    state = replace(core.state(), version=1)
    settings = replace(SETTINGS, on_stale="mask", max_staleness=0)
    for version, outcome in ((0, {}), (1, {"interrupted": 1})):
        resumed = DecisionCore.from_state(
            replace(state, version=version),
            settings=settings,
            sampler=sampler_of(),
            restored_draw_ids=[draw.draw_id for draw in draws],
            now_s=0.0,
            debug=True,
        )
        assert resumed.counts().returned_by_reason == outcome


def test_checkpoint_when_taken_inside_a_step_has_its_batch_in_the_queue() -> None:
    core = core_of()
    draws = core.admit(0.0)
    for draw in draws:
        finish(core, draw)
    core.choose_batch(0.0)
    core.begin_step(0.0)
    everything = [draw.draw_id for draw in draws]
    resumed = DecisionCore.from_state(
        core.state(),
        settings=SETTINGS,
        sampler=sampler_of(),
        restored_draw_ids=everything,
        now_s=0.0,
        debug=True,
    )
    assert chosen_ids(resumed.choose_batch(0.0)) == [0, 1]


def test_checkpoint_when_the_bound_has_changed_gives_the_queue_back() -> None:
    core = core_of()
    for draw in core.admit(0.0):
        finish(core, draw)
    resumed = DecisionCore.from_state(
        core.state(),
        settings=replace(SETTINGS, max_staleness=0),
        sampler=sampler_of(),
        restored_draw_ids=range(4),
        now_s=0.0,
        debug=True,
    )
    assert resumed.counts().returned == 4


def test_close_when_draws_are_live_lists_them_as_run_ended() -> None:
    core = core_of()
    draws = core.admit(0.0)
    finish(core, draws[0])
    finish(core, draws[1])
    core.choose_batch(0.0)
    fates = core.close(9.0).fates
    assert [(fate.outcome, fate.reason) for fate in fates] == [("dropped", "run_ended")] * 4
    assert core.counts().dropped == core.counts().issued == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("max_staleness", -1),
        ("max_concurrent_groups", 0),
        ("num_steps", 0),
        ("max_attempts", 0),
    ],
)
def test_settings_when_out_of_range_name_the_key_and_the_value(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least .* got {value}"):
        replace(SETTINGS, **{name: value})


class SkippingSampler(EpochSampler):
    """Accepts every `one_in`-th candidate."""

    def __init__(self, *, one_in: int) -> None:
        super().__init__(prompt_ids=["p0", "p1"], seed=0, num_epochs=None)
        self._one_in = one_in

    def next_candidate(self) -> Candidate:
        candidate = super().next_candidate()
        return replace(candidate, accepted=(candidate.number + 1) % self._one_in == 0)


def test_candidates_when_some_are_skipped_are_listed_and_continue_after_a_resume() -> None:
    core = core_of(sampler=SkippingSampler(one_in=3))
    draws = core.admit(5.0)
    for draw in draws:
        finish(core, draw)
    batch = core.choose_batch(5.0)
    assert isinstance(batch, Chosen)
    core.begin_step(5.0)
    news = core.end_step(5.0, TokenUse(trained=batch.num_tokens, stale=0, rejected=0)).news
    assert [entry.candidate.number for entry in news.considered] == list(range(12))
    assert [entry.draw_id for entry in news.considered] == [
        None,
        None,
        0,
        None,
        None,
        1,
        None,
        None,
        2,
        None,
        None,
        3,
    ]
    assert {(entry.version, entry.at_s) for entry in news.considered} == {(0, 5.0)}
    counts = core.counts()
    assert (counts.considered, counts.skipped, counts.issued) == (12, 8, 4)

    sampler = SkippingSampler(one_in=3)
    resumed = DecisionCore.from_state(
        CoreState.from_json(core.state().to_json()),
        settings=SETTINGS,
        sampler=sampler,
        restored_draw_ids=[draw.draw_id for draw in draws],
        now_s=6.0,
        debug=True,
    )
    assert sampler.num_considered == 12
    resumed.served(1)
    resumed.admit(7.0)
    assert [entry.candidate.number for entry in resumed.close(8.0).considered] == list(range(12, 18))


def test_candidates_when_the_sampler_and_the_ledger_disagree_are_not_listed() -> None:
    sampler = SkippingSampler(one_in=3)
    core = core_of(sampler=sampler)
    sampler.next_candidate()
    with pytest.raises(AssertionError, match="every candidate"):
        core.admit(0.0)


def test_admission_when_the_sampler_accepts_nothing_ends_with_advice() -> None:
    core = core_of(sampler=SkippingSampler(one_in=10**9))
    with pytest.raises(TaskError, match="skipped 1021 candidates in a row; lower its selectivity"):
        core.admit(0.0)
