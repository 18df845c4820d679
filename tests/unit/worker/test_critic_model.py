"""A critic on disk and in parts: saved with its head, loaded by path, frozen where it is told to be."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.critic_folder import HEAD_FILE, critic_folder
from asyppo_async.trainer.worker.backend.choice import open_backend
from asyppo_async.trainer.worker.control import WorkerSettings
from asyppo_async.trainer.worker.critic import CriticLearner
from asyppo_async.trainer.worker.critic_model import load_critic
from asyppo_async.trainer.worker.group import GroupTimes, specs_of
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.messages import CriticForward, Save
from asyppo_async.trainer.worker.packing import Cutting
from asyppo_async.trainer.worker.rank import CriticRank
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from tests.unit.worker.learners import critic_request, random_sequences, write_model

SEQUENCES = random_sequences(3, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("critic"))


def settings(folder: Path, **changes: object) -> WorkerSettings:
    times = GroupTimes(join_timeout_s=1, request_timeout_s=1, silent_after_s=1)
    section = CriticSection(count=1, model=folder, learning_rate=1e-2)
    spec = specs_of(ActorSection(model=folder), section, seed=1, bucket_bytes=1024, times=times)[1]
    return replace(spec.settings, **changes)  # type: ignore[arg-type]


def test_critic_when_saved_and_loaded_by_path_says_the_same(folder: Path, tmp_path: Path) -> None:
    rank = CriticRank(settings(folder), World.alone(), "cpu")
    rank.answer(critic_request(SEQUENCES, [3, 3]))
    rank.answer(Save(folder=str(tmp_path / "critic-0")))
    fresh = CriticRank(settings(folder), World.alone(), "cpu").answer(CriticForward(sequences=SEQUENCES))
    trained = rank.answer(CriticForward(sequences=SEQUENCES))
    loaded = CriticRank(settings(critic_folder(tmp_path, 0)), World.alone(), "cpu")
    again = loaded.answer(CriticForward(sequences=SEQUENCES))
    assert np.array_equal(again.values, trained.values)  # type: ignore[union-attr]
    assert not np.array_equal(fresh.values, trained.values)  # type: ignore[union-attr]


def test_critic_folder_when_one_is_missing_is_refused_with_both_numbers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "critic-0").mkdir()
    assert critic_folder(folder, 3) == folder, "one folder serves all critics"
    assert critic_folder(tmp_path, 0) == tmp_path / "critic-0"
    with pytest.raises(ConfigError, match=r"holds 1 critics, and critic\.count asks for more"):
        critic_folder(tmp_path, 1)


def test_critic_when_the_head_is_of_another_shape_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    save_file({"weight": torch.zeros(1, 7)}, other / HEAD_FILE)
    with pytest.raises(
        ConfigError, match=r"is of shape \[1, 7\].*needs \[1, 16\]: they are not of one critic"
    ):
        load_critic(other, "float32", 0)
    save_file({"bias": torch.zeros(1, 16)}, other / HEAD_FILE)
    with pytest.raises(ConfigError, match="is no value head"):
        load_critic(other, "float32", 0)


@pytest.mark.parametrize("changes", [{"hidden_size": 24, "head_dim": 6}, {"num_hidden_layers": 3}])
def test_backbone_when_its_weights_are_of_another_shape_is_refused_and_not_drawn_anew(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    other = write_model(tmp_path / "other")
    tree = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(tree | changes | {"layer_types": None}))
    with pytest.raises(
        ConfigError, match=r"are not those of its config\.json: \d+ are missing or of another shape"
    ):
        load_critic(other, "float32", 0)


def test_frozen_parts_keep_every_bit_and_the_others_move(folder: Path) -> None:
    frozen = settings(folder, frozen=("attention", "router", "vision"))
    critic = load_critic(folder, "float32", 1, frozen=frozen.frozen)
    before = {name: weight.clone() for name, weight in critic.module.state_dict().items()}
    stepper = Stepper(
        open_backend(critic, frozen, World.alone()),
        World.alone(),
        cutting=Cutting(budget_tokens=4096),
        non_finite_budget=0,
    )
    CriticLearner(critic, stepper).train(critic_request(SEQUENCES, [6]))
    moved = {
        name for name, weight in critic.module.state_dict().items() if not torch.equal(weight, before[name])
    }
    assert not [name for name in moved if ".self_attn." in name]
    assert {"value_head.weight", "backbone.embed_tokens.weight", "backbone.norm.weight"} <= moved
    assert [name for name in moved if ".mlp." in name]


def test_frozen_part_when_the_model_has_none_is_refused(folder: Path) -> None:
    head_only = load_critic(folder, "float32", 0, frozen=("backbone",))
    assert [name for name, weight in head_only.module.named_parameters() if weight.requires_grad] == [
        "value_head.weight"
    ]
    inner = torch.nn.Linear(2, 2)
    from asyppo_async.trainer.worker.critic_model import _freeze

    with pytest.raises(ConfigError, match="names 'attention', and no parameter"):
        _freeze(inner, "attention", folder)
    _freeze(inner, "vision", folder)


def test_fresh_head_when_a_std_is_given_has_it(folder: Path) -> None:
    small = load_critic(folder, "float32", 0).module["value_head"].weight
    wide = load_critic(folder, "float32", 0, head_std=0.5).module["value_head"].weight
    torch.testing.assert_close(wide, small * 17 * 0.5)


def test_learning_rate_comes_down_a_cosine_to_its_end_and_stays_there() -> None:
    rate = LearningRate(peak=1e-5, warmup_steps=3, final=5e-6, schedule_steps=103)
    assert [rate.after(step) for step in (0, 2, 3)] == pytest.approx([1e-5 / 3, 1e-5, 1e-5])
    assert rate.after(53) == pytest.approx(7.5e-6)
    assert [rate.after(step) for step in (103, 500)] == pytest.approx([5e-6, 5e-6])
    assert LearningRate(peak=1e-5, warmup_steps=0).after(10**6) == 1e-5
