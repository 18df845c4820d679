"""What the handlers of all services share: the parts of one server, and what it says of itself."""

import asyncio
import contextlib
import time
from typing import Literal

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.call_record import CallRecorder
from asyppo_async.fleet.engine_watch import EngineWatch
from asyppo_async.fleet.identity import ServerIdentity
from asyppo_async.fleet.metrics import FleetMetrics
from asyppo_async.fleet.receiver import Receiver
from asyppo_async.fleet.rollouts import RolloutFloor
from asyppo_async.fleet.stop import StopSignal
from asyppo_async.fleet.traffic import Traffic
from asyppo_async.fleet.update_state import NO_RUN
from asyppo_async.rpc.info import ServerInfo, ServerState

Lifecycle = Literal["starting", "running", "draining", "failed"]


class FleetService:
    """The parts of a server. The engine's parts appear with `attach`, when the engine is ready."""

    def __init__(self, identity: ServerIdentity, config: ServeConfig, stop: StopSignal) -> None:
        self._identity = identity
        self._config = config
        self.lifecycle: Lifecycle = "starting"
        self.traffic = Traffic(time.monotonic())
        self.stop = stop
        self.drain_grace_s = config.drain_grace_s
        """Of the drain that the first signal, or an operator's call, begins."""
        self.metrics = FleetMetrics()
        self.recorder = CallRecorder(self.metrics, log_calls=config.log_calls)
        self.watch = EngineWatch(config.engine_silence_s, self._engine_changed)
        self._floor: RolloutFloor | None = None
        self._receiver: Receiver | None = None

    def attach(self, floor: RolloutFloor, receiver: Receiver) -> None:
        self._floor = floor
        self._receiver = receiver
        self.lifecycle = "running"

    @property
    def floor(self) -> RolloutFloor:
        if self._floor is None:
            raise CallError("UNAVAILABLE", "the engine is still starting")
        return self._floor

    @property
    def receiver(self) -> Receiver:
        if self._receiver is None:
            raise CallError("UNAVAILABLE", "the engine is still starting")
        return self._receiver

    def _engine_changed(self) -> None:
        if self._receiver is not None:
            self._receiver.notify()

    @property
    def max_samples_per_call(self) -> int:
        return self._config.max_samples_per_call

    @property
    def state(self) -> ServerState:
        if self.lifecycle != "running" or self._floor is None:
            return "starting" if self.lifecycle == "running" else self.lifecycle
        if self.watch.is_stuck:
            return "failed"
        update = self._floor.state
        if update.is_updating:
            return "updating"
        return "serving" if update.served is not None else "weights_unknown"

    def info(self) -> ServerInfo:
        floor, config, model = self._floor, self._config, self._identity.model
        served = floor.state.served if floor is not None else None
        run = served.identity if served is not None else NO_RUN
        longest = config.max_model_len or model.max_positions
        session = floor.state.open_session if floor is not None else None
        now_s = time.monotonic()
        return ServerInfo(
            server_id=self._identity.server_id,
            model_name=str(config.model),
            model_fingerprint=model.model_fingerprint,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=floor.engine.info.max_model_len if floor is not None else longest,
            max_num_seqs=config.max_num_seqs * config.data_parallel_size,
            num_workers=config.num_workers,
            dtype=config.dtype,
            float32_head=config.float32_head,
            state=self.state,
            run_id=run.run_id,
            incarnation=run.incarnation,
            served_version=served.version if served is not None else -1,
            num_running_samples=floor.queue.num_running if floor is not None else 0,
            num_queued_samples=floor.queue.num_queued if floor is not None else 0,
            sent_tokens=self.traffic.num_tokens,
            sent_tokens_per_s=self.traffic.tokens_per_s(now_s),
            session_epoch=session.epoch if session is not None else 0,
            session_world_size=session.world_size if session is not None else 0,
            uptime_s=self.traffic.uptime_s(now_s),
            kv_cache_usage=floor.engine.kv_cache_usage if floor is not None else -1.0,
        )

    async def wait_changed(self, timeout_s: float) -> None:
        """Until the state of the weights may have changed, but not longer than `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._receiver is None:
                    await asyncio.sleep(timeout_s)
                else:
                    await self._receiver.wait_changed()
