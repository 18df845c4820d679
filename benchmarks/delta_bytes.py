"""How many bytes a delta takes where a whole publication takes all: float32 masters, bfloat16 serving, a small rate.

    python benchmarks/delta_bytes.py --model models/smollm2/actor [--steps 20] [--learning-rate 1e-6]

Trains the model on windows of this repository's own documents with AdamW, as the trainer's plain engine does: masters
are float32, and what would be served is their rounding to bfloat16. Every step's rounding becomes a delta against that
of the step before, by the sender's own code, is patched into a second copy and compared bit for bit. The last line is
one JSON object:

    bytes_full_over_delta       all bytes of the steps over the bytes of their deltas
    worst_step                  the same of the step with the largest delta
    changed_share               elements that changed in a step, mean over the steps
    unchanged_tensors           tensors of which no served element has changed by the end, though they had a gradient
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyppo_async.weights.host_copy import HostCopy
from asyppo_async.weights.manifest import manifest_of_checkpoint
from asyppo_async.weights.transfer import tensors_in

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--tokens", type=int, default=128, help="of one step")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.model, arguments.steps, arguments.learning_rate, arguments.tokens)))


def measure(folder: Path, steps: int, learning_rate: float, num_tokens: int) -> dict[str, object]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    manifest = manifest_of_checkpoint(folder, "bfloat16")
    names = [spec.name for spec in manifest.tensors]
    parameters = dict(model.named_parameters())

    def served() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, parameters[name].detach()) for name in names)

    ours, theirs = HostCopy.empty(manifest), HostCopy.empty(manifest)
    for copy in (ours, theirs):
        copy.hold(0, served())
    first = ours.buffer.clone()
    sizes: list[int] = []
    shares: list[float] = []
    num_elements = sum(spec.num_elements for spec in manifest.tensors)
    for step, tokens in zip(range(1, steps + 1), windows(folder, num_tokens), strict=False):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = theirs.buffer.clone()
        started_s = time.monotonic()
        delta = ours.advance(step, served())
        made_s = time.monotonic() - started_s
        theirs.patch(step, delta)
        applied_s = time.monotonic() - started_s - made_s
        assert torch.equal(ours.buffer, theirs.buffer), "not bit for bit"
        num_changed = int((before.view(torch.int16) != theirs.buffer.view(torch.int16)).sum())
        sizes.append(len(delta))
        shares.append(num_changed / num_elements)
        print(
            f"step {step}: {len(delta) / 1e6:.2f} of {manifest.num_bytes / 1e6:.0f} MB, "
            f"{100 * shares[-1]:.2f} % changed, {8 * len(delta) / num_changed:.1f} bits each; made in {made_s:.2f} s, "
            f"applied in {applied_s:.2f} s",
            flush=True,
        )
    pairs = zip(tensors_in(manifest, first), tensors_in(manifest, ours.buffer), strict=True)
    unchanged = [name for (name, before), (_, after) in pairs if torch.equal(before, after)]
    return {
        "bytes_full_over_delta": round(len(sizes) * manifest.num_bytes / sum(sizes), 1),
        "worst_step": round(manifest.num_bytes / max(sizes), 1),
        "changed_share": round(sum(shares) / len(shares), 5),
        "unchanged_tensors": len(unchanged),
        "tensors": len(names),
    }


def windows(folder: Path, num_tokens: int) -> Iterator[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids
    for start in range(0, ids.shape[1] - num_tokens, num_tokens):
        yield ids[:, start : start + num_tokens]


if __name__ == "__main__":
    main()
