"""What both ends of the ZMQ connection agree on: keys, times, frames.

Both key pairs of CURVE follow from the run's token, and the coordinator's public key travels nowhere, so who does not
hold the token can neither take part nor listen.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils import z85

from asyppo_async.errors import ConfigError

HEARTBEAT_INTERVAL_S = 2.0
ABANDONED_AFTER_S = 60.0
"""A rank whose coordinator is silent for so long ends itself."""
SHUTDOWN_GRACE_S = 3.0
"""A rank that was told to end and is still computing after this is ended."""
LINGER_MS = 2000


def read_token(file: Path) -> str:
    """The run's token.

    Raises:
        ConfigError: the file is not there or empty.
    """
    try:
        token = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"the token file {file} cannot be read: {error.strerror}") from error
    if len(token) < 16:
        raise ConfigError(f"the token in {file} must have at least 16 characters, got {len(token)}")
    return token


def secure_coordinator(socket: zmq.asyncio.Socket, token: str) -> None:
    """Make `socket` the CURVE server of the run."""
    socket.curve_secretkey = _secret_key(token, "coordinator")
    socket.curve_server = True


def secure_worker(socket: "zmq.Socket[bytes]", token: str) -> None:
    """Make `socket` a CURVE client of the run."""
    secret = _secret_key(token, "worker")
    socket.curve_secretkey = secret
    socket.curve_publickey = zmq.curve_public(secret)
    socket.curve_serverkey = zmq.curve_public(_secret_key(token, "coordinator"))


def buffers_of(frames: Sequence["zmq.Frame"]) -> list[memoryview]:
    """The frames' bytes, not copied."""
    return [frame.buffer for frame in frames]


def _secret_key(token: str, purpose: str) -> bytes:
    """A CURVE25519 secret in Z85, drawn from the token by a hash that is slow to guess against."""
    seed = hashlib.scrypt(token.encode(), salt=f"asyppo-{purpose}".encode(), n=2**12, r=8, p=1, dklen=32)
    return bytes(z85.encode(seed))
