"""CPU seconds and memory of the per-token arithmetic of one batch, in the coordinator, on one thread.

    python benchmarks/arithmetic.py [--asyppo 2048x8000] [--s3ac 4096x16000] [--scale 0.1] [--repeats 1]

What is measured is `decide_tokens`, the requests to actor and critics, and the row of metrics (which is made after the
step and not in the total), on a made-up batch of the given size (the
responses have random lengths whose mean is the given one); not measured are the models. `--scale` cuts the number of
responses. The last line is one JSON object; of each part:

    seconds_per_million      CPU seconds per million response tokens, the best of the repeats
    extra_mb_per_million     peak of the process above what the batch itself takes, MB per million tokens
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.arithmetic import actor_request, critic_requests, decide_tokens
from asyppo_async.trainer.coordinator.batch import batch_of
from asyppo_async.trainer.coordinator.report import step_histograms, step_metrics
from asyppo_async.trainer.coordinator.step import StepResult
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.types import Group, Prompt, Response, Trajectory, VersionRuns

NUM_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Responses of a batch and their mean length."""

    responses: int
    mean_tokens: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        responses, _, tokens = text.partition("x")
        return cls(responses=int(responses), mean_tokens=int(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--asyppo", type=Shape.parse, default=Shape(responses=2048, mean_tokens=8000))
    parser.add_argument("--s3ac", type=Shape.parse, default=Shape(responses=4096, mean_tokens=16000))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the responses")
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    # The smaller batch first: a peak of the process never falls.
    for preset, shape in (("asyppo", arguments.asyppo), ("s3ac_single", arguments.s3ac)):
        config = config_for(preset, shape, arguments.scale)
        rows[preset] = measure(config, shape.mean_tokens, arguments.repeats)
        print(preset, json.dumps(rows[preset]), flush=True)
    print(json.dumps(rows))


def config_for(preset: str, shape: Shape, scale: float) -> TrainConfig:
    config = config_from_tree({"preset": preset, "actor": {"model": "a"}, "critic": {"model": "c"}})
    prompts = max(1, round(shape.responses * scale / config.batch.group_size))
    tree = {"preset": preset, "actor": {"model": "a"}, "critic": {"model": "c"}}
    return config_from_tree(
        tree, [f"batch.prompts={prompts}", f"sampling.max_tokens={2 * shape.mean_tokens}"]
    )


def measure(config: TrainConfig, mean_tokens: int, repeats: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    started_s = time.process_time()
    groups = made_up_groups(config, mean_tokens, random)
    built_s = time.process_time() - started_s
    laying_s, laying_mb, batch = timed(lambda: batch_of(0, groups, config))
    num_tokens = batch.sequences.num_response_tokens
    proximal = batch.behaviour_logprobs + random.normal(0, 0.01, num_tokens).astype(np.float32)
    values = random.normal(0, 0.3, (config.critic.count, num_tokens)).astype(np.float32)
    stale = np.zeros(num_tokens, dtype=np.bool_)

    def decide():
        return decide_tokens(batch, values, proximal, stale=stale, algorithm=config.algorithm)

    deciding_s, deciding_mb, decisions = timed(decide)
    for _ in range(repeats - 1):
        deciding_s = min(deciding_s, timed(decide)[0])
    actor_s, actor_mb, _ = timed(
        lambda: actor_request(
            batch,
            decisions,
            proximal,
            algorithm=config.algorithm,
            actor=config.actor,
            sampling=config.sampling,
            seed=0,
        )
    )
    critic_s, critic_mb, _ = timed(
        lambda: critic_requests(
            batch, values=values, trained=~stale, algorithm=config.algorithm, critic=config.critic, seed=0
        )
    )
    result = StepResult(
        batch=batch,
        values_before=None,
        values=values,
        proximal_logprobs=proximal,
        proximal_entropies=np.ones_like(proximal),
        reference_logprobs=None,
        algorithm=config.algorithm,
        decisions=decisions,
        critics=(),
        actor=None,
        actor_clip_norm=1.0,
        critic_clip_norm=1.0,
    )
    row_s, row_mb, _ = timed(lambda: (step_metrics(result, Trace()), step_histograms(result)))
    millions = num_tokens / 1e6
    return {
        "responses": float(len(batch.rewards)),
        "million_tokens": round(millions, 3),
        "made_up_in_s": round(built_s, 2),
        **{
            f"{part}_seconds_per_million": round(seconds / millions, 4)
            for part, seconds in (
                ("lay_out", laying_s),
                ("decide", deciding_s),
                ("actor_request", actor_s),
                ("critic_requests", critic_s),
                ("row_of_metrics", row_s),
            )
        },
        **{
            f"{part}_extra_mb_per_million": round(megabytes / millions, 1)
            for part, megabytes in (
                ("lay_out", laying_mb),
                ("decide", deciding_mb),
                ("actor_request", actor_mb),
                ("critic_requests", critic_mb),
                ("row_of_metrics", row_mb),
            )
        },
        "total_seconds_per_million": round((laying_s + deciding_s + actor_s + critic_s) / millions, 4),
    }


def made_up_groups(config: TrainConfig, mean_tokens: int, random: np.random.Generator) -> list[Group]:
    groups = []
    for draw_id in range(config.batch.prompts):
        prompt = Prompt(id=f"p{draw_id}", task="none", text="", token_ids=(5,) * NUM_PROMPT_TOKENS, answer="")
        lengths = random.integers(1, 2 * mean_tokens, config.batch.group_size)
        groups.append(
            Group(
                draw_id=draw_id,
                prompt=prompt,
                admission_version=0,
                trajectories=tuple(
                    Trajectory(
                        prompt=prompt,
                        draw_id=draw_id,
                        sample_index=index,
                        response=Response(
                            token_ids=np.full(length, 7, dtype=np.int32),
                            behaviour_logprobs=-random.exponential(1.0, length).astype(np.float32),
                            versions=VersionRuns(((0, length),)),
                            finish_reason="stop",
                        ),
                        reward=float(random.choice((-1.0, 1.0))),
                        server="none",
                        started_s=0.0,
                        finished_s=0.0,
                    )
                    for index, length in enumerate(lengths)
                ),
                finished_s=0.0,
            )
        )
    return groups


def timed(work: Callable[[], object]):
    """CPU seconds, and MB that the process's peak rose above what it held before."""
    reset_peak()
    before_mb = resident_mb()
    started_s = time.process_time()
    result = work()
    seconds = time.process_time() - started_s
    return seconds, max(0.0, peak_mb() - before_mb), result


def reset_peak() -> None:
    """Linux forgets the peak of a process that writes 5 here; elsewhere peaks only rise."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        print("the peak of memory cannot be reset here: later parts read too low", file=sys.stderr)


def resident_mb() -> float:
    return status_mb("VmRSS:")


def peak_mb() -> float:
    return status_mb("VmHWM:")


def status_mb(key: str) -> float:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(key):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
