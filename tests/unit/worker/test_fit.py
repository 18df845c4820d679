"""The state of training against free memory: sizes by hand, and a refusal that says both numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.learner import OffloadDevice, OffloadSection, TrainingBackend, ZeroStage
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import ComputeDtype, WorkerSettings
from asyppo_async.trainer.worker.fit import check_fit, free_bytes, state_bytes
from asyppo_async.trainer.worker.specs import GroupTimes, specs_of

TIMES = GroupTimes(join_timeout_s=1, request_timeout_s=1, silent_after_s=1)


def settings(
    backend: TrainingBackend,
    stage: ZeroStage,
    dtype: ComputeDtype = "float32",
    offload: OffloadDevice = "none",
) -> WorkerSettings:
    actor = ActorSection(
        model=Path("a"), backend=backend, zero_stage=stage, offload=OffloadSection(optimizer=offload)
    )
    (spec,) = specs_of(actor, CriticSection(count=0), seed=0, bucket_bytes=1024, times=TIMES)
    return replace(spec.settings, dtype=dtype)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (settings("plain", 2), (1200, 0)),
        (settings("plain", 2, "bfloat16"), (1600, 0)),
        (settings("deepspeed", 1), (200 + 400, 0)),
        (settings("deepspeed", 2), (200 + 100, 0)),
        (settings("deepspeed", 3, "bfloat16"), (300 + 100, 0)),
        (settings("deepspeed", 3, "bfloat16", "cpu"), (0, 200 + 100 + 100)),
    ],
)
def test_state_of_a_hundred_parameters_over_four_ranks(of: WorkerSettings, expected: tuple[int, int]) -> None:
    state = state_bytes(100, of, 4)
    assert (state.device, state.host) == expected


def test_offloaded_state_when_host_memory_is_short_is_refused_and_the_device_is_not_asked() -> None:
    module = nn.Linear(1000, 1000)
    offloaded = settings("deepspeed", 3, offload="cpu")
    assert check_fit(module, offloaded, 1, 0, 2**24).host == 16 * 1_001_000
    with pytest.raises(ConfigError, match=r"0\.0 GiB are free in host memory"):
        check_fit(module, offloaded, 1, 2**30, 2**23)


def test_model_when_its_state_is_larger_than_what_is_free_is_refused_with_both_numbers() -> None:
    module = nn.Linear(1000, 1000)  # 1,001,000 parameters, 12 MB of state
    check_fit(module, settings("plain", 2), 1, 2**24)
    check_fit(module, settings("plain", 2), 1, None)
    with pytest.raises(
        ConfigError, match=r"actor\.model does not fit: 1,001,000 trained .* 0\.0 GiB are free"
    ):
        check_fit(module, settings("plain", 2), 1, 2**23)
    module.weight.requires_grad_(False)
    check_fit(module, settings("plain", 2), 1, 2**23)


def test_free_memory_of_this_machine_is_known_and_less_than_all_of_it() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None and 2**20 < free < 2**50
