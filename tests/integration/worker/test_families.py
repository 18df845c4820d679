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
TOLERANCES = {"float32": 5e-6, "bfloat16": 0.2}
"""Relative, per tensor (invariant 5), against float64 on the same weights."""


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


@pytest.mark.report("P57")
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_of_all_presets_when_partitioned_and_cut_anyhow_are_those_of_float64(
    folder: Path, exact: dict[str, dict[str, Gradients]], tmp_path: Path, num_ranks: int
) -> None:
    run_ranks(PROGRAM, num_ranks, str(folder), str(tmp_path), timeout_s=800)
    assert set(exact["actor"]) == set(PRESETS)
    worst: dict[str, tuple[float, str]] = {}
    for role in ROLES:
        for stage in STAGES:
            for dtype in DTYPES:
                found = torch.load(tmp_path / f"{role}:{stage}:{dtype}.pt", weights_only=True)
                assert found.keys() == exact[role].keys()
                for preset, gradients in found.items():
                    difference = largest_difference(gradients, exact[role][preset])
                    where = f"{preset}, {role}, ZeRO {stage}"
                    worst[dtype] = max(worst.get(dtype, (0.0, "")), (difference, where))
    for dtype, (difference, where) in worst.items():
        assert difference < TOLERANCES[dtype], (dtype, difference, where)
