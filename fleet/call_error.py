"""Why a call was refused or ended, before it becomes a gRPC status."""

from typing import Literal

from asyppo_async.errors import FleetError

StatusName = Literal[
    "ABORTED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
]


class CallError(FleetError):
    """Ends one call with the gRPC status of this name and this message."""

    def __init__(self, status: StatusName, message: str) -> None:
        super().__init__(message)
        self.status = status
