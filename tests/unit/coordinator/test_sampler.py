"""The sampler: an epoch is a permutation, its order depends on seed and epoch only, the cursor is all its state."""

import pytest

from asyppo_async.trainer.coordinator.sampler import EpochSampler, permuted_index

CHI_SQUARE_99_9 = 39.25
"""For 16 degrees of freedom (table): rows and columns are all 2,000."""


def drawn(sampler: EpochSampler, number: int) -> list[str]:
    return [sampler.next_candidate().prompt_id for _ in range(number)]


def sampler_of(num_prompts: int, *, seed: int = 0, num_epochs: int | None = None) -> EpochSampler:
    prompt_ids = [f"p{index}" for index in range(num_prompts)]
    return EpochSampler(prompt_ids=prompt_ids, seed=seed, num_epochs=num_epochs)


@pytest.mark.parametrize("num_prompts", [1, 2, 3, 5, 16, 17, 100, 1025])
def test_epoch_when_drawn_to_its_end_has_each_prompt_once(num_prompts: int) -> None:
    sampler = sampler_of(num_prompts)
    everything = {f"p{index}" for index in range(num_prompts)}
    for epoch in range(3):
        candidates = [sampler.next_candidate() for _ in range(num_prompts)]
        assert {candidate.prompt_id for candidate in candidates} == everything
        assert {candidate.epoch for candidate in candidates} == {epoch}


def test_order_when_seed_or_epoch_changes_is_another() -> None:
    sampler = sampler_of(100, seed=1)
    first, second = drawn(sampler, 100), drawn(sampler, 100)
    assert first != second
    assert first != drawn(sampler_of(100, seed=2), 100)
    assert first == drawn(sampler_of(100, seed=1), 100)
    assert first != [f"p{index}" for index in range(100)]


def test_cursor_when_sought_continues_the_same_sequence() -> None:
    sampler, resumed = sampler_of(7), sampler_of(7)
    everything = drawn(sampler, 30)
    resumed.seek(11)
    assert drawn(resumed, 19) == everything[11:]
    assert resumed.num_considered == 30


def test_position_when_counted_over_seeds_is_uniform() -> None:
    """Where each of 5 prompts lands in the epoch, over 2,000 seeds."""
    counts = [[0] * 5 for _ in range(5)]
    for seed in range(2000):
        for position in range(5):
            counts[position][permuted_index(position, size=5, key=f"{seed}:0")] += 1
    chi_square = sum((count - 400) ** 2 / 400 for row in counts for count in row)
    assert chi_square < CHI_SQUARE_99_9


def test_sampler_when_epochs_are_used_up_is_exhausted() -> None:
    sampler = sampler_of(3, num_epochs=2)
    drawn(sampler, 6)
    assert sampler.exhausted
    with pytest.raises(ValueError, match="all 6 candidates of 2 epochs"):
        sampler.next_candidate()


def test_sampler_when_prompts_are_missing_or_doubled_says_so() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        EpochSampler(prompt_ids=[], seed=0, num_epochs=None)
    with pytest.raises(ValueError, match="'b' more than once"):
        EpochSampler(prompt_ids=["a", "b", "c", "b"], seed=0, num_epochs=None)
    with pytest.raises(ValueError, match="got -1"):
        sampler_of(3).seek(-1)
