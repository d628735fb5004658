# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phase C, pack: admit what is predicted to pay.

Inputs: the state. Outputs: simulations launched or resumed, with notes that say why.

Invariants: one admission at a time while ranks share cores, and none before the last one has
been tried; a set that did not pay is not tried again; trials may lose no more than
`Settings.harm` of the plan's sequential time; something runs whenever something can.
"""

from __future__ import annotations

from dovetail.controller import widths
from dovetail.controller.knowledge import CoScheduled, TrialVerdict, with_one
from dovetail.controller.prediction import parts, predicted, spun_need
from dovetail.controller.simulation import Simulation, Stage
from dovetail.controller.state import State
from dovetail.core.protocol import Cause


def admit(state: State) -> None:
    """Start or resume what may run beside what runs."""
    halting = [sim for sim in state.active.values() if sim.stage is Stage.HALTING]
    if any(state.now - sim.resumed_at < state.settings.halt for sim in halting):
        return  # it is about to go on otherwise
    for sim in halting:
        why = f"{sim.spec.name} was to stop at a checkpoint, and goes on: nothing waits for that"
        state.note_once(("halting", sim.spec.name, sim.resumed_at), "hold", why)
    if state.moldable and not state.suspended:
        widths.start_chosen(state)
    if state.moldable and state.terminating:
        return  # the choice waits for their cores
    if not state.active and not state.full:
        _start_first(state)
    while state.active and _admit_one(state):
        if not state.own_cores:
            break


def _start_first(state: State) -> None:
    """Nothing runs: the oldest suspended one is resumed, or else the head of the queue starts."""
    for sim in _resumable(state):
        state.note("admit", f"{sim.spec.name} is resumed", name=sim.spec.name, n=1)
        state.resume(sim, "there is room again")
        return
    alone = not (state.terminating or state.suspended)  # whose memory and devices fall free
    heads = state.heads(len(state.families))
    while heads:
        sim = heads.pop(0)
        every = widths.allowed(state.family(sim))
        fitting = [r for r in reversed(every) if r <= state.cores] or every[:1]
        ranks = next((r for r in fitting if state.fits(sim, r)), 0)  # fewer need fewer devices
        if alone and not ranks:
            ranks = next((r for r in fitting if state.fits_alone(sim, r)), 0)
        if ranks:
            state.note(
                "admit", f"{sim.spec.name} starts, nothing else runs", name=sim.spec.name, n=1
            )
            _begin(state, sim, ranks)
            return
        if alone and _drop_too_large(state, sim):
            heads = state.heads(len(state.families))  # with the next one of its entry


def _drop_too_large(state: State, sim: Simulation) -> bool:
    """Give up what can never run; a node that was there a moment ago may be there again."""
    lacks, name = state.lacks(sim, widths.allowed(state.family(sim))[0]), sim.spec.name
    why = f"needs {sim.spec.memory} bytes of memory, there are {state.capacity.memory}"
    why = f"needs {lacks}" if lacks else why
    if 0.0 < state.capacity_at >= state.now - state.settings.no_nodes:
        until = f"{state.settings.no_nodes:.0f} s from the last change of the capacity on"
        state.note_once(
            ("too large", name), "hold", f"{name} {why}: it waits for more, {until}", name=name
        )
        return False
    state.take(sim)
    state.end(sim, Stage.NOT_STARTED, Cause.TOO_LARGE, why)
    state.note("fail", f"{name} cannot run: {why}", name=name)
    return True


def _begin(state: State, sim: Simulation, ranks: int = 0) -> None:
    head = state.heads(1)
    state.overtakes = 0 if head and head[0] is sim else state.overtakes + 1
    state.launch(sim, ranks or sim.spec.ranks)


def _admit_one(state: State) -> bool:
    if state.full:
        return False
    running = state.running
    for sim in _choices(state):
        verdict = _pays(state, running, sim)
        if verdict:
            suspended = sim.spec.name in state.suspended
            state.note(
                "admit",
                f"{sim.spec.name} {'is resumed' if suspended else 'starts'} beside "
                f"{len(state.active)} running: {verdict}",
                name=sim.spec.name,
                n=len(state.active) + 1,
            )
            if suspended:
                state.resume(sim, "there is room again")
            else:
                _begin(state, sim)
            return True
    return False


def _choices(state: State) -> list[Simulation]:
    """Suspended ones first, then the heads of a few families; only the first if it waited long."""
    heads = state.heads(state.settings.lookahead)
    if state.moldable:  # what has cores to itself is started elsewhere; the rest must share
        heads = heads if not widths.room_is_left(state) else []
        heads = [sim for sim in heads if not widths.waits_for_more(state, sim)]
        for sim in heads:
            sim.spec = sim.planned.on(_beside(state, sim))
    if state.overtakes >= state.settings.overtakes and heads and not state.lacks(heads[0]):
        heads = heads[:1]
    return [*_resumable(state), *heads]


def _beside(state: State, sim: Simulation) -> int:
    """On how many ranks one shares cores: as many as others of its family have.

    A trial counts what each does of what it does alone, so one on fewer would count for too much.
    Where none of its family runs it has as many as any other, but no more than are planned.
    """
    family, active = state.family(sim), state.active.values()
    like = [one.spec.ranks for one in active if state.family(one) is family]
    others = max(one.spec.ranks for one in active)
    most = max(like, default=min(others, widths.planned_on(state, family)))
    open_ = widths.allowed(family)
    return max((ranks for ranks in open_ if ranks <= most), default=open_[0])


def _resumable(state: State) -> list[Simulation]:
    """The suspended ones, oldest first; none for a while after a resize was refused.

    It would be refused again at once where the simulation has ended, as with its node, and the
    executor has yet to see the last of it.
    """
    return [*state.suspended.values()] if state.now >= state.resize_after else []


def _pays(state: State, running: CoScheduled, sim: Simulation) -> str:
    """Why it pays to run a simulation beside what runs; empty if it does not, or not yet."""
    if sim.stage is Stage.QUEUED and not state.fits(sim):
        state.tell_lack(sim)
        return ""
    if state.ranks + state.shape(sim).cores <= state.cores:
        return "each rank has a core to itself"
    if state.profiling or _unmeasurable(state, sim):
        return ""
    if state.shape(sim).profile is None and state.counts.get(sim.shape):
        return ""  # one of that shape is on its way to a profile
    new = with_one(running, sim.shape)
    verdict = state.knowledge.verdict(new)
    if verdict is TrialVerdict.BAD or state.now < state.admit_after:
        return ""
    if verdict is TrialVerdict.GOOD:
        promise = "this has paid before"
    else:
        promise = _promises(state, running, new) if _ready_for_trial(state, running) else ""
    return promise if promise and _within_budgets(state, new, sim) else ""


def _unmeasurable(state: State, sim: Simulation) -> bool:
    """True if nothing would tell whether sharing cores pays: one of them publishes nothing."""
    return any(state.family(one).silent for one in (sim, *state.active.values()))


def _ready_for_trial(state: State, running: CoScheduled) -> bool:
    sims = state.active.values()
    if (
        len(sims) > 1
        and not state.own_cores
        and state.knowledge.verdict(running) is not TrialVerdict.GOOD
    ):
        return False
    if not state.settled() or not state.affordable(0.0):
        return False
    for sim in sims:
        left = state.remaining(sim)
        if not sim.measured or (left is not None and left <= 2 * state.settings.window):
            return False
    return all(state.shapes[name].profile for name, _ in running)


def _within_budgets(state: State, new: CoScheduled, extra: Simulation) -> bool:
    slow = {name: s for (name, _), s in zip(new, predicted(state, new))}
    known = state.knowledge.outcomes.get(new)
    for sim in (*state.active.values(), extra):
        expected = slow[sim.shape]
        if known and known.verdict is TrialVerdict.GOOD and known.best:
            expected = min(known.best[1].slowdowns)
        if expected > state.budget(sim) * (1.0 + state.settings.margin):
            state.note_once(
                ("budget", new),
                "hold",
                f"{len(state.active) + 1} at once would slow {sim.spec.name} to {expected:.2f} "
                f"times its time alone, its budget is {state.budget(sim):.2f}",
                predicted=expected,
                budget=state.budget(sim),
            )
            return False
    return True


def _promises(state: State, running: CoScheduled, new: CoScheduled) -> str:
    for name, _ in new:
        need = spun_need(state, name)
        if need >= state.settings.full * state.cores:
            state.note_once(
                ("full", name),
                "hold",
                f"{name} keeps {need:.2f} of {state.cores:g} cores busy: nothing fits beside it",
                family=name,
                need=need,
                cores=state.cores,
            )
            return ""
    slow = predicted(state, new)
    after = sum(count / s for (_, count), s in zip(new, slow))
    now = state.knowledge.throughput(running)
    if now is None:
        now = sum(c / s for (_, c), s in zip(running, predicted(state, running)))
    gain = after / now
    if gain >= state.settings.predicted_gain:
        return f"{gain:.2f} times the throughput of now is predicted"
    state.note_once(
        ("gain", new),
        "hold",
        f"one more would do {gain:.2f} times the work of now: not worth a trial",
        predicted=gain,
        mix=[[name, count] for name, count in new],
        need=sum(p.count * p.need for p in parts(state, new)),
        cores=state.cores,
    )
    return ""
