"""Which worker groups a run's settings ask for."""

from pathlib import Path

import pytest

from asyppo_async.config.critic import CriticSection, OneCritic
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.specs import GroupSpec, GroupTimes, specs_of

TIMES = GroupTimes(join_timeout_s=1, request_timeout_s=1, silent_after_s=1)


def specs(critic: CriticSection) -> tuple[GroupSpec, ...]:
    return specs_of(ActorSection(model=Path("a")), critic, seed=0, bucket_bytes=1024, times=TIMES)


def test_groups_when_there_are_no_critics_are_the_actor_alone() -> None:
    (actor,) = specs(CriticSection(count=0))
    assert actor.settings.role == "actor" and actor.critic is None


def test_actor_alone_gets_the_reference_and_replays() -> None:
    def of(actor: ActorSection) -> list[tuple[str, bool]]:
        critic = CriticSection(count=1, model=Path("c"))
        found = specs_of(actor, critic, seed=0, bucket_bytes=1024, times=TIMES)
        return [(Path(spec.settings.reference).name, spec.settings.routing_replay) for spec in found]

    assert of(ActorSection(model=Path("a"))) == [("", False), ("", False)]
    held = ActorSection(model=Path("a"), reference="initial", routing_replay=True)
    assert of(held) == [("a", True), ("", False)]
    assert of(ActorSection(model=Path("a"), reference=Path("b"))) == [("b", False), ("", False)]


def test_groups_of_critics_need_a_model() -> None:
    assert [spec.critic for spec in specs(CriticSection(count=2, model=Path("c")))] == [None, 0, 1]
    with pytest.raises(ConfigError, match=r"critic\.model is missing"):
        specs(CriticSection(count=1))


def test_critics_of_an_uneven_ensemble_when_one_names_its_own_keep_the_rest_of_the_section() -> None:
    own = OneCritic(model=Path("small"), learning_rate=3e-4, head_std=0.02, frozen=("backbone",))
    uneven = CriticSection(
        count=2, model=Path("c"), learning_rate=1e-5, frozen=("router",), each=(OneCritic(), own)
    )
    first, second = [spec.settings for spec in specs(uneven)[1:]]
    assert (Path(first.model).name, first.learning_rate.peak, first.head_std) == ("c", 1e-5, 0.0)
    assert (Path(second.model).name, second.learning_rate.peak, second.head_std) == ("small", 3e-4, 0.02)
    assert (first.frozen, second.frozen) == (("router",), ("backbone",))
    assert second.weight_decay == first.weight_decay == uneven.weight_decay
    trained = [Path(spec.settings.model).name for spec in specs(uneven.without_own_models())[1:]]
    assert trained == ["c", "c"]
