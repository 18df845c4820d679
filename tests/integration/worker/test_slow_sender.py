"""A publication out of ZeRO 3 over four ranks, with a sender that is slow: the others run ahead, and nobody hangs."""

import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.trainer.worker.group import open_groups
from asyppo_async.trainer.worker.processes import environment_of_rank
from asyppo_async.types import TokenSequences
from tests.integration.worker.conftest import TIMES
from tests.integration.worker.slow_rank import PAUSE_S
from tests.integration.worker.test_groups import receive
from tests.unit.worker.learners import actor_request

ROOT = Path(__file__).parents[3]
NUM_RANKS = 4
SILENT_AFTER_S = 8.0


@pytest.mark.report("P02")
@pytest.mark.long
@pytest.mark.timeout(400)
async def test_publication_when_the_sender_pauses_at_every_bucket_then_it_ends_and_all_ranks_are_heard(
    tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(line: str) -> None:
        arguments = shlex.split(line.split(": ", 1)[1])[2:]
        place = arguments.index("--connect") + 1
        arguments[place] = f"tcp://{arguments[place]}"
        command = [sys.executable, "-m", "tests.integration.worker.slow_rank", *arguments]
        environment = environment_of_rank(num_threads=1)
        started.extend(subprocess.Popen(command, cwd=ROOT, env=environment) for _ in range(NUM_RANKS))

    try:
        async with open_groups(
            actor=ActorSection(
                model=tiny_folder,
                backend="deepspeed",
                zero_stage=3,
                zero_whole_below=0,
                num_ranks=NUM_RANKS,
                local_ranks=0,
                num_threads=1,
                learning_rate=1e-3,
            ),
            critic=CriticSection(count=0),
            seed=1,
            bucket_bytes=1024,
            folder=tmp_path,
            times=replace(TIMES, join_timeout_s=240, request_timeout_s=120, silent_after_s=SILENT_AFTER_S),
            on_line=start,
        ) as (actor, _):
            await actor.train(actor_request(sequences, [9]))
            started_s = time.monotonic()
            received = await receive(actor, epoch=1, bucket_bytes=1024, deadline_s=90)
            assert time.monotonic() - started_s > SILENT_AFTER_S + 2 * PAUSE_S, "heartbeats were needed"
            result = await actor.train(actor_request(sequences, [9]))
            assert not result.steps[0].skipped, "the group goes on"
            again = await receive(actor, epoch=2, bucket_bytes=1024, deadline_s=90)
            await actor.save(tmp_path / "final")
    finally:
        for process in started:
            process.kill()
            process.wait()
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "final").named_parameters())
    for name, tensor in again.items():
        assert torch.equal(tensor, saved[name].detach()), name
        assert not torch.equal(tensor, received[name]), name
