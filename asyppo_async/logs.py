"""One set-up of the standard `logging` for both programs. Modules use `logging.getLogger(__name__)`."""

import json
import logging
import sys
import time
from pathlib import Path


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and what the record carries as `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), default=str)


def set_up_logging(
    level: str = "INFO", file: Path | None = None, *, console: bool = True, as_json: bool = False
) -> None:
    """Send our log lines to the console (stderr) and, if asked, to a file.

    Only the `asyppo_async` logger is touched: libraries keep theirs, so that nothing of a user's own set-up is lost.
    """
    logger = logging.getLogger("asyppo_async")
    logger.setLevel(level)
    logger.propagate = False
    formatter = (
        JsonFormatter()
        if as_json
        else logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    )
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
