"""Reading data sets: every format, and every way in which one can be broken, with file and line."""

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from asyppo_async.errors import TaskError
from asyppo_async.tasks.rows import Row, read_rows

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1, "extra": {"deep": str(n)}} for n in range(3)]


def rows_of(path: Path, split: str = "train") -> list[Row]:
    return list(read_rows(path, split, "task.data.path"))


def write_jsonl(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_jsonl_when_read_then_gives_rows_and_lines_and_skips_blank_ones(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", json.dumps(ROWS[0]), "", json.dumps(ROWS[1]))
    rows = rows_of(file)
    assert [row.fields for row in rows] == ROWS[:2]
    assert [row.place for row in rows] == [f"{file}:1", f"{file}:3"]
    assert rows[1].field("extra.deep") == "1"
    assert json.loads(rows[1].document()) == ROWS[1]


def test_parquet_when_read_then_gives_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), file)
    rows = rows_of(file)
    assert [row.fields for row in rows] == chats
    assert rows[2].place == f"{file} row 3"


def test_hugging_face_folder_when_saved_alone_with_splits_or_copied_from_a_hub_then_is_read(
    tmp_path: Path,
) -> None:
    data_set = datasets.Dataset.from_list(ROWS)
    data_set.save_to_disk(str(tmp_path / "alone"))
    datasets.DatasetDict({"train": data_set, "test": data_set.select([2])}).save_to_disk(
        str(tmp_path / "dict")
    )
    (tmp_path / "copy").mkdir()
    data_set.to_parquet(str(tmp_path / "copy" / "train-00000-of-00001.parquet"))
    assert [row.fields for row in rows_of(tmp_path / "alone")] == ROWS
    assert [row.fields for row in rows_of(tmp_path / "dict", "test")] == ROWS[2:]
    assert [row.fields for row in rows_of(tmp_path / "copy")] == ROWS
    with pytest.raises(TaskError, match="no split 'dev'; it has: train, test"):
        rows_of(tmp_path / "dict", "dev")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(TaskError, match="nothing cannot be read as a data set: "):
        rows_of(tmp_path / "nothing")


def test_path_when_missing_empty_or_of_another_kind_then_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task.data.path: there is no file or folder .*no.jsonl"):
        rows_of(tmp_path / "no.jsonl")
    with pytest.raises(TaskError, match=r"empty.jsonl has no rows"):
        rows_of(write_jsonl(tmp_path / "empty.jsonl", "", ""))
    with pytest.raises(TaskError, match=r"must end in .jsonl or .parquet"):
        rows_of(write_jsonl(tmp_path / "rows.csv", "a,b"))
    with pytest.raises(TaskError, match=r"a.parquet cannot be read as parquet"):
        rows_of(write_jsonl(tmp_path / "a.parquet", "not parquet"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a", "answer":', "Expecting value"),
        (b"[1, 2]", "is not a JSON object but list"),
        (b"prompt,answer", "Expecting value"),
        (b'{"prompt": "\xff"}', "codec can't decode"),
    ],
)
def test_line_when_broken_then_error_names_file_and_line(tmp_path: Path, line: bytes, words: str) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(TaskError, match=rf"broken.jsonl:2 .*{words}"):
        rows_of(file)


def test_column_when_missing_then_error_names_the_place_and_what_there_is(tmp_path: Path) -> None:
    row = rows_of(write_jsonl(tmp_path / "a.jsonl", json.dumps(ROWS[0])))[0]
    with pytest.raises(TaskError, match=r"a.jsonl:1 has no column 'solution'; it has: prompt, answer, extra"):
        row.field("solution")
    with pytest.raises(TaskError, match=r"no column 'extra.shallow'"):
        row.field("extra.shallow")
