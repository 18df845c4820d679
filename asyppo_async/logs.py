"""One set-up of the standard `logging` for both programs. Modules use `logging.getLogger(__name__)`."""

import logging
import sys
from pathlib import Path


def set_up_logging(level: str = "INFO", file: Path | None = None, *, console: bool = True) -> None:
    """Send our log lines to the console (stderr) and, if asked, to a file.

    Only the `asyppo_async` logger is touched: libraries keep theirs, so that nothing of a user's own set-up is lost.
    """
    logger = logging.getLogger("asyppo_async")
    logger.setLevel(level)
    logger.propagate = False
    formatter = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = []
    if console:
        handlers.append(logging.StreamHandler(sys.stderr))
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
