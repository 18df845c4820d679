"""Several tasks by weight: shares, epochs of each task, and the cursor."""

from collections import Counter

import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.mixed_sampler import MixedSampler, TaskShare, open_sampler, pattern_of
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.selection import open_selection


def share(label: str, num: int, weight: float) -> TaskShare:
    return TaskShare(label=label, weight=weight, prompt_ids=tuple(f"{label}/{index}" for index in range(num)))


def sampler(seed: int = 0) -> MixedSampler:
    return MixedSampler(shares=[share("a", 6, 2), share("b", 10, 1)], seed=seed)


def draw(source: MixedSampler, num: int) -> list[tuple[str, int]]:
    candidates = [source.next_candidate() for _ in range(num)]
    assert all(candidate.accepted for candidate in candidates)
    return [(candidate.prompt_id, candidate.epoch) for candidate in candidates]


def test_draws_when_counted_over_any_stretch_then_follow_the_weights() -> None:
    tasks = [prompt_id[0] for prompt_id, _ in draw(sampler(), 300)]
    for start in range(0, 270):
        assert abs(Counter(tasks[start : start + 30])["a"] - 20) <= 1


def test_epochs_when_a_task_is_drawn_then_each_of_its_prompts_comes_once_in_each() -> None:
    seen: dict[tuple[str, int], list[str]] = {}
    for prompt_id, epoch in draw(sampler(), 90):
        seen.setdefault((prompt_id[0], epoch), []).append(prompt_id)
    assert all(len(set(prompts)) == len(prompts) for prompts in seen.values())
    assert {key: len(prompts) for key, prompts in seen.items()} == {
        **{("a", epoch): 6 for epoch in range(10)},
        **{("b", epoch): 10 for epoch in range(3)},
    }
    assert seen["a", 0] != seen["a", 1], "another order in another epoch"


def test_cursor_when_sought_then_goes_on_as_if_never_stopped() -> None:
    whole = draw(sampler(), 60)
    for cursor in (0, 1, 17, 42):
        resumed = sampler()
        resumed.seek(cursor)
        assert draw(resumed, 60 - cursor) == whole[cursor:]
        assert resumed.num_considered == 60
    assert whole != draw(sampler(seed=1), 60)


def test_pattern_when_weights_are_even_or_not_then_is_the_shortest_and_spread() -> None:
    assert pattern_of([2, 1]) == (0, 1, 0)
    assert pattern_of([0.5, 0.25, 0.25]) == (0, 1, 2, 0)
    assert pattern_of([3]) == (0,)
    pattern = pattern_of([0.7, 0.2, 0.1])
    assert Counter(pattern) == {0: 7, 1: 2, 2: 1}
    with pytest.raises(ConfigError, match="use rounder weights"):
        pattern_of([0.31831, 0.57721, 0.123457])
    with pytest.raises(ConfigError, match="use rounder weights"):
        pattern_of([1, 1e-9])


def test_sampler_when_there_is_one_task_then_is_the_plain_one() -> None:
    assert isinstance(open_sampler([share("a", 6, 2)], 0), EpochSampler)
    assert sampler().num_prompts == 16
    with pytest.raises(ValueError, match="no prompts"):
        MixedSampler(shares=[share("a", 0, 1), share("b", 1, 1)], seed=0)


@pytest.mark.parametrize("prompts", ["greso", "spo"])
def test_choosing_sampler_when_there_is_a_mix_then_considers_tasks_by_weight(prompts: str) -> None:
    config = config_from_tree(
        {"actor": {"model": "a"}, "critic": {"model": "c"}}, [f"selection.prompts={prompts}"]
    )
    mix = sampler()
    ids = [f"a/{index}" for index in range(6)] + [f"b/{index}" for index in range(10)]
    choosing = open_selection(config, ids, PromptTable(config.selection), mix)
    assert choosing is not None and choosing.num_prompts == 16
    considered = [choosing.next_candidate().prompt_id for _ in range(90)]
    assert Counter(prompt_id[0] for prompt_id in considered) == {"a": 60, "b": 30}
    assert set(considered) == set(ids)
