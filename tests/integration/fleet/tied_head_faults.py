"""Run as a program: what a publication's probe says with and without the cure of the tied head.

One engine, in this process. Prints one JSON line: the mean gap (nats) of the fixed sequences against transformers
before any update, after an update whose cure is switched off in the worker, and after one with it.
"""

import asyncio
import json
import os
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.engine.protocol import StagedWeights, WeightsLabel
from asyppo_async.fleet.engine.vllm_engine import VllmEngine
from asyppo_async.fleet.engine.vllm_options import engine_args, prepare_environment
from asyppo_async.weights.manifest import manifest_of_checkpoint
from asyppo_async.weights.probe import compare, fixed_sequences


class Faults:
    """Mixed into vLLM's worker."""

    def switch_cure(self, on: bool) -> None:
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        if on:
            transfer.__dict__.pop("repack_embeddings", None)
        else:
            transfer.repack_embeddings = lambda: None


def staged(folder: Path, model: PreTrainedModel) -> StagedWeights:
    manifest = manifest_of_checkpoint(folder, "float32")
    descriptor = os.memfd_create("weights")
    os.ftruncate(descriptor, manifest.num_bytes)
    state = model.state_dict()
    checksums = []
    for spec, offset in zip(manifest.tensors, manifest.offsets, strict=True):
        data = state[spec.name].contiguous().numpy().tobytes()
        os.pwrite(descriptor, data, offset)
        checksums.append(zlib.crc32(data))
    return StagedWeights(
        process_id=os.getpid(),
        file_descriptor=descriptor,
        num_bytes=manifest.num_bytes,
        manifest=manifest,
        checksums=tuple(checksums),
    )


async def gap(engine: VllmEngine, model: PreTrainedModel, name: str) -> float:
    mine, theirs = [], []
    for index, sequence in enumerate(fixed_sequences(0, 160, 128, 512)):
        mine.append(await engine.score(sequence, request_id=f"{name}-{index}", cache_salt=name))
        ids = torch.from_numpy(sequence.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        theirs.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return compare(np.concatenate(mine), np.concatenate(theirs)).mean


async def main(folder: Path) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    config = ServeConfig(model=folder, max_num_seqs=4, num_threads=1, max_model_len=512)
    prepare_environment(config)
    args = replace(engine_args(config), worker_extension_cls=f"{Path(__file__).stem}.Faults")
    llm = AsyncLLM.from_engine_args(args)
    engine = VllmEngine(llm, config)
    try:
        await engine.warm_up()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        gaps = {"start": await gap(engine, model, "start")}
        for load, cured in enumerate((False, True), start=1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            await llm.collective_rpc("switch_cure", args=(cured,))
            weights = staged(folder, model)
            await engine.verify_staged(weights)
            await engine.pause("recompute")
            await engine.load_staged(weights, WeightsLabel(version=load, load=load))
            await engine.resume()
            name = "cured" if cured else "uncured"
            gaps[name] = await gap(engine, model, name)
        print(json.dumps(gaps), flush=True)
    finally:
        await engine.stop_listening()
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
