"""What a report shows of a run, section by section."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from asyppo_async.trainer.report.critic_charts import critic_figures
from asyppo_async.trainer.report.figures import heat, lines, points, stacked
from asyppo_async.trainer.report.run_data import RunData, numbers

PHASES = {
    "wait": "waiting for the batch",
    "actor_forward": "actor forward",
    "critic_forward": "critic forward",
    "critic_train": "critic training",
    "critic_scoring": "scoring candidates",
    "arithmetic": "arithmetic",
    "actor_train": "actor training",
    "publication": "publication",
}
PUBLICATION = ("session", "stage", "pause", "load", "resume", "probe", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    note: str
    """One sentence: what it is and what to look for."""
    figure: go.Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    charts: tuple[Chart, ...]


def sections(run: RunData) -> list[Section]:
    """Every section that the run has something for."""
    made = {
        "Learning": _learning(run),
        "Staleness": _staleness(run),
        "Ratios and masks": _masks(run),
        "Critics": _critics(run),
        "Engine against trainer": _agreement(run),
        "Time": _time(run),
    }
    found = {title: tuple(chart for chart in charts if chart.figure.data) for title, charts in made.items()}
    return [Section(title=title, charts=charts) for title, charts in found.items() if charts]


def _learning(run: RunData) -> Iterator[Chart]:
    if run.evaluations:
        versions = numbers(run.evaluations, "version")
        yield Chart(
            title="Held-out accuracy",
            note="At temperature 1 and greedy; bars are one standard error over prompts.",
            figure=points(
                versions,
                {
                    "temperature 1": (
                        numbers(run.evaluations, "accuracy"),
                        numbers(run.evaluations, "accuracy_standard_error"),
                    ),
                    "greedy": (numbers(run.evaluations, "greedy_accuracy"), [0.0] * len(versions)),
                },
            ),
        )
    yield _lines(run, "Reward", "Mean reward of the batch, in [-1, 1].", {"reward": "reward/mean"})
    yield _lines(
        run,
        "Accuracy and equal groups",
        "Share of right responses in the batch, and of groups that are all right or all wrong.",
        {"accuracy": "reward/accuracy", "groups all equal": "reward/groups_all_equal"},
    )
    yield _lines(run, "Entropy", "Of the policy, nats per token.", {"entropy": "actor/entropy"})
    yield _lines(
        run,
        "Length",
        "Tokens of a response.",
        {"mean": "response/length_mean_tokens", "95th percentile": "response/length_p95_tokens"},
    )
    yield _lines(
        run,
        "Actor update",
        "Gradient norm before clipping, and KL of the proximal policy to the updated one.",
        {"gradient norm": "actor/grad_norm", "KL": "actor/kl_proximal"},
        log=True,
    )


def _staleness(run: RunData) -> Iterator[Chart]:
    for unit in ("tokens", "responses"):
        name = f"staleness_histogram_{unit}"
        columns = [row[name] for row in run.steps if isinstance(row.get(name), list)]
        if len(columns) == len(run.steps) and columns:
            yield Chart(
                title=f"Age of {unit}",
                note="Share of the batch by age in versions"
                + (", of the oldest token." if unit == "responses" else "."),
                figure=heat(run.versions, columns, "versions"),  # type: ignore[arg-type]
            )
    yield _lines(
        run,
        "Mixed versions",
        "Share of responses that more than one version sampled.",
        {"mixed": "staleness/mixed_version_share"},
        zero=True,
    )
    yield _lines(
        run,
        "Queue",
        "Groups that wait for a step, and groups in flight.",
        {"queued": "queue/groups", "in flight": "queue/in_flight_groups"},
        zero=True,
    )


def _masks(run: RunData) -> Iterator[Chart]:
    yield _lines(
        run,
        "Proximal over behaviour",
        "The ratio that the mismatch correction sees; far from 1 is stale or wrong.",
        {"mean": "mismatch/ratio_mean", "largest": "mismatch/ratio_max", "smallest": "mismatch/ratio_min"},
        log=True,
    )
    yield _lines(
        run,
        "Effective sample size",
        "Share of the tokens that would give the same precision with ratio 1; a fall announces a collapse.",
        {
            "all": "mismatch/effective_sample_size",
            "fresh": "mismatch_fresh/effective_sample_size",
            "older": "mismatch_older/effective_sample_size",
        },
        zero=True,
    )
    yield Chart(
        title="What became of the tokens",
        note="Tokens of the batch by class; only trained tokens have weight in the policy gradient.",
        figure=_stacked(
            run, {name: f"tokens/{name}" for name in ("trained", "stale", "rejected", "filtered")}
        ),
    )
    yield _lines(
        run,
        "Masked, by cause",
        "Share of tokens that each mask took out.",
        {
            "ratio below": "mismatch/below_share",
            "ratio above": "mismatch/above_share",
            "advantage masked": "value_std/advantage_masked_share",
            "entropy filtered": "value_std/entropy_filtered_share",
        },
        zero=True,
    )
    yield _lines(
        run,
        "Clipped",
        "Share of tokens outside the clip range in an update, and in the last one of the step.",
        {
            "low": "actor/clip_fraction_low",
            "high": "actor/clip_fraction_high",
            "last update": "actor/clip_fraction_last",
        },
    )


def _critics(run: RunData) -> Iterator[Chart]:
    for kind, words in (
        (
            "explained_variance_used",
            "Explained variance of the values that the advantages use; 0: knows nothing.",
        ),
        ("bias_used", "Mean of value minus return."),
        ("loss", "Value loss in training."),
        ("grad_norm", "Gradient norm before clipping."),
    ):
        yield _lines(
            run,
            f"Critics: {kind.replace('_', ' ').removesuffix(' used')}",
            words,
            {name.split("/")[0].replace("_", " "): name for name in run.names("critic_", f"/{kind}")},
        )
    for kind, words in (
        ("grad_norm", "Gradient norms before clipping; clipping scales both parts alike."),
        ("norm", "Norms of the weights after the step."),
    ):
        yield _lines(
            run,
            f"Critics: {kind.replace('_', ' ')} of head and backbone",
            words,
            {
                f"{name.split('/')[0].replace('_', ' ')} {part}": name
                for part in ("head", "backbone")
                for name in run.names("critic_", f"/{part}_{kind}")
            },
            log=True,
        )
    yield _lines(
        run,
        "Disagreement",
        "Quantiles of the critics' standard deviation over the tokens of the batch.",
        {name.split("/")[1]: name for name in run.names("value_std/p")},
    )
    for title, note, figure in critic_figures(run):
        yield Chart(title=title, note=note, figure=figure)
    yield _lines(
        run,
        "Value pretraining",
        "Value loss against 1/2 Var(G), what a critic loses that knows the mean return alone: the range of values is "
        "learned down to it, knowledge of the responses below it.",
        {
            name.split("/")[0].replace("_", " "): name
            for constant in run.names("pretrain/constant_loss")
            for name in (*run.names("critic_", "/loss"), constant)
        },
    )


def _agreement(run: RunData) -> Iterator[Chart]:
    yield _lines(
        run,
        "Fresh gap",
        "Mean |engine - trainer| in nats, on tokens sampled right after each publication, and the bound that passes.",
        {
            "sampled": "probe/fresh_gap_mean_nats",
            "prefill": "probe/fixed_gap_mean_nats",
            "bound": "probe/bound_nats",
        },
        log=True,
    )
    ages = run.names("mismatch/gap_mean_staleness_")
    yield _lines(
        run,
        "Gap by age",
        "The same on the tokens of the batch: older tokens are of older weights.",
        {f"age {name.rsplit('_', 1)[1]}": name for name in ages},
        log=True,
    )


def _time(run: RunData) -> Iterator[Chart]:
    yield Chart(
        title="A step, by phase",
        note="Seconds; phases that ran side by side are both counted.",
        figure=_stacked(run, {words: f"time/{phase}_s" for phase, words in PHASES.items()}),
    )
    yield Chart(
        title="A publication, by phase",
        note="Seconds; servers stand still in pause and load, and withhold tokens until the probe has passed.",
        figure=_stacked(run, {phase: f"weights/{phase}_s" for phase in PUBLICATION}),
    )
    yield _lines(
        run,
        "Step time",
        "Seconds of a whole step, publication included.",
        {"step": "time/step_s"},
        zero=True,
    )
    yield _lines(
        run,
        "Event loop",
        "Longest delay of the coordinator's loop within a step, seconds.",
        {"lag": "loop/lag_max_s"},
        log=True,
    )


def _lines(
    run: RunData, title: str, note: str, metrics: Mapping[str, str], *, log: bool = False, zero: bool = False
) -> Chart:
    series = {name: run.column(metric) for name, metric in metrics.items()}
    return Chart(title=title, note=note, figure=lines(run.versions, series, log=log, zero=zero))


def _stacked(run: RunData, metrics: Mapping[str, str]) -> go.Figure:
    series = {name: run.column(metric) for name, metric in metrics.items()}
    return stacked(run.versions, {name: values for name, values in series.items() if _any(values)})


def _any(values: Sequence[float]) -> bool:
    return any(value > 0 for value in values)
