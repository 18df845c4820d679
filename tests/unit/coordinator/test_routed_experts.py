"""The experts that an engine used, from a server of a mixture to the batch of a step: asked for where a run replays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from asyppo_async.errors import FleetError
from asyppo_async.trainer.coordinator.connecting import connect
from asyppo_async.trainer.coordinator.generated import Generated
from asyppo_async.trainer.coordinator.membership import Fleet
from asyppo_async.trainer.coordinator.publish import open_publisher
from asyppo_async.types import Prompt
from tests.unit.coordinator.publish_fleet import (
    RUN,
    SAMPLING,
    SETTINGS,
    Sender,
    expected_of,
    plan,
    servers,
    write_model,
)

PROMPT = Prompt(id="p", task="arithmetic", text="1+2=", token_ids=(5, 6, 7), answer="3")


@asynccontextmanager
async def published(tmp_path: Path, *, num_experts: int, asked: bool) -> AsyncIterator[Fleet]:
    model = write_model(tmp_path / "model")
    async with servers(model, tmp_path, marked_by="version", num_experts=num_experts) as started:
        expected = expected_of(model, routed_experts=asked)
        async with (
            connect([started[0].address], expected, RUN, 10.0, debug=True) as fleet,
            open_publisher(
                sender=Sender(model, marked_by="version"),
                fleet=fleet,
                settings=SETTINGS,
                plan=plan(),
                host="127.0.0.1",
                version=0,
            ) as publisher,
        ):
            await publisher.publish(0)
            yield fleet


async def group(fleet: Fleet) -> Generated:
    return await asyncio.wait_for(
        fleet.generate(
            PROMPT,
            num_samples=3,
            sampling=SAMPLING,
            deadline_s=30,
            on_tokens=lambda _: None,
            on_server=lambda _: None,
        ),
        60,
    )


async def test_responses_of_a_run_that_replays_say_their_experts_at_every_fed_position(
    tmp_path: Path,
) -> None:
    async with published(tmp_path, num_experts=5, asked=True) as fleet:
        generated = await group(fleet)
    assert len(generated.responses) == 3
    for response in generated.responses:
        experts = response.routed_experts
        assert experts is not None
        assert experts.shape == (len(PROMPT.token_ids) + len(response.token_ids) - 1, 3, 2)
        # The script's rule: seven times the sum of position, layer and place, modulo the number of experts.
        np.testing.assert_array_equal(experts, np.indices(experts.shape).sum(0) * 7 % 5)


async def test_responses_of_a_run_that_does_not_replay_carry_no_experts(tmp_path: Path) -> None:
    async with published(tmp_path, num_experts=5, asked=False) as fleet:
        generated = await group(fleet)
    assert [response.routed_experts for response in generated.responses] == [None] * 3


async def test_run_that_replays_on_an_engine_that_does_not_say_ends_with_the_servers_words(
    tmp_path: Path,
) -> None:
    async with published(tmp_path, num_experts=0, asked=True) as fleet:
        with pytest.raises(FleetError, match="does not say which experts it used"):
            await group(fleet)
