"""All studies by name: their arms and how many steps each arm takes."""

from benchmarks.trends.arms import Study, ladder_arms, lambda_arms, mismatch_arms, staleness_arms
from benchmarks.trends.critic_arms import daps_arms, orthogonal_arms, pretraining_arms, single_arms

STUDIES = {
    "ladder": Study(arms=ladder_arms(), num_steps=60),
    "staleness": Study(arms=(*staleness_arms(), *mismatch_arms()), num_steps=80),
    "lambda": Study(arms=lambda_arms(), num_steps=80),
    "daps": Study(arms=daps_arms(), num_steps=80),
    "best_of": Study(arms=(), num_steps=0),
    "pretraining": Study(arms=pretraining_arms(), num_steps=80),
    "coverage": Study(arms=(), num_steps=0),
    "single": Study(arms=single_arms(), num_steps=160),
    "orthogonal": Study(arms=orthogonal_arms(), num_steps=100),
}
