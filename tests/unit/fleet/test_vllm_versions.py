"""Version runs of each delta, from the engine's growing list of starts, against its final spans."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

from asyppo_async.fleet.engine.protocol import EngineFault, LabelRun, WeightsLabel
from asyppo_async.fleet.engine.vllm_versions import VersionReader, label_text, parse_label, runs_between

OLD, NEW = WeightsLabel(version=3, load=7), WeightsLabel(version=4, load=8)


def processor(starts: list[tuple[str, int]]) -> SimpleNamespace:
    ids: defaultdict[str, list[str]] = defaultdict(list, {"a": ["a-1"]})
    return SimpleNamespace(
        external_req_ids=ids, request_states={"a-1": SimpleNamespace(weight_version_starts=starts)}
    )


def spans(*triples: tuple[str, int, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(version=version, start=start, end=end) for version, start, end in triples]


def run(label: WeightsLabel, num_tokens: int) -> LabelRun:
    return LabelRun(label=label, num_tokens=num_tokens)


def test_labels_when_written_and_read_then_equal() -> None:
    assert parse_label(label_text(NEW)) == NEW
    with pytest.raises(EngineFault, match="'default'"):
        parse_label("default")


def test_runs_when_weights_change_inside_then_split_there() -> None:
    starts = [("3@7", 0), ("4@8", 10)]
    assert runs_between(starts, 0, 4) == (run(OLD, 4),)
    assert runs_between(starts, 8, 13) == (run(OLD, 2), run(NEW, 3))
    assert runs_between(starts, 10, 13) == (run(NEW, 3),)
    assert runs_between(starts, 5, 5) == ()
    with pytest.raises(EngineFault, match="no weights are named"):
        runs_between([("3@7", 2)], 0, 4)


def test_take_when_the_list_grows_then_each_delta_gets_its_own_runs() -> None:
    starts = [("3@7", 0)]
    reader = VersionReader(processor(starts), "a")
    assert reader.take(6, None) == (run(OLD, 6),)
    starts.append(("4@8", 8))
    assert reader.take(5, None) == (run(OLD, 2), run(NEW, 3))
    assert reader.take(4, spans(("3@7", 0, 8), ("4@8", 8, 15))) == (run(NEW, 4),)


def test_take_when_final_spans_contradict_then_raises() -> None:
    reader = VersionReader(processor([("3@7", 0)]), "a")
    reader.take(6, None)
    with pytest.raises(EngineFault, match="reported on the way"):
        reader.take(2, spans(("3@7", 0, 4), ("4@8", 4, 8)))


def test_take_when_finished_in_one_delta_then_uses_the_final_spans() -> None:
    gone = SimpleNamespace(external_req_ids=defaultdict(list), request_states={})
    assert VersionReader(gone, "a").take(3, spans(("3@7", 0, 3))) == (run(OLD, 3),)
    with pytest.raises(EngineFault, match="holds no version spans"):
        VersionReader(gone, "a").take(3, None)
