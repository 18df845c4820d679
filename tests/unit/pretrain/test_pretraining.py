"""Value pretraining with a critic's own code in this process: shares, schedule, phases, stop rule, what it leaves."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.pool import PretrainSection
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.critic_folder import critic_folder
from asyppo_async.trainer.pool.pool import open_pool
from asyppo_async.trainer.pool.shards import Entry, Pooled, Vocabulary, write_shard
from asyppo_async.trainer.pretrain import settings
from asyppo_async.trainer.pretrain.kept import open_folder
from asyppo_async.trainer.pretrain.pool_batches import PoolBatches, open_batches
from asyppo_async.trainer.pretrain.pretraining import Pretraining
from asyppo_async.trainer.pretrain.progress import Progress, StopRule, constant_loss
from asyppo_async.trainer.pretrain.shares import deal, heldout_prompts
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.worker.messages import (
    CriticForward,
    CriticForwardResult,
    CriticTrain,
    Save,
    TrainResult,
)
from asyppo_async.trainer.worker.rank import CriticRank
from asyppo_async.trainer.worker.specs import GroupTimes, specs_of
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import Prompt, Response, Trajectory, VersionRuns
from tests.unit.worker.learners import write_model

VOCABULARY = Vocabulary(tokenizer_fingerprint="", size=23)
TIMES = GroupTimes(join_timeout_s=1, request_timeout_s=1, silent_after_s=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def pool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty prompts with five responses each; right responses have low tokens, wrong ones high tokens."""
    folder = tmp_path_factory.mktemp("pool")
    random = np.random.default_rng(1)
    rows = []
    for number in range(40):
        prompt = Prompt(id=f"p{number}", task="t", text="", token_ids=(number % 23, 3), answer="")
        for sample in range(5):
            is_right = bool(random.random() < 0.5)
            low, high = (0, 12) if is_right else (11, 23)
            tokens = random.integers(low, high, random.integers(1, 12)).astype(np.int32)
            response = Response(
                token_ids=tokens,
                behaviour_logprobs=np.full(len(tokens), -1, dtype=np.float32),
                versions=VersionRuns(((0, len(tokens)),)),
                finish_reason="stop",
            )
            reward = 1.0 if is_right else -1.0
            trajectory = Trajectory(
                prompt=prompt, draw_id=number, sample_index=sample, response=response, reward=reward,
                server="", started_s=0, finished_s=0,
            )  # fmt: skip
            rows.append(Pooled(trajectory=trajectory, policy="a"))
    write_shard(folder / "a.safetensors", rows, VOCABULARY)
    return folder


def config_of(model: Path, folder: Path, **pretrain: object) -> TrainConfig:
    return config_from_tree(
        {
            "preset": "asyppo",
            "run": {"folder": str(folder)},
            "actor": {"model": str(model)},
            "critic": {"model": str(model), "count": 2, "weight_decay": 0.0},
            "pretrain": {
                "responses": 16,
                "epochs": 6,
                "learning_rate": 3e-2,
                "final_learning_rate": 1e-3,
                **pretrain,
            },
        }
    )


class LocalCritic:
    """A critic group of one rank in this process."""

    def __init__(self, config: TrainConfig, index: int) -> None:
        specs = specs_of(config.actor, config.critic, seed=config.run.seed, bucket_bytes=1024, times=TIMES)
        self.rank = CriticRank(specs[1 + index].settings, World.alone(), "cpu")
        self.trained: list[CriticTrain] = []
        self.name = f"critic-{index}"

    async def forward(self, request: CriticForward) -> CriticForwardResult:
        return self.rank.answer(request)  # type: ignore[return-value]

    async def train(self, request: CriticTrain) -> TrainResult:
        self.trained.append(request)
        return self.rank.answer(request)  # type: ignore[return-value]

    @property
    def state(self) -> "LocalCritic":
        return KeptState(self)  # type: ignore[return-value]

    async def save(self, folder: Path) -> None:
        self.rank.answer(Save(folder=str(folder)))


class KeptState:
    """As a group's: every critic below its own name."""

    def __init__(self, critic: LocalCritic) -> None:
        self._critic = critic

    async def save(self, folder: Path) -> None:
        self._critic.rank.state.save(folder / self._critic.name)

    async def restore(self, folder: Path) -> None:
        self._critic.rank.state.restore(folder / self._critic.name)


def pretrain(
    config: TrainConfig, batches: PoolBatches, rule: StopRule | None = None
) -> tuple[Pretraining, tuple[LocalCritic, ...], Path]:
    critics = tuple(LocalCritic(config, index) for index in range(config.critic.count))
    folder = RunFolder.create(config)
    done = Pretraining(
        config,
        critics,
        folder,
        heldout=batches.heldout_batch(),
        edges=(4, 8),
        rule=rule,
        on_phase=lambda _: None,
    )
    steps = iter(range(batches.num_steps))

    async def following() -> Batch | None:
        step = next(steps, None)
        return None if step is None else batches.batch(step)

    return done, critics, asyncio.run(done.run(following))


def test_pretraining_over_a_pool_learns_on_heldout_prompts_and_leaves_critics_that_load(
    model: Path, pool_folder: Path, tmp_path: Path
) -> None:
    pool = open_pool(pool_folder)
    first = open_batches(pool, config_of(model, tmp_path, freeze_pool=False))
    config = settings.over_pool(first.config, first.num_steps)
    batches = open_batches(pool, config)
    done, critics, final = pretrain(config, batches)
    rows = [
        json.loads(line) for line in (tmp_path / "run-critics" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == batches.num_steps == 6 * batches.steps_per_epoch
    assert rows[-1]["critic_0/loss"] < 0.5 * rows[0]["critic_0/loss"]
    assert {
        "critic_1/heldout_explained_variance_to_4",
        "critic_1/heldout_explained_variance_to_longest",
    } <= set(rows[0])
    summary = json.loads((tmp_path / "run-critics" / "summary.json").read_text())
    name = "pretrain/heldout_explained_variance"
    assert rows[0][name] < 0.3 < summary[name]
    assert summary["loss_last_steps"] <= summary["loss_first_steps"]
    assert 1 < summary["knowledge_from_step"] < len(rows), "first the range, then knowledge"
    assert 0 <= summary["clipped_share"] <= 1
    assert sorted(path.name for path in (tmp_path / "run-critics" / "steps").iterdir()) == ["000025"] * (
        len(rows) >= 25
    )
    request = CriticForward(sequences=batches.heldout_batch().sequences)
    for index, critic in enumerate(critics):
        loaded = config.model_copy(update={"critic": config.critic.model_copy(update={"model": final})})
        assert critic_folder(final, index).name == f"critic-{index}"
        again = LocalCritic(loaded, index).rank.answer(request)
        assert np.array_equal(again.values, critic.rank.answer(request).values)  # type: ignore[union-attr]
    assert len(done.progress.losses) == len(rows)


def test_pretraining_when_critics_train_adapters_then_they_learn_over_a_base_that_stays_and_load_as_whole_critics(
    model: Path, pool_folder: Path, tmp_path: Path
) -> None:
    config = config_of(model, tmp_path)  # attention is frozen, so adapters are in the MLPs
    config = config.model_copy(update={"critic": config.critic.model_copy(update={"lora_rank": 4})})
    pool = open_pool(pool_folder)
    config = settings.over_pool(config, open_batches(pool, config).num_steps)
    batches = open_batches(pool, config)
    done, critics, final = pretrain(config, batches)
    assert done.progress.losses[-1] < 0.7 * done.progress.losses[0]
    base = load_file(model / "model.safetensors")
    request = CriticForward(sequences=batches.heldout_batch().sequences)
    trained = config.critic.model_copy(update={"model": final, "lora_rank": 0})
    for index, critic in enumerate(critics):
        for name, tensor in load_file(final / f"critic-{index}" / "model.safetensors").items():
            assert torch.equal(tensor, base[f"model.{name}"]) == (".mlp." not in name), name
        again = LocalCritic(config.model_copy(update={"critic": trained}), index).rank.answer(request)
        expected = critic.rank.answer(request).values  # type: ignore[union-attr]
        np.testing.assert_allclose(again.values, expected, atol=1e-4)  # type: ignore[union-attr]


def test_pretraining_never_shows_a_critic_the_other_ones_share_or_a_heldout_prompt(
    model: Path, pool_folder: Path, tmp_path: Path
) -> None:
    batches = open_batches(open_pool(pool_folder), config_of(model, tmp_path))
    seen: list[set[int]] = [set(), set()]
    for step in range(batches.num_steps):
        batch = batches.batch(step)
        for critic, rows in enumerate(batch.critic_shares):
            for row in rows:
                (one,) = batch.groups[row].trajectories
                seen[critic].add(hash((one.prompt.id, one.sample_index)))
    everything = {hash((f"p{number}", sample)) for number in range(40) for sample in range(5)}
    out = {entry.prompt_id for entry in batches.heldout}
    assert len(out) == 4 and not seen[0] & seen[1]
    assert seen[0] | seen[1] == everything - {hash((prompt, sample)) for prompt in out for sample in range(5)}
    again = open_batches(open_pool(pool_folder), config_of(model, tmp_path))
    assert np.array_equal(again.batch(3).versions, batches.batch(3).versions)
    assert np.array_equal(
        again.batch(3).sequences.response_token_ids, batches.batch(3).sequences.response_token_ids
    )


def entries(*counts: int) -> list[Entry]:
    return [
        Entry(shard=Path(), row=0, prompt_id=f"p{prompt}", task="", policy="", reward=1, num_tokens=1)
        for prompt, count in enumerate(counts)
        for _ in range(count)
    ]


def test_split_when_a_critic_would_miss_a_prompt_is_refused() -> None:
    shares = deal(entries(2, 5, 1, 1), num_critics=2, data="group_split", seed=0)
    assert (
        sorted(np.concatenate(shares).tolist()) == list(range(9))
        and abs(len(shares[0]) - len(shares[1])) <= 1
    )
    with pytest.raises(
        ConfigError, match=r"'random_split' lets critic \d miss \d+ prompts that have responses"
    ):
        deal(entries(*[2] * 40), num_critics=2, data="random_split", seed=0)


def test_heldout_prompts_are_a_share_that_does_not_depend_on_order() -> None:
    ids = [f"p{number}" for number in range(50)]
    out = heldout_prompts(ids, 0.1, 3)
    assert len(out) == 5 and out == heldout_prompts(reversed(ids), 0.1, 3) != heldout_prompts(ids, 0.1, 4)
    assert heldout_prompts(["one"], 0.1, 0) == frozenset()
    assert len(heldout_prompts(["one", "two"], 0.1, 0)) == 1


def test_settings_over_a_pool_are_those_of_the_paper(model: Path, tmp_path: Path) -> None:
    config = config_from_tree(
        {"preset": "s3ac", "actor": {"model": str(model)}, "critic": {"model": str(model)}}
    )
    critic = settings.over_pool(config, 1000).critic
    assert (critic.learning_rate, critic.final_learning_rate, critic.schedule_steps) == (1e-5, 5e-6, 1000)
    assert (critic.learning_rate_warmup_steps, critic.max_grad_norm, critic.epochs) == (30, 10.0, 1)
    assert (
        critic.frozen == ("attention", "router", "vision") and critic.half_loss and critic.value_clip is None
    )
    policy = settings.over_policy(config, tmp_path)
    assert (policy.critic.learning_rate, policy.critic.final_learning_rate) == (2e-6, None)
    assert policy.algorithm.lambda_critic == 1.0 and policy.actor.model == tmp_path
    none = config.model_copy(update={"critic": config.critic.model_copy(update={"count": 0})})
    with pytest.raises(ConfigError, match="there is no critic to pretrain"):
        settings.over_pool(none, 10)


def test_stop_rule_ends_when_nothing_has_risen_for_its_steps() -> None:
    rule = StopRule(PretrainSection(stop_rise=0.01, stop_steps=20))
    assert [rule.is_over(step, value) for step, value in ((5, 0.1), (15, 0.2), (25, 0.205))] == [False] * 3
    assert not rule.is_over(34, float("nan"))
    assert rule.is_over(35, 0.209)


def test_pretraining_when_the_rule_says_so_ends_early(model: Path, pool_folder: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, heldout_every_steps=1, stop_steps=2, stop_rise=1.0)
    batches = open_batches(open_pool(pool_folder), config)
    done, _, _ = pretrain(settings.over_pool(config, 10), batches, StopRule(config.pretrain))
    assert len(done.progress.losses) == 3 < batches.num_steps


def test_phases_of_the_loss_are_told_apart_by_the_best_constant(
    model: Path, pool_folder: Path, tmp_path: Path
) -> None:
    batch = open_batches(open_pool(pool_folder), config_of(model, tmp_path)).batch(0)
    returns = np.repeat(batch.rewards, batch.lengths)
    assert constant_loss(batch) == pytest.approx(0.5 * np.mean((returns - returns.mean()) ** 2), rel=1e-6)
    progress = Progress()
    for loss in (0.9, 0.7, 0.6, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4):
        progress.add({"critic_0/loss": loss, "critic_0/clipped_share": 1.0, "pretrain/constant_loss": 0.5}, 1)
    assert progress.knowledge_from_step == 8
    assert replace(progress).row()["clipped_share"] == 1.0


def test_pretraining_when_it_is_killed_and_goes_on_ends_where_one_in_one_piece_does(
    model: Path, pool_folder: Path, tmp_path: Path
) -> None:
    first = open_batches(
        open_pool(pool_folder), config_of(model, tmp_path, checkpoint_every_steps=2, epochs=1)
    )
    config = settings.over_pool(first.config, first.num_steps)
    batches = open_batches(open_pool(pool_folder), config)
    assert batches.num_steps == 6

    def open_one(name: str) -> tuple[TrainConfig, Pretraining, tuple[LocalCritic, ...]]:
        own = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        critics = tuple(LocalCritic(own, index) for index in range(2))
        folder = open_folder(own, resume=(tmp_path / name).exists())
        heldout = batches.heldout_batch()
        return (
            own,
            Pretraining(
                own, critics, folder, heldout=heldout, edges=(4,), rule=None, on_phase=lambda _: None
            ),
            critics,
        )

    async def run(done: Pretraining, last: int) -> int:
        start = await done.restore()
        steps = iter(range(start, last))

        async def following() -> Batch | None:
            step = next(steps, None)
            return None if step is None else batches.batch(step)

        await done.run(following)
        return start

    _, whole, one_piece = open_one("whole")
    asyncio.run(run(whole, 6))
    own, broken, _ = open_one("broken")
    asyncio.run(run(broken, 5))
    _, again, gone_on = open_one("broken")
    assert asyncio.run(run(again, 6)) == 4, "the fifth step is made again"
    request = CriticForward(sequences=batches.heldout_batch().sequences)
    for one, other in zip(one_piece, gone_on, strict=True):
        assert np.array_equal(one.rank.answer(request).values, other.rank.answer(request).values)  # type: ignore[union-attr]
    assert again.progress.losses == whole.progress.losses
    rows = [json.loads(line) for line in (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows if not row.get("abandoned")] == [1, 2, 3, 4, 5, 6]
    assert len(list((tmp_path / "broken" / "state").iterdir())) == 1, "older states are gone"
    other = own.model_copy(update={"pretrain": own.pretrain.model_copy(update={"epochs": 9})})
    with pytest.raises(ConfigError, match="had other settings"):
        open_folder(other, resume=True)
