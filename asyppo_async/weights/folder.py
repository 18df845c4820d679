"""A folder of a file system that fsspec knows: a path of this machine, or the URL of an object store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs

from asyppo_async.errors import WeightSyncError

_UNFINISHED = ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Each method raises `WeightSyncError` with the file system's own words."""

    system: Any
    """An `fsspec.AbstractFileSystem`."""
    path: str

    @classmethod
    def at(cls, where: str) -> "Folder":
        """`where`: `/a/path`, or a URL such as `s3://bucket/prefix`; access comes from the environment."""
        with _in_our_words(where, "opened"):
            # A listing that is kept would hide what another machine has written since.
            system, path = url_to_fs(where, use_listings_cache=False)
        return cls(system=system, path=str(path))

    def inside(self, name: str) -> "Folder":
        return Folder(system=self.system, path=f"{self.path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.path

    def make(self) -> None:
        with _in_our_words(self.path, "written"):
            self.system.makedirs(self.path, exist_ok=True)

    def write(self, name: str, data: bytes) -> None:
        place = f"{self.path}/{name}"
        with _in_our_words(place, "written"):
            self.system.pipe_file(place, data)

    def write_whole(self, name: str, data: bytes) -> None:
        """As `write`, and nobody ever sees a part of the file."""
        self.write(name + _UNFINISHED, data)
        place = f"{self.path}/{name}"
        with _in_our_words(place, "written"):
            self.system.mv(place + _UNFINISHED, place)

    def read(self, name: str) -> bytes | None:
        """None: there is no such file."""
        place = f"{self.path}/{name}"
        with _in_our_words(place, "read"):
            try:
                return bytes(self.system.cat_file(place))
            except FileNotFoundError:
                return None

    def names(self) -> list[str]:
        """Of the files and folders in it."""
        with _in_our_words(self.path, "listed"):
            return sorted(
                str(path).rstrip("/").rsplit("/", 1)[-1] for path in self.system.ls(self.path, detail=False)
            )

    def remove(self) -> None:
        """With all that is in it; nothing happens where it is not there."""
        with _in_our_words(self.path, "removed"):
            if self.system.exists(self.path):
                self.system.rm(self.path, recursive=True)


@contextmanager
def _in_our_words(place: str, done: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what the client library of some store raises has no type in common
        words = str(error) or type(error).__name__
        raise WeightSyncError(f"{place} cannot be {done}: {words}") from error
