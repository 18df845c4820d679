"""Checkpoints on disk: written aside, complete or absent, checked before they are used.

RUN/checkpoints/
  latest                    name of the newest checkpoint; written last: what it does not name yet does not count
  000007-step-00000012/     number of the checkpoint, and the training steps that it stands behind
    manifest.json           size and CRC-32 of every other file
    run.json groups.npz     the coordinator's
    actor/ critic-0/ ...    each group's
  000006-step-00000010.damaged/   found with other bytes than were written, and passed over; for a person to look at
  .a1b2c3d4.partial/        being written, or what a crash has left of that
"""

import logging
import os
import re
import secrets
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.durable import checksum_of, replace_file, sync_file, sync_folder

_log = logging.getLogger(__name__)

FORMAT = 2
"""2: the groups' training state is in fragments, for any number of ranks."""
_NAME = re.compile(r"(\d{6})-step-(\d{8})")
_LATEST = "latest"
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint."""

    folder: Path
    number: int
    """Of checkpoints before it in this run, over all incarnations."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    format: int
    version: int
    files: dict[str, _File]


class CheckpointFolder:
    """The checkpoints of one run. One writer at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep`: how many stay."""
        self.folder = folder
        self._keep = keep

    def begin(self) -> Path:
        """An empty folder to write into; what earlier attempts have left is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*.partial"):
            _remove(left)
        # A name of its own: a rank of an earlier life that is still writing must not write into this one.
        partial = self.folder / f".{secrets.token_hex(4)}.partial"
        partial.mkdir()
        return partial

    def discard(self, partial: Path) -> None:
        """Give up what `begin` gave."""
        shutil.rmtree(partial, ignore_errors=True)

    def commit(self, partial: Path, version: int) -> Saved:
        """Make what was written the newest checkpoint, and delete the oldest.

        Raises:
            OSError: The disk is full, or gone. The checkpoints before are as they were.
        """
        files = {}
        for path in (path for path in sorted(partial.rglob("*")) if path.is_file()):
            sync_file(path)
            name = path.relative_to(partial).as_posix()
            files[name] = _File(num_bytes=path.stat().st_size, crc32=checksum_of(path))
        manifest = _Manifest(format=FORMAT, version=version, files=files)
        (partial / _MANIFEST).write_text(_sealed(manifest), encoding="utf-8")
        sync_file(partial / _MANIFEST)
        for inner in (path for path in partial.rglob("*") if path.is_dir()):
            sync_folder(inner)
        sync_folder(partial)
        number = max((saved.number for saved in self._all()), default=0) + 1
        saved = Saved(folder=self.folder / f"{number:06d}-step-{version:08d}", number=number, version=version)
        os.rename(partial, saved.folder)
        sync_folder(self.folder)
        replace_file(self.folder / _LATEST, saved.folder.name + "\n")
        self._delete_old()
        return saved

    def newest(self) -> Saved | None:
        """The newest checkpoint of which every byte is there; None: the run has made none yet.

        Those that are passed over are renamed.

        Raises:
            CheckpointError: There are some, and none is whole.
        """
        damaged: list[tuple[Saved, str]] = []
        for saved in self._candidates():
            try:
                verify(saved)
            except CheckpointError as error:
                damaged.append((saved, str(error)))
                continue
            for other, words in damaged:
                _log.warning("%s; going back to the checkpoint before it", words)
                aside = other.folder.with_name(f"{other.folder.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                other.folder.rename(aside)
            return saved
        if damaged:
            words = "; ".join(words for _, words in damaged)
            raise CheckpointError(f"none of the {len(damaged)} checkpoints is whole: {words}")
        return None

    def of_version(self, version: int) -> Saved:
        """The newest checkpoint of a version, whole.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        candidates = self._candidates()
        for saved in candidates:
            if saved.version == version:
                verify(saved)
                return saved
        versions = ", ".join(str(each) for each in sorted({saved.version for saved in candidates})) or "none"
        raise CheckpointError(f"{self.folder} has no checkpoint of step {version}; it has of: {versions}")

    def _candidates(self) -> list[Saved]:
        """Newest first, from the one that `latest` names."""
        everything = sorted(self._all(), key=lambda saved: saved.number, reverse=True)
        try:
            named = (self.folder / _LATEST).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            named = ""
        match = _NAME.fullmatch(named)
        if match is None:
            if everything:
                _log.warning("%s names no checkpoint; looking at all of them", self.folder / _LATEST)
            return everything
        # A newer one that `latest` does not name was not acknowledged by anybody.
        return [saved for saved in everything if saved.number <= int(match[1])]

    def _all(self) -> list[Saved]:
        if not self.folder.is_dir():
            return []
        matches = [(path, _NAME.fullmatch(path.name)) for path in self.folder.iterdir() if path.is_dir()]
        return [
            Saved(folder=path, number=int(match[1]), version=int(match[2]))
            for path, match in matches
            if match is not None
        ]

    def _delete_old(self) -> None:
        everything = sorted(self._all(), key=lambda saved: saved.number)
        for saved in everything[: max(0, len(everything) - self._keep)]:
            _remove(saved.folder)


def verify(saved: Saved) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: Something is missing, cut short or changed; names it.
    """
    manifest = _unsealed(saved.folder / _MANIFEST)
    if manifest.format != FORMAT:
        raise CheckpointError(f"{saved.folder} is of format {manifest.format}, this program reads {FORMAT}")
    if manifest.version != saved.version:
        raise CheckpointError(f"{saved.folder} holds step {manifest.version}: it was renamed")
    for name, file in manifest.files.items():
        path = saved.folder / name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != file.num_bytes:
                raise CheckpointError(f"{path} has {num_bytes} bytes instead of {file.num_bytes}")
            if checksum_of(path) != file.crc32:
                raise CheckpointError(f"{path} has other bytes than were written")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _sealed(manifest: _Manifest) -> str:
    """JSON, and on a second line a checksum of it."""
    text = TypeAdapter(_Manifest).dump_json(manifest).decode()
    return f"{text}\n{zlib.crc32(text.encode()):08x}"


def _unsealed(path: Path) -> _Manifest:
    try:
        text, seal = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if seal != f"{zlib.crc32(text.encode()):08x}":
        raise CheckpointError(f"{path} has other bytes than were written")
    return TypeAdapter(_Manifest).validate_json(text)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("%s cannot be deleted: %s", folder, error)
