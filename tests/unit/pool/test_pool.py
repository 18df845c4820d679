"""A pool on disk: what is written is read, broken and mixed pools are refused, coverage says what is missing."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from asyppo_async.config.pool import PoolSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.cli import app
from asyppo_async.trainer.pool.coverage import balanced_shares, cover, length_edges, missing_lines
from asyppo_async.trainer.pool.pool import check_both_verdicts, open_pool
from asyppo_async.trainer.pool.saver import PoolSaver
from asyppo_async.trainer.pool.shards import Pooled, Vocabulary, write_shard
from tests.unit.coordinator.worked_batch import make_group

VOCABULARY = Vocabulary(tokenizer_fingerprint="abc", size=23)


def rows(draw: int, lengths: list[int], rewards: list[float], policy: str = "weak") -> list[Pooled]:
    group = make_group(draw, lengths, rewards, version=draw)
    return [Pooled(trajectory=one, policy=policy) for one in group.trajectories]


def test_pool_when_read_gives_back_every_number_in_any_order(tmp_path: Path) -> None:
    written = rows(0, [3, 2], [1.0, -1.0]) + rows(1, [4, 1], [1.0, -0.5], "strong")
    write_shard(tmp_path / "a.safetensors", written[:3], VOCABULARY)
    write_shard(tmp_path / "b.safetensors", written[3:], VOCABULARY)
    pool = open_pool(tmp_path)
    assert [entry.policy for entry in pool.entries] == ["weak", "weak", "strong", "strong"]
    for entry, back, row in zip(
        reversed(pool.entries), pool.read(list(reversed(pool.entries))), reversed(written), strict=True
    ):
        original = row.trajectory
        assert (back.prompt.id, back.prompt.token_ids) == (original.prompt.id, original.prompt.token_ids)
        assert (back.reward, back.sample_index) == (original.reward, original.sample_index)
        for name in ("token_ids", "behaviour_logprobs", "versions", "finish_reason"):
            assert np.array_equal(getattr(back.response, name), getattr(original.response, name))
        assert entry.num_tokens == original.num_tokens and entry.is_right == (original.reward >= 1)


def test_shard_when_its_step_is_repeated_replaces_itself(tmp_path: Path) -> None:
    for lengths in ([3, 2], [1]):
        write_shard(tmp_path / "run-000001.safetensors", rows(0, lengths, [1.0] * len(lengths)), VOCABULARY)
    assert [entry.num_tokens for entry in open_pool(tmp_path).entries] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["run-000001.safetensors"]


def test_pool_when_it_cannot_be_used_says_why_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no pool.*pool collect CONFIG"):
        open_pool(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"is empty: collect into it.*pool\.save=true"):
        open_pool(tmp_path)
    shard = tmp_path / "a.safetensors"
    write_shard(shard, rows(0, [3, 2], [1.0, 1.0]), VOCABULARY)
    with pytest.raises(
        ConfigError, match=r"all 2 trajectories .* are right: a critic would learn one constant"
    ):
        check_both_verdicts(open_pool(tmp_path))
    with pytest.raises(
        ConfigError, match=r"another tokenizer \(abc, 23 tokens\) than model reads \(xyz, 9 tokens"
    ):
        open_pool(tmp_path).check(Vocabulary(tokenizer_fingerprint="xyz", size=9), Path("model"))
    write_shard(
        tmp_path / "b.safetensors", rows(1, [1], [1.0]), Vocabulary(tokenizer_fingerprint="xyz", size=9)
    )
    with pytest.raises(ConfigError, match=r"mixes shards of several tokenizers \(abc, xyz\)"):
        open_pool(tmp_path)
    whole = shard.read_bytes()
    for length in (0, 4, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"a\.safetensors cannot be read.*take it out of the pool"):
            open_pool(tmp_path)


def test_coverage_counts_every_cell_and_names_what_is_missing(tmp_path: Path) -> None:
    written = rows(0, [2, 9, 30], [1.0, -1.0, -1.0]) + rows(1, [3, 12], [1.0, 1.0], "strong")
    write_shard(tmp_path / "a.safetensors", written, VOCABULARY)
    entries = open_pool(tmp_path).entries
    assert length_edges(entries, ()) == (4, 8, 16) and length_edges(entries, (9, 3)) == (3, 9)
    coverage = cover(entries, (4, 16))
    assert coverage.policies == ("weak", "strong") and coverage.buckets == ["1-4", "5-16", "17-"]
    lines = missing_lines(coverage, 1)
    assert lines == [
        "missing: wrong responses of 1-4 tokens, 0 of 1 at least",
        "missing: right responses of 17- tokens, 0 of 1 at least",
        "7 of 12 cells hold fewer than 1",
    ]
    assert len(coverage.missing(1)) == 7


def test_balanced_draws_give_every_length_and_verdict_the_same_mass(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", rows(0, [2, 2, 2, 9], [1.0, 1.0, -1.0, 1.0]), VOCABULARY)
    shares = balanced_shares(open_pool(tmp_path).entries, (4,))
    assert shares.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])


def test_pool_info_shows_the_table_and_fails_on_an_empty_folder(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", rows(0, [2, 9], [1.0, -1.0]), VOCABULARY)
    shown = CliRunner().invoke(app, ["pool", "info", str(tmp_path), "--edge", "4", "--least", "2"])
    assert shown.exit_code == 0, shown.output
    for words in (
        "2 trajectories of 1 prompts, 11 response tokens",
        "weak",
        "1 / 0",
        "4 of 4 cells hold fewer than 2",
    ):
        assert words in shown.output
    empty = CliRunner().invoke(app, ["pool", "info", str(tmp_path / "no")])
    assert isinstance(empty.exception, ConfigError)


def test_saver_when_the_disk_is_full_loses_shards_and_not_the_run(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    saver = PoolSaver(PoolSection(path=blocked, policy_steps=10), VOCABULARY, "run", kept_only=False)
    saver.arrived(make_group(0, [2], [1.0], version=27))
    saver.step(None, 1)  # type: ignore[arg-type]
    assert saver.num_failed == 1
    saver = PoolSaver(
        PoolSection(path=tmp_path / "pool", policy_steps=10), VOCABULARY, "run", kept_only=False
    )
    saver.step(None, 1)  # type: ignore[arg-type]
    assert not (tmp_path / "pool").exists(), "a step without arrivals writes nothing"
    saver.arrived(make_group(0, [2], [1.0], version=27))
    saver.step(None, 2)  # type: ignore[arg-type]
    assert [entry.policy for entry in open_pool(tmp_path / "pool").entries] == ["run@20"]
