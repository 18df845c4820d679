"""What a server counts, and the Prometheus endpoint that shows it beside vLLM's own metrics."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.port import check_free
from asyppo_async.rpc.info import ServerInfo

SCRAPE_S = 2.0
"""The server's loop answers a scrape within this time, or the scrape fails: a stuck loop looks like one."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)
_SECONDS_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STATES = ("starting", "weights_unknown", "serving", "updating", "draining", "failed")


class FleetMetrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = self._counter("calls", "Generate calls that ended, by how", "outcome")
        self.samples = self._counter("samples", "Samples that ended, by how", "end")
        self.tokens = self._counter("tokens", "Tokens that were sent")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of calls that were admitted")
        self.updates = self._counter("updates", "Weight updates that were judged", "outcome")
        self.first_token_s = self._histogram("time_to_first_token", "From a call to its first token")
        self.call_s = self._histogram("call", "From a call to its end")
        self.token_s = self._histogram(
            "time_per_token", "Between two tokens of a sample, mean of a call", buckets=_SECONDS_PER_TOKEN
        )
        self.update_s = self._histogram("update", "Phases of weight updates", "phase")

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"asyppo_fleet_{name}", words, labels, registry=self.registry)

    def _histogram(
        self, name: str, words: str, *labels: str, buckets: Iterable[float] = _SECONDS
    ) -> Histogram:
        return Histogram(
            f"asyppo_fleet_{name}_seconds", words, labels, buckets=tuple(buckets), registry=self.registry
        )


class _Present(Collector):
    """What holds now, asked of the server's loop at each scrape."""

    def __init__(self, info: Callable[[], ServerInfo], loop: asyncio.AbstractEventLoop) -> None:
        self._info = info
        self._loop = loop

    def collect(self) -> Iterator[GaugeMetricFamily]:
        async def ask() -> ServerInfo:
            return self._info()

        info = asyncio.run_coroutine_threadsafe(ask(), self._loop).result(SCRAPE_S)
        values = {
            "running_samples": (info.num_running_samples, "Samples in the engine"),
            "queued_samples": (info.num_queued_samples, "Samples that wait for a slot"),
            "served_version": (info.served_version, "Version of the weights; -1: unknown"),
            "session_ranks": (info.session_world_size, "Ranks of the weight session; 0: none"),
            "kv_cache_usage_ratio": (info.kv_cache_usage, "Share of the KV cache in use; negative: unknown"),
            "uptime_seconds": (info.uptime_s, "Since the start"),
        }
        for name, (value, words) in values.items():
            yield GaugeMetricFamily(f"asyppo_fleet_{name}", words, value=value)
        state = GaugeMetricFamily("asyppo_fleet_state", "1 for the state that holds", labels=["state"])
        for name in _STATES:
            state.add_metric([name], float(name == info.state))
        yield state


class _Others(Collector):
    """The process's own metrics, vLLM's among them."""

    def collect(self) -> Iterable[Metric]:
        return REGISTRY.collect()


@asynccontextmanager
async def metrics_endpoint(
    config: ServeConfig, metrics: FleetMetrics, info: Callable[[], ServerInfo]
) -> AsyncIterator[int | None]:
    """Serve /metrics over HTTP, with the server's TLS if it has one; yields the port, None: not asked for.

    Raises:
        ConfigError: the port is taken.
    """
    if config.metrics_port is None:
        yield None
        return
    check_free(config.metrics_host, config.metrics_port)
    metrics.registry.register(_Present(info, asyncio.get_running_loop()))
    metrics.registry.register(_Others())
    server, thread = start_http_server(
        config.metrics_port,
        config.metrics_host,
        metrics.registry,
        certfile=None if config.tls_cert is None else str(config.tls_cert),
        keyfile=None if config.tls_key is None else str(config.tls_key),
    )
    try:
        yield int(server.server_port)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)
