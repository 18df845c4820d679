"""`asyppo-fleet bench`: how much running servers make, asked as a trainer asks."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyppo_async.errors import FleetError
from asyppo_async.rpc.pool import FleetPool
from asyppo_async.rpc.security import ClientSecurity
from asyppo_async.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """What is asked for."""

    calls_at_once: int
    num_samples: int
    """Of each call."""
    prompt_tokens: int
    max_tokens: int
    """Every response has exactly so many."""
    seconds: float


@dataclass(slots=True, kw_only=True)
class BenchReport:
    """What came."""

    seconds: float = 0.0
    num_calls: int = 0
    num_failed_calls: int = 0
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    num_moves: int = 0

    def figures(self) -> dict[str, float]:
        """For programs: rates and quantiles; a quantile of nothing is absent."""
        values: dict[str, float] = {
            "seconds": round(self.seconds, 3),
            "calls": self.num_calls,
            "failed_calls": self.num_failed_calls,
            "moved_calls": self.num_moves,
            "tokens": self.num_tokens,
            "tokens_per_s": round(self.num_tokens / self.seconds, 1) if self.seconds else 0.0,
        }
        for name, times in (("first_token", self.first_token_s), ("call", self.call_s)):
            if len(times) > 1:
                cuts = statistics.quantiles(times, n=100, method="inclusive")
                values |= {f"{name}_p50_s": round(cuts[49], 4), f"{name}_p99_s": round(cuts[98], 4)}
        return values


async def bench(addresses: Sequence[str], security: ClientSecurity, load: BenchLoad) -> BenchReport:
    """Keep `calls_at_once` calls under way for `seconds`; those that run then are waited for and counted.

    Raises:
        FleetError: no call succeeded; the last error.
    """
    report = BenchReport()
    last_error: FleetError | None = None
    chance = random.Random(0)
    sampling = SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_tokens=load.max_tokens,
        max_tokens=load.max_tokens,
        stop_token_ids=(),
    )
    async with FleetPool(addresses, security=security) as pool:
        vocab_size = await pool.vocab_size(load.seconds)
        began_s = time.monotonic()

        async def keep_asking() -> None:
            nonlocal last_error
            while time.monotonic() - began_s < load.seconds:
                prompt = [chance.randrange(vocab_size) for _ in range(load.prompt_tokens)]
                call_began_s = time.monotonic()
                firsts: list[float] = []

                def note(_: int, firsts: list[float] = firsts, began_s: float = call_began_s) -> None:
                    if not firsts:
                        firsts.append(time.monotonic() - began_s)

                try:
                    responses = await pool.generate(
                        prompt,
                        num_samples=load.num_samples,
                        sampling=sampling,
                        deadline_s=load.seconds + 600,
                        on_tokens=note,
                    )
                except FleetError as error:
                    report.num_failed_calls += 1
                    last_error = error
                    return
                report.num_calls += 1
                report.num_tokens += sum(len(response.token_ids) for response in responses)
                report.first_token_s += firsts
                report.call_s.append(time.monotonic() - call_began_s)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(load.calls_at_once):
                tasks.create_task(keep_asking())
        report.seconds = time.monotonic() - began_s
        report.num_moves = pool.num_moves
    if last_error is not None and not report.num_calls:
        raise last_error
    return report
