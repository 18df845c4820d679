"""How vLLM is set up: its environment, its engine arguments, and one request's parameters, every field explicit."""

import os
import secrets
from typing import Any

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError
from asyppo_async.fleet.engine.vllm_adapters import NUM_PLACES
from asyppo_async.fleet.engine.vllm_plugin import BACKEND, check_enabled
from asyppo_async.types import SamplingParams
from asyppo_async.weights.adapter import adapted_layers
from asyppo_async.weights.manifest import manifest_of_checkpoint

TESTED_VERSION = "0.32"

_GIB = 2**30


def prepare_environment(config: ServeConfig) -> None:
    """Set what vLLM reads from the environment; must run before vLLM is imported.

    Raises:
        ConfigError: the environment disables our plugin, or there are fewer cores than workers need.
    """
    check_enabled()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork under a running gRPC server can dead-lock
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # No model code or configuration is fetched: what is served is the folder that was named.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if config.num_workers > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _binding(config))
    elif config.num_threads > 0:
        # Not bound: several servers and a trainer on one machine would all be bound to the first cores.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)


def _binding(config: ServeConfig) -> str:
    cores = sorted(os.sched_getaffinity(0))
    workers = config.num_workers
    each = config.num_threads or len(cores) // workers
    if each < 1 or each * workers > len(cores):
        raise ConfigError(
            f"tensor_parallel_size = {config.tensor_parallel_size} x data_parallel_size = {config.data_parallel_size} "
            f"with num_threads = {config.num_threads} needs more than the {len(cores)} cores that this process may use"
        )
    starts = range(0, each * workers, each)
    return "|".join(",".join(str(core) for core in cores[start : start + each]) for start in starts)


def check_version(found: str) -> None:
    """Raise `ConfigError` for a vLLM that this adapter was not tested with: its interface changes at every release."""
    if not found.startswith(f"{TESTED_VERSION}."):
        raise ConfigError(f"vLLM {found} is installed and this server is written for {TESTED_VERSION}.*")


def engine_args(config: ServeConfig) -> Any:
    """vLLM's arguments for this server.

    Raises:
        ConfigError: another version of vLLM is installed than this adapter is written for.
    """
    import vllm
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    check_version(str(vllm.__version__))
    on_cpu = current_platform.is_cpu()
    if not on_cpu:
        check_devices(config, current_platform.device_count())
    return AsyncEngineArgs(
        model=str(config.model),
        skip_tokenizer_init=True,  # token ids in, token ids out
        trust_remote_code=False,
        dtype=config.dtype,
        hf_overrides={"head_dtype": "float32"} if config.float32_head else {},
        seed=secrets.randbelow(
            2**31
        ),  # differs per server and per start, or replicas would repeat each other
        max_model_len=config.max_model_len or -1,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
        distributed_executor_backend="mp",
        **memory_arguments(config, on_cpu=on_cpu),
        **adapter_arguments(config),
        enable_prefix_caching=True,
        enforce_eager=on_cpu,
        generation_config="vllm",  # the model's own generation_config.json has no say
        logprobs_mode="processed_logprobs",
        max_logprobs=max(1, config.max_kept_tokens),
        stream_interval=config.stream_interval,
        scheduling_policy="priority",  # a probe goes before what waits; among the rest first come, first served
        disable_log_stats=False,  # how full the KV cache is, and vLLM's own metrics
        use_tqdm_on_load=False,
        enable_log_requests=False,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
    )


def check_devices(config: ServeConfig, num_devices: int) -> None:
    """Raise `ConfigError` where there are fewer devices than workers."""
    if config.num_workers > num_devices:
        raise ConfigError(
            f"tensor_parallel_size = {config.tensor_parallel_size} x data_parallel_size = {config.data_parallel_size} "
            f"needs {config.num_workers} devices of this machine, and {num_devices} can be seen"
        )


def memory_arguments(config: ServeConfig, *, on_cpu: bool) -> dict[str, Any]:
    """A CPU engine is told the size of its KV cache; one on GPUs measures what its share leaves beside the weights."""
    if on_cpu:
        return {"kv_cache_memory_bytes": int(config.kv_cache_gib * _GIB)}
    return {"gpu_memory_utilization": config.gpu_memory_utilization}


def adapter_arguments(config: ServeConfig) -> dict[str, Any]:
    """Of an engine whose versions are adapters."""
    if not config.enable_lora:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": config.max_lora_rank,
        "max_loras": NUM_PLACES,
        "max_cpu_loras": NUM_PLACES,
        # Not the head: on a CPU the engine dies when a prompt's log-probs pass through a head with adapters.
        "lora_target_modules": adapted_layers(manifest_of_checkpoint(config.model, config.dtype)),
    }


def request_params(sampling: SamplingParams, max_tokens: int, *, return_kept_tokens: bool = False) -> Any:
    """One sample's parameters. No seed: the CPU worker crashes when a seeded request is recomputed."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=None,
        stop=None,
        stop_token_ids=list(sampling.stop_token_ids),
        bad_words=None,
        logit_bias=None,
        allowed_token_ids=None,
        ignore_eos=True,  # only the ids that were sent end a response
        min_tokens=sampling.min_tokens,
        max_tokens=max_tokens,
        # In processed mode the most likely `top_k` are all that top-k can have kept.
        logprobs=sampling.top_k if return_kept_tokens else 0,
        prompt_logprobs=None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def score_params() -> Any:
    """Log-probs of a prompt's tokens; always raw at temperature 1, whatever the log-prob mode."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        n=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=1,
        ignore_eos=True,
        prompt_logprobs=0,
        flat_logprobs=False,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
