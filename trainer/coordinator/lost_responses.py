"""Responses that are lost: counted by reason, and how many of them a run stands.

A run that goes on with what happens to survive trains on the easy rest, so beyond a share it ends and says why. What
servers lose and what rewards lose is held against budgets of their own: the cure is another one.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping

from asyppo_async.config.failures import FailuresSection
from asyppo_async.errors import TooManyLost

_log = logging.getLogger(__name__)

OF_REWARDS = ("failed_reward", "late_reward")
"""Reasons that lie in the data or in their reward; all others are the infrastructure's."""


class LostResponses:
    """Told of every response that was asked for: kept, or lost with its reason."""

    def __init__(self, settings: FailuresSection, by_reason: Mapping[str, int] | None = None) -> None:
        """`by_reason`: what a resumed run has lost before."""
        self._settings = settings
        self._newest: deque[str] = deque(maxlen=settings.window_responses)
        """Reason of each; empty: it was kept."""
        self.by_reason = dict(by_reason or {})
        """Over the run."""

    def keep(self, number: int) -> None:
        """So many responses came to something."""
        self._newest.extend([""] * number)

    def lose(self, reason: str, words: str, number: int = 1) -> None:
        """`number` responses came to nothing.

        Raises:
            TooManyLost: More of the newest ones than a budget allows.
        """
        self.by_reason[reason] = self.by_reason.get(reason, 0) + number
        _log.warning("%s; the response is lost", words)
        self._newest.extend([reason] * number)
        if len(self._newest) == self._newest.maxlen:
            self._check(words)

    def _check(self, words: str) -> None:
        lost = Counter(reason for reason in self._newest if reason)
        of_rewards = Counter({reason: lost.pop(reason) for reason in OF_REWARDS if reason in lost})
        settings = self._settings
        for counts, whose, setting, share, cure in (
            (lost, "servers", "infrastructure_share", settings.infrastructure_share, "look at their logs"),
            (
                of_rewards,
                "rewards",
                "reward_share",
                settings.reward_share,
                "look at the reward function and its data",
            ),
        ):
            if counts.total() > share * len(self._newest):
                causes = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
                raise TooManyLost(
                    f"of the newest {len(self._newest)} responses {counts.total()} were lost by {whose} ({causes}); "
                    f"failures.{setting} = {share:g} is the most: {cure}; the last one: {words}"
                )
