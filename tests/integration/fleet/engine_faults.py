"""Run as a program: what a probe says of one engine after faults that only its worker can have.

Prints one JSON line: the mean gap (nats) of fixed sequences against transformers at the start; after an update with
the cure of the tied head switched off, and with it; after an update that was begun and aborted; and after a repeat of
one that broke between the q and the k projection of a layer. Then of responses that were put back, all their KV gone,
for a sequence of full length, and how many of them had ended when it was scored.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import WeightSyncError
from asyppo_async.fleet.engine.protocol import Delta, SampleRequest, StagedWeights, WeightsLabel
from asyppo_async.fleet.engine.vllm_engine import VllmEngine
from asyppo_async.fleet.engine.vllm_meter import KvMeter
from asyppo_async.fleet.engine.vllm_options import engine_args, prepare_environment
from asyppo_async.fleet.host_memory import HostMemory
from asyppo_async.fleet.update_state import RunIdentity
from asyppo_async.types import Float32Array, Int32Array, SamplingParams
from asyppo_async.weights.manifest import manifest_of_checkpoint
from asyppo_async.weights.probe import compare, fixed_sequences

RUN = RunIdentity(run_id="faults", incarnation=0)
MAX_MODEL_LEN = 512
KV_GIB = 6 * 128 * 4 * 2 * 2 * 32 * 4 / 2**30
"""Blocks, tokens in one, layers, keys and values, heads, head size, bytes. One block is vLLM's own."""


class Faults:
    """Mixed into vLLM's worker."""

    def switch_cure(self, on: bool) -> None:
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        if on:
            transfer.__dict__.pop("repack_embeddings", None)
        else:
            transfer.repack_embeddings = lambda: None

    def break_load(self, num_tensors: int) -> None:
        """The next load raises after so many tensors."""
        model = self.weight_transfer_engine.model  # type: ignore[attr-defined]

        def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            del model.load_weights
            model.load_weights(itertools.islice(tensors, num_tensors))
            raise RuntimeError("the load broke")

        model.load_weights = load_weights


def staged(folder: Path, model: PreTrainedModel) -> StagedWeights:
    """In memory that nobody closes: the engine maps it when it loads."""
    memory = HostMemory(manifest_of_checkpoint(folder, "float32"))
    state = model.state_dict()
    tensors = [(spec.name, state[spec.name]) for spec in memory.copy.manifest.tensors]
    with memory.written_by(RUN) as copy:
        copy.hold(0, tensors)
    return memory.staged(copy.checksums)


async def gap(engine: VllmEngine, model: PreTrainedModel, name: str) -> float:
    mine, theirs = [], []
    for index, sequence in enumerate(fixed_sequences(0, 160, 128, MAX_MODEL_LEN)):
        mine.append(await engine.score(sequence, request_id=f"{name}-{index}", cache_salt=name))
        theirs.append(logprobs_of(model, sequence))
    return compare(np.concatenate(mine), np.concatenate(theirs)).mean


def logprobs_of(model: PreTrainedModel, sequence: Int32Array) -> Float32Array:
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()


async def put_back(engine: VllmEngine, model: PreTrainedModel) -> tuple[float, int]:
    """Three responses need more KV than there is, and the sequence four fifths of it."""
    prompt = np.arange(20, dtype=np.int32)
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=490, stop_token_ids=()
    )
    responses: list[list[Delta]] = [[], [], []]
    begun = [asyncio.Event() for _ in responses]

    async def respond(index: int) -> None:
        request = SampleRequest(
            id=f"put-back-{index}", prompt_token_ids=prompt, sampling=sampling, cache_salt=str(index)
        )
        async for delta in engine.generate(request):
            responses[index].append(delta)
            begun[index].set()

    responding = [asyncio.create_task(respond(index)) for index in range(3)]
    for each in begun:
        await each.wait()
    sequence = np.arange(MAX_MODEL_LEN - 1, dtype=np.int32) % 160
    scoring = asyncio.create_task(engine.score(sequence, request_id="long", cache_salt="long"))
    await asyncio.sleep(0.01)
    await engine.make_room()
    mine, theirs = [await scoring], [logprobs_of(model, sequence)]
    num_ended = sum(task.done() for task in responding)
    await asyncio.gather(*responding)
    for deltas in responses:
        mine.append(np.concatenate([delta.logprobs for delta in deltas]))
        whole = np.concatenate([prompt, *(delta.token_ids for delta in deltas)])
        theirs.append(logprobs_of(model, whole)[len(prompt) - 1 :])
    return compare(np.concatenate(mine), np.concatenate(theirs)).mean, num_ended


def scale(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


async def update(engine: VllmEngine, weights: StagedWeights, load: int) -> None:
    await engine.verify_staged(weights)
    await engine.pause("recompute")
    await engine.load_staged(weights, WeightsLabel(version=load, load=load))
    await engine.resume()


async def main(folder: Path) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    config = ServeConfig(
        model=folder, max_num_seqs=4, num_threads=1, max_model_len=MAX_MODEL_LEN, kv_cache_gib=KV_GIB
    )
    prepare_environment(config)
    args = replace(engine_args(config), worker_extension_cls=f"{Path(__file__).stem}.Faults")
    llm = AsyncLLM.from_engine_args(args)
    engine = VllmEngine(llm, config, KvMeter())
    try:
        await engine.warm_up()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        gaps = {"start": await gap(engine, model, "start")}
        for load, cured in enumerate((False, True), start=1):
            scale(model)
            await llm.collective_rpc("switch_cure", args=(cured,))
            await update(engine, staged(folder, model), load)
            name = "cured" if cured else "uncured"
            gaps[name] = await gap(engine, model, name)

        await engine.pause("recompute")
        await llm.start_weight_update()
        try:
            await llm.update_weights(WeightTransferUpdateRequest(update_info={"abort": "test"}))
        except Exception as error:
            assert "the update was aborted: test" in str(error), error
        await engine.resume()
        gaps["aborted"] = await gap(engine, model, "aborted")

        scale(model)
        weights = staged(folder, model)
        names = [spec.name for spec in weights.manifest.tensors]
        between = names.index("model.layers.1.self_attn.k_proj.weight") + 1
        await llm.collective_rpc("break_load", args=(between,))
        try:
            await update(engine, weights, 3)
        except WeightSyncError as error:
            assert "the load broke" in str(error), error
            gaps["broken"] = float("nan")
        await engine.resume()
        await update(engine, weights, 4)
        gaps["repeated"] = await gap(engine, model, "repeated")
        gaps["put back"], gaps["ended"] = await put_back(engine, model)
        print(json.dumps(gaps), flush=True)
    finally:
        await engine.stop_listening()
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
