"""How much a run may lose before it ends: what is lost is seldom a random part of what was asked for."""

from pydantic import Field

from asyppo_async.config.base import Section, Share


class FailuresSection(Section):
    window_responses: int = Field(default=256, ge=8)
    """Newest responses that the shares below are of; a run that has asked for fewer is not judged."""
    infrastructure_share: Share = 0.5
    """A run ends that loses more than this share of its responses to servers: late, broken, not finite."""
    reward_share: Share = 0.5
    """A run ends in which more than this share of the rewards fail or are late."""
