"""What is served of bfloat16 weights that train at a small learning rate."""

from pathlib import Path

import pytest
import torch

from asyppo_async.types import TokenSequences
from asyppo_async.weights.manifest import manifest_of_checkpoint
from asyppo_async.weights.transfer import as_tensor, bytes_of, matched
from tests.unit.worker.learners import actor_request, lost_alone, open_actor, write_small_norms

RATE = 1e-6
NUM_STEPS = 50


@pytest.mark.report("P58")
def test_served_weights_when_the_rate_is_small_then_the_masters_gather_steps_that_alone_would_be_lost(
    sequences: TokenSequences, tmp_path: Path
) -> None:
    folder = write_small_norms(tmp_path / "model")
    manifest = manifest_of_checkpoint(folder, "bfloat16")
    actor = open_actor(folder, dtype="bfloat16", rate=RATE)

    def served() -> dict[str, torch.Tensor]:
        tensors = actor.backend.full_tensors([spec.name for spec in manifest.tensors])
        return {
            spec.name: as_tensor(bytes_of(tensor, spec), spec).clone()
            for spec, _, tensor in matched(manifest, tensors)
        }

    before = served()
    actor.learner.train(actor_request(sequences, [sequences.num_sequences] * NUM_STEPS))
    after = served()
    assert len(actor.backend.gradients) == NUM_STEPS
    with_gradient = {name for name, gradient in actor.backend.gradients[0].items() if bool(gradient.any())}
    assert with_gradient == set(before), "every tensor of this model has a gradient"
    shares = {name: float((after[name] != before[name]).float().mean()) for name in before}
    assert min(shares.values()) > 0, shares
    for name, weights in before.items():
        gathered = (after[name] != weights) & lost_alone(weights, RATE)
        assert int(gathered.sum()) > 0, f"{name} changed only where one step is enough"
