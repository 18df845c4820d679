"""Versions of tokens as runs: what they say, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyppo_async.types import Response, VersionRuns


@given(versions=st.lists(st.integers(0, 2**31 - 1), max_size=40).map(sorted))
def test_version_runs_when_made_of_tokens_then_they_give_them_back(versions: list[int]) -> None:
    runs = VersionRuns.of(versions)
    assert runs.per_token().dtype == np.int32 and runs.per_token().tolist() == versions
    assert runs.num_tokens == len(versions)
    assert len(runs.runs) == len(set(versions)), "one run a version"
    if versions:
        assert (runs.oldest, runs.newest) == (min(versions), max(versions))


@given(versions=st.lists(st.integers(0, 5), max_size=12).map(sorted), cut=st.integers(0, 12))
def test_joined_when_parts_follow_one_another_then_they_are_the_whole(versions: list[int], cut: int) -> None:
    parts = [VersionRuns.of(versions[:cut]), VersionRuns.of(versions[cut:])]
    assert VersionRuns.joined(parts) == VersionRuns.of(versions), "cut within a run, it is one run again"


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (((5, 1), (4, 1)), "never fall"),
        (((-1, 1),), "31-bit"),
        (((2**31, 1),), "31-bit"),
        (((3, 1), (4, 0)), "a token at least"),
    ],
)
def test_version_runs_when_they_cannot_be_then_they_are_refused(
    runs: tuple[tuple[int, int], ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        VersionRuns(runs)
    with pytest.raises(ValueError, match=words):
        VersionRuns.joined([VersionRuns(runs[:1]), VersionRuns(runs[1:])])


def test_response_when_its_lengths_differ_then_it_is_refused() -> None:
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
    with pytest.raises(ValueError, match="got 3 tokens, 3 log-probs, 2 versions"):
        Response(
            token_ids=ids, behaviour_logprobs=logprobs, versions=VersionRuns(((0, 2),)), finish_reason="stop"
        )
