"""How hard the prompts of a run were: what it considered and trained on, by the share of right fresh responses."""

import json
from pathlib import Path

import pytest

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.reference_success import (
    Draw,
    chosen_prompts,
    difficulty_of,
    read_draws,
    reference_config,
    sets_of,
)

P_REF = {"easy": 1.0, "middle": 0.5, "edge": 0.2, "hard": 0.0}


def draws(*ids: str) -> list[Draw]:
    return [Draw(prompt_id=prompt, step=step) for step, prompt in enumerate(ids)]


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"half": ')


def test_difficulty_when_a_prompt_is_drawn_twice_then_it_counts_twice_and_the_lower_edge_not() -> None:
    found = difficulty_of(draws("middle", "middle", "edge", "unmeasured", "easy"), P_REF)
    assert (found.draws, found.middle_share, found.mean) == (4, 0.5, pytest.approx(2.2 / 4))
    assert found.estimate_error is None
    estimated = [Draw(prompt_id="hard", step=0, estimate=0.25), Draw(prompt_id="easy", step=0)]
    assert difficulty_of(estimated, P_REF).estimate_error == 0.25
    assert difficulty_of([], P_REF).middle_share is None


def test_sets_when_ten_steps_were_trained_then_the_ends_are_two_each() -> None:
    sets = sets_of(draws("hard"), draws("easy", "easy", *["hard"] * 6, "middle", "middle"), P_REF)
    assert {name: of.draws for name, of in sets.items()} == {
        "considered": 1,
        "trained": 10,
        "trained, first fifth": 2,
        "trained, last fifth": 2,
    }
    assert (sets["trained, first fifth"].mean, sets["trained, last fifth"].middle_share) == (1.0, 1.0)


def test_prompts_when_they_are_too_many_are_the_same_choice_again_whatever_was_drawn_how_often() -> None:
    many = draws(*[f"p{index}" for index in range(40)])
    chosen = chosen_prompts(many, [], 7, seed=1)
    assert chosen == chosen_prompts([*reversed(many), *many[:5]], many[3:9], 7, seed=1)
    assert len(set(chosen)) == 7 and chosen != chosen_prompts(many, [], 7, seed=2)


def test_draws_of_a_run_when_read_leave_out_what_was_abandoned_and_what_was_not_trained(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="trained on no prompt yet"):
        read_draws(tmp_path)
    fate = {"prompt": "p1", "step": 3, "outcome": "trained"}
    lost = {**fate, "outcome": "dropped"}
    write(tmp_path, "draws.jsonl", [fate, lost, {**fate, "abandoned": True}])
    considered, trained = read_draws(tmp_path)
    assert considered == trained == [Draw(prompt_id="p1", step=3)]
    write(tmp_path, "candidates.jsonl", [{"prompt": "p2", "version": 2, "success_estimate": 0.4}])
    assert read_draws(tmp_path)[0] == [Draw(prompt_id="p2", step=2, estimate=0.4)]
    with pytest.raises(ConfigError, match="is no run folder"):
        reference_config(tmp_path, None, [])
