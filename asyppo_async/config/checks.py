"""Combinations of settings that contradict each other, each refused with its reason before anything starts."""

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError


def check_config(config: TrainConfig, source: str) -> None:
    """Raise `ConfigError` for the first contradiction between settings of different keys."""
    for wrong, reason in _contradictions(config):
        if wrong:
            raise ConfigError(f"{source}: {reason}")


def _contradictions(config: TrainConfig) -> list[tuple[bool, str]]:
    algorithm, batch, critic, sampling = config.algorithm, config.batch, config.critic, config.sampling
    num_responses = batch.prompts * batch.group_size
    selects_by_std = algorithm.advantage_mask_share > 0 or algorithm.entropy_filter_share > 0
    return [
        (
            sampling.top_p < 1 or sampling.top_k > 0,
            f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: with a truncated behaviour the "
            "trainer must rebuild the kept token set, which this version cannot; use top_p = 1 and top_k = 0",
        ),
        (
            selects_by_std and critic.count < 2,
            "algorithm.advantage_mask_share and entropy_filter_share rank tokens by the disagreement of critics, and "
            f"critic.count is {critic.count}; use two critics or set both shares to 0",
        ),
        (
            critic.count > batch.group_size and critic.data == "group_split" and batch.group_size > 1,
            f"critic.count = {critic.count} exceeds batch.group_size = {batch.group_size}: some critics would get no "
            "response of a group; sample more responses or use fewer critics",
        ),
        (
            algorithm.schedule == "critic_ahead" and config.staleness.max_staleness < 1,
            "algorithm.schedule = 'critic_ahead' spends one version of staleness; "
            f"staleness.max_staleness is {config.staleness.max_staleness}, use at least 1",
        ),
        (
            algorithm.mismatch_low > algorithm.mismatch_high,
            f"algorithm.mismatch_low = {algorithm.mismatch_low} exceeds mismatch_high = {algorithm.mismatch_high}",
        ),
        (
            config.actor.mini_batches > num_responses,
            f"actor.mini_batches = {config.actor.mini_batches} exceeds the {num_responses} responses of a batch",
        ),
        (
            critic.mini_batches > max(1, num_responses // critic.count),
            f"critic.mini_batches = {critic.mini_batches} exceeds the {num_responses // critic.count} responses that "
            "each critic gets of a batch",
        ),
        (
            config.weights.backend == "nccl",
            "weights.backend = 'nccl' needs GPUs on both ends, and this version publishes over gloo only",
        ),
    ]
