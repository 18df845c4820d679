"""Settings of adapters that contradict each other are refused with the reason."""

import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.errors import ConfigError

MODELS = {"preset": "asyppo", "actor": {"model": "a"}, "critic": {"model": "c"}}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (['actor.lora_targets=["q_proj"]'], r"actor\.lora_rank is 0"),
        (['critic.each=[{lora_targets=["q_proj"]}, {lora_rank=4}]'], r"critic\.lora_rank is 0"),
        (["critic.lora_rank=4", 'critic.frozen=["backbone"]'], "lets nothing of it train"),
        (["weights.lora=adapter"], r"actor\.lora_rank = 0 has none"),
        (["weights.lora=adapter", "actor.lora_rank=4", "weights.way=direct"], "from host memory"),
        (["weights.lora=adapter", "actor.lora_rank=1024"], "up to rank 512"),
        (
            [
                "actor.lora_rank=4",
                "actor.reference=ema",
                "actor.ema_decay=0.9",
                "algorithm.kl_coefficient=0.1",
            ],
            "follows an average of whole weights",
        ),
        (["actor.lora_dropout=0.1"], r"unknown key 'actor\.lora_dropout'"),
    ],
)
def test_settings_of_adapters_when_they_contradict_each_other_then_refused(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_tree(MODELS, overrides)


def test_critics_when_one_alone_has_adapters_then_the_others_keep_the_settings_of_all() -> None:
    config = config_from_tree(
        MODELS,
        ['critic.each=[{}, {lora_rank=4, lora_alpha=8, lora_targets=["q_proj"]}]', "actor.lora_rank=2"],
    )
    first, second = (config.critic.of(index) for index in range(2))
    assert (first.lora_rank, first.lora_targets) == (0, ())
    assert (second.lora_rank, second.lora_alpha, second.lora_targets) == (4, 8, ("q_proj",))
    bare = config.without_training_of_actor()
    assert bare.actor.lora_rank == 0 and bare.weights.lora == "merged" and config.actor.lora_rank == 2
