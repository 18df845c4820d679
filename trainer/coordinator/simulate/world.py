"""The simulated coordinator: drives the decision core as the event loop does, on a virtual clock.

Everything that the core is told passes through here, and here it is lost, doubled, late or killed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from asyppo_async.errors import Stalled
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.decisions import CoreState
from asyppo_async.trainer.coordinator.draws import Draw, TokenUse
from asyppo_async.trainer.coordinator.order import Chosen, Waiting
from asyppo_async.trainer.coordinator.sampler import EpochSampler
from asyppo_async.trainer.coordinator.simulate.clock import Event, VirtualClock
from asyppo_async.trainer.coordinator.simulate.fleet import SimFleet
from asyppo_async.trainer.coordinator.simulate.outcome import Outcome, SimGroup, SimStep
from asyppo_async.trainer.coordinator.simulate.scenario import Scenario
from asyppo_async.trainer.coordinator.simulate.server import Sequence


@dataclass(slots=True, kw_only=True)
class _Rollout:
    """An attempt in flight."""

    draw: Draw
    deadline: Event
    missing: dict[int, Sequence]
    ended: list[Sequence] = field(default_factory=list)
    is_silent: bool = False
    """It is complete, and the message that says so was lost."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in [*self.missing.values(), *self.ended])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    core: CoreState
    groups: dict[int, SimGroup]
    num_steps: int
    num_fates: int


class World:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, *, debug: bool) -> None:
        self._scenario = scenario
        self._debug = debug
        self._clock = VirtualClock()
        self._fleet = SimFleet(scenario, self._clock, on_ended=self._sequence_ended, on_joiner=self._publish)
        self._outcome = Outcome(scenario=scenario)
        self.core = DecisionCore(settings=scenario.settings, sampler=self._sampler(), debug=debug)
        self._rollouts: dict[int, _Rollout] = {}
        self._groups: dict[int, SimGroup] = {}
        self._is_training = False
        self._unended: Callable[[], None] | None = None
        """The end of a step whose critics still wait for the batch ahead."""
        self._is_blocked = False
        """Ended a step, and has to send its weights before the next one."""
        self._incarnation = 0
        self._checkpoint = _Checkpoint(core=self.core.state(), groups={}, num_steps=0, num_fates=0)
        for fault in scenario.faults:
            if fault.kind == "kill_coordinator":
                self._clock.at(fault.at_s, self._kill)

    def run(self) -> Outcome:
        """To the end.

        Raises:
            Stalled: nothing is left to happen and the run has not ended, or too many draws were given up.
        """
        self._publish()
        while not self.core.finished:
            if not self._clock.step():
                raise Stalled(f"seed {self._scenario.seed}: nothing happens any more at {self.core.counts()}")
            self._pump()
        for rollout in list(self._rollouts.values()):
            self._stop(rollout)
        outcome = self._outcome
        outcome.fates.extend(self.core.close(self._clock.now_s))
        outcome.duration_s = self._clock.now_s
        outcome.counts, outcome.tokens = self.core.counts(), self.core.token_counts()
        return outcome

    def _sampler(self) -> EpochSampler:
        scenario = self._scenario
        prompt_ids = [f"p{index}" for index in range(scenario.num_prompts)]
        return EpochSampler(prompt_ids=prompt_ids, seed=scenario.seed, num_epochs=scenario.num_epochs)

    def _pump(self) -> None:
        """After every event: start what may be started, train what can be trained."""
        now_s = self._clock.now_s
        for draw in self.core.admit(now_s):
            self._start(draw)
        if self.core.finished:
            return
        if not self._is_training and not self._is_blocked:
            batch = self.core.choose_batch(now_s)
            if isinstance(batch, Chosen):
                self._train(batch)
        elif self._unended is not None:
            end, self._unended = self._unended, None
            end()
        for draw in self.core.admit(now_s):
            self._start(draw)

    def _start(self, draw: Draw) -> None:
        scenario = self._scenario
        sequences = {
            member: Sequence(draw=draw, member=member, length=scenario.length(draw, member))
            for member in range(scenario.settings.group_size)
        }
        self._groups.pop(draw.draw_id, None)
        self._rollouts[draw.draw_id] = _Rollout(
            draw=draw,
            deadline=self._clock.after(scenario.deadline_s, lambda: self._late(draw)),
            missing=sequences,
        )
        for sequence in sequences.values():
            self._fleet.submit(sequence)

    def _sequence_ended(self, sequence: Sequence) -> None:
        rollout = self._rollouts[sequence.draw.draw_id]
        rollout.ended.append(rollout.missing.pop(sequence.member))
        self.core.record_tokens(rollout.draw, rollout.num_tokens)
        if not rollout.missing:
            key = (rollout.draw.draw_id, rollout.draw.attempt)
            rollout.is_silent = self._scenario.chance("lost", *key) < self._scenario.lost_fraction
            if not rollout.is_silent:
                self._complete(rollout, reason="failed_reward")

    def _late(self, draw: Draw) -> None:
        """The deadline of an attempt: what is missing, or was not heard of, is lost."""
        rollout = self._rollouts[draw.draw_id]
        self._complete(rollout, reason="deadline")

    def _complete(self, rollout: _Rollout, *, reason: str) -> None:
        """All members are there, or given up: reward them and tell the core. `reason`: if none is left."""
        scenario, draw, now_s = self._scenario, rollout.draw, self._clock.now_s
        key = (draw.draw_id, draw.attempt)
        self._stop(rollout)
        kept = [
            sequence
            for sequence in rollout.ended
            if not rollout.is_silent
            and scenario.chance("reward", *key, sequence.member) >= scenario.failed_reward_fraction
        ]
        if not kept or scenario.chance("doomed", draw.prompt_id) < scenario.doomed_fraction:
            self.core.fail(draw, reason=reason, now_s=now_s)
        elif scenario.chance("filtered", *key) < scenario.filtered_fraction:
            self.core.filter(draw, reason="equal_rewards", now_s=now_s)
        else:
            self._finish(draw, kept)
            if scenario.chance("duplicated", *key) < scenario.duplicated_fraction:
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
        answer = self.core.finish(
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

    def _stop(self, rollout: _Rollout) -> None:
        """No more tokens; those that were generated are told, and counted."""
        rollout.deadline.cancelled = True
        for sequence in rollout.missing.values():
            self._fleet.cancel(sequence)
        self.core.record_tokens(rollout.draw, rollout.num_tokens)
        self._outcome.num_tokens += rollout.num_tokens
        del self._rollouts[rollout.draw.draw_id]

    def _train(self, batch: Chosen) -> None:
        scenario, now_s = self._scenario, self._clock.now_s
        self._is_training = True
        self.core.begin_step(now_s)
        is_skipped = scenario.chance("skipped", batch.step) < scenario.skipped_fraction
        seconds = scenario.step_s / 10 if is_skipped else scenario.step_s
        seconds += 0.0 if is_skipped else scenario.step_s_per_token * batch.num_tokens
        incarnation = self._incarnation
        self._clock.after(
            seconds,
            lambda: self._trained(batch, now_s, is_skipped) if incarnation == self._incarnation else None,
        )
        if scenario.critic_ahead:
            self.core.choose_ahead(now_s)

    def _trained(self, batch: Chosen, began_s: float, is_skipped: bool) -> None:
        now_s = self._clock.now_s
        if self._scenario.critic_ahead and isinstance(self.core.choose_ahead(now_s), Waiting):
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
        report = self.core.end_step(now_s, use)
        self._outcome.busy_s += now_s - began_s
        self._outcome.fates.extend(report.fates)
        self._outcome.steps.append(
            SimStep(
                step=batch.step,
                began_s=began_s,
                ended_s=now_s,
                waited_s=batch.waited_s,
                groups=groups,
                num_trained_tokens=use.trained,
                lead_limit=report.lead_limit,
            )
        )
        self._outcome.publications.append((self._incarnation, self.core.version))
        if self.core.version % self._scenario.checkpoint_every_steps == 0:
            self._save()
        self._is_training = False
        self._is_blocked = self._scenario.publication_blocks_trainer
        self._publish()

    def _publish(self) -> None:
        """The version of now to every server; if a publication is under way, it will be followed by another."""
        if not self._fleet.is_publishing:
            self._fleet.publish(self.core.version, self._served)

    def _served(self, version: int) -> None:
        self.core.served(version)
        if version < self.core.version:
            self._publish()
        else:
            self._is_blocked = False

    def _save(self) -> None:
        self._checkpoint = _Checkpoint(
            core=self.core.state(),
            groups=dict(self._groups),
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
        self._groups = dict(saved.groups) if self._scenario.restores_queue else {}
        del self._outcome.steps[saved.num_steps :]
        del self._outcome.fates[saved.num_fates :]
        self._outcome.num_resumes += 1
        self._incarnation += 1
        self._is_training = self._is_blocked = False
        self._unended = None
        self.core = DecisionCore.from_state(
            CoreState.from_json(saved.core.to_json()),
            settings=self._scenario.settings,
            sampler=self._sampler(),
            restored_draw_ids=self._groups.keys(),
            now_s=self._clock.now_s,
            debug=self._debug,
        )
        self._publish()
