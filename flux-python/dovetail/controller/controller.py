# SPDX-License-Identifier: LGPL-3.0-or-later
"""The controller: events in, actions out.

Inputs: `handle(event)`, from the loop that also drives an executor. The loop hands in a Tick
at least once a second, after the events of its last look. Outputs: the actions in the order
in which the executor shall take them, and views for the live table and the summary.

Invariants: no I/O, no clock and no randomness, so the same events give the same actions; each
simulation ends in exactly one of done, failed, not started; unknown names are ignored. Time
is counted in the controller's own seconds, which go on by the events' differences, except
for jumps (backwards, or by more than `Settings.jump`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.controller import (
    admission,
    baseline_run,
    binding_trial,
    fairness,
    plan_phases,
    recut,
    shares,
    trial,
    views,
    watchdog,
    widening,
    widths,
)
from dovetail.controller.choice import Schedule
from dovetail.controller.settings import Settings
from dovetail.controller.simulation import Simulation, Stage
from dovetail.controller.state import Mode, Phase, State
from dovetail.controller.views import Status, View
from dovetail.core import protocol, units
from dovetail.core.protocol import Action, Capacity, Cause, Event, Share, Spec


class Controller:
    """Decides what runs, with which shares and wait policy. See the module."""

    def __init__(
        self, specs: Sequence[Spec], capacity: Capacity, settings: Settings | None = None
    ) -> None:
        self.settings = settings or Settings()
        self._state = State(specs, capacity, self.settings)
        self._decided = -1.0
        self._begun = False

    def handle(self, event: Event) -> list[Action]:
        """What to do about an event."""
        self._clock(event.t)
        urgent = self._take(event)
        due = self._state.now - self._decided >= self.settings.period
        if urgent or due or not self._begun:
            self._decide()
        return self._state.flush()

    def resume(self, t: float, capacity: Capacity, alive: Sequence[str] = ()) -> list[Action]:
        """The loop died and began again at run time `t`: nothing runs any more but `alive`.

        Call it after all logged events were handled. What had started, or was ended by an
        interrupt, is queued again with one restart more; what had stopped at a checkpoint, or was
        given up, is queued again. What the user had cancelled is over. What is alive and was to
        stop at a checkpoint is asked once more.
        """
        state = self._state
        self._clock(t)
        if capacity.cpu != state.capacity.cpu:
            state.knowledge.forget()
        state.set_capacity(capacity)
        state.flush()  # whoever that was for is gone
        groups = (state.active, state.suspended, state.terminating)
        killed = [sim for group in groups for sim in group.values() if sim.spec.name not in alive]
        sims = state.sims.values()
        ended = [s for s in sims if s.stage is Stage.FAILED and s.cause is Cause.INTERRUPTED]
        ended += [s for s in sims if s.stage is Stage.CHECKPOINTED]
        if state.mode is Mode.INTERRUPTED:
            state.schedule()
        for sim in [*killed, *ended]:
            why = sim.reason or "the run was killed and resumed"
            state.ended(sim)
            if sim.stop is not None and sim.stop.cause is Cause.CANCELLED:
                sim.ended = t
                state.end(sim, Stage.FAILED, Cause.CANCELLED, sim.stop.why)
                continue
            sim.begun = True  # on a cluster perhaps only since nobody looked
            if sim.stage is not Stage.CHECKPOINTED:
                sim.restarts += 1
            state.requeue(sim, sim.cause or Cause.INTERRUPTED, why)
        for sim in sims:
            if sim.stage is Stage.NOT_STARTED:
                state.requeue(sim, sim.cause or Cause.INTERRUPTED, sim.reason)
        if not alive:
            state.schedule()
        state.resizing.clear()
        state.note("hold", "the run is resumed", t=t)
        for name in alive:
            state.sims[name].progress_at = state.now
            if state.sims[name].stage is Stage.HALTING:
                state.ask_to_halt(state.sims[name], "it was to when the run was killed")
        state.restart_windows([*state.active.values(), *state.suspended.values()])
        self._decide()
        return state.flush()

    # --- events ---

    def _clock(self, t: float) -> None:
        state = self._state
        step = t - state.t
        if self._begun and not 0.0 <= step <= self.settings.jump:
            state.note("hold", f"the clock jumped by {step:.0f} s: measurements begin anew")
            state.restart_windows([*state.active.values(), *state.suspended.values()])
        elif self._begun:
            state.now += step
        state.t = t

    def _take(self, event: Event) -> bool:
        """Write an event into the state; True if it calls for a decision at once."""
        state = self._state
        if isinstance(event, protocol.Sampled):
            # One that was told to end may still end well.
            sim = self._started(event.name) or state.terminating.get(event.name)
            if sim is not None:
                state.sampled(sim, event.ranks)
            return False
        if isinstance(event, protocol.Started):
            sim = self._started(event.name)
            if sim is not None:
                state.started(sim, event.t, event.iterations, event.total)
        elif isinstance(event, protocol.Delayed):
            state.note("hold", f"{event.name} waits: {event.why}", name=event.name)
            return False
        elif isinstance(event, (protocol.Placed, protocol.Counted)):
            return False  # where it is, and what held it up, is for the reader
        elif isinstance(event, protocol.Finished):
            self._finished(event)
        elif isinstance(event, protocol.Resized):
            state.resized(event.names, event.refused)
        elif isinstance(event, protocol.CapacityChanged):
            self._capacity(event.capacity)
        elif isinstance(event, protocol.Interrupted):
            if state.mode is not Mode.INTERRUPTED:
                state.interrupt(event.reason or "interrupted", event.within)
        elif isinstance(event, protocol.Unwanted):
            sim = self._started(event.name) or state.terminating.get(event.name)
            if sim is not None and (
                sim.stop is None or sim.stop.requeue or sim.stop.cause is Cause.INTERRUPTED
            ):
                state.stop(sim, Cause.CANCELLED, event.reason)
            state.withdraw(event.name, Cause.CANCELLED, event.reason)
        return True

    def _started(self, name: str) -> Simulation | None:
        """The simulation of that name, if it is started and not asked to stop."""
        return self._state.active.get(name) or self._state.suspended.get(name)

    def _finished(self, event: protocol.Finished) -> None:
        state = self._state
        sim = state.sims.get(event.name)
        if sim is None or not state.ended(sim):
            return
        sim.ended = event.t
        sim.failed = sim.failed or event.cause in (Cause.FAILED, Cause.LAUNCH_FAILED)
        stop, halted = sim.stop, sim.stage is Stage.HALTING
        unwanted = stop is not None and stop.cause is Cause.CANCELLED
        if event.cause is Cause.CHECKPOINTED and not unwanted:
            stop, halted = None, True  # a stop came too late: what obeys one has its cause
        if halted and state.mode is Mode.INTERRUPTED:
            self._halted(sim, event)
            return
        again = stop is not None and stop.requeue and event.cause is not Cause.DONE
        lost = event.cause.lost and sim.losses < self.settings.restarts
        # As one fails that was to stop at a checkpoint, what it had written before is still there.
        lost = lost or (sim.stage is Stage.HALTING and event.cause is Cause.FAILED)
        lost = lost and stop is None
        if state.mode is not Mode.INTERRUPTED and (again or lost):
            sim.restarts += 1
            sim.losses += event.cause.lost
            state.requeue(
                sim, stop.cause if stop else event.cause, stop.why if stop else event.reason
            )
            if lost:
                state.note("hold", f"{event.name} is queued again: {event.reason}")
            return
        if again:  # by a run that goes on with this one
            state.end(sim, Stage.FAILED, Cause.INTERRUPTED, state.subject)
            return
        if event.cause is Cause.DONE:
            state.end(sim, Stage.DONE, Cause.DONE)
            self._learn_from_end(sim)
            return
        broke = stop is None and event.cause in (Cause.FAILED, Cause.LAUNCH_FAILED)
        broke = broke and state.mode is not Mode.INTERRUPTED
        if broke and recut.undo(state, sim, event.reason or f"exit code {event.code}"):
            sim.restarts += 1
            sim.losses += 1
            state.requeue(sim, event.cause, event.reason)
            return
        unready = self._unready(sim, event)
        if broke and widths.starts_elsewhere(state, sim, unready):
            ranks = sim.spec.ranks
            sim.restarts += 1
            state.note(
                "hold",
                f"{event.name} is queued again for another number of ranks than {ranks}, on which "
                f"it did not come to an iteration: {event.reason}",
                name=event.name,
                ranks=ranks,
            )
            state.requeue(sim, event.cause, event.reason)
            return
        if broke and unready and sim.losses < self.settings.restarts:
            sim.restarts += 1
            sim.losses += 1
            state.requeue(sim, event.cause, event.reason)
            state.note("hold", f"{event.name} is queued again: {event.reason}")
            return
        if event.cause is Cause.CHECKPOINTED and stop is None:
            self._goes_on(sim, event)
            return
        by = stop if stop is not None and not stop.requeue else None
        why = (by.why if by else event.reason) or f"exit code {event.code}"
        state.end(sim, Stage.FAILED, by.cause if by else event.cause, why)
        state.note("fail", f"{event.name} failed: {sim.reason}", name=event.name)

    def _unready(self, sim: Simulation, event: protocol.Finished) -> bool:
        """Whether it failed to go on from what it has written, which need not fail again."""
        return sim.continued and event.cause is Cause.LAUNCH_FAILED

    def _goes_on(self, sim: Simulation, event: protocol.Finished) -> None:
        """It has stopped at a checkpoint to go on on other ranks, at once if they are free."""
        state, ranks, halted_at = self._state, sim.next_ranks, sim.halted_at
        sim.stops += 1
        wanted = f"to go on on {widths.in_ranks(ranks)} as cut now"
        state.requeue(sim, event.cause, wanted)
        if state.heads(1) == [sim] and ranks <= widths.free_cores(state) and state.fits(sim, ranks):
            state.launch(sim, ranks)
            sim.halted_at = halted_at  # one that waits for something else tells nothing of restarts

    def _halted(self, sim: Simulation, event: protocol.Finished) -> None:
        """The run is to end, and a simulation that was to stop at a checkpoint has ended."""
        state, over = self._state, sim.told
        if event.cause is Cause.DONE:
            state.end(sim, Stage.DONE, Cause.DONE)
        elif event.cause is Cause.CHECKPOINTED:
            sim.stops += 1
            state.end_at_checkpoint(sim, over, state.subject)
            state.note("hold", f"{event.name} {sim.reason}", name=event.name, iterations=over)
        else:  # what it had written before is still there, and a resumed run goes on from that
            why = f"{event.reason or f'exit code {event.code}'}, as it was to stop at a checkpoint"
            state.end(sim, Stage.FAILED, Cause.INTERRUPTED, why)
            state.note("fail", f"{event.name} failed: {why}", name=event.name)

    def _learn_from_end(self, sim: Simulation) -> None:
        state = self._state
        family, shape = state.family(sim), state.shape(sim)
        if not sim.shared and sim.resumed_at == sim.launched_at and not sim.over:
            shape.lasted.append(state.now - sim.launched_at - sim.startup)
            shape.broken = False
        if not sim.iterations and sim.work.meter.iterations and shape.profile is None:
            state.measure_by_work(sim)
        if sim.iterations:
            family.iterations, family.guessed = max(1, sim.over + sim.iterations), False
            baseline_run.finished_early(state, sim)
            if sim.by_work and not sim.over:
                shape.ends.append((float(sim.iterations), float(sim.undisturbed)))
                trial.judge_ends(state, shape)
        elif not family.silent and shape.profile is None:
            family.silent = True
            state.note(
                "hold",
                f"{sim.spec.name} ended well before an iteration or work of it was seen: those of "
                f"{sim.spec.family} have cores to themselves, as many at once as fit",
                family=sim.spec.family,
            )

    def _capacity(self, capacity: Capacity) -> None:
        state = self._state
        if capacity == state.capacity:
            return
        devices = "".join(f", {there} of {name}" for name, there in capacity.devices)
        state.note(
            "hold",
            f"the capacity changed from {state.capacity.cpu}m to {capacity.cpu}m on "
            f"{units.counted(len(capacity.nodes), 'node')}{devices}: the plan is made anew",
            cpu=capacity.cpu,
            memory=capacity.memory,
        )
        if capacity.cpu != state.capacity.cpu:
            state.knowledge.forget()
        state.set_capacity(capacity)
        state.noted.clear()
        state.regime()

    # --- decisions ---

    def _decide(self) -> None:
        state = self._state
        self._begun = True
        self._decided = state.now
        if state.mode is Mode.INTERRUPTED:
            state.end_what_does_not_halt()
            return
        watchdog.end_what_cannot_go_on(state)
        if state.capacity.cpu <= 0:  # nothing to share out, and nothing to measure by
            if state.profiling:
                baseline_run.end(state)  # so that all that runs goes on
            return
        baseline_run.measure(state)
        recut.recut(state)
        trial.judge(state)
        fairness.keep_budgets(state)
        admission.admit(state)
        widening.widen(state)
        binding_trial.bind(state)
        plan_phases.turn(state)
        shares.settle(state)

    # --- views ---

    def outlook(self) -> Schedule | None:
        """The choice of now for what is queued, and what else there is; None if none is left.

        Its `widths_planned` are ranks, of which there may be more than cores.
        """
        state = self._state
        if not state.moldable or not state.queued:
            return None
        best = widths.schedule(state)
        return replace(best, widths_planned=widths.ranks_planned(state, best))

    @property
    def finished(self) -> bool:
        """True once every simulation is done, failed or not started."""
        return self._state.finished

    @property
    def measuring(self) -> bool:
        """True while a decision waits for measurements; else a look each second is enough."""
        return self._state.phase in (Phase.PROFILE, Phase.PACK)

    def spec(self, name: str) -> Spec:
        """What the plan asks for, on the chosen ranks. Raises KeyError for an unknown name."""
        return self._state.sims[name].spec

    def running(self) -> dict[str, Share]:
        """The simulations whose own command runs, and what each of them shall have."""
        state = self._state
        if state.mode is Mode.INTERRUPTED:
            return {}
        groups = {**state.active, **state.suspended}
        return {
            name: sim.share for name, sim in groups.items() if sim.share and sim.started is not None
        }

    def view(self, name: str) -> View:
        """One simulation. Raises KeyError for an unknown name."""
        return views.view(self._state, self._state.sims[name])

    def views(self) -> list[View]:
        """All simulations in the order of the plan."""
        return [self.view(name) for name in self._state.sims]

    def active_views(self) -> list[View]:
        """Those that were launched and have not ended, in the order of the plan."""
        state = self._state
        there = {**state.active, **state.suspended, **state.terminating}
        return [self.view(name) for name in state.sims if name in there]

    def decided(self) -> list[str]:
        """On how many ranks those run that may have several, and why: lines for the reader."""
        return views.decided(self._state)

    def status(self) -> Status:
        """The run as a whole."""
        return views.status(self._state)
