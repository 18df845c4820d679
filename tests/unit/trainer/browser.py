"""Pages as a headless browser shows them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")


def open_in_chromium(page: Path, *options: str) -> str:
    """Open a page, wait until it is quiet, and return what Chromium prints."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [*command, f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(page.parent)},
    )
    return done.stdout
