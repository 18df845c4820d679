"""The methods as pure functions on packed tensors: no I/O, no configuration, no process groups, no state of
modules.

    layout       packed, alignment, token_classes, aggregation
    advantages   advantages (GAE, targets, length-adaptive lambda), truncation, evpo, group_advantages
    critics      critics (ensemble, split, selection, value loss), critic_data, token_selection, confidence, calibration
    mismatch     mismatch (IcePoP, MIS, TIS, KPop, gates), token_age, routing (R3)
    losses       losses (PPO family), weighted_losses (CISPO, DIS, TOPR, ASPO, DPPO), sequence_losses (GSPO, GEPO),
                 trust_masks (M2PO, OPSM, GEPO), regularisers, logprobs (chunked head), composition
    selection    daps, prompt_values (SPO, PCL), greso, dynamic_sampling, seeded
    measures     metrics, breakdowns, calibration, ratio_counts (percentiles over ranks)

rho = pi_old / mu is the mismatch ratio (proximal over behaviour, a constant of the step), r = pi_theta /
pi_old the ratio of the trust region (it carries the gradient), u = pi_theta / mu = rho r.
"""
