"""One training step on given completions, ours or a peer's, measured; the contenders of `benchmarks/learner.py`."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.trainer.worker.memory import forget_peak, peak_bytes
from asyppo_async.trainer.worker.messages import ActorTrain, MiniBatches, TrainResult
from asyppo_async.trainer.worker.model import silence_transformers
from asyppo_async.trainer.worker.rank import ActorRank
from asyppo_async.trainer.worker.specs import GroupTimes, specs_of
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import TokenSequences, concatenate_sequences

_PROMPT_TOKENS = 16
_PEER_ROWS = 8
_OUR_TOKENS = 2048
"""Of a micro-batch: at the lengths of the benchmark at least as many real tokens as TRL's eight rows hold."""
_STEPS = 2
"""One to warm up, one that is measured."""
_CPU = torch.device("cpu")
_STATE_BYTES = 12
"""Of a parameter beside itself: gradient and two moments in float32."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    model: str
    lengths: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def sequences(self, vocab_size: int) -> TokenSequences:
        random = np.random.default_rng(1)
        return concatenate_sequences(
            [
                (
                    random.integers(0, vocab_size, _PROMPT_TOKENS),
                    random.integers(0, vocab_size, length).astype(np.int32),
                )
                for length in self.lengths
            ]
        )

    def advantages(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[B]"""
        return np.random.default_rng(2).normal(size=len(self.lengths)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Measured:
    num_tokens: int
    """Of responses."""
    num_input_tokens: int
    num_parameters: int
    seconds: float
    extra_bytes: int
    """Peak above what the process held before the first step and the model's state."""
    activation_bytes: int = 0
    """Kept by the first micro-batch for its backward; 0: not counted."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def describe(self) -> str:
        return (
            f"{self.num_tokens} tokens in {self.seconds:.2f} s: {self.tokens_per_s:.0f} tokens/s, "
            f"{self.extra_bytes / 2**20:.0f} MiB above the model's state"
        )


class Meter:
    """Memory and CPU time of the second step."""

    def __init__(self, plan: Plan, num_parameters: int) -> None:
        self._plan = plan
        self._num_parameters = num_parameters
        self._resident = 0
        self._started = 0.0

    def start(self) -> None:
        """Before each step; what the process holds before the first is the model and its libraries."""
        self._resident = self._resident or psutil.Process().memory_info().rss
        forget_peak(_CPU)
        self._started = time.process_time()

    def stop(self) -> Measured:
        seconds = time.process_time() - self._started
        lengths = np.array(self._plan.lengths)
        return Measured(
            num_tokens=int(lengths.sum()),
            num_input_tokens=int((lengths + _PROMPT_TOKENS).sum()),
            num_parameters=self._num_parameters,
            seconds=seconds,
            extra_bytes=peak_bytes(_CPU) - self._resident - _STATE_BYTES * self._num_parameters,
        )


def ours(
    plan: Plan, *, recompute: bool, micro_batch_tokens: int = _OUR_TOKENS, whole_head: bool = False
) -> Measured:
    """A rank of the actor as a run makes it, without the connection.

    `whole_head` has the logits of a micro-batch in one piece, which no run does: to see what the chunks are good for.
    """
    silence_transformers()
    section = ActorSection(
        model=Path(plan.model), recompute=recompute, micro_batch_tokens=micro_batch_tokens, learning_rate=1e-6
    )
    times = GroupTimes(join_timeout_s=1, request_timeout_s=1, silent_after_s=1)
    (spec,) = specs_of(section, CriticSection(count=0), seed=0, bucket_bytes=2**20, times=times)
    rank = ActorRank(spec.settings, World.alone(), "cpu")
    if whole_head:
        rank._actor._chunk_tokens = sys.maxsize
    request = train_request(plan, rank.loaded.vocab_size)
    meter = Meter(plan, rank.loaded.num_parameters)
    for _ in range(_STEPS):
        meter.start()
        result = rank.answer(request)
    assert isinstance(result, TrainResult)
    return replace(meter.stop(), activation_bytes=result.activation_bytes)


def train_request(plan: Plan, vocab_size: int) -> ActorTrain:
    """All responses in one optimizer step."""
    sequences = plan.sequences(vocab_size)
    per_token = np.repeat(plan.advantages(), plan.lengths)
    return ActorTrain(
        sequences=sequences,
        proximal_logprobs=np.full(len(per_token), -1.0, dtype=np.float32),
        advantages=per_token,
        policy_weights=np.ones(len(per_token), dtype=np.float32),
        entropy_weights=np.zeros(len(per_token), dtype=np.float32),
        mini_batches=MiniBatches(
            sequence_indices=np.arange(len(plan.lengths), dtype=np.int32),
            sizes=np.array([len(plan.lengths)], dtype=np.int32),
            denominators=np.array([float(len(per_token))]),
        ),
        temperature=1.0,
        clip_low=0.2,
        clip_high=0.2,
        entropy_coefficient=0.0,
    )


def peer(plan: Plan, *, recompute: bool) -> Measured:
    """TRL's trainer with its own loop; its generation is replaced by the given completions."""
    # Only this contender needs them, and TRL is not installed with the project.
    from datasets import Dataset  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    inputs = _padded(plan, model.config.vocab_size)
    meter = Meter(plan, num_parameters)
    found: list[Measured] = []

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, _: object) -> dict[str, Any]:
            return inputs

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            meter.start()

        def on_step_end(self, *_: object, **__: object) -> None:
            found.append(meter.stop())

    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as folder:
        trainer = Given(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * len(plan.lengths)}),
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                max_steps=_STEPS,
                per_device_train_batch_size=_PEER_ROWS,
                gradient_accumulation_steps=len(plan.lengths) // _PEER_ROWS,
                num_generations=_PEER_ROWS,
                max_completion_length=max(plan.lengths),
                learning_rate=1e-6,
                gradient_checkpointing=recompute,
            ),
            callbacks=[Timed()],
        )
        trainer.train()
    return found[-1]


def _padded(plan: Plan, vocab_size: int) -> dict[str, Any]:
    """As TRL lays completions out: one length for the whole batch."""
    sequences = plan.sequences(vocab_size)
    longest = max(plan.lengths)
    completions = torch.zeros(len(plan.lengths), longest, dtype=torch.int64)
    mask = torch.zeros_like(completions)
    responses = torch.from_numpy(sequences.response_token_ids.astype(np.int64)).split(list(plan.lengths))
    for row, response in enumerate(responses):
        completions[row, : len(response)] = response
        mask[row, : len(response)] = 1
    prompts = torch.from_numpy(sequences.prompt_token_ids.astype(np.int64)).view(len(plan.lengths), -1)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.from_numpy(plan.advantages()),
        "num_items_in_batch": mask.sum(),
    }


CONTENDERS: Mapping[str, Callable[[Plan], Measured]] = {
    "ours": lambda plan: ours(plan, recompute=False),
    "ours, recompute": lambda plan: ours(plan, recompute=True),
    "trl": lambda plan: peer(plan, recompute=True),
    "trl, kept": lambda plan: peer(plan, recompute=False),
}
"""TRL computes again unless it is told otherwise; ours keeps."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    plan_ = json.loads(sys.argv[2])
    measured_ = CONTENDERS[sys.argv[1]](Plan(model=plan_["model"], lengths=tuple(plan_["lengths"])))
    Path(sys.argv[3]).write_text(json.dumps(asdict(measured_)))
