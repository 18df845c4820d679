"""The simulated coordinator: drives the decision core as the event loop does, on a virtual clock.

Everything that the core is told passes through here, and here it is lost, doubled, late or killed.
"""

from collections.abc import Callable, Iterable
from functools import partial

from asyppo_async.errors import Stalled
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.decisions import CoreState
from asyppo_async.trainer.coordinator.draws import Draw, TokenUse
from asyppo_async.trainer.coordinator.order import Chosen, Waiting
from asyppo_async.trainer.coordinator.simulate.clock import VirtualClock
from asyppo_async.trainer.coordinator.simulate.fleet import SimFleet
from asyppo_async.trainer.coordinator.simulate.in_progress import Checkpoint, Rollout, rollout_of
from asyppo_async.trainer.coordinator.simulate.outcome import Outcome, SimGroup, SimStep
from asyppo_async.trainer.coordinator.simulate.rival_rule import RivalRule
from asyppo_async.trainer.coordinator.simulate.rule import Rule
from asyppo_async.trainer.coordinator.simulate.scenario import Scenario, sampler_of
from asyppo_async.trainer.coordinator.simulate.server import Sequence


class World:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, *, debug: bool, rule: Rule | None = None) -> None:
        """`rule` None: the decision core. Other rules know no checkpoint: their coordinator cannot be killed."""
        self._scenario = scenario
        self._debug = debug
        self._clock = VirtualClock()
        self._fleet = SimFleet(
            scenario, self._clock, debug=debug, on_ended=self._sequence_ended, on_joiner=self._joiner
        )
        self._outcome = Outcome(scenario=scenario)
        core = DecisionCore(settings=scenario.settings, sampler=sampler_of(scenario), debug=debug)
        self.rule: Rule = rule or core
        self._rival = rule if isinstance(rule, RivalRule) else None
        self._rollouts: dict[int, Rollout] = {}
        self._groups: dict[int, SimGroup] = {}
        self._has_news = True
        """Whether anything has happened that the rules could answer."""
        self._is_training = False
        self._unended: Callable[[], None] | None = None
        """The end of a step whose critics still wait for the batch ahead."""
        self._is_blocked = False
        """Ended a step, and has to send its weights before the next one."""
        self._incarnation = 0
        self._checkpoint = Checkpoint(core=core.state(), groups={}, begun={}, num_steps=0, num_fates=0)
        for fault in scenario.faults:
            if fault.kind == "kill_coordinator":
                self._clock.at(fault.at_s, self._kill)

    def run(self, until_step: int | None = None, on_step: Callable[[int], None] | None = None) -> Outcome:
        """To the end, or until `until_step` steps are made. `on_step` is told how many have been.

        Raises:
            Stalled: nothing is left to happen and the run has not ended, or too many draws were given up.
        """
        outcome = self._outcome
        self._publish()
        num_told = 0
        while not self.rule.finished and (until_step is None or len(outcome.steps) < until_step):
            if not self._clock.step():
                raise Stalled(f"seed {self._scenario.seed}: nothing happens any more at {self.rule.counts()}")
            if self._has_news:
                self._has_news = False
                self._pump()
            if on_step is not None and len(outcome.steps) > num_told:
                num_told = len(outcome.steps)
                on_step(num_told)
        for rollout in list(self._rollouts.values()):
            self._stop(rollout)
        outcome.add(self.rule.close(self._clock.now_s))
        outcome.duration_s = self._clock.now_s
        outcome.counts, outcome.tokens = self.rule.counts(), self.rule.token_counts()
        return outcome

    def _pump(self) -> None:
        """Start what may be started, train what can be trained."""
        now_s = self._clock.now_s
        self._stop_cancelled()
        for draw in self.rule.admit(now_s):
            self._start(draw)
        if self.rule.finished:
            return
        if not self._is_training and not self._is_blocked:
            batch = self.rule.choose_batch(now_s)
            if isinstance(batch, Chosen):
                self._train(batch)
        elif self._unended is not None:
            end, self._unended = self._unended, None
            end()
        self._stop_cancelled()
        for draw in self.rule.admit(now_s):
            self._start(draw)

    def _stop_cancelled(self) -> None:
        for draw in [] if self._rival is None else self._rival.take_cancelled():
            self._stop(self._rollouts[draw.draw_id])
            self.rule.fail(draw, reason="cancelled", now_s=self._clock.now_s)

    def _start(self, draw: Draw, begun: Iterable[Sequence] = ()) -> None:
        scenario = self._scenario
        deadline = self._clock.after(
            scenario.deadline_s, lambda: self._complete(self._rollouts[draw.draw_id], reason="deadline")
        )
        self._groups.pop(draw.draw_id, None)
        rollout = self._rollouts[draw.draw_id] = rollout_of(scenario, draw, deadline, begun)
        sequences = list(rollout.missing.values())
        for together in [[each] for each in sequences] if scenario.members_apart else [sequences]:
            self._fleet.submit(together)
        if not sequences:
            self._complete(rollout, reason="failed_reward")

    def _sequence_ended(self, sequence: Sequence) -> None:
        rollout = self._rollouts[sequence.draw.draw_id]
        rollout.ended.append(rollout.missing.pop(sequence.member))
        rollout.num_ended_tokens += sequence.num_tokens
        self.rule.record_tokens(rollout.draw, rollout.num_ended_tokens)
        if not rollout.missing:
            key = (rollout.draw.draw_id, rollout.draw.attempt)
            rollout.is_silent = self._scenario.happens(self._scenario.lost_fraction, "lost", *key)
            if not rollout.is_silent:
                self._complete(rollout, reason="failed_reward")

    def _complete(self, rollout: Rollout, *, reason: str) -> None:
        """All members are there, or what is missing is late and lost: reward them. `reason`: if none is left."""
        scenario, draw, now_s = self._scenario, rollout.draw, self._clock.now_s
        key, self._has_news = (draw.draw_id, draw.attempt), True
        self._stop(rollout)
        kept = [
            sequence
            for sequence in rollout.ended
            if not rollout.is_silent
            and not scenario.happens(scenario.failed_reward_fraction, "reward", *key, sequence.member)
        ]
        if not kept or scenario.happens(scenario.doomed_fraction, "doomed", draw.prompt_id):
            self.rule.fail(draw, reason=reason, now_s=now_s)
        elif scenario.happens(scenario.filtered_fraction, "filtered", *key):
            self.rule.filter(draw, reason="equal_rewards", now_s=now_s)
        else:
            self._finish(draw, kept)
            if scenario.happens(scenario.duplicated_fraction, "duplicated", *key):
                delay_s = 10 * scenario.step_s * scenario.chance("delay", *key)
                incarnation = self._incarnation
                self._clock.after(delay_s, lambda: self._repeat(draw, kept, incarnation))

    def _repeat(self, draw: Draw, kept: list[Sequence], incarnation: int) -> None:
        if incarnation == self._incarnation and self._finish(draw, kept) != "late":
            raise AssertionError(f"a message about {draw} counted twice")

    def _finish(self, draw: Draw, kept: list[Sequence]) -> str:
        versions: dict[int, int] = {}
        for sequence in kept:
            for version, number in sequence.versions.items():
                versions[version] = versions.get(version, 0) + number
        group = SimGroup(draw=draw, num_members=len(kept), versions=versions)
        answer = self.rule.finish(
            draw,
            num_members=group.num_members,
            num_tokens=group.num_tokens,
            oldest_version=group.oldest_version,
            newest_version=max(versions),
            now_s=self._clock.now_s,
        )
        if answer == "queued":
            self._groups[draw.draw_id] = group
        return answer

    def _stop(self, rollout: Rollout) -> None:
        """No more tokens; those that were generated are told, and counted."""
        rollout.deadline.cancelled = True
        for sequence in rollout.missing.values():
            self._fleet.cancel(sequence)
        self.rule.record_tokens(rollout.draw, rollout.num_tokens)
        self._outcome.num_tokens += rollout.num_tokens
        del self._rollouts[rollout.draw.draw_id]

    def _train(self, batch: Chosen) -> None:
        scenario, now_s = self._scenario, self._clock.now_s
        self._is_training = self._has_news = True  # the batch has left the queue: there may be room
        self.rule.begin_step(now_s)
        is_skipped = scenario.happens(scenario.skipped_fraction, "skipped", batch.step)
        seconds = scenario.training_s(batch.num_tokens) / (10 if is_skipped else 1)
        incarnation = self._incarnation
        self._clock.after(
            seconds,
            lambda: self._trained(batch, now_s, is_skipped) if incarnation == self._incarnation else None,
        )
        if scenario.critic_ahead:
            self.rule.choose_ahead(now_s)

    def _trained(self, batch: Chosen, began_s: float, is_skipped: bool) -> None:
        now_s = self._clock.now_s
        self._has_news = True
        if self._scenario.critic_ahead and isinstance(self.rule.choose_ahead(now_s), Waiting):
            # As in the event loop: the step ends when the critics, too, have had their batch.
            self._unended = partial(self._trained, batch, began_s, is_skipped)
            return
        groups = tuple(self._groups.pop(chosen.draw.draw_id) for chosen in batch.draws)
        fresh = sum(
            number
            for group in groups
            for version, number in group.versions.items()
            if version >= batch.token_bound
        )
        total = sum(group.num_tokens for group in groups)
        use = TokenUse(
            trained=0 if is_skipped else fresh, stale=total - fresh, rejected=fresh if is_skipped else 0
        )
        report = self.rule.end_step(now_s, use)
        tokens = self.rule.token_counts()
        self._outcome.busy_s += now_s - began_s
        self._outcome.add(report.news)
        self._outcome.steps.append(
            SimStep(
                step=batch.step,
                began_s=began_s,
                ended_s=now_s,
                waited_s=batch.waited_s,
                in_flight_s=batch.in_flight_s,
                groups=groups,
                num_trained_tokens=use.trained,
                token_bound=batch.token_bound,
                lead_limit=report.lead_limit,
                num_generated_tokens=tokens.generated,
                dropped_tokens=tokens.dropped_by_reason,
                occupied_s=self._fleet.occupied_s,
            )
        )
        self._outcome.publications.append((self._incarnation, self.rule.version))
        if self.rule.version % self._scenario.checkpoint_every_steps == 0:
            self._save()
        self._is_training = False
        self._is_blocked = self._scenario.publication_blocks_trainer
        self._publish()

    def _publish(self) -> None:
        """The version of now to every server; if a publication is under way, it will be followed by another."""
        if not self._fleet.is_publishing:
            self._fleet.publish(self.rule.version, self._served)

    def _joiner(self) -> None:
        self._has_news = True
        self._publish()

    def _served(self, version: int) -> None:
        self._has_news = True
        self.rule.served(version)
        if version < self.rule.version:
            self._publish()
        else:
            self._is_blocked = False

    def _save(self) -> None:
        if not isinstance(self.rule, DecisionCore):
            return
        self._checkpoint = Checkpoint(
            core=self.rule.state(),
            groups=dict(self._groups),
            begun={draw_id: rollout.begun() for draw_id, rollout in self._rollouts.items()},
            num_steps=len(self._outcome.steps),
            num_fates=len(self._outcome.fates),
        )

    def _kill(self) -> None:
        """The coordinator dies and comes back from its last checkpoint, with a higher incarnation."""
        self._fleet.abandon()
        for rollout in self._rollouts.values():
            rollout.deadline.cancelled = True
            self._outcome.num_tokens += rollout.num_tokens
        self._rollouts.clear()
        saved = self._checkpoint
        restores = self._scenario.restores_queue
        self._groups = dict(saved.groups) if restores else {}
        begun = {draw_id: some for draw_id, some in saved.begun.items() if some and restores}
        self._outcome.resume(saved.num_steps, saved.core.totals.considered, saved.num_fates)
        self._incarnation += 1
        self._is_training = self._is_blocked = False
        self._unended, self._has_news = None, True
        self.rule = core = DecisionCore.from_state(
            CoreState.from_json(saved.core.to_json()),
            settings=self._scenario.settings,
            sampler=sampler_of(self._scenario),
            restored_draw_ids={*self._groups, *begun},
            now_s=self._clock.now_s,
            debug=self._debug,
        )
        for record in core.live():
            if record.state == "in_flight":
                self._start(record.draw, begun[record.draw_id])
                self._outcome.num_continued += 1
        self._publish()
