"""How full vLLM's KV cache is, from what its scheduler says with every step."""

from typing import Any


class KvMeter:
    """Made before the engine; `logger_of` is what vLLM takes as a factory of stat loggers."""

    def __init__(self) -> None:
        self._usages: dict[int, float] = {}
        """By replica."""

    @property
    def usage(self) -> float:
        """Of the fullest replica, 0 to 1; negative before the first step."""
        return max(self._usages.values(), default=-1.0)

    def saw(self, replica: int, usage: float) -> None:
        self._usages[replica] = usage

    def logger_of(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        meter = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                if scheduler_stats is not None:
                    meter.saw(engine_idx, float(scheduler_stats.kv_cache_usage))

            def log_engine_initialized(self) -> None:
                pass

        return Logger(vllm_config, engine_index)
