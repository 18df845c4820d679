"""Models: the response slice against transformers, the value head, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import ComputeDtype
from asyppo_async.trainer.worker.critic_model import load_critic, new_value_head
from asyppo_async.trainer.worker.messages import ActorForward, CriticForward
from asyppo_async.trainer.worker.model import copy_companions, load_policy
from asyppo_async.types import TokenSequences, concatenate_sequences
from tests.unit.worker.learners import open_actor, open_critic, random_sequences, tiny_config


def rows_of(sequences: TokenSequences) -> list[tuple[torch.Tensor, int]]:
    """Token ids of each sequence, and how many of them are the prompt."""
    prompts = np.split(sequences.prompt_token_ids, sequences.prompt_lengths.cumsum()[:-1])
    responses = np.split(sequences.response_token_ids, sequences.response_lengths.cumsum()[:-1])
    return [
        (torch.tensor(np.concatenate([prompt, response])).long(), len(prompt))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


@pytest.mark.parametrize("micro_batch_tokens", [1, 25, 4096])
def test_forward_gives_what_transformers_gives_for_each_response_alone(
    tiny_folder: Path, sequences: TokenSequences, micro_batch_tokens: int
) -> None:
    actor = open_actor(tiny_folder, dtype="float32", micro_batch_tokens=micro_batch_tokens)
    result = actor.learner.forward(ActorForward(sequences=sequences, temperature=0.7))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    logprobs, entropies = [], []
    for ids, num_prompt in rows_of(sequences):
        with torch.no_grad():
            logs = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
        for position in range(num_prompt, len(ids)):
            logprobs.append(float(logs[position - 1, ids[position]]))
            entropies.append(float(-(logs[position - 1].exp() * logs[position - 1]).sum()))
    np.testing.assert_allclose(result.logprobs, logprobs, atol=3e-6)
    np.testing.assert_allclose(result.entropies, entropies, atol=3e-6)


def test_values_start_at_the_last_prompt_token_and_end_before_the_last_response_token(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    critic = open_critic(tiny_folder)
    values = critic.learner.forward(CriticForward(sequences=sequences)).values
    expected = []
    for ids, num_prompt in rows_of(sequences):
        with torch.no_grad():
            hidden = critic.module["backbone"](ids[None], use_cache=False).last_hidden_state[0]
            at_every_position = critic.module["value_head"](hidden).squeeze(-1)
        expected += at_every_position[num_prompt - 1 : len(ids) - 1].tolist()
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_result_of_a_response_does_not_depend_on_its_neighbours(tiny_folder: Path) -> None:
    actor = open_actor(tiny_folder)
    short = concatenate_sequences([([4, 5], np.array([6, 7], dtype=np.int32))])
    long = concatenate_sequences(
        [([4, 5], np.array([6, 7], dtype=np.int32)), (list(range(20)), np.arange(12, dtype=np.int32))]
    )
    alone = actor.learner.forward(ActorForward(sequences=short, temperature=1.0)).logprobs
    beside = actor.learner.forward(ActorForward(sequences=long, temperature=1.0)).logprobs[:2]
    np.testing.assert_array_equal(alone, beside)


def test_value_head_is_float32_with_std_one_over_hidden_plus_one_and_alike_for_a_seed() -> None:
    head = new_value_head(2048, "bfloat16", seed=3).requires_grad_(False)
    assert head.weight.dtype == torch.float32
    assert head.bias is None
    # 2048 draws: the sample std of a normal lies within 5 standard errors, 5 / sqrt(2 * 2048) = 8 %.
    assert float(head.weight.std()) == pytest.approx(1 / 2049, rel=0.08)
    assert torch.equal(head.weight, new_value_head(2048, "float32", seed=3).weight)
    assert not torch.equal(head.weight, new_value_head(2048, "float32", seed=4).weight)


@pytest.mark.parametrize(("std", "key"), [(0.0, "head_1/(H+1)_H2048"), (0.01, "head_0.01_H2048")])
def test_value_head_when_hidden_states_have_unit_rms_then_golden_first_predictions_and_gradients(
    std: float, key: str, golden: dict[str, Any]
) -> None:
    expected = golden[key]
    head = new_value_head(2048, "float64", seed=3, std=std)
    hidden = torch.randn(4000, 2048, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden = (hidden / hidden.square().mean(1, keepdim=True).sqrt()).requires_grad_()
    assert float(hidden[0].square().sum().detach()) == pytest.approx(expected["E||h||^2 (unit RMS)"])
    assert float(head.weight.square().sum().detach()) == pytest.approx(expected["E||w||^2"], rel=0.16)
    values = head(hidden).squeeze(-1)
    # Half the spread of E||w||^2, and that of 4,000 predictions.
    assert float(values.std().detach()) == pytest.approx(expected["pred_std"], rel=0.12)
    rewards = torch.ones(4000, dtype=torch.float64)
    rewards[::2] = -1
    loss = 0.5 * (values.detach() - rewards).square().mean()
    assert float(loss) == pytest.approx(expected["init_loss_half_mse_R=+-1"], rel=0.05)
    to_head, to_hidden = torch.autograd.grad(values[0], [head.weight, hidden])
    ratio = float(to_head.square().sum() / to_hidden[0].square().sum())
    assert ratio == pytest.approx(expected["ratio ||grad_w||^2/||grad_h||^2"], rel=0.2)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.float32), ("float64", torch.float64)])
def test_critic_in_low_precision_keeps_its_head_and_values_in_float32(
    tiny_folder: Path, dtype: ComputeDtype, expected: torch.dtype
) -> None:
    critic = load_critic(tiny_folder, dtype, seed=0)
    values = critic.values(torch.tensor([[1, 2, 3]]), torch.tensor([0, 2]))
    assert values.dtype == expected


def test_critics_of_one_seed_start_alike_and_of_untrained_ones_the_values_are_small(
    tiny_folder: Path,
) -> None:
    sequences = random_sequences(8, 20)
    first, second = (open_critic(tiny_folder).learner for _ in range(2))
    values = first.forward(CriticForward(sequences=sequences)).values
    np.testing.assert_array_equal(values, second.forward(CriticForward(sequences=sequences)).values)
    assert 0 < values.std() < 1


def test_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_policy(tmp_path, "float32")


def test_folder_with_config_but_no_weights_is_refused_by_name(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(tmp_path, "float32")


def test_model_whose_logits_are_not_hidden_times_weight_is_refused(tmp_path: Path) -> None:
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=7.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="its logits differ"):
        load_policy(tmp_path, "float32")


def test_bfloat16_model_is_not_taken_for_one_with_another_head(tiny_folder: Path) -> None:
    assert load_policy(tiny_folder, "bfloat16").head_weight.dtype == torch.bfloat16


def test_companions_are_copied_and_weights_and_what_is_there_are_not(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors"):
        (source / name).write_text("source")
    (target / "config.json").write_text("target")
    copy_companions(source, target)
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
    ]
    assert (target / "config.json").read_text() == "target"


def test_saved_policy_is_a_folder_that_transformers_loads(tiny_folder: Path, tmp_path: Path) -> None:
    actor = open_actor(tiny_folder, dtype="float32")
    actor.backend.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in actor.module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
