# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whether a simulation that runs is to stop at a checkpoint and go on on other ranks.

When nothing is queued any more, cores fall free one simulation after the other, and what is left
runs on as many ranks as were right while all cores were wanted. What was predicted of more ranks
may turn out wrong, and then fewer are right again.

Inputs: the state: what runs, how long it still will, the cores on which nothing does. Outputs: a
checkpoint of one simulation at a time, with a note that has what was predicted.

Invariants: only the simulation that would be the last to end is stopped, since no other one makes
the queue longer, and none that failed before, perhaps as it was stopped; what is saved is predicted
to be `restart_pays` times what the restart takes; the simulation goes on on the ranks that were
chosen as long as their cores are free; it is stopped so `STOPS` times at most, and each end of a
run at which it stopped counts as one of them.
"""

from __future__ import annotations

from dovetail.controller import widths
from dovetail.controller.simulation import Simulation, Stage
from dovetail.controller.state import State

STOPS = 3
"""Stops of one simulation: the third one's prediction has two wrong ones before it."""
PARTS = 2.0
"""Starts that a restart is taken for before one was seen: writing, cutting anew, the start."""


def widen(state: State) -> None:
    """Stop the simulation that would end last, if it pays to have it go on on more ranks."""
    if not state.moldable or state.queued or not state.own_cores or state.profiling:
        return
    if state.suspended or any(s.stage is not Stage.RUNNING for s in widths.running(state)):
        return
    sims = {sim.spec.name: widths.seconds_left(state, sim) for sim in state.active.values()}
    if not sims:
        return
    sim = state.sims[max(sims, key=lambda name: sims[name])]
    if not state.can_halt(sim) or sim.failed or sim.stops >= STOPS or not _measured(state, sim):
        return
    found = _best(state, sim, sims[sim.spec.name])
    if found is None:
        return
    ranks, left, cost = found
    now = sims[sim.spec.name]
    wanted = widths.in_ranks(ranks)
    state.note(
        "hold",
        f"{sim.spec.name} stops at a checkpoint to go on on {wanted}: {now:.0f} s left on "
        f"{sim.spec.ranks}, {left:.0f} s on {ranks}, about {cost:.0f} s for the restart",
        name=sim.spec.name, ranks=ranks, left=now, then=left, restart=cost,
    )  # fmt: skip
    sim.next_ranks, sim.halted_at = ranks, state.now
    state.halt(sim, f"to go on on {wanted}")


def restart_seconds(state: State, sim: Simulation) -> float:
    """Seconds without progress that a restart costs: as seen in its family, else guessed."""
    family = state.family(sim)
    if family.restart is not None:
        return family.restart
    # Its own may have begun with the cut of another entry of the same case, which cut it.
    alike = (one for one in state.families.values() if one.spec.case == family.spec.case)
    shapes = [shape for one in alike for shape in one.shapes.values()]
    shapes.append(state.shape(sim))  # which may be cut as no more are
    return PARTS * max(shape.startup or 0.0 for shape in shapes)


def _measured(state: State, sim: Simulation) -> bool:
    """Whether it is known how long it still needs, and not only guessed."""
    return bool(state.iterations_left(sim)) and sim.spec.name in state.shape(sim).rates


def _best(state: State, sim: Simulation, left: float) -> tuple[int, float, float] | None:
    """Ranks, seconds left on them and seconds of the restart, of what saves most; or None."""
    family = state.family(sim)
    seconds = widths.seconds_on(state, family)
    room = widths.free_cores(state) + sim.spec.ranks
    cost = restart_seconds(state, sim)
    found = None
    for ranks in widths.allowed(family):
        back = ranks < sim.spec.ranks and sim.stops > 0 and family.shapes[ranks].rates
        if not (back or sim.spec.ranks < ranks <= room) or not state.fits(sim, ranks):
            continue
        then = left * seconds[ranks] / seconds[sim.spec.ranks]
        if left - then >= state.settings.restart_pays * cost and (found is None or then < found[1]):
            found = ranks, then, cost
    return found
