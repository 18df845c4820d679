"""Lint, format, types, and that the generated stubs are those of the contract."""

import filecmp
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=170, check=False)


def test_lint_finds_nothing() -> None:
    result = run(sys.executable, "-m", "ruff", "check", ".")
    assert result.returncode == 0, result.stdout


def test_format_finds_nothing_to_change() -> None:
    result = run(sys.executable, "-m", "ruff", "format", "--check", ".")
    assert result.returncode == 0, result.stdout


def test_types_are_strict() -> None:
    result = run("scripts/typecheck")
    assert result.returncode == 0, result.stdout + result.stderr


def test_stubs_when_generated_again_are_the_committed_ones(tmp_path: Path) -> None:
    protos = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "proto").rglob("*.proto"))
    assert protos
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    result = run(sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, *protos)
    assert result.returncode == 0, result.stderr
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert generated
    _, differing, missing = filecmp.cmpfiles(tmp_path, ROOT, map(str, generated), shallow=False)
    assert not differing and not missing, f"run `make stubs`: {differing + missing}"
