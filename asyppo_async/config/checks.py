"""Combinations of settings that contradict each other, each refused with its reason before anything starts."""

from asyppo_async.config.actor_checks import actor_rules
from asyppo_async.config.learner_checks import Rules, moving, offloading, placing, sizes
from asyppo_async.config.lora_checks import lora_rules
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError

FROM_CRITICS = ("gae", "evpo")
FROM_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
OVER_BEHAVIOUR = ("dis", "dppo")
"""Losses whose ratio is over the behaviour policy by definition."""
OF_RESPONSES = ("gspo", "gepo_expectation")
"""Losses with one advantage a response."""
CUT = ("bootstrap", "egae")
"""Responses at maximum length have no reward of their own."""
WEIGHTING = ("icepop", "tis", "clamp", "importance")


def check_config(config: TrainConfig, source: str) -> None:
    """Raise `ConfigError` for the first contradiction between settings of different keys."""
    for rules in (
        _sampling,
        _critics,
        _critics_data,
        _advantages,
        _losses,
        _selection,
        sizes,
        _weights,
        offloading,
        placing,
        moving,
    ):
        for wrong, reason in rules(config):
            if wrong:
                raise ConfigError(f"{source}: {reason}")


def _sampling(config: TrainConfig) -> Rules:
    sampling = config.sampling
    return [
        (
            (sampling.top_p < 1 or sampling.top_k > 0) and not sampling.kept_tokens,
            f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: with a truncated behaviour the "
            "ratio is off by the mass that was cut, at every token; use top_p = 1 and top_k = 0, or "
            "sampling.kept_tokens = true, which rebuilds the kept set in the trainer",
        ),
        (
            config.algorithm.overlong_cache_tokens > sampling.max_tokens,
            f"algorithm.overlong_cache_tokens = {config.algorithm.overlong_cache_tokens} exceeds sampling.max_tokens = "
            f"{sampling.max_tokens}",
        ),
    ]


def _critics(config: TrainConfig) -> Rules:
    algorithm, critic, selection = config.algorithm, config.critic, config.selection
    selects_by_std = (algorithm.advantage_mask_share > 0 and algorithm.advantage_mask_by == "value_std") or (
        algorithm.entropy_filter_share > 0 and algorithm.entropy_filter_by == "value_std"
    )
    needs_critics = algorithm.estimator in FROM_CRITICS
    reads_critics = needs_critics or selection.prompts in ("daps", "pcl") or selects_by_std
    return [
        (
            needs_critics and critic.count == 0,
            f"algorithm.estimator = {algorithm.estimator!r} takes its advantages from critics, and critic.count is 0; "
            "use at least one critic, or an estimator without critics (grpo, rloo, ...)",
        ),
        (
            selection.prompts in ("daps", "pcl") and critic.count == 0,
            f"selection.prompts = {selection.prompts!r} asks the critics for V(s_0), and critic.count is 0",
        ),
        (
            selects_by_std and critic.count < 2,
            "algorithm.advantage_mask_share and entropy_filter_share rank tokens by the disagreement of critics, and "
            f"critic.count is {critic.count}; use two critics or set both shares to 0",
        ),
        (
            critic.count > 0 and not reads_critics,
            f"algorithm.estimator = {algorithm.estimator!r} does not read the {critic.count} critics, and nothing else "
            "does; use critic.count = 0",
        ),
        (
            critic.each != () and len(critic.each) != critic.count,
            f"critic.each describes {len(critic.each)} critics, and critic.count is {critic.count}: one entry for each",
        ),
        (
            len(critic.each) == critic.count
            and any(critic.of(index).model is None for index in range(critic.count)),
            "critic.model is missing, and critic.count is not 0",
        ),
        (
            critic.count > 0 and critic.model is None and not critic.each,
            "critic.model is missing, and critic.count is not 0",
        ),
    ]


def _critics_data(config: TrainConfig) -> Rules:
    algorithm, critic = config.algorithm, config.critic
    exclusive = critic.count >= 2 and critic.data != "shared" and critic.small_groups == "rotate"
    return [
        (
            critic.count > config.batch.group_size
            and critic.data == "group_split"
            and config.batch.group_size > 1,
            f"critic.count = {critic.count} exceeds batch.group_size = {config.batch.group_size}: some critics would "
            "get no response of a group; sample more responses or use fewer critics",
        ),
        (
            algorithm.schedule == "critic_ahead"
            and (config.staleness.max_staleness < 1 or critic.count == 0),
            "algorithm.schedule = 'critic_ahead' spends one version of staleness on training critics; "
            f"staleness.max_staleness is {config.staleness.max_staleness}, use at least 1, and critic.count is "
            f"{critic.count}",
        ),
        (
            algorithm.schedule == "pre" and algorithm.advantage_values in ("post", "crossfit"),
            f"algorithm.advantage_values = {algorithm.advantage_values!r} needs critics that have trained on the "
            "batch, and algorithm.schedule = 'pre' trains them beside the actor; use schedule = 'post'",
        ),
        (
            algorithm.advantage_values == "crossfit" and not exclusive,
            "algorithm.advantage_values = 'crossfit' needs a critic that has not seen the response: at least two "
            "critics with disjoint data (critic.data = 'group_split', critic.small_groups = 'rotate')",
        ),
        (
            algorithm.value_aggregation == "confidence" and not exclusive,
            "algorithm.value_aggregation = 'confidence' measures each critic on responses that it has not seen: at "
            "least two critics with disjoint data",
        ),
        (
            algorithm.value_aggregation != "mean" and algorithm.advantage_values == "crossfit",
            f"algorithm.value_aggregation = {algorithm.value_aggregation!r}: cross-fitted values are always a mean",
        ),
    ]


def _advantages(config: TrainConfig) -> Rules:
    algorithm, group_size = config.algorithm, config.batch.group_size
    return [
        (
            algorithm.estimator in FROM_GROUPS and group_size == 1,
            f"algorithm.estimator = {algorithm.estimator!r} compares the responses of a group, and batch.group_size is "
            "1: every advantage would be 0; sample at least two, or use gae, reinforce_pp, flash_reinforce or spo",
        ),
        (
            algorithm.estimator == "evpo" and algorithm.evpo_mean == "group" and group_size == 1,
            "algorithm.evpo_mean = 'group' needs groups, and batch.group_size is 1; use 'batch'",
        ),
        (
            algorithm.whiten_advantages == "group" and group_size == 1,
            "algorithm.whiten_advantages = 'group' needs groups, and batch.group_size is 1; use 'batch'",
        ),
        (
            algorithm.whiten_advantages != "off" and algorithm.estimator.startswith("reinforce_pp"),
            f"algorithm.estimator = {algorithm.estimator!r} whitens over the batch itself; use "
            "whiten_advantages = 'off'",
        ),
        (
            algorithm.estimator == "evpo"
            and (algorithm.advantage_values or algorithm.schedule) in ("post", "crossfit", "critic_ahead"),
            "algorithm.estimator = 'evpo' judges the critics by values from before they saw the batch; use "
            "algorithm.schedule = 'pre' or algorithm.advantage_values = 'pre'",
        ),
        (
            algorithm.critic_use != "both" and (algorithm.estimator != "gae" or algorithm.truncated in CUT),
            f"algorithm.critic_use = {algorithm.critic_use!r} takes the advantages of 'gae' apart: "
            f"algorithm.estimator is {algorithm.estimator!r}, algorithm.truncated {algorithm.truncated!r}",
        ),
        (
            algorithm.truncated in CUT and algorithm.estimator != "gae",
            f"algorithm.truncated = {algorithm.truncated!r} ends a response with a critic's value, and "
            f"algorithm.estimator is {algorithm.estimator!r}; use 'gae', or 'scored' or 'finished'",
        ),
        (
            algorithm.group_entropy_scaling and group_size == 1,
            "algorithm.group_entropy_scaling needs groups, and batch.group_size is 1",
        ),
    ]


def _losses(config: TrainConfig) -> Rules:
    algorithm = config.algorithm
    over_behaviour = algorithm.loss_reference == "behaviour" or algorithm.loss in OVER_BEHAVIOUR
    return [
        (
            over_behaviour and algorithm.mismatch in WEIGHTING,
            f"algorithm.loss = {algorithm.loss!r} uses the ratio over the behaviour policy and algorithm.mismatch = "
            f"{algorithm.mismatch!r} weighs by proximal / behaviour as well, which counts the mismatch twice; use "
            "'none', 'icepop_mask' or 'kpop', or a loss over the proximal policy",
        ),
        (
            algorithm.loss == "gepo_expectation" and algorithm.mismatch in WEIGHTING,
            "algorithm.loss = 'gepo_expectation' weighs by the behaviour policy's probabilities itself; "
            f"algorithm.mismatch = {algorithm.mismatch!r} would count the mismatch twice",
        ),
        (
            algorithm.loss == "gepo_expectation" and config.batch.group_size == 1,
            "algorithm.loss = 'gepo_expectation' takes an expectation over the group, and batch.group_size is 1",
        ),
        (
            algorithm.loss in OF_RESPONSES and algorithm.estimator in FROM_CRITICS,
            f"algorithm.loss = {algorithm.loss!r} needs one advantage for a whole response, and algorithm.estimator = "
            f"{algorithm.estimator!r} gives one per token; use 'gspo_token' or an estimator without critics",
        ),
        (
            config.actor.reference is not None and algorithm.kl_coefficient == 0,
            f"actor.reference = {str(config.actor.reference)!r} costs memory and a forward, and "
            "algorithm.kl_coefficient is 0; set a coefficient or leave the reference out",
        ),
        (
            algorithm.kl_coefficient > 0
            and algorithm.kl_estimator == "k1"
            and config.actor.reference is None,
            "algorithm.kl_estimator = 'k1' is a cost in the advantages, over a frozen model: set actor.reference "
            "('initial'), or use 'k2' or 'k3' for the divergence from the loss's own reference",
        ),
        (
            algorithm.loss == "aspo" and algorithm.dual_clip is None,
            "algorithm.loss = 'aspo' turns the ratio over and needs a cap for it; set algorithm.dual_clip (3)",
        ),
        (
            algorithm.loss not in ("ppo", "aspo") and algorithm.dual_clip is not None,
            f"algorithm.dual_clip has no meaning for algorithm.loss = {algorithm.loss!r}; leave it out",
        ),
        (
            algorithm.mismatch_low > algorithm.mismatch_high,
            f"algorithm.mismatch_low = {algorithm.mismatch_low} exceeds mismatch_high = {algorithm.mismatch_high}",
        ),
        *(
            (
                gate.low > gate.high,
                f"algorithm.sequence_gates: low = {gate.low} exceeds high = {gate.high} of {gate.kind!r}",
            )
            for gate in algorithm.sequence_gates
        ),
    ]


def _selection(config: TrainConfig) -> Rules:
    selection, group_size = config.selection, config.batch.group_size
    return [
        (
            selection.group_filter != "off" and group_size == 1,
            f"selection.group_filter = {selection.group_filter!r}: a group of one response is always all right or all "
            "wrong; use 'off', or sample at least two",
        ),
        (
            selection.prompts == "greso" and group_size == 1,
            "selection.prompts = 'greso' looks at groups without variance, and batch.group_size is 1",
        ),
        (
            (selection.floor_by_std, selection.prior_by_std, selection.decay_by_std) != (0, 0, 0)
            and (selection.prompts != "daps" or config.critic.count < 2),
            "selection.floor_by_std, prior_by_std and decay_by_std let DAPS follow the disagreement of critics: they "
            "need selection.prompts = 'daps' and two critics; these are "
            f"{selection.prompts!r} and {config.critic.count}",
        ),
        (
            selection.spo_factor_min > selection.spo_factor_max,
            f"selection.spo_factor_min = {selection.spo_factor_min} exceeds spo_factor_max = "
            f"{selection.spo_factor_max}",
        ),
    ]


def _weights(config: TrainConfig) -> Rules:
    weights = config.weights
    return [
        *lora_rules(config),
        *actor_rules(config),
        (
            weights.encoding == "delta" and config.actor.dtype != "bfloat16",
            f'weights.encoding = "delta" with actor.dtype = {config.actor.dtype!r}: nearly every float32 weight '
            "changes at every step, so a delta would be larger than the weights; use bfloat16, or encoding full",
        ),
        (
            weights.encoding == "delta" and weights.way == "direct",
            'weights.encoding = "delta" needs the copy in host memory that weights.way = "direct" does without; use '
            "the way staged or folder, or encoding full",
        ),
        (
            (weights.way == "folder") != bool(weights.folder),
            f"weights.way = {weights.way!r} and weights.folder = {weights.folder!r}: the way folder and a folder "
            "go together; set both or neither",
        ),
        (
            weights.backend == "nccl" and weights.way != "direct",
            f'weights.backend = "nccl" with weights.way = {weights.way!r}: host memory receives over gloo only; use '
            "the way direct, or the backend gloo",
        ),
    ]
