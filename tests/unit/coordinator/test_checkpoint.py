"""Checkpoints on disk: whole or absent, whatever is cut, changed, full, or killed in between."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.coordinator.checkpoint import CheckpointFolder, Saved

FILES = {"run.json": b'{"a": 1}', "actor/state.safetensors": bytes(range(200)), "actor/rank-0.json": b"{}"}


def written(checkpoints: CheckpointFolder, version: int) -> Path:
    partial = checkpoints.begin()
    for name, content in FILES.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(content + str(version).encode())
    return partial


def saved(checkpoints: CheckpointFolder, version: int) -> Saved:
    return checkpoints.commit(written(checkpoints, version), version)


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def test_newest_is_the_last_one_committed_and_old_ones_go(checkpoints: CheckpointFolder) -> None:
    assert checkpoints.newest() is None
    last = [saved(checkpoints, version) for version in (3, 6, 9)][-1]
    assert checkpoints.newest() == last and (last.number, last.version) == (3, 9)
    assert (checkpoints.folder / "latest").read_text() == "000003-step-00000009\n"
    names = {path.name for path in checkpoints.folder.iterdir()}
    assert names == {"latest", "000002-step-00000006", "000003-step-00000009"}
    assert (last.folder / "actor" / "state.safetensors").read_bytes().endswith(b"9")


@pytest.mark.report("P53")
def test_newest_when_bytes_are_missing_anywhere_is_the_one_before(
    checkpoints: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    before, newest = saved(checkpoints, 1), saved(checkpoints, 2)
    aside = newest.folder.with_name(f"{newest.folder.name}.damaged")
    for path in [path for path in newest.folder.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for size in (*range(0, len(whole), 5), len(whole) - 1):
            path.write_bytes(whole[:size])
            assert checkpoints.newest() == before, f"{path} cut to {size} of {len(whole)} bytes"
            aside.rename(newest.folder)
            path.write_bytes(whole)
    assert f"{newest.folder}" in caplog.text and "going back to the checkpoint before it" in caplog.text
    assert checkpoints.newest() == newest


def test_newest_when_a_bit_is_flipped_or_a_file_is_gone_is_the_one_before(
    checkpoints: CheckpointFolder,
) -> None:
    before, newest = saved(checkpoints, 1), saved(checkpoints, 2)
    aside = newest.folder.with_name(f"{newest.folder.name}.damaged")
    for path in [path for path in newest.folder.rglob("*") if path.is_file()]:
        whole = bytearray(path.read_bytes())
        for place in (0, len(whole) // 2, len(whole) - 1):
            whole[place] ^= 16
            path.write_bytes(whole)
            assert checkpoints.newest() == before, f"{path}, byte {place}"
            aside.rename(newest.folder)
            whole[place] ^= 16
        path.unlink()
        assert checkpoints.newest() == before
        aside.rename(newest.folder)
        path.write_bytes(whole)
    assert checkpoints.newest() == newest


def test_newest_when_none_is_whole_names_what_is_wrong_with_each(checkpoints: CheckpointFolder) -> None:
    for version in (1, 2):
        (saved(checkpoints, version).folder / "run.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints is whole: .*run\.json has 1 bytes"):
        checkpoints.newest()
    assert len(list(checkpoints.folder.glob("*-step-*"))) == 2, "nothing is moved before one is found"


def test_newest_when_latest_is_lost_or_garbled_looks_at_all(checkpoints: CheckpointFolder) -> None:
    newest = [saved(checkpoints, version) for version in (1, 2)][-1]
    for content in (b"", b"000009-step", b"\xff\xfe", None):
        latest = checkpoints.folder / "latest"
        latest.unlink() if content is None else latest.write_bytes(content)
        assert checkpoints.newest() == newest


def test_newest_when_latest_does_not_name_a_newer_one_then_nobody_has_acknowledged_it(
    checkpoints: CheckpointFolder,
) -> None:
    before = saved(checkpoints, 1)
    latest = (checkpoints.folder / "latest").read_text()
    saved(checkpoints, 2)
    (checkpoints.folder / "latest").write_text(latest)
    assert checkpoints.newest() == before
    assert saved(checkpoints, 2).number == 3, "and its number is not used again"


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at_call(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From the call on of all those that reach the disk's names and sync, the process is no more."""
    calls = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **settings: object) -> object:
            nonlocal calls
            calls += 1
            if calls >= number:
                raise Killed
            return real(*arguments, **settings)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "rename", "replace"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


@pytest.mark.report("P53")
def test_commit_when_it_is_killed_anywhere_leaves_the_old_or_the_new_one(
    checkpoints: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, outcomes = 1, []
    saved(checkpoints, version)
    for number in range(1, 30):
        partial = written(checkpoints, version + 1)
        try:
            with killed_at_call(number, monkeypatch):
                checkpoints.commit(partial, version + 1)
            finished = True
        except Killed:
            finished = False
        newest = checkpoints.newest()
        assert newest is not None and newest.version in (
            (version + 1,) if finished else (version, version + 1)
        )
        outcomes.append((finished, newest.version - version))
        version = newest.version
        if finished:
            break
    assert outcomes[0] == (False, 0) and outcomes[-1] == (True, 1), outcomes
    assert (False, 1) in outcomes, "killed after `latest` was written"
    checkpoints.begin()
    assert len(list(checkpoints.folder.glob(".*.partial"))) == 1, "what was left is removed"


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_commit_when_the_disk_is_full_leaves_the_one_before(checkpoints: CheckpointFolder) -> None:
    before = saved(checkpoints, 1)
    partial = written(checkpoints, 2)
    with files_at_most(100), pytest.raises(OSError, match="too large"):
        checkpoints.commit(partial, 2)
    checkpoints.discard(partial)
    assert checkpoints.newest() == before and not list(checkpoints.folder.glob(".*.partial"))
    assert saved(checkpoints, 2).number == 2
