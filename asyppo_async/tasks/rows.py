"""The rows of a data set on disk, each with the place where it stands: JSON lines, parquet, Hugging Face data sets."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from asyppo_async.errors import TaskError
from asyppo_async.tasks.protocol import JsonValue

_BATCH_ROWS = 1024
_MAX_QUOTED = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row."""

    fields: Mapping[str, object]
    place: str
    """`FILE:LINE`, or `FILE row N` counted from 1."""

    def field(self, column: str) -> object:
        """The value of a column, or None where it is null; `a.b` is a field within a field.

        Raises:
            TaskError: there is no such column; the message names those that are there.
        """
        value: object = self.fields
        for name in [column] if column in self.fields else column.split("."):
            if not isinstance(value, Mapping) or name not in value:
                known = ", ".join(map(str, self.fields))
                raise TaskError(f"{self.place} has no column {column!r}; it has: {known}")
            value = value[name]
        return value

    def document(self) -> str:
        """The whole row as JSON, for a reward function; what JSON cannot hold (dates, bytes) is its text."""
        return json.dumps(dict(self.fields), default=str)


class _ParquetFile(Protocol):
    def iter_batches(self, batch_size: int) -> Iterable["_Batch"]: ...


class _Batch(Protocol):
    def to_pylist(self) -> list[dict[str, object]]: ...


class _DataSets(Protocol):
    def load_from_disk(self, dataset_path: str) -> object: ...

    def load_dataset(self, path: str, *, split: str) -> object: ...

    def disable_progress_bars(self) -> None: ...


def read_rows(path: Path, split: str, key: str) -> Iterator[Row]:
    """All rows in their order, one at a time.

    Args:
        path: A `.jsonl` or `.parquet` file, or a folder.
        split: Of a folder with several.
        key: The setting that named the path, for messages.

    Raises:
        TaskError: nothing is there, it is empty, or a line is broken; with file and line.
    """
    if not path.exists():
        raise TaskError(f"{key}: there is no file or folder {path}")
    if path.is_dir():
        rows = _data_set_rows(path, split)
    elif path.suffix in (".jsonl", ".ndjson"):
        rows = _json_rows(path)
    elif path.suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        raise TaskError(f"{key}: {path} must end in .jsonl or .parquet, or be the folder of a data set")
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise TaskError(f"{key}: {path} has no rows")


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                fields: JsonValue = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: no JSON, or no UTF-8
                shown = line[:_MAX_QUOTED].decode(errors="replace").strip()
                raise TaskError(f"{place} is not a JSON object: {error}: {shown!r}") from error
            if not isinstance(fields, dict):
                raise TaskError(f"{place} is not a JSON object but {type(fields).__name__}")
            yield Row(fields=fields, place=place)


def _parquet_rows(path: Path) -> Iterator[Row]:
    parquet = importlib.import_module("pyarrow.parquet")  # when needed: a third of a second
    number = 0
    try:
        file = cast(_ParquetFile, parquet.ParquetFile(path))
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for fields in batch.to_pylist():
                number += 1
                yield Row(fields=fields, place=f"{path} row {number}")
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        raise TaskError(f"{path} cannot be read as parquet after row {number}: {error}") from error


def _data_set_rows(path: Path, split: str) -> Iterator[Row]:
    library = cast(_DataSets, importlib.import_module("datasets"))  # when needed: it takes seconds
    library.disable_progress_bars()
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        found = library.load_from_disk(str(path)) if saved else library.load_dataset(str(path), split=split)
        if isinstance(found, Mapping):
            if split not in found:
                raise TaskError(f"{path} has no split {split!r}; it has: {', '.join(map(str, found))}")
            found = found[split]
        for number, fields in enumerate(cast(Iterable[dict[str, object]], found), 1):
            yield Row(fields=fields, place=f"{path} ({split}) row {number}")
    except (OSError, ValueError) as error:
        raise TaskError(f"{path} cannot be read as a data set: {str(error).splitlines()[0]}") from error
