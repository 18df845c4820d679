"""Makes the models of the quickstart: `python examples/tiny_models.py --out models/tiny [--seed 0] [--budget-s 180]`.

    OUT/actor       a Qwen3 of 0.6 M parameters that adds one-digit numbers, right in four to five cases of ten
    OUT/critic      its first layers, as a model folder of its own: what the mini-critics start from
    OUT/warmup.json how they were made and how often the actor is right; written last

A second call with the same settings and the same code finds `warmup.json` and returns at once.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
WARM_UP = EXAMPLES / "tiny_warmup.py"
TEACHER = "asyppo_async.tasks.arithmetic"


def fingerprint_of(seed: int) -> str:
    """Of what decides which models come out: the seed and the code of the warm-up."""
    digest = hashlib.sha256(f"seed {seed}".encode())
    teacher = importlib.util.find_spec(TEACHER)
    assert teacher is not None and teacher.origin is not None
    for path in (WARM_UP, Path(teacher.origin)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cached_report(out: Path, fingerprint: str) -> dict[str, object] | None:
    """The report of an earlier call that made the same models, if they are all there."""
    report_path = out / "warmup.json"
    weights = [out / folder / "model.safetensors" for folder in ("actor", "critic")]
    if not report_path.is_file() or not all(path.is_file() for path in weights):
        return None
    report: dict[str, object] = json.loads(report_path.read_text())
    return report if report.get("fingerprint") == fingerprint else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that gets actor/ and critic/")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the examples seen")
    parser.add_argument("--budget-s", type=float, default=180.0, help="seconds that it is expected to take")
    arguments = parser.parse_args()
    if arguments.budget_s <= 0:
        parser.error(f"--budget-s must be positive, got {arguments.budget_s}")
    fingerprint = fingerprint_of(arguments.seed)
    report = cached_report(arguments.out, fingerprint)
    if report is None:
        # Only here, because torch and transformers take seconds to import.
        from tiny_warmup import make_models  # noqa: PLC0415

        report = make_models(
            arguments.out, seed=arguments.seed, budget_s=arguments.budget_s, fingerprint=fingerprint
        )
    else:
        print(f"models are there already: {arguments.out}")
    print(
        f"actor right in {float(str(report['accuracy'])):.1%} of {report['accuracy_samples']} held-out samples "
        f"at temperature 1 ({float(str(report['accuracy_greedy'])):.1%} greedy)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
