"""The supervised warm-up behind `tiny_models.py`.

The teacher guesses at once in half of the cases, and else writes running sums and slips now and then, so that a model
that imitates it is right in about 40 of 100 cases. What reinforcement learning finds easy is to sharpen what a policy
does part of the time (here: to work the sum out, and without a slip); new arithmetic it finds hard at this size. The
guesses come only near the end: running sums are what takes long to learn.
"""

import json
import math
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyppo_async.tasks.arithmetic import (
    ALPHABET,
    ArithmeticTask,
    final_number,
    question_text,
    teacher_response,
)
from asyppo_async.tasks.prompting import split_of
from asyppo_async.tasks.protocol import TaskSpec

VOCABULARY = ("<pad>", "<eos>", "<unk>", *ALPHABET)
PAD_ID, EOS_ID = 0, 1
NUM_CRITIC_LAYERS = 2
NUM_STEPS = 1700
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
NUM_RISING_STEPS = 20
GUESS_PROBABILITY = 0.5
GUESSES_FROM = 0.8
"""Share of the warm-up after which the teacher guesses too."""
SLIP_PROBABILITY = 0.02
MAX_RESPONSE_TOKENS = 40
NUM_SAMPLES = 2000
REPORT_EVERY_STEPS = 100
LOWEST_ACCURACY, HIGHEST_ACCURACY = 0.35, 0.55


def make_models(out: Path, *, seed: int, budget_s: float, fingerprint: str) -> dict[str, object]:
    """Warm the actor up and save it, the critic and the report under `out`.

    `budget_s` is what the progress is shown against; a slow machine takes longer and makes the same models.
    """
    started_s = time.monotonic()
    torch.manual_seed(seed)
    actor = new_actor()
    task = ArithmeticTask.from_spec(TaskSpec(name="arithmetic", seed=seed, system_prompt="", params={}))
    print(
        f"warm-up: {actor.num_parameters():,} parameters, {NUM_STEPS} steps, budget {budget_s:.0f} s",
        flush=True,
    )
    warm_up(actor, task, rng=random.Random(seed), started_s=started_s, budget_s=budget_s)
    questions = draw_questions(task, NUM_SAMPLES, rng=random.Random(seed + 1), split="heldout")
    accuracy = measure_accuracy(actor, questions, greedy=False)
    accuracy_greedy = measure_accuracy(actor, questions, greedy=True)
    report: dict[str, object] = {
        "fingerprint": fingerprint,
        "seed": seed,
        "steps": NUM_STEPS,
        "accuracy": accuracy,
        "accuracy_greedy": accuracy_greedy,
        "accuracy_samples": NUM_SAMPLES,
        "wall_seconds": round(time.monotonic() - started_s, 1),
    }
    if not LOWEST_ACCURACY <= accuracy <= HIGHEST_ACCURACY:
        print(
            f"the warmed actor is right in {accuracy:.1%} of {NUM_SAMPLES} samples, outside of the "
            f"{LOWEST_ACCURACY:.0%} to {HIGHEST_ACCURACY:.0%} that the quickstart was tuned for",
            flush=True,
        )
    save(actor, first_layers(actor, NUM_CRITIC_LAYERS), out)
    (out / "warmup.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"models made in {report['wall_seconds']} s (budget {budget_s:.0f} s): {out}", flush=True)
    return report


def new_actor() -> Qwen3ForCausalLM:
    """A Qwen3 small enough to learn in two minutes on a CPU, in float32, with fresh weights."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def draw_questions(task: ArithmeticTask, num: int, *, rng: random.Random, split: str) -> list[list[int]]:
    """[num] questions of a split, each as its numbers."""
    questions: list[list[int]] = []
    while len(questions) < num:
        numbers = task.draw_numbers(rng)
        if split_of(question_text(numbers)) == split:
            questions.append(numbers)
    return questions


def teacher_batch(
    task: ArithmeticTask, *, guess_probability: float, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, L], padded on the right, and what each position should say next [B, L], -100 for no matter."""
    rows: list[tuple[list[int], list[int]]] = []
    for numbers in draw_questions(task, BATCH_SIZE, rng=rng, split="train"):
        response = teacher_response(
            numbers, guess_probability=guess_probability, slip_probability=SLIP_PROBABILITY, rng=rng
        )
        rows.append((encode(question_text(numbers)), [*encode(response), EOS_ID]))
    length = max(len(question) + len(answer) for question, answer in rows)
    token_ids = torch.full((BATCH_SIZE, length), PAD_ID)
    labels = torch.full((BATCH_SIZE, length), -100)
    for row, (question, answer) in enumerate(rows):
        end = len(question) + len(answer)
        token_ids[row, :end] = torch.tensor(question + answer)
        labels[row, len(question) - 1 : end - 1] = torch.tensor(answer)
    return token_ids, labels


def warm_up(
    actor: Qwen3ForCausalLM, task: ArithmeticTask, *, rng: random.Random, started_s: float, budget_s: float
) -> None:
    """Train on the teacher for `NUM_STEPS`, with a learning rate that rises and then falls along a cosine."""
    optimizer = torch.optim.AdamW(actor.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    actor.train()
    for step in range(1, NUM_STEPS + 1):
        spent = (step - 1) / NUM_STEPS
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(step / NUM_RISING_STEPS, 0.5 * (1 + math.cos(math.pi * spent)))
        guess_probability = GUESS_PROBABILITY if spent >= GUESSES_FROM else 0.0
        token_ids, labels = teacher_batch(task, guess_probability=guess_probability, rng=rng)
        # Without a mask: padding is on the right, so no real token sees it.
        logits = actor(input_ids=token_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        if step % REPORT_EVERY_STEPS == 0:
            print(
                f"warm-up: step {step}/{NUM_STEPS}, loss {loss.item():.3f}, "
                f"{time.monotonic() - started_s:.0f} s of {budget_s:.0f} s",
                flush=True,
            )


@torch.no_grad()
def sample(actor: Qwen3ForCausalLM, questions: Sequence[Sequence[int]], *, greedy: bool) -> list[str]:
    """One response to each question, at temperature 1 or greedy. Questions of one length go through together."""
    actor.eval()
    responses = [""] * len(questions)
    for num_numbers in sorted({len(numbers) for numbers in questions}):
        chosen = [index for index, numbers in enumerate(questions) if len(numbers) == num_numbers]
        token_ids = torch.tensor([encode(question_text(questions[index])) for index in chosen])
        ended = torch.zeros(len(chosen), dtype=torch.bool)
        columns: list[torch.Tensor] = []
        cache = None
        while len(columns) < MAX_RESPONSE_TOKENS and not bool(ended.all()):
            output = actor(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.past_key_values, output.logits[:, -1]
            token = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
            token = torch.where(ended, EOS_ID, token)
            columns.append(token)
            ended |= token == EOS_ID
            token_ids = token[:, None]
        for index, row in zip(chosen, torch.stack(columns, dim=1).tolist(), strict=True):
            end = row.index(EOS_ID) if EOS_ID in row else len(row)
            responses[index] = "".join(VOCABULARY[token] for token in row[:end])
    return responses


def measure_accuracy(actor: Qwen3ForCausalLM, questions: Sequence[Sequence[int]], *, greedy: bool) -> float:
    """The share of questions with the right final number."""
    responses = sample(actor, questions, greedy=greedy)
    num_right = sum(
        final_number(response) == str(sum(numbers))
        for response, numbers in zip(responses, questions, strict=True)
    )
    return num_right / len(questions)


def first_layers(actor: Qwen3ForCausalLM, num_layers: int) -> Qwen3ForCausalLM:
    """A model of its own with the embedding, the first layers and the final norm of the actor."""
    settings = actor.config.to_dict()
    settings.update(num_hidden_layers=num_layers, layer_types=settings["layer_types"][:num_layers])
    critic = Qwen3ForCausalLM(Qwen3Config(**settings))
    names = critic.state_dict().keys()
    critic.load_state_dict({name: value for name, value in actor.state_dict().items() if name in names})
    return critic


def save(actor: Qwen3ForCausalLM, critic: Qwen3ForCausalLM, out: Path) -> None:
    """Write both folders anew, each with the tokenizer."""
    tokenizer = new_tokenizer()
    (out / "warmup.json").unlink(missing_ok=True)
    for model, name in ((actor, "actor"), (critic, "critic")):
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
