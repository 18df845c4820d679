"""Learning rates over the steps: by hand at the corners, and in the moves of weights and value head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.learner import RateCurve
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.specs import learning_rate_of
from asyppo_async.trainer.worker.world import World


@pytest.mark.parametrize(
    ("final", "curve", "expected"),
    [
        (None, "cosine", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        (0.6, "linear", [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (0.6, "cosine", [0.5, 1, 1, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2, 0.2]),
    ],
)
def test_rates_by_hand(final: float | None, curve: RateCurve, expected: list[float]) -> None:
    rate = LearningRate(peak=3.0, warmup_steps=2, final=final, curve=curve, schedule_steps=6)
    assert [rate.after(num_steps) / 3.0 for num_steps in range(8)] == pytest.approx(expected, abs=1e-6)


class Valued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(1, 1, bias=False)
        self.value_head = nn.Linear(1, 1, bias=False)


@pytest.mark.report("P61")
def test_value_head_has_its_own_rate_and_follows_the_schedule() -> None:
    module = Valued()
    rate = LearningRate(peak=0.1, warmup_steps=2, final=0.0, curve="linear", schedule_steps=4, head_peak=0.3)
    backend = PlainBackend(
        module,
        module.backbone,
        world=World.alone(),
        learning_rate=rate,
        weight_decay=0.0,
        max_grad_norm=10,
    )
    moves = []
    for _ in range(5):
        before = [float(parameter.detach()) for parameter in module.parameters()]
        backend.backward(sum((parameter.sum() for parameter in module.parameters()), torch.zeros(())))
        backend.step()
        # AdamW moves by exactly the rate where the gradient stays the same.
        after = [float(parameter.detach()) for parameter in module.parameters()]
        moves.append([was - now for was, now in zip(before, after, strict=True)])
    rates = [0.05, 0.1, 0.1, 0.05, 0.0]
    assert [move[0] for move in moves] == pytest.approx(rates, abs=1e-6)
    assert [move[1] for move in moves] == pytest.approx([3 * rate for rate in rates], abs=1e-6)


@pytest.mark.parametrize("threshold", [1, 10])
def test_clip_when_the_head_outweighs_the_backbone_then_both_shrink_alike(
    threshold: int, golden: dict[str, Any], tmp_path: Path
) -> None:
    """S3AC's hand norms: 45 of the head, 1.5 of the backbone; what is left of them shows in Adam's first moments."""
    expected = golden["clip_scale"]
    moments = {}
    for name, max_norm in (("free", 1e9), ("clipped", threshold)):
        module = Valued().double()
        backend = PlainBackend(
            module,
            module.backbone,
            world=World.alone(),
            learning_rate=LearningRate(
                peak=0.1, warmup_steps=0, final=0.1, curve="constant", schedule_steps=1
            ),
            weight_decay=0.0,
            max_grad_norm=max_norm,
        )
        backend.backward(45 * module.value_head.weight.sum() + 1.5 * module.backbone.weight.sum())
        outcome = backend.step()
        assert outcome.grad_norm == pytest.approx(expected["norm"])
        assert outcome.parts is not None
        share = outcome.parts.head_gradient**2 / outcome.grad_norm**2
        assert share == pytest.approx(expected["head_share_sq"])
        (tmp_path / name).mkdir()
        backend.save_state(tmp_path / name)
        state = load_file(tmp_path / name / "state-0.safetensors")
        moments[name] = [float(state[f"exp_avg.{part}.weight"]) for part in ("value_head", "backbone")]
    scales = [clipped / free for clipped, free in zip(moments["clipped"], moments["free"], strict=True)]
    assert scales == pytest.approx([expected[f"clip{threshold}"]] * 2)
    assert 1.5 * scales[1] == pytest.approx(expected[f"bb_norm_after_clip{threshold}"])


def test_schedule_is_as_long_as_the_run_unless_its_steps_are_named() -> None:
    actor = ActorSection(
        model=Path("a"), final_learning_rate=0, epochs=4, mini_batches=2, learning_rate_warmup_steps=8
    )
    assert learning_rate_of(actor, 10).schedule_steps == 80
    assert learning_rate_of(actor.model_copy(update={"schedule_steps": 25}), 10).schedule_steps == 25
    with pytest.raises(
        ConfigError, match=r"actor: the learning rate comes down from step 8 .* to step 8: set"
    ):
        learning_rate_of(actor, 1)
    assert learning_rate_of(CriticSection(head_learning_rate=5e-5), 10).head_share == pytest.approx(5)
