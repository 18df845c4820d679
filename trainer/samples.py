"""A few responses of every step, as text with their rewards, for people to read."""

from collections.abc import Callable, Sequence

from asyppo_async.trainer.coordinator.batch import Batch
from asyppo_async.trainer.run_folder import Row


def sample_rows(batch: Batch, decode: Callable[[Sequence[int]], str], count: int) -> list[Row]:
    """The best and the worst response of the batch's first group, then the ones between: `count` of them at most.

    Args:
        batch: Of the step.
        decode: Token ids to text.
        count: 0 keeps nothing.
    """
    if count == 0 or not batch.groups:
        return []
    group = batch.groups[0]
    ranked = sorted(group.trajectories, key=lambda trajectory: trajectory.reward, reverse=True)
    chosen = [ranked[-(index // 2) - 1] if index % 2 else ranked[index // 2] for index in range(len(ranked))]
    return [
        {
            "step": batch.step,
            "prompt_id": trajectory.prompt.id,
            "task": trajectory.prompt.task,
            "draw": trajectory.draw_id,
            "prompt": trajectory.prompt.text,
            "answer": trajectory.prompt.answer,
            "response": decode(trajectory.response.token_ids.tolist()),
            "reward": trajectory.reward,
            "tokens": trajectory.num_tokens,
            "finish_reason": trajectory.response.finish_reason,
            "oldest_version": trajectory.oldest_version,
            "server": trajectory.server,
        }
        for trajectory in chosen[:count]
    ]
