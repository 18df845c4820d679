"""How a client proves who it is and knows whom it talks to: TLS from files, a bearer token from file or variable."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from asyppo_async.errors import ConfigError

TOKEN_VARIABLE = "ASYPPO_FLEET_TOKEN"
"""Environment variable of a token, for both ends; a file that is named goes before it."""
AUTHORIZATION = "authorization"
BEARER = "Bearer "

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ClientSecurity:
    """Of one client. Its `repr` is the default one of an object, so that no log ever shows the token."""

    token: str | None = None
    credentials: grpc.ChannelCredentials | None = None
    """None: no encryption."""

    @property
    def metadata(self) -> Metadata:
        """What goes with every call."""
        return ((AUTHORIZATION, BEARER + self.token),) if self.token else ()


OPEN = ClientSecurity()
"""Neither TLS nor a token: loopback, or a network that is closed by other means."""


def client_security(
    *,
    token_file: Path | None = None,
    ca_file: Path | None = None,
    certificate_file: Path | None = None,
    key_file: Path | None = None,
) -> ClientSecurity:
    """Read a client's files.

    Args:
        token_file: One line; None: `ASYPPO_FLEET_TOKEN`, if it is set.
        ca_file: PEM of the authority that signed the servers' certificates; None: no TLS.
        certificate_file: PEM of this client's own certificate, where servers ask for one.
        key_file: PEM of its key.

    Raises:
        ConfigError: A file cannot be read or is empty, or only one of certificate and key is given.
    """
    token = read_token(token_file) if token_file is not None else os.environ.get(TOKEN_VARIABLE) or None
    if (certificate_file is None) != (key_file is None):
        raise ConfigError("a client certificate and its key go together; name both or neither")
    if ca_file is None:
        if certificate_file is not None:
            raise ConfigError("a client certificate needs TLS: name the servers' authority too")
        return ClientSecurity(token=token)
    return ClientSecurity(
        token=token,
        credentials=grpc.ssl_channel_credentials(
            root_certificates=read_pem(ca_file),
            private_key=None if key_file is None else read_pem(key_file),
            certificate_chain=None if certificate_file is None else read_pem(certificate_file),
        ),
    )


def read_token(path: Path) -> str:
    """The one token of a file."""
    tokens = read_lines(path)
    if len(tokens) != 1:
        raise ConfigError(
            f"{path}: a client's token file holds one token on one line, got {len(tokens)} lines"
        )
    return tokens[0].split()[0]


def read_lines(path: Path) -> Sequence[str]:
    """Lines with something in them; `#` begins a comment line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {path}: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def read_pem(path: Path) -> bytes:
    """A PEM file, checked for being one; TLS libraries say little about a wrong one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if b"-----BEGIN" not in data:
        raise ConfigError(f"{path} is no PEM file (no line -----BEGIN ...)")
    return data
