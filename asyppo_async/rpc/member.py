"""One server of a fleet, as whoever spreads work over the fleet sees it."""

from collections import Counter

from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.info import ServerInfo

INFO_DEADLINE_S = 5.0
"""A server answers `GetInfo` within a second in every state."""
ENDING = ("draining", "failed")
"""States of a server that takes no new work any more."""


class Member:
    """A server with its channel and what is under way there."""

    def __init__(self, client: FleetClient, info: ServerInfo) -> None:
        self.client = client
        self.info = info
        self.outstanding_tokens = 0
        """Tokens that were asked for and have not come."""
        self.prompts: Counter[str] = Counter()
        """Calls under way, by prompt: their KV is there."""

    @property
    def address(self) -> str:
        return self.client.address
