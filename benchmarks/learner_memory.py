"""What a training step holds and how fast it is, against the length of responses and the size of the vocabulary.

    python -m benchmarks.learner_memory [--tokens 2048] [--lengths 128,512,2048] [--vocabularies 1024,8192,65536]

One step of a rank of the actor in a fresh process for each cell, one thread, all tokens in one micro-batch: with layers
kept or computed again in the backward (`recompute`), and with the logits in chunks of 128 MiB, as every run has them,
or in one piece. Lengths are tried at the middle vocabulary, vocabularies at the middle length. Memory is the peak above
parameters, gradients, Adam's state and what the libraries hold; kept is what autograd keeps for the backward. Tokens
are response tokens, seconds CPU seconds of the second step. The last line is one JSON object with every cell.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.learner_contenders import Measured, Plan, ours

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 280
MIB = 2**20
WAYS = {
    "kept, chunks": (False, False),
    "kept, one piece": (False, True),
    "recompute, chunks": (True, False),
    "recompute, one piece": (True, True),
}
"""Name: layers computed again, logits in one piece."""
PROMPT_MARGIN = 64
"""Tokens of prompts per response that a micro-batch has room for."""


def main() -> None:
    if sys.argv[1:2] == ["--cell"]:
        run_cell(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="response tokens of the step")
    parser.add_argument("--lengths", type=numbers, default=[128, 512, 2048], help="tokens of a response")
    parser.add_argument("--vocabularies", type=numbers, default=[1024, 8192, 65536])
    parser.add_argument("--width", type=int, default=128, help="of the model; a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    lengths, vocabularies = arguments.lengths, arguments.vocabularies
    middle = vocabularies[len(vocabularies) // 2], lengths[len(lengths) // 2]
    points = [(middle[0], length) for length in lengths]
    points += [(vocabulary, middle[1]) for vocabulary in vocabularies if vocabulary != middle[0]]
    cells = []
    print(f"{'vocabulary':>10} {'length':>7}  {'':20} {'tokens/s':>9} {'peak MiB':>9} {'kept MiB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary, length in points:
            model = Path(folder) / str(vocabulary)
            if not model.exists():
                write_model(model, vocabulary, arguments.width, arguments.layers)
            plan = Plan(model=str(model), lengths=(length,) * max(1, arguments.tokens // length))
            for way in WAYS:
                measured = measure(plan, way)
                print(line_of(vocabulary, length, way, measured), flush=True)
                cells.append({"vocabulary": vocabulary, "length": length, "way": way, **figures_of(measured)})
    print(json.dumps({"cells": cells}))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def write_model(folder: Path, vocabulary: int, width: int, layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def measure(plan: Plan, way: str) -> Measured:
    """In a process of its own, so that no peak is another cell's."""
    command = [sys.executable, "-m", "benchmarks.learner_memory", "--cell", plan.to_json(), way]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def run_cell(plan_text: str, way: str) -> None:
    torch.set_num_threads(1)
    read = json.loads(plan_text)
    plan = Plan(model=read["model"], lengths=tuple(read["lengths"]))
    recompute, whole_head = WAYS[way]
    budget = sum(plan.lengths) + PROMPT_MARGIN * len(plan.lengths)
    measured = ours(plan, recompute=recompute, micro_batch_tokens=budget, whole_head=whole_head)
    print(json.dumps(asdict(measured)))


def figures_of(measured: Measured) -> dict[str, float]:
    return {
        "tokens_per_s": round(measured.tokens_per_s, 1),
        "peak_mib": round(measured.extra_bytes / MIB, 1),
        "kept_mib": round(measured.activation_bytes / MIB, 1),
    }


def line_of(vocabulary: int, length: int, way: str, measured: Measured) -> str:
    figures: Sequence[float] = list(figures_of(measured).values())
    return f"{vocabulary:10} {length:7}  {way:20} " + " ".join(f"{figure:9.1f}" for figure in figures)


if __name__ == "__main__":
    main()
