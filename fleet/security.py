"""Who may call what: bearer tokens with roles, checked before a handler runs, and TLS from files."""

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import grpc
import grpc.aio

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError
from asyppo_async.rpc.security import AUTHORIZATION, BEARER, TOKEN_VARIABLE, read_lines, read_pem
from asyppo_async.rpc.v1 import fleet_pb2

Role = Literal["generate", "weights", "admin"]

ROLES: tuple[Role, ...] = get_args(Role)
_SERVICE_ROLES: Mapping[str, Role] = {"Rollout": "generate", "WeightSession": "weights", "Admin": "admin"}
_ANY_ROLE = "GetInfo"


@dataclass(frozen=True, slots=True, repr=False)
class Token:
    """A secret and what it allows. Its `repr` does not show it."""

    secret: bytes
    roles: frozenset[Role]


def tokens_of(config: ServeConfig, environment: Mapping[str, str]) -> tuple[Token, ...]:
    """The tokens that a server accepts; none: it asks for none.

    A line of the token file is `TOKEN` (every role) or `TOKEN role[,role]`, with the roles generate, weights, admin.

    Raises:
        ConfigError: The file cannot be read, holds no token, or names another role.
    """
    if config.token_file is None:
        secret = environment.get(TOKEN_VARIABLE)
        return (Token(secret.encode(), frozenset(ROLES)),) if secret else ()
    lines = read_lines(config.token_file)
    if not lines:
        raise ConfigError(f"the token file {config.token_file} holds no token")
    return tuple(_token(line, f"{config.token_file}, token {number}") for number, line in enumerate(lines, 1))


def _token(line: str, where: str) -> Token:
    secret, *rest = line.split(maxsplit=1)
    named = [role.strip() for role in rest[0].split(",")] if rest else list(ROLES)
    wrong = [role for role in named if role not in ROLES]
    if wrong:
        raise ConfigError(f"{where}: {wrong[0]!r} is no role; roles are {', '.join(ROLES)}")
    return Token(secret.encode(), frozenset(role for role in ROLES if role in named))


def server_credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """TLS as the settings say; None: no encryption."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    authority = None if config.tls_client_ca is None else read_pem(config.tls_client_ca)
    return grpc.ssl_server_credentials(
        [(read_pem(config.tls_key), read_pem(config.tls_cert))],
        root_certificates=authority,
        require_client_auth=authority is not None,
    )


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses a call without a token, or with one that has not the role of the call. Health needs none."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tuple(tokens)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        refusal = self._refusal(handler_call_details)
        return handler if refusal is None or handler is None else _refusing(handler, *refusal)

    def _refusal(self, details: Any) -> tuple[grpc.StatusCode, str] | None:
        service, _, method = str(details.method).lstrip("/").rpartition("/")
        package, _, name = service.rpartition(".")
        if package != fleet_pb2.DESCRIPTOR.package:
            return None  # grpc.health.v1: load balancers ask it
        sent = [value for key, value in details.invocation_metadata or () if key.lower() == AUTHORIZATION]
        roles = self._roles(str(sent[0])) if sent else None
        if roles is None:
            words = "the token is not one of this server's" if sent else "this server asks for a token"
            return grpc.StatusCode.UNAUTHENTICATED, f"{words}; name it with --token-file or {TOKEN_VARIABLE}"
        role = _SERVICE_ROLES[name]
        if method != _ANY_ROLE and role not in roles:
            return grpc.StatusCode.PERMISSION_DENIED, f"{method} needs a token with the role {role!r}"
        return None

    def _roles(self, value: str) -> frozenset[Role] | None:
        """Of the token that was sent; every known one is compared, in constant time."""
        sent = value.removeprefix(BEARER).encode()
        found = None
        for token in self._tokens:
            if hmac.compare_digest(token.secret, sent):
                found = token.roles
        return found


def _refusing(handler: Any, code: grpc.StatusCode, words: str) -> Any:
    async def refuse(_request: object, context: Any) -> None:
        await context.abort(code, words)

    async def refuse_stream(_request: object, context: Any) -> Any:
        await context.abort(code, words)
        yield  # pragma: no cover

    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        refuse_stream if handler.response_streaming else refuse,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
