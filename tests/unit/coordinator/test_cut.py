"""What a checkpoint keeps of the coordinator comes back as it was."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyppo_async.algorithms.confidence import initial_calibration
from asyppo_async.algorithms.trust_masks import EntropyTracker
from asyppo_async.config.load import config_from_tree
from asyppo_async.config.selection import SelectionSection
from asyppo_async.errors import CheckpointError, ConfigError
from asyppo_async.rpc.calls import ResponseParts
from asyppo_async.rpc.codec import SampleFailure, SampleTokens
from asyppo_async.trainer.coordinator.begun_groups import begun_group
from asyppo_async.trainer.coordinator.cut import Cut, crc32_of, read_cut, write_cut
from asyppo_async.trainer.coordinator.decisions import CoreState
from asyppo_async.trainer.coordinator.draws import DrawRecord, Totals
from asyppo_async.trainer.coordinator.memory import StepMemory
from asyppo_async.trainer.coordinator.prompt_table import PromptTable
from asyppo_async.trainer.coordinator.selection import SelectingSampler, open_selection
from asyppo_async.types import FinishReason, Group, Prompt, Response, SamplingParams, Trajectory, VersionRuns

PROMPTS = {
    f"p{index}": Prompt(id=f"p{index}", task="t", text="?", token_ids=(1, 2, 3), answer="1")
    for index in range(4)
}


SAMPLING = SamplingParams(
    temperature=0.7, top_p=1.0, top_k=0, min_tokens=0, max_tokens=9, stop_token_ids=(1,)
)


def response(length: int, *, routed: bool) -> Response:
    random = np.random.default_rng(length)
    return Response(
        token_ids=random.integers(0, 99, length).astype(np.int32),
        behaviour_logprobs=np.where(np.arange(length) == 1, -np.inf, -random.random(length)).astype(
            np.float32
        ),
        versions=VersionRuns.of(np.sort(random.integers(0, 5, length))),
        finish_reason="stop" if length % 2 else "length",
        routed_experts=random.integers(0, 8, (length + 2, 3, 2)).astype(np.int16) if routed else None,
    )


def group(draw_id: int, *, lengths: tuple[int, ...], routed: bool) -> Group:
    prompt = PROMPTS[f"p{draw_id % 4}"]
    return Group(
        draw_id=draw_id,
        prompt=prompt,
        admission_version=draw_id,
        trajectories=tuple(
            Trajectory(
                prompt=prompt,
                draw_id=draw_id,
                sample_index=2 * index,
                response=response(length, routed=routed),
                reward=-0.25 * index,
                server="127.0.0.1:5",
                started_s=1.5,
                finished_s=2.5,
            )
            for index, length in enumerate(lengths)
        ),
        finished_s=3.0,
    )


def record(draw_id: int) -> DrawRecord:
    return DrawRecord(
        draw_id=draw_id,
        prompt_id="p1",
        epoch=0,
        state="queued",
        attempt=1,
        num_failures=1,
        admission_version=2,
        admitted_s=10.0,
        finished_s=14.0,
    )


def a_cut(groups: tuple[Group, ...] = (), **changes: object) -> Cut:
    core = CoreState(
        version=7,
        batch_size=4,
        max_staleness=1,
        records=(record(3),),
        totals=Totals(issued=5, trained=2, dropped_by_reason={"deadline": 1}),
        lead_limit=6,
        max_staleness_seen=1,
    )
    settings: dict[str, object] = {
        "core": core,
        "groups": groups,
        "begun": (),
        "sampling": SAMPLING,
        "memory": StepMemory(),
        "table": PromptTable(SelectionSection()),
        "selection": None,
        "lost_members": {"late_reward": 2},
        "clock_s": 20.0,
    }
    return Cut(**(settings | changes))  # type: ignore[arg-type]


def same_group(one: Group, other: Group, later_s: float) -> None:
    assert (one.draw_id, one.prompt, one.admission_version) == (
        other.draw_id,
        other.prompt,
        other.admission_version,
    )
    assert other.finished_s == one.finished_s + later_s
    for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
        assert (mine.sample_index, mine.reward, mine.server) == (
            theirs.sample_index,
            theirs.reward,
            theirs.server,
        )
        assert mine.response.finish_reason == theirs.response.finish_reason
        assert mine.response.versions == theirs.response.versions
        for name in ("token_ids", "behaviour_logprobs", "routed_experts"):
            array, again = getattr(mine.response, name), getattr(theirs.response, name)
            assert (array is None) == (again is None)
            if array is not None:
                assert array.dtype == again.dtype
                np.testing.assert_array_equal(array, again)


def chunk(sample_index: int, length: int, finish_reason: FinishReason | None, **more: object) -> SampleTokens:
    whole = response(length, routed=True)
    return SampleTokens(
        sample_index=sample_index,
        token_ids=whole.token_ids,
        behaviour_logprobs=whole.behaviour_logprobs,
        versions=VersionRuns(((3 + length, length),)),
        finish_reason=finish_reason,
        routed_experts=whole.routed_experts if finish_reason else None,
        **more,  # type: ignore[arg-type]
    )


def test_cut_with_begun_groups_goes_on_from_every_token_that_had_come(tmp_path: Path) -> None:
    """Of a finished member, of one that is under way, and of none that has not begun."""
    parts = ResponseParts(4, SAMPLING)
    for each in (chunk(0, 2, None), chunk(2, 3, None), chunk(0, 4, "stop")):
        parts.add(each)
    begun = begun_group(3, parts)
    assert begun is not None
    parts.add(chunk(2, 5, None))  # what comes after the cut is not in it
    other = ResponseParts(1, SAMPLING, [chunk(0, 1, None)])
    cut = a_cut(begun=(begun, begun_group(6, other)))
    write_cut(tmp_path, cut, prompts_crc32=crc32_of(PROMPTS), tally="")
    restored = read_cut(tmp_path, PROMPTS, SAMPLING, 0.0).begun
    assert [(each.sample_index, each.finish_reason) for each in restored[3]] == [(0, "stop"), (2, None)]
    assert [each.versions.per_token().tolist() for each in restored[3]] == [[5, 5, 7, 7, 7, 7], [6, 6, 6]]
    assert list(restored) == [3, 6]
    for name in ("token_ids", "behaviour_logprobs"):
        whole = np.concatenate([getattr(response(length, routed=True), name) for length in (2, 4)])
        np.testing.assert_array_equal(getattr(restored[3][0], name), whole)
    np.testing.assert_array_equal(restored[3][0].routed_experts, response(4, routed=True).routed_experts)
    assert restored[3][1].routed_experts is None
    again = ResponseParts(4, SAMPLING, restored[3])
    assert again.num_tokens == 9 and again.unfinished() == [1, 2, 3]


def test_cut_does_not_go_on_with_what_was_sampled_in_another_way(tmp_path: Path) -> None:
    cut = a_cut(begun=(begun_group(3, ResponseParts(1, SAMPLING, [chunk(0, 2, None)])),))
    write_cut(tmp_path, cut, prompts_crc32=crc32_of(PROMPTS), tally="")
    assert read_cut(tmp_path, PROMPTS, replace(SAMPLING, temperature=1.0), 0.0).begun == {}


def test_begun_group_when_nothing_came_or_a_member_is_lost_is_none() -> None:
    parts = ResponseParts(2, SAMPLING)
    assert begun_group(3, parts) is None
    parts.add(chunk(0, 2, None))
    assert begun_group(3, parts) is not None
    parts.add(chunk(1, 2, None, failure=SampleFailure(kind="engine", message="no logits")))
    assert begun_group(3, parts) is None


@pytest.mark.parametrize("routed", [False, True])
def test_cut_with_finished_groups_comes_back_bit_for_bit(tmp_path: Path, routed: bool) -> None:
    groups = (group(3, lengths=(5, 2, 1), routed=routed), group(6, lengths=(4,), routed=routed))
    write_cut(tmp_path, a_cut(groups), prompts_crc32=crc32_of(PROMPTS), tally='{"steps": 7}')
    now_s = 120.0
    restored = read_cut(tmp_path, PROMPTS, SAMPLING, now_s)
    for one, other in zip(groups, restored.groups, strict=True):
        same_group(one, other, later_s=100.0)
    state = restored.state
    assert state.core.totals == a_cut().core.totals and state.tally == '{"steps": 7}'
    assert state.core.records == (replace(record(3), admitted_s=110.0, finished_s=114.0),)
    assert state.lost_members == {"late_reward": 2} and state.memory == StepMemory()


def test_cut_without_groups_and_with_memory_comes_back(tmp_path: Path) -> None:
    calibration = initial_calibration(2, 5)
    calibration.errors[1, 3] = 1 / 3
    memory = StepMemory(calibration=calibration, entropy=EntropyTracker(mean=0.1, variance=float("nan")))
    write_cut(tmp_path, a_cut(memory=memory), prompts_crc32=crc32_of(PROMPTS), tally="")
    restored = read_cut(tmp_path, PROMPTS, SAMPLING, time.monotonic())
    assert restored.groups == () and restored.state.memory.calibration is not None
    assert torch.equal(restored.state.memory.calibration.errors, calibration.errors)
    entropy = restored.state.memory.entropy
    assert entropy is not None and entropy.mean == 0.1 and np.isnan(entropy.variance)


def test_cut_when_the_data_are_others_is_refused(tmp_path: Path) -> None:
    write_cut(tmp_path, a_cut(), prompts_crc32=crc32_of(PROMPTS), tally="")
    others = dict(reversed(PROMPTS.items()))
    with pytest.raises(ConfigError, match="are not those, or not in the order"):
        read_cut(tmp_path, others, SAMPLING, 0.0)


def test_cut_when_its_files_are_no_state_is_refused(tmp_path: Path) -> None:
    write_cut(tmp_path, a_cut(), prompts_crc32=crc32_of(PROMPTS), tally="")
    (tmp_path / "groups.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="holds no finished groups"):
        read_cut(tmp_path, PROMPTS, SAMPLING, 0.0)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no state of a run"):
        read_cut(tmp_path, PROMPTS, SAMPLING, 0.0)


def selection(prompts: str) -> tuple[SelectingSampler, PromptTable]:
    config = config_from_tree(
        {"actor": {"model": "a"}, "critic": {"model": "c"}, "preset": "asyppo"},
        [
            f"selection.prompts={prompts}",
            "selection.uniform_steps=1",
            "selection.ramp_steps=2",
            "selection.pcl_candidates=2",
            "batch.prompts=3",
            *(f"selection.{part}_by_std=5" for part in ("prior", "decay") if prompts == "daps"),
        ],
    )
    table = PromptTable(config.selection)
    sampler = open_selection(config, list(PROMPTS), table)
    assert sampler is not None
    return sampler, table


@pytest.mark.parametrize("prompts", ["daps", "spo", "pcl", "greso"])
def test_selection_restored_decides_as_the_one_that_was_saved(tmp_path: Path, prompts: str) -> None:
    sampler, table = selection(prompts)
    for step in range(6):
        for _ in range(5):
            sampler.next_candidate()
        rewards = group(step, lengths=(3, 4), routed=False)
        all_right = replace(rewards, trajectories=tuple(replace(t, reward=1.0) for t in rewards.trajectories))
        sampler.record(all_right)
        for trajectory in all_right.trajectories:
            table._try(trajectory.prompt.id, 1.0)
        table.advance(0.01)
        sampler.end_step(2)
        sampler.score(
            {f"p{index}": 0.3 * index - 0.5 for index in range(4)},
            {f"p{index}": 0.2 * index for index in range(4)},
        )
    considered = sampler.num_considered
    cut = a_cut(table=table.copy(), selection=sampler.freeze())
    ahead = [sampler.next_candidate() for _ in range(40)]
    table.advance(5.0)  # what comes after the cut is not in it
    write_cut(tmp_path, cut, prompts_crc32=crc32_of(PROMPTS), tally="")
    state = read_cut(tmp_path, PROMPTS, SAMPLING, 0.0).state

    resumed, resumed_table = selection(prompts)
    assert state.selection is not None
    resumed.restore(state.selection)
    resumed_table.restore(state.table)
    resumed.seek(considered)
    assert [resumed.next_candidate() for _ in range(40)] == ahead
    fresh, _ = selection(prompts)
    fresh.seek(considered)
    assert [fresh.next_candidate() for _ in range(40)] != ahead, "what was kept makes a difference"
