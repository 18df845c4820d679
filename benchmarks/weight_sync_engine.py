"""The pause of a staged load against vLLM's own load of the same tensors; run by `weight_sync.py`."""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.engine.protocol import StagedWeights, WeightsLabel
from asyppo_async.fleet.engine.vllm_engine import VllmEngine
from asyppo_async.fleet.engine.vllm_meter import KvMeter
from asyppo_async.fleet.engine.vllm_options import engine_args, prepare_environment
from asyppo_async.fleet.host_memory import HostMemory
from asyppo_async.fleet.update_state import RunIdentity
from asyppo_async.weights.manifest import Manifest, manifest_of_checkpoint

MODEL = {
    "vocab_size": 16_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 11,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""125 M parameters: 500 MB in float32."""
RUN = RunIdentity(run_id="benchmark", incarnation=0)


class OwnLoad:
    """Mixed into vLLM's worker."""

    def own_load(self) -> float:
        """Seconds that vLLM's reload lifecycle takes with tensors that lie in this process's memory."""
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415  only in the worker
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        staged = transfer._staged
        if staged is not None:
            self.tensors = {
                name: tensor.clone() for name, tensor in staged.tensors(frozenset(staged_names(staged)))
            }
        started_s = time.monotonic()
        initialize_layerwise_reload(transfer.model)
        transfer.model.load_weights(iter(self.tensors.items()))
        finalize_layerwise_reload(transfer.model, transfer.model_config)
        return time.monotonic() - started_s


def staged_names(staged: object) -> list[str]:
    return [spec.name for spec in staged._manifest.tensors]  # type: ignore[attr-defined]


def staged(manifest: Manifest, model: LlamaForCausalLM) -> StagedWeights:
    memory = HostMemory(manifest)
    state = model.state_dict()
    tensors = [(spec.name, state[spec.name]) for spec in memory.copy.manifest.tensors]
    with memory.written_by(RUN) as copy:
        copy.hold(0, tensors)
    return memory.staged(copy.checksums)


async def measure(folder: Path, repeats: int) -> dict[str, float]:
    config = ServeConfig(model=folder, max_num_seqs=8, num_threads=1)
    prepare_environment(config)
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415  after `prepare_environment` has set its variables

    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    manifest = manifest_of_checkpoint(folder, "float32")
    weights = staged(manifest, model)
    del model
    args = engine_args(config)
    args.worker_extension_cls = f"{Path(__file__).stem}.OwnLoad"
    llm = AsyncLLM.from_engine_args(args)
    engine = VllmEngine(llm, config, KvMeter())
    await engine.warm_up()
    pauses, loads = [], []
    for load in range(1, repeats + 2):
        await engine.verify_staged(weights)
        loads += await llm.collective_rpc("own_load")
        await engine.verify_staged(weights)
        started_s = time.monotonic()
        await engine.pause("keep")
        await engine.load_staged(weights, WeightsLabel(version=load, load=load))
        await engine.resume()
        pauses.append(time.monotonic() - started_s)
    await engine.stop_listening()
    engine.shutdown()
    pause_s, load_s = min(pauses[1:]), min(loads[1:])
    print(
        f"{manifest.num_bytes / 1e6:.0f} MB: pause {pause_s:.3f} s (median {statistics.median(pauses[1:]):.3f}), "
        f"vLLM's own load {load_s:.3f} s (median {statistics.median(loads[1:]):.3f})"
    )
    return {"pause_over_load_500mb": round(pause_s / load_s, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(asyncio.run(measure(Path(name), arguments.repeats))))


if __name__ == "__main__":
    main()
