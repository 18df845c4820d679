"""Files that survive a power cut, and what proves that they are whole."""

import os
import zlib
from pathlib import Path

_CHUNK_BYTES = 2**24


def replace_file(path: Path, text: str) -> None:
    """The new content or the old one, never a part of it."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    sync_file(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Have the operating system put a file on its disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def checksum_of(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def sync_folder(path: Path) -> None:
    """Put the names in a folder on its disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
