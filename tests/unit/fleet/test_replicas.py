"""Data-parallel replicas behind one server: where requests go, what has to agree, what is refused before the start."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError
from asyppo_async.fleet.engine.protocol import EngineFault
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.fleet.engine.vllm_options import check_devices, prepare_environment
from asyppo_async.fleet.engine.vllm_replicas import Replicas, agreed

DEADLINE_S = 20.0


def test_place_when_replicas_fill_and_empty_then_none_has_more_than_its_share() -> None:
    replicas = Replicas(3)
    places = [contextlib.ExitStack() for _ in range(12)]
    taken = [each.enter_context(replicas.place()) for each in places]
    assert [taken.count(replica) for replica in range(3)] == [4, 4, 4]
    for each, replica in zip(places, taken, strict=True):
        if replica == 1:
            each.close()
    with contextlib.ExitStack() as more:
        assert [more.enter_context(replicas.place()) for _ in range(4)] == [1, 1, 1, 1]


def test_place_when_there_is_one_replica_then_it_has_no_number() -> None:
    with Replicas(1).place() as first, Replicas(1).place() as second:
        assert (first, second) == (None, None)
    assert Replicas(1).all == (None,)


def test_scores_when_a_replica_holds_other_weights_then_they_are_no_scores() -> None:
    scores = np.array([-1.0, -2.0, -0.5], np.float32)
    rounded = scores + np.array([2e-5, -2e-5, 0], np.float32)
    np.testing.assert_array_equal(agreed([scores, rounded], "float32"), scores)
    with pytest.raises(EngineFault, match=r"replicas 0 and 2 differ by 0\.01 nats on the same 4 tokens"):
        agreed([scores, rounded, scores + 0.01], "float32")
    agreed([scores, scores + 0.01], "bfloat16")
    with pytest.raises(EngineFault, match="replicas 0 and 1 differ by nan"):
        agreed([scores, scores * np.nan], "bfloat16")


async def test_server_when_it_has_replicas_then_its_slots_are_those_of_all(serving, draw, until) -> None:
    settings = {"max_num_seqs": 4, "probe_slots": 1, "data_parallel_size": 2, "tensor_parallel_size": 3}
    async with serving(Script(delta_delay_s=0.02), **settings) as server:
        info = await server.client.info(DEADLINE_S)
        assert (info.max_num_seqs, info.num_workers) == (8, 6)
        async with server.client.generate(draw(num_samples=10, max_tokens=400), DEADLINE_S) as stream:
            await anext(stream)
            await until(lambda: len(server.engine.running_ids) == 6)
        assert server.engine.max_running == 6


def test_workers_when_there_are_too_few_devices_or_cores_then_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ServeConfig(model=Path("m"), tensor_parallel_size=2, data_parallel_size=4)
    check_devices(config, 8)
    with pytest.raises(ConfigError, match="needs 8 devices of this machine, and 7 can be seen"):
        check_devices(config, 7)
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    prepare_environment(ServeConfig(model=Path("m"), data_parallel_size=4))
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0|1|2|3"
    with pytest.raises(ConfigError, match="needs more than the 4 cores"):
        prepare_environment(config)
