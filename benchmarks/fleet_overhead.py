"""What our server costs: the same engine in process, behind `asyppo-fleet serve`, and behind vLLM's own HTTP server.

    python -m benchmarks.fleet_overhead MODEL [--samples 16 128 512] [--tokens 256 1024] [--repeats 5] [--sittings 1]

The same prompts, samples per prompt, lengths and engine settings; the engine's processes on the first core, everything
between them and the caller on the second. All three are up the whole time and take turns. In process is the best that
`AsyncLLM` does: final outputs only, no text, flat log-probs. Two starts of one engine differ, by a tenth where few
samples run: what is closer than that needs several sittings, each with new engines, started in another order. The last
line is one JSON object, each the smallest over the lengths of the median over sittings of the ratio of median tokens
per second:

    ratio_in_process_16, _128, _512    ours over in process
    ratio_http_16, _128, _512          ours over vLLM's server
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from asyppo_async.config.serve import ServeConfig
from benchmarks.fleet_contenders import GROUP_SIZE, Contender, Setting, http_server, in_process, our_server

PROMPT_TOKENS = 32
CONTENDERS = {"in process": in_process, "ours": our_server, "http": http_server}

Medians = dict[tuple[int, int, str], float]
"""Tokens per second, by samples at once, tokens of a response, and contender."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 128, 512], help="at once")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024], help="of every response")
    parser.add_argument("--repeats", type=int, default=5, help="of each setting in a sitting")
    parser.add_argument("--sittings", type=int, default=1, help="with engines of their own")
    parser.add_argument(
        "--stream-interval",
        type=int,
        default=ServeConfig.model_fields["stream_interval"].default,
        help="tokens between two outputs of the engine",
    )
    parser.add_argument("--kv-cache-gib", type=float, default=2.0, help="of each engine")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores are needed, one for the engine and one for the rest")
    if any(count % GROUP_SIZE for count in arguments.samples):
        parser.error(f"samples come in groups of {GROUP_SIZE}")
    max_model_len = PROMPT_TOKENS + max(arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = long_enough(arguments.model.resolve(), Path(folder), max_model_len)
        setting = Setting(
            model=model,
            engine_core=cores[0],
            frontend_core=cores[1],
            max_num_seqs=max(arguments.samples) + 1,
            max_model_len=max_model_len,
            stream_interval=arguments.stream_interval,
            kv_cache_gib=arguments.kv_cache_gib,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sittings = [
                runner.run(
                    sit(setting, order(number), arguments.samples, arguments.tokens, arguments.repeats)
                )
                for number in range(arguments.sittings)
            ]
    print(json.dumps({name: round(value, 3) for name, value in smallest_ratios(sittings).items()}))


def long_enough(model: Path, folder: Path, max_model_len: int) -> Path:
    """The same checkpoint, said to hold `max_model_len` positions; what it says there does not matter here."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], max_model_len)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def order(number: int) -> list[str]:
    """Of the contenders in one sitting: each comes first, second and last in turn."""
    names = list(CONTENDERS)
    turn = number % len(names)
    return names[turn:] + names[:turn]


async def sit(
    setting: Setting, names: list[str], counts: list[int], lengths: list[int], repeats: int
) -> Medians:
    """One sitting: all contenders are started, and take turns at every setting."""
    vocab_size = json.loads((setting.model / "config.json").read_text())["vocab_size"]
    chance = random.Random(0)
    cores = os.sched_getaffinity(0)
    medians: Medians = {}
    async with contextlib.AsyncExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for name in names:
            contenders[name] = await stack.enter_async_context(CONTENDERS[name](setting))
            await contenders[name].generate([[1, 2, 3]], 4)
        os.sched_setaffinity(0, {setting.frontend_core})
        stack.callback(os.sched_setaffinity, 0, cores)
        for count in counts:
            for length in lengths:
                rates: dict[str, list[float]] = {name: [] for name in contenders}
                costs: dict[str, list[float]] = {name: [] for name in contenders}
                for _ in range(repeats):
                    # New ones each time, or the prefix cache would answer.
                    prompts = [
                        [chance.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
                        for _ in range(count // GROUP_SIZE)
                    ]
                    for name, contender in contenders.items():
                        began_s, cpu_s = time.monotonic(), contender.frontend_cpu_s()
                        num_tokens = await contender.generate(prompts, length)
                        if num_tokens != count * length:
                            raise RuntimeError(
                                f"{name}: {num_tokens} tokens came, {count * length} were asked for"
                            )
                        rates[name].append(num_tokens / (time.monotonic() - began_s))
                        costs[name].append((contender.frontend_cpu_s() - cpu_s) / num_tokens * 1000)
                for name in CONTENDERS:
                    medians[count, length, name] = statistics.median(rates[name])
                    print(
                        f"{count:4} samples of {length:4} tokens, {name:10}: {medians[count, length, name]:8.0f} "
                        f"tokens/s, {statistics.median(costs[name]) * 1000:7.2f} ms of frontend CPU per 1,000 tokens",
                        flush=True,
                    )
    return medians


def smallest_ratios(sittings: list[Medians]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for count, length in dict.fromkeys((count, length) for count, length, _ in sittings[0]):
        for key, other in (("in_process", "in process"), ("http", "http")):
            of_sittings = [
                medians[count, length, "ours"] / medians[count, length, other] for medians in sittings
            ]
            if len(sittings) > 1:
                listed = " ".join(f"{ratio:.3f}" for ratio in of_sittings)
                print(f"{count:4} samples of {length:4} tokens, ours over {other}, by sitting: {listed}")
            name = f"ratio_{key}_{count}"
            ratios[name] = min(ratios.get(name, float("inf")), statistics.median(of_sittings))
    return ratios


if __name__ == "__main__":
    main()
