"""Options of both ends of every channel, together, because half of them must agree."""

PING_INTERVAL_S = 10.0
"""How often an end asks whether the other one still lives."""
PING_TIMEOUT_S = 60.0
"""A peer that does not answer for so long is gone: a stopped or cut-off host is noticed after both together.

Long against the pauses of a host that is only busy: on a laptop at three times its load live streams were lost with
5 s and with 20 s. A process that ends is noticed at once whatever this says, and a client notices a frozen server in
seconds by other means (`asyppo_async.rpc.pulse`).
"""

_UNLIMITED = -1

Options = tuple[tuple[str, int], ...]


def client_options(
    ping_interval_s: float = PING_INTERVAL_S, ping_timeout_s: float = PING_TIMEOUT_S
) -> Options:
    return (
        *_shared_options(ping_interval_s, ping_timeout_s),
        # A proxy for the outside world has no business between two hosts of one cluster.
        ("grpc.enable_http_proxy", 0),
        # One connection for each client: two clients of one process do not share the fate of a broken one.
        ("grpc.use_local_subchannel_pool", 1),
        # A server that is being started is found within a second of its coming up.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # In spite of its name, how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", 5000),
    )


def server_options(
    ping_interval_s: float = PING_INTERVAL_S,
    ping_timeout_s: float = PING_TIMEOUT_S,
    max_receive_bytes: int = _UNLIMITED,
) -> Options:
    """`max_receive_bytes`: of one message; a larger one is refused before it is read."""
    return (
        *_shared_options(ping_interval_s, ping_timeout_s, max_receive_bytes),
        # Below the client's interval: a server that finds pings too frequent ends the connection in mid-stream.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _ms(ping_interval_s) // 2),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(ping_interval_s) // 2),
        # Otherwise a second server on the same port starts without an error and gets half of the calls.
        ("grpc.so_reuseport", 0),
    )


def _shared_options(
    ping_interval_s: float, ping_timeout_s: float, max_receive_bytes: int = _UNLIMITED
) -> Options:
    return (
        ("grpc.max_send_message_length", _UNLIMITED),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.keepalive_time_ms", _ms(ping_interval_s)),
        ("grpc.keepalive_timeout_ms", _ms(ping_timeout_s)),
        # Without it the keepalive timeout alone takes effect after 60 s only.
        ("grpc.http2.ping_timeout_ms", _ms(ping_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
