"""The lineage of a run over its resumes: who it is on the wire, and which rows of its files a resume has abandoned."""

import json
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.decisions import CoreState
from asyppo_async.trainer.coordinator.membership import RunIdentity
from asyppo_async.trainer.durable import replace_file

_log = logging.getLogger(__name__)

_IDENTITY = "run.json"

Row = dict[str, object]


def first_identity(folder: Path, name: str) -> RunIdentity:
    """Of a new run."""
    return _keep(folder, RunIdentity(run_id=f"{name}-{secrets.token_hex(4)}", incarnation=0))


def next_identity(folder: Path) -> RunIdentity:
    """Of a resume. On disk before anything is sent: two lives of a run never have the same one.

    Raises:
        ConfigError: The folder is not that of a run.
    """
    path = folder / _IDENTITY
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        last = RunIdentity(run_id=str(row["run_id"]), incarnation=int(row["incarnation"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not say which run this is: {error}") from None
    return _keep(folder, RunIdentity(run_id=last.run_id, incarnation=last.incarnation + 1))


def _keep(folder: Path, identity: RunIdentity) -> RunIdentity:
    row = {"run_id": identity.run_id, "incarnation": identity.incarnation}
    replace_file(folder / _IDENTITY, json.dumps(row) + "\n")
    return identity


def abandon_rows(folder: Path, state: CoreState | None) -> int:
    """Mark what was written after the checkpoint that the run goes back to with `"abandoned": true`.

    Args:
        folder: Of the run.
        state: Of the checkpoint; None: the run begins anew.

    Returns:
        Training steps that are abandoned here.
    """
    version = 0 if state is None else state.version
    considered = 0 if state is None else state.totals.considered
    kept_draws = 0 if state is None else state.totals.num_fates
    draws_seen = 0

    def is_draw_kept(_: Row) -> bool:
        # Rows come in the order in which the totals grew.
        nonlocal draws_seen
        draws_seen += 1
        return draws_seen <= kept_draws

    first_evaluation = version if state is not None else -1
    _mark(folder / "evaluations.jsonl", lambda row: _number(row, "version") <= first_evaluation)
    _mark(folder / "samples.jsonl", lambda row: _number(row, "step") < version)
    _mark(folder / "traces.jsonl", lambda row: _number(row, "step") < version)
    _mark(folder / "candidates.jsonl", lambda row: _number(row, "number") < considered)
    _mark(folder / "draws.jsonl", is_draw_kept)
    return _mark(folder / "metrics.jsonl", lambda row: _number(row, "version") <= version)


def has_evaluation(folder: Path, version: int) -> bool:
    """Whether the lineage has an evaluation of that version."""
    path = folder / "evaluations.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = map(json.loads, lines)
    return any(row["version"] == version and not row.get("abandoned") for row in rows)


def _mark(path: Path, is_kept: Callable[[Row], bool]) -> int:
    """Rewrite a file of rows; a last line that the crash has cut goes. How many rows are newly marked."""
    if not path.exists():
        return 0
    num_marked = 0
    lines = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            _log.warning("%s: a line that is no JSON is left out: %.80s", path, line)
            continue
        is_left = not row.get("abandoned") and not is_kept(row)
        num_marked += is_left
        lines.append((json.dumps({**row, "abandoned": True}) if is_left else line) + "\n")
    replace_file(path, "".join(lines))
    return num_marked


def _number(row: Row, key: str) -> int:
    value = row[key]
    assert isinstance(value, int)
    return value
