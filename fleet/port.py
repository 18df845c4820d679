"""The address that a server listens on."""

import socket

from asyppo_async.errors import ConfigError


def check_free(host: str, port: int) -> None:
    """Raise `ConfigError` where nobody can listen there; gRPC says so in several lines of its own, and later."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; stop what uses the port, or use --port 0"
        ) from error


def address_text(host: str, port: int) -> str:
    """As gRPC writes it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
