"""What a critic knows of prompts and of tokens, apart."""

import pytest
import torch

from asyppo_async.algorithms.advantages import gae
from asyppo_async.algorithms.critic_parts import prompt_advantages, token_advantages
from asyppo_async.config.load import config_from_tree
from asyppo_async.errors import ConfigError

VALUES = torch.tensor([0.1, 0.2, -0.1, 0.4, 0.0], dtype=torch.float64)
LENGTHS = torch.tensor([3, 2])
RETURNS = torch.tensor([1.0, -1.0], dtype=torch.float64)


def test_prompt_advantages_are_the_return_less_the_first_value() -> None:
    found = prompt_advantages(RETURNS, VALUES, LENGTHS)
    assert found.tolist() == pytest.approx([0.9, 0.9, 0.9, -1.4, -1.4])


def test_token_advantages_keep_the_shape_and_take_the_batch_as_baseline() -> None:
    # GAE at lambda 1: [.9, .8, 1.1 | -1.4, -1.0], means .9333 and -1.2; R - mean R: 1 and -1.
    whole = gae(RETURNS, VALUES, LENGTHS, 1.0)
    found = token_advantages(whole, RETURNS, LENGTHS)
    third = 0.9 + 0.1 / 3
    assert found.tolist() == pytest.approx([1 + 0.9 - third, 1 + 0.8 - third, 1 + 1.1 - third, -1.2, -0.8])
    shifted = token_advantages(gae(RETURNS, VALUES + 5, LENGTHS, 1.0), RETURNS, LENGTHS)
    torch.testing.assert_close(shifted, found, msg="a constant of the critic says nothing about tokens")


def test_parts_of_a_critic_when_there_is_no_gae_are_refused() -> None:
    tree = {"preset": "s3ac", "actor": {"model": "a"}, "critic": {"model": "c"}}
    assert config_from_tree(tree, ["algorithm.critic_use=prompt"]).algorithm.critic_use == "prompt"
    for wrong in ("algorithm.estimator=evpo", "algorithm.truncated=bootstrap"):
        with pytest.raises(ConfigError, match="takes the advantages of 'gae' apart"):
            config_from_tree(tree, ["algorithm.critic_use=token", wrong])
