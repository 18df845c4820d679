"""A disk that is full when a checkpoint is due."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.chaos.conftest import (
    ChaosRunner,
    ScriptedServer,
    check_lineage,
    wait_for_steps,
    wait_until,
)

DISK_BYTES = 2**28


@pytest.mark.report("P46")
@pytest.mark.long
@pytest.mark.timeout(280)
def test_run_whose_disk_is_full_goes_on_and_comes_back_from_the_checkpoint_before(
    runner: ChaosRunner, server: ScriptedServer, tmp_path: Path
) -> None:
    name = "full"
    folder = runner.folder / "runs" / name
    log = folder / "logs" / "trainer.log"
    settings = {"task.num_train": 80, "run.num_steps": 20, "checkpoint.failure_budget": 100}
    arguments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with small_disk(tmp_path / "disk") as disk:
        process = runner.start(name, "--fleet", server.address, *arguments)
        wait_for_steps(process, folder, 2)
        process.kill()
        process.communicate(timeout=30)
        move(folder / "checkpoints", disk / "checkpoints")
        process = runner.resume(name)
        wait_for_steps(process, folder, 1)
        wait_until(lambda: is_full(disk, log), 60, "a checkpoint fails", alive=lambda: process.poll() is None)
        wait_for_steps(process, folder, 2)
        process.kill()
        process.communicate(timeout=30)
        process = runner.resume(name)
        wait_for_steps(process, folder, 1)
        abandoned = [
            line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"abandoned"' in line
        ]
        assert len(abandoned) >= 2, "what could not be saved is done again"
        (disk / "ballast").unlink()
        done = runner.finish(process, name, timeout_s=150)
        assert done.code == 0, done.err
        newest = (disk / "checkpoints" / "latest").read_text()
    check_lineage(done, 80)
    assert newest.strip().endswith("step-00000020"), "with room it is saved again"
    assert done.summary["resumes"] == 2
    assert "the run goes on, and could only be resumed from the one before" in log.read_text()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def move(folder: Path, target: Path) -> None:
    """Onto another disk, with a link in its place."""
    shutil.move(folder, target)
    folder.symlink_to(target)


def is_full(disk: Path, log: Path) -> bool:
    """Take what room there is; whether a checkpoint has found none."""
    with (disk / "ballast").open("ab") as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(2**20))
            ballast.flush()
    return "No space left on device" in log.read_text()
