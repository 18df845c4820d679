"""Every preset's gradients over DeepSpeed, whatever stage, type, ranks and cutting: those of the plain engine."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyppo_async.trainer.worker.world import World
from tests.integration.worker.families import DTYPES, PRESETS, ROLES, STAGES, Gradients, gradients_of
from tests.integration.worker.test_zero import run_ranks
from tests.unit.worker.learners import largest_difference, write_model

PROGRAM = "tests.integration.worker.families"
TOLERANCE = 5e-6
"""Relative, per tensor (invariant 5), of float32 against float64 on the same weights."""
ROUNDING = 1.5
"""bfloat16 may be so many times as far from float64 as the plain engine in bfloat16 is, for the same preset."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that bfloat16 holds exactly, so that all types start alike."""
    place = write_model(tmp_path_factory.mktemp("families"))
    model = AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def exact(folder: Path) -> dict[str, dict[str, Gradients]]:
    return {role: gradients_of(folder, role, None, "float64", World.alone()) for role in ROLES}


@pytest.fixture(scope="module")
def rounding(folder: Path, exact: dict[str, dict[str, Gradients]]) -> dict[str, dict[str, float]]:
    rounded = {role: gradients_of(folder, role, None, "bfloat16", World.alone()) for role in ROLES}
    return {
        role: {
            preset: largest_difference(gradients, exact[role][preset])
            for preset, gradients in rounded[role].items()
        }
        for role in ROLES
    }


@pytest.mark.report("P57")
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_of_all_presets_when_partitioned_and_cut_anyhow_are_those_of_float64(
    folder: Path,
    exact: dict[str, dict[str, Gradients]],
    rounding: dict[str, dict[str, float]],
    tmp_path: Path,
    num_ranks: int,
) -> None:
    assert set(exact["actor"]) == set(PRESETS)
    run_ranks(PROGRAM, num_ranks, str(folder), str(tmp_path), timeout_s=800)
    for role in ROLES:
        for stage in STAGES:
            for dtype in DTYPES:
                found = torch.load(tmp_path / f"{role}:{stage}:{dtype}.pt", weights_only=True)
                assert found.keys() == exact[role].keys()
                for preset, gradients in found.items():
                    difference = largest_difference(gradients, exact[role][preset])
                    bound = TOLERANCE if dtype == "float32" else ROUNDING * rounding[role][preset]
                    assert difference < bound, (preset, role, stage, dtype, difference)
