"""From the status of a failed call to an error of ours that names the server."""

import grpc
import grpc.aio

from asyppo_async.errors import (
    AsyppoError,
    FleetMismatch,
    FleetOverloaded,
    FleetUnavailable,
    RequestRejected,
    WeightSyncError,
)

RETRY_AFTER = "grpc-retry-pushback-ms"
"""Trailing metadata of an overloaded server: milliseconds after which another try may help (gRPC's own name)."""

# What is not listed (UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, INTERNAL, ...) means that this server did not answer.
_ERRORS: dict[grpc.StatusCode, type[AsyppoError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: FleetOverloaded,
    grpc.StatusCode.FAILED_PRECONDITION: FleetMismatch,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRejected,
    grpc.StatusCode.OUT_OF_RANGE: RequestRejected,
    grpc.StatusCode.NOT_FOUND: RequestRejected,
    grpc.StatusCode.UNIMPLEMENTED: RequestRejected,
    grpc.StatusCode.PERMISSION_DENIED: RequestRejected,
    grpc.StatusCode.UNAUTHENTICATED: RequestRejected,
    grpc.StatusCode.DATA_LOSS: WeightSyncError,
}


def error_of(address: str, what: str, error: grpc.aio.AioRpcError, deadline_s: float) -> AsyppoError:
    """What the server said, or why it said nothing.

    Args:
        address: of the server.
        what: was called.
        error: of the call.
        deadline_s: that the call had, for the message.
    """
    code = error.code()
    words = error.details() or "no message"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        words = f"{words} (deadline {deadline_s:.1f} s)"
    # gRPC's own status for a message above the receiver's limit; no later try makes it smaller.
    is_too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in words
    kind = RequestRejected if is_too_large else _ERRORS.get(code, FleetUnavailable)
    failure = kind(f"server {address}: {what}: {words} [{code.name}]")
    # ABORTED is what a server says that only noticed the failure of another party.
    failure.server = None if code is grpc.StatusCode.ABORTED else address
    if isinstance(failure, FleetOverloaded):
        failure.retry_after_s = _retry_after_s(error)
    return failure


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_AFTER and str(value).isdigit():
            return int(value) / 1000
    return None
