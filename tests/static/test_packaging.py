"""What is installed is what is in the tree, and the programs start fast."""

import os
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {"asyppo-train": "asyppo_async.trainer.cli", "asyppo-fleet": "asyppo_async.fleet.cli"}


def test_package_list_names_every_package_of_the_tree() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for top in ("asyppo_async", "fleet", "trainer"):
        for init in (ROOT / top).rglob("__init__.py"):
            package = ".".join(init.parent.relative_to(ROOT).parts)
            found.add(package if top == "asyppo_async" else f"asyppo_async.{package}")
    assert listed == found
    assert not list((ROOT / "proto").rglob("__init__.py")), "proto/ must not shadow proto-plus"


def test_wheel_when_installed_elsewhere_brings_every_module(tmp_path: Path) -> None:
    # From a copy: setuptools leaves a build folder behind, and would take what a former build left into this wheel.
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("asyppo_async", "fleet", "trainer"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=copy, check=True, timeout=120, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    unpack = [*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(unpack, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    assert {entry.name for entry in site.iterdir() if entry.is_dir()} >= {"asyppo_async"}
    assert not (site / "fleet").exists() and not (site / "trainer").exists()
    smoke = """
import sys
sys.path.insert(0, sys.argv[1])
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
import asyppo_async.fleet.serve, asyppo_async.trainer.run, asyppo_async.rpc.v1.fleet_pb2
from asyppo_async.config.load import preset_names
assert "asyppo" in preset_names()
assert asyppo_async.__path__[0].startswith(sys.argv[1]), asyppo_async.__path__
assert "flash_attn" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", smoke, str(site)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def child_cpu_s() -> float:
    """Of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_when_asked_comes_in_a_second_without_torch(program: str) -> None:
    for arguments in ([], ["run"] if program == "asyppo-train" else ["serve"]):
        before_s = child_cpu_s()
        command = [Path(sys.executable).with_name(program), *arguments, "--help"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        # Of its own time, whatever else the machine does; the import test below is exact.
        assert child_cpu_s() - before_s < 2.0
        assert "--help" in result.stdout
    heavy = ("torch", "vllm", "transformers")
    probe = f"import sys, {PROGRAMS[program]}; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", probe], timeout=60, check=False).returncode == 0


def test_every_toml_of_the_project_loads() -> None:
    from asyppo_async.config.load import load_config

    examples = sorted((ROOT / "examples").glob("*.toml"))
    assert examples
    for path in examples:
        load_config(path)


def test_every_preset_loads_with_models_named() -> None:
    from asyppo_async.config.load import config_from_tree, preset_names

    assert preset_names()
    for name in preset_names():
        config_from_tree({"preset": name, "actor": {"model": "a"}, "critic": {"model": "c"}})
