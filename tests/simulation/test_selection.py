"""The samplers that choose, over the real core: trainings follow the acceptance, all candidates are listed."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.trainer.coordinator.batch import batch_of
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.draws import Consideration, TokenUse
from asyppo_async.trainer.coordinator.order import Chosen
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.selection import open_selection
from asyppo_async.trainer.run_core import decision_settings
from tests.unit.coordinator.worked_batch import make_group

NUM_PROMPTS = 10
SUCCESS_RATES = [index / (NUM_PROMPTS - 1) for index in range(NUM_PROMPTS)]
LEAST_ACCEPTANCE = 0.2
NUM_STEPS = 400
CHI_SQUARE_99_9 = 27.88
"""For 9 degrees of freedom (table)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    core: DecisionCore
    listed: list[Consideration]
    trainings: list[float]
    """By prompt, as the ledger's fates have it."""

    def per_prompt(self, weight: dict[bool, float] | None = None) -> list[float]:
        """Sum over the listed candidates of `weight[accepted]`, or of their acceptance."""
        sums = [0.0] * NUM_PROMPTS
        for entry in self.listed:
            candidate = entry.candidate
            sums[int(candidate.prompt_id[1:])] += (
                candidate.acceptance if weight is None else weight[candidate.accepted]
            )
        return sums


def train(prompts: str, *overrides: str) -> Trained:
    """Responses are right at fixed rates, groups finish in random order, the critics know the rates; all is trained."""
    config = config_from_tree(
        {"preset": "s3ac", "actor": {"model": "a", "mini_batches": 1}, "critic": {"model": "c"}},
        [
            f"selection.prompts={prompts}",
            f"run.num_steps={NUM_STEPS}",
            "batch.prompts=8",
            "batch.group_size=4",
            "critic.mini_batches=1",
            "staleness.max_staleness=2",
            "staleness.lead=saturated",
            *overrides,
        ],
    )
    table = PromptTable(config.selection)
    sampler = open_selection(config, [f"p{index}" for index in range(NUM_PROMPTS)], table)
    assert sampler is not None
    sampler.score({f"p{index}": 2 * rate - 1 for index, rate in enumerate(SUCCESS_RATES)})
    core = DecisionCore(settings=decision_settings(config), sampler=sampler, debug=True)
    rng = random.Random(4)
    listed: list[Consideration] = []
    trainings = [0.0] * NUM_PROMPTS
    in_flight = []
    now_s = 0.0
    core.served(0)
    while not core.finished:
        now_s += 1
        in_flight += core.admit(now_s)
        if in_flight:
            draw = in_flight.pop(rng.randrange(len(in_flight)))
            version = draw.admission_version
            core.finish(
                draw, num_members=4, num_tokens=4, oldest_version=version, newest_version=version, now_s=now_s
            )
        batch = core.choose_batch(now_s)
        if not isinstance(batch, Chosen):
            continue
        core.begin_step(now_s)
        groups = []
        for chosen in batch.draws:
            index = int(chosen.draw.prompt_id[1:])
            right = [rng.random() < SUCCESS_RATES[index] for _ in range(4)]
            groups.append(make_group(index, [1] * 4, [1.0 if one else -1.0 for one in right]))
            sampler.record(groups[-1])
        if prompts == "spo":
            table.take(batch_of(batch.step, groups, config))
        sampler.end_step(1)
        report = core.end_step(now_s, TokenUse(trained=batch.num_tokens, stale=0, rejected=0))
        core.served(core.version)
        listed += report.news.considered
        for fate in report.news.fates:
            assert fate.outcome == "trained"
            trainings[int(fate.draw.prompt_id[1:])] += 1
    listed += core.close(now_s).considered
    return Trained(core=core, listed=listed, trainings=trainings)


def chi_square(observed: list[float], weights: list[float]) -> float:
    expected = [sum(observed) * weight / sum(weights) for weight in weights]
    return sum((count - mean) ** 2 / mean for count, mean in zip(observed, expected, strict=True) if mean > 0)


@pytest.mark.parametrize("prompts", ["daps", "spo", "pcl", "greso"])
def test_candidates_when_a_sampler_selects_are_all_listed_and_follow_their_acceptance(prompts: str) -> None:
    run = train(prompts, "selection.uniform_steps=0", "selection.ramp_steps=0")
    counts = run.core.counts()
    assert sum(run.trainings) == counts.trained == counts.issued == 8 * NUM_STEPS
    assert [entry.candidate.number for entry in run.listed] == list(range(counts.considered))
    accepted = [entry for entry in run.listed if entry.draw_id is not None]
    assert [entry.draw_id for entry in accepted] == list(range(counts.issued))
    assert all(entry.candidate.accepted for entry in accepted)
    assert counts.skipped == counts.considered - counts.issued > 0
    assert run.per_prompt({True: 1.0, False: 0.0}) == run.trainings
    assert chi_square(run.trainings, run.per_prompt()) < CHI_SQUARE_99_9
    assert chi_square(run.trainings, [1.0] * NUM_PROMPTS) > 10 * CHI_SQUARE_99_9


def test_trainings_when_daps_knows_the_success_rates_follow_its_formula() -> None:
    """`algorithms.md` section 9: a = a_min + (1 - a_min) * 4 p (1 - p), with the true rates; not uniform."""
    run = train(
        "daps",
        "selection.uniform_steps=0",
        "selection.ramp_steps=0",
        "selection.decay=1",
        f"selection.minimum_acceptance={LEAST_ACCEPTANCE}",
    )
    weights = [LEAST_ACCEPTANCE + (1 - LEAST_ACCEPTANCE) * 4 * rate * (1 - rate) for rate in SUCCESS_RATES]
    assert chi_square(run.trainings, weights) < CHI_SQUARE_99_9
    assert chi_square(run.trainings, [1.0] * NUM_PROMPTS) > 10 * CHI_SQUARE_99_9
    last = run.listed[-500:]
    for entry in last:
        rate = SUCCESS_RATES[int(entry.candidate.prompt_id[1:])]
        assert entry.candidate.success_estimate == pytest.approx(rate, abs=0.06)
    share = run.core.counts().issued / run.core.counts().considered
    assert share == pytest.approx(sum(weights) / NUM_PROMPTS, abs=0.03)


def test_candidates_when_what_a_method_says_of_them_is_compared_have_their_own_estimate() -> None:
    """PCL takes a candidate for certain or not at all; GRESO has no opinion about success."""
    pcl, greso, spo = (train(prompts).listed for prompts in ("pcl", "greso", "spo"))
    assert {entry.candidate.acceptance for entry in pcl} == {0.0, 1.0}
    for entry in pcl:
        rate = SUCCESS_RATES[int(entry.candidate.prompt_id[1:])]
        assert entry.candidate.success_estimate == pytest.approx(rate)
    assert {entry.candidate.success_estimate for entry in greso} == {None}
    assert Counter(entry.candidate.acceptance == 1.0 for entry in greso)[False] > 100, (
        "runs are skipped by lot"
    )
    first = spo[0].candidate
    assert (first.success_estimate, first.acceptance) == (0.5, pytest.approx(1.0))
