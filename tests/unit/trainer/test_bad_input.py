"""What a user gets wrong: one line that says what and where, exit code 1, nothing started, nothing hung."""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from asyppo_async.trainer.cli import main
from tests.unit.trainer.conftest import write_rows

GOOD = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(30)]


class Program:
    """`asyppo-train` in this process, on a configuration of its own."""

    def __init__(
        self, folder: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self._models = models
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def fails_with(self, *arguments: str, data: dict[str, object] | None = None, **tree: object) -> str:
        """The one line of an error."""
        config = self.folder / "run.toml"
        sections: dict[str, object] = {
            "run": {"folder": str(self.folder / "runs")},
            "actor": {"model": str(self._models / "actor")},
            "critic": {"model": str(self._models / "critic")},
        }
        if data is not None:
            sections["task"] = {
                "name": "data", "chat_template": "none", "prompt_template": "{prompt}", "data": data,
            }  # fmt: skip
        config.write_text(tomli_w.dumps({**sections, **tree}))
        self._monkeypatch.setattr(sys, "argv", ["asyppo-train", str(config), *arguments])
        started_s = time.monotonic()
        with pytest.raises(SystemExit) as end:
            main()
        assert time.monotonic() - started_s < 30, "an error at the start is there at once"
        assert end.value.code == 1
        error = self._capsys.readouterr().err
        lines = [line for line in error.splitlines() if line.startswith("asyppo-train: ")]
        assert len(lines) == 1 and "Traceback" not in error, error
        assert not (self.folder / "runs").exists(), "a run that cannot start leaves no folder"
        return lines[0].removeprefix("asyppo-train: ")


@pytest.fixture
def program(
    tmp_path: Path, tiny_models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Program:
    return Program(tmp_path, tiny_models, monkeypatch, capsys)


def test_data_file_when_missing_or_empty_then_is_named(program: Program) -> None:
    missing = program.folder / "missing.jsonl"
    assert f"data.path: there is no file or folder {missing}" in program.fails_with(
        data={"path": str(missing)}
    )
    empty = write_rows(program.folder / "empty.jsonl", [])
    assert f"data.path: {empty} has no rows" in program.fails_with(data={"path": str(empty)})
    good = write_rows(program.folder / "good.jsonl", GOOD)
    words = program.fails_with(data={"path": str(good), "heldout_path": str(missing)})
    assert f"data.heldout_path: there is no file or folder {missing}" in words


def test_data_file_when_a_line_is_broken_or_a_column_is_missing_then_file_and_line_are_named(
    program: Program,
) -> None:
    path = program.folder / "rows.jsonl"
    path.write_text(json.dumps(GOOD[0]) + '\n{"prompt": "1+1=", \n')
    assert f"{path}:2 is not a JSON object" in program.fails_with(data={"path": str(path)})
    write_rows(path, [{"prompt": row["prompt"], "solution": row["answer"]} for row in GOOD])
    words = program.fails_with(data={"path": str(path)})
    assert f"{path}:1 has no column 'answer'; it has: prompt, solution" in words
    write_rows(path, [*GOOD, {"prompt": "2+2=", "answer": "?"}])
    words = program.fails_with(data={"path": str(path), "heldout_share": 0.2})
    assert f"{path}:31 ('?')" in words and 'data.bad_answers = "skip"' in words


def test_prompt_when_longer_than_the_model_takes_then_lengths_and_remedy_are_named(program: Program) -> None:
    path = write_rows(
        program.folder / "long.jsonl", [{"prompt": f"{n}+" * 300, "answer": n} for n in range(30)]
    )
    words = program.fails_with(data={"path": str(path)})
    assert "train prompts are longer than 256 tokens, the shortest has 600" in words
    assert "sampling.max_tokens" in words


def test_chat_template_when_missing_then_error_says_what_to_do(program: Program) -> None:
    path = write_rows(program.folder / "rows.jsonl", GOOD)
    task = {"name": "data", "data": {"path": str(path)}}
    assert "the tokenizer has no chat template; name a Jinja file" in program.fails_with(task=task)
    own = {**task, "chat_template": str(program.folder / "no.jinja")}
    assert "task.chat_template: " in program.fails_with(task=own)
    broken = program.folder / "broken.jinja"
    broken.write_text("{% for message in messages %}{{ message.content }}")
    assert "the chat template refuses the prompt" in program.fails_with(
        task={**task, "chat_template": str(broken)}
    )


def test_names_when_unknown_then_the_nearest_is_given(program: Program) -> None:
    assert "unknown preset 'asypo'; did you mean 'asyppo'?" in program.fails_with(preset="asypo")
    assert "there is no task 'dat'; did you mean data" in program.fails_with(task={"name": "dat"})
    words = program.fails_with(data={"path": "x", "reward": "maths"})
    assert "task.data.reward" in words and "maths" in words
    words = program.fails_with(data={"path": "x", "colum": "q"})
    assert "unknown key 'task.data.colum'" in words
    words = program.fails_with(task={"mix": [{"name": "arithmetic", "wieght": 2}]})
    assert "unknown key 'task.mix.0.wieght'; did you mean 'weight'?" in words


def test_folder_when_it_holds_another_kind_of_model_then_key_and_folder_are_named(program: Program) -> None:
    other = program.folder / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert f"actor.model: {other} has no *.safetensors weights" in program.fails_with(
        "--set", f"actor.model={other}"
    )


def test_critic_when_one_of_an_uneven_ensemble_has_another_vocabulary_then_it_is_named(
    program: Program, tiny_models: Path
) -> None:
    other = program.folder / "other-critic"
    shutil.copytree(tiny_models / "critic", other)
    tree = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**tree, "vocab_size": tree["vocab_size"] + 1}))
    each = f'critic.each=[{{}}, {{model="{other}"}}]'
    words = program.fails_with("--set", each)
    assert f"critic.model {other} has another vocabulary than actor.model" in words
    assert "critic.each describes 1 critics" in program.fails_with("--set", "critic.each=[{}]")
