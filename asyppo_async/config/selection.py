"""Which prompts are rolled out, and what becomes of groups that teach nothing."""

from typing import Literal

from pydantic import Field

from asyppo_async.config.base import Section


class SelectionSection(Section):
    prompts: Literal["epochs", "daps", "spo", "pcl", "greso"] = "epochs"
    """Every prompt once an epoch; or by critic and history (DAPS, S3AC), by the uncertainty of a running value (SPO),
    nearest to a target value (PCL), or without prompts that kept being all right or all wrong (GRESO)."""
    group_filter: Literal["off", "replace", "mask"] = "off"
    """Groups that are all right or all wrong: train as any other, are thrown away and replaced (DAPO's dynamic
    sampling), or stay in the batch for the critics alone."""
    count_dropped: bool = True
    """History counts responses on arrival, also of groups that are later dropped or filtered; false: trained ones."""

    partial_rewards: Literal["fraction", "binary", "refuse"] = "fraction"
    """DAPS: what a reward R between -1 and 1 counts as: (R + 1) / 2 of a success, none, or the end of the run. A reward
    outside [-1, 1] ends it in any case."""
    minimum_acceptance: float = Field(default=0.1, ge=0, le=1)
    """DAPS's a_min (0.1 to 0.3 in the paper)."""
    prior_trials: float = Field(default=3.0, gt=0)
    """DAPS's n_c: how many outcomes the critics' guess is worth."""
    decay: float = Field(default=0.99, gt=0, le=1)
    """DAPS: of all counts, once a training step and before new outcomes are added."""
    floor_by_std: float = Field(default=0.0, ge=0)
    """DAPS, beyond the paper: c of a_min(s) = a_min + (1 - a_min) min(1, c s), with s the critics' standard deviation
    of V(s_0), at most 1: a prompt on which they disagree is tried although it looks certain."""
    prior_by_std: float = Field(default=0.0, ge=0)
    """Likewise of n_c(s) = n_c / (1 + c s): where critics disagree their guess weighs less against outcomes."""
    decay_by_std: float = Field(default=0.0, ge=0)
    """Likewise of decay(s) = decay^(1 + c s): where critics disagree outcomes are forgotten sooner."""
    uniform_steps: int = Field(default=40, ge=0)
    """DAPS accepts every candidate for so many steps ..."""
    ramp_steps: int = Field(default=80, ge=0)
    """... and turns to its full selection over so many more."""
    schedule_unit: Literal["batch", "gradient_step"] = "batch"
    """What the two above count: training steps, or optimizer steps of the actor."""

    spo_floor: float = Field(default=0.05, gt=0)
    """SPO: added to sqrt(v (1 - v))."""
    spo_half_divergence: float = Field(default=0.06, gt=0)
    """SPO: half of a prompt's history is forgotten when the policy has moved so far (nats a token, summed steps)."""
    spo_factor_min: float = Field(default=0.875, ge=0, lt=1)
    spo_factor_max: float = Field(default=0.96, gt=0, lt=1)

    pcl_target: float = Field(default=0.0, ge=-1, le=1)
    """PCL: value aimed at, on the scale of rewards (0 is one half right)."""
    pcl_candidates: int = Field(default=4, ge=1)
    """PCL: candidates for each prompt that is taken."""

    greso_start: float = Field(default=0.5, gt=0, lt=1)
    """GRESO: first base probability of keeping an easy or a hard prompt."""
    greso_floor: float = Field(default=0.01, gt=0, lt=1)
    greso_target_easy: float = Field(default=0.25 / 3, ge=0, le=1)
    greso_target_hard: float = Field(default=0.5 / 3, ge=0, le=1)
    greso_step: float = Field(default=0.01, ge=0, lt=1)
