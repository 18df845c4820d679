"""What a resume does to the files of a run: rows of abandoned steps are marked, and no life has the name of another."""

import json
from pathlib import Path

import pytest

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.decisions import CoreState
from asyppo_async.trainer.coordinator.draws import Totals
from asyppo_async.trainer.lineage import abandon_rows, first_identity, has_evaluation, next_identity
from asyppo_async.trainer.report.run_data import read_run

STATE = CoreState(
    version=3,
    batch_size=1,
    max_staleness=1,
    records=(),
    totals=Totals(issued=5, skipped=1, trained=3, returned_by_reason={"deadline": 1}),
    lead_limit=2,
    max_staleness_seen=0,
)


def write(folder: Path) -> None:
    def lines(name: str, rows: list[dict[str, object]], rest: str = "") -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)

    lines("metrics.jsonl", [{"version": version} for version in range(1, 6)], rest='{"version": 6, "rew')
    lines("evaluations.jsonl", [{"version": version} for version in (0, 3, 4)])
    for name in ("samples.jsonl", "traces.jsonl"):
        lines(name, [{"step": step} for step in range(5)])
    lines("candidates.jsonl", [{"number": number} for number in range(8)])
    lines("draws.jsonl", [{"draw": draw} for draw in (0, 1, 0, 2, 3, 4)])
    (folder / "config.toml").write_text("")


def kept(folder: Path, name: str, key: str) -> list[object]:
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [row[key] for row in rows if not row.get("abandoned")]


def test_rows_after_the_checkpoint_are_marked_once_and_reports_skip_them(tmp_path: Path) -> None:
    write(tmp_path)
    assert abandon_rows(tmp_path, STATE) == 2
    assert kept(tmp_path, "metrics.jsonl", "version") == [1, 2, 3]
    assert kept(tmp_path, "evaluations.jsonl", "version") == [0, 3]
    assert [has_evaluation(tmp_path, version) for version in (0, 3, 4, 5)] == [True, True, False, False]
    assert kept(tmp_path, "samples.jsonl", "step") == kept(tmp_path, "traces.jsonl", "step") == [0, 1, 2]
    assert kept(tmp_path, "candidates.jsonl", "number") == [0, 1, 2, 3, 4, 5]
    assert kept(tmp_path, "draws.jsonl", "draw") == [0, 1, 0, 2]
    assert read_run(tmp_path).versions == [1, 2, 3]
    before = (tmp_path / "draws.jsonl").read_text()
    assert abandon_rows(tmp_path, STATE) == 0 and (tmp_path / "draws.jsonl").read_text() == before
    # The next life writes behind them, and dies as well.
    with (tmp_path / "draws.jsonl").open("a") as file:
        file.write('{"draw": 3}\n{"draw": 4}\n')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"version": 4}\n')
    assert abandon_rows(tmp_path, STATE) == 1
    assert kept(tmp_path, "draws.jsonl", "draw") == [0, 1, 0, 2]


def test_rows_when_there_is_no_checkpoint_are_all_marked(tmp_path: Path) -> None:
    write(tmp_path)
    assert abandon_rows(tmp_path, None) == 5
    for name, key in (("evaluations.jsonl", "version"), ("samples.jsonl", "step"), ("draws.jsonl", "draw")):
        assert kept(tmp_path, name, key) == []


def test_identity_grows_with_every_life_even_if_it_saves_nothing(tmp_path: Path) -> None:
    first = first_identity(tmp_path, "name")
    lives = [next_identity(tmp_path) for _ in range(3)]
    assert first.run_id.startswith("name-") and {life.run_id for life in lives} == {first.run_id}
    assert [life.incarnation for life in (first, *lives)] == [0, 1, 2, 3]
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="does not say which run this is"):
        next_identity(tmp_path)
