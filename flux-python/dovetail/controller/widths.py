# SPDX-License-Identifier: LGPL-3.0-or-later
"""On how many ranks each simulation starts, and which of them start now.

Where the plan leaves the ranks open, one after the other, fewer ranks side by side and all
between are points in one space; `choice` finds the best of them for the queue that is left, from
what is measured by now, and this module does what it says.

Inputs: the state: what is queued, what runs and how long it still will. Outputs: launches, and a
note for each new decision with the alternatives and what they were predicted to take.

Invariants: a rank that is started here has a core to itself unless the plan allows no fewer ranks
than there are cores; cores wait for others only while something runs, and not before the length
of some simulation is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from dovetail.controller import binding_trial, choice, speedup
from dovetail.controller.choice import Busy, Schedule, Task
from dovetail.controller.simulation import Family, Shape, Simulation
from dovetail.controller.speedup import Measured
from dovetail.controller.state import AT_ONCE, UNKNOWN, State
from dovetail.core import units

Number = TypeVar("Number", int, float)

TOLD = 4
"""Parts of a decision that are said in words; the log has all."""
EXPLORING = 0.2
"""Share of a simulation that running it on ranks of which nothing is known may cost beyond what is
predicted: the balanced case of `speedup` takes 1.17 times the core-seconds on two ranks."""
ENOUGH = 3
"""Simulations beyond the first of their kind that can tell how much equal ones differ; before that
they are taken to be equal, since more ranks would else be tried where nothing is known."""
LEAST = 1e-6
"""Seconds that a simulation takes at least; a clock that was set may say that it took none."""
LEAST_LEFT = 0.05
"""Share of its length that a simulation at least has left, as long as its end is only guessed."""


def start_chosen(state: State) -> None:
    """Start what the best schedule for the queue starts now."""
    _learn_rates(state)
    free = free_cores(state)
    if not state.queued or (free <= 0 and state.active):
        return
    if state.now < state.choose_after:
        return
    state.choose_after = state.now + state.settings.replan
    best = schedule(state)
    state.decided = (best, state.now)
    known = any(_known(family) for family in state.families.values())
    before = state.queued
    free -= _explore(state, free)
    if fewer := _explore_fewer(state, best, free):
        free -= fewer
        best = schedule(state)  # for the others, beside that one
        state.decided = (best, state.now)
    held = False
    for name, cores in best.starts_now:
        family = state.families[name]
        if family.queue and cores <= free:
            if _start(state, family, cores):
                free -= cores
            else:
                held = held or bool(state.lacks(state.sims[family.queue[0][1]]))
    if held or (state.queued == before and not known):
        _fill(state, free)  # what waits for a device keeps no cores for itself
    _tell(state, best)


def free_cores(state: State) -> int:
    """Cores on which no rank runs, counting none twice."""
    return int(state.cores) - sum(_cores(state, sim.cores) for sim in running(state))


def room_is_left(state: State) -> bool:
    """Whether some that is queued could have free cores to itself: then these are not shared."""
    free = free_cores(state)
    queued = (family for family in state.families.values() if family.queue)
    return free > 0 and any(_cores(state, allowed(family)[0]) <= free for family in queued)


def waits_for_more(state: State, sim: Simulation) -> bool:
    """Whether one that is queued waits for more than its fewest ranks, though some cores are free.

    Of a family that tried fewer: that cores are left over beside these was known, and what would be
    packed onto them is done sooner on the ranks that are planned.
    """
    family = state.family(sim)
    if not family.tried or free_cores(state) <= 0 or state.decided is None:
        return False
    return planned_on(state, family) > allowed(family)[0]


def planned_on(state: State, family: Family) -> int:
    """The fewest ranks that are planned for those of a family that are queued."""
    rest = state.decided[0].rest.get(family.spec.family) if state.decided else None
    open_ = allowed(family)
    return next((r for r in open_ if rest and _cores(state, r) in rest), open_[0])


def schedule(state: State) -> Schedule:
    """The best known way to run what is queued beside what runs."""
    state.usual_seconds = _usual_length(state)
    tasks, busy = [], []
    for family in state.families.values():
        if family.queue:
            tasks.append(_task(state, family))
    for sim in running(state):
        used = _cores(state, sim.cores)
        busy.append(Busy(used, seconds_left(state, sim), state.memory_of(sim)))
    return _chosen(state, tasks, busy, state.decided)


def _chosen(
    state: State,
    tasks: Sequence[Task],
    busy: Sequence[Busy],
    decided: tuple[Schedule, float] | None = None,
) -> Schedule:
    """The best way to run these beside those."""
    cores = max(1, int(state.cores))
    nodes = tuple(node.cpu // 1000 for node in state.capacity.nodes)
    nodes = nodes if any(nodes) else ()  # none has a whole core left, and one rank may run
    before, then = decided or (None, state.now)
    return choice.choose(
        tasks,
        cores,
        busy,
        state.capacity.memory,
        nodes,
        _at_once(state),
        before=before,
        since=state.now - then,
        scatter=_scatter(state),
    )


def _at_once(state: State) -> int:
    """How many may run at once, by the plan, the place, and devices that all need; 0: any."""
    takes = [sim.spec.takes() for sim in running(state)]
    for family in state.families.values():
        if family.queue:
            takes.append(family.spec.takes(allowed(family)[0]))
    limits = [most for most in (state.settings.max_packed, state.capacity.simulations) if most]
    for name, there in state.capacity.devices:
        if least := min((one.get(name, 0) for one in takes), default=0):
            limits.append(max(1, there // least))
    return min(limits, default=0)


def _scatter(state: State) -> float:
    """How much equal simulations differ: the standard deviation, as a part of what they take."""
    squares, free = 0.0, 0
    for shape in state.shapes.values():
        if len(shape.lasted) > 1:
            mean = sum(shape.lasted) / len(shape.lasted)
            whole = max(1e-9, mean + shape.soonest)
            squares += sum(((each - mean) / whole) ** 2 for each in shape.lasted)
            free += len(shape.lasted) - 1
    return (squares / free) ** 0.5 if free >= ENOUGH else 0.0


def seconds_on(state: State, family: Family) -> dict[int, float]:
    """Seconds of a whole run by number of ranks: measured with all cores busy, or predicted."""
    measured = _all_measured(family) or {1: Measured(state.usual_seconds)}
    made_from = measured, max(1, int(state.cores))
    if family.curve[0] != made_from:
        family.curve = (made_from, _curve(family, *made_from))
    return family.curve[1]


def _curve(family: Family, measured: Mapping[int, Measured], cores: int) -> dict[int, float]:
    curve = speedup.predict((1, *planned(family)), measured)
    seconds: dict[int, float] = {}
    for ranks in planned(family):
        weights = family.spec.on(ranks).weights
        # Its heaviest rank's, and where ranks share cores no less than all of these can do.
        least = curve.seconds[1] * max(max(weights) / max(sum(weights), 1e-9), 1.0 / cores)
        known_here = ranks in measured and ranks not in curve.predicted
        seconds[ranks] = curve.seconds[ranks] if known_here else max(curve.seconds[ranks], least)
    return seconds


def planned(family: Family) -> tuple[int, ...]:
    """The numbers of ranks in the plan."""
    return family.spec.widths or (family.spec.ranks,)


def allowed(family: Family) -> tuple[int, ...]:
    """The numbers of ranks that a family may run on: those of the plan on which it can start."""
    good = [r for r in planned(family) if not family.shapes[r].broken]
    return tuple(good) or planned(family)


def starts_elsewhere(state: State, sim: Simulation, unready: bool) -> bool:
    """Whether one that failed before its first iteration may do better on other ranks.

    So it is if nothing has iterated or ended well on these, or if what it has written was `unready`
    to be gone on from here, of which those that began here tell nothing. They are not taken again
    then, unless another one iterates on them.
    """
    family, shape = state.family(sim), state.shape(sim)
    tried = (shape.startup is not None or shape.lasted) and not unready
    if sim.iterations or tried or len(family.spec.widths) < 2:
        return False
    shape.broken = True
    return any(not family.shapes[r].broken for r in family.spec.widths)


def seconds_left(state: State, sim: Simulation) -> float:
    """Seconds that a running simulation still needs, as far as is known.

    One that runs longer than predicted is taken to go on for as long again as it did beyond that:
    nothing waits for its cores for longer than it gains by them. So is one that stands still, which
    may hang.
    """
    left, rate = state.iterations_left(sim), state.shape(sim).rates.get(sim.spec.name)
    if left and rate:
        still = state.now - max(sim.progress_at, sim.resumed_at)
        return left / rate + max(0.0, still - max(1.0 / rate, state.settings.window))
    total = seconds_on(state, state.family(sim))[sim.spec.ranks]
    return max(LEAST_LEFT * total, abs(total - (state.now - sim.launched_at)))


# --- what is known ---


def _learn_rates(state: State) -> None:
    """Keep the rates of those whose ranks have cores to themselves, with the others running."""
    if not state.own_cores:
        return
    for sim in state.active.values():
        window = sim.meter.window() if sim.measured else None
        if binding_trial.undecided(state, sim):
            continue
        if window and window.seconds >= state.settings.window and window.iterations >= 3:
            rates = state.shape(sim).rates
            if sim.spec.name not in rates:
                state.choose_after = AT_ONCE
            rates[sim.spec.name] = window.rate


def _measured(family: Family, shape: Shape) -> Measured | None:
    """A whole run in that shape, from those that are done or else from the rates of now."""
    loads = shape.profile.loads if shape.profile else ()
    work = tuple(load * family.length for load in loads)
    if shape.lasted:
        seconds = sum(shape.lasted) / len(shape.lasted)
    elif family.length and shape.rates:
        seconds = family.length * len(shape.rates) / sum(shape.rates.values())
    else:
        return None
    seconds += shape.soonest  # what the first one prepared may be there for the others
    return Measured(max(LEAST, seconds), work=work if family.length else ())


def _all_measured(family: Family) -> dict[int, Measured]:
    found = {r: _measured(family, family.shapes[r]) for r in planned(family)}
    return {ranks: one for ranks, one in found.items() if one is not None}


def _known(family: Family) -> bool:
    return bool(_all_measured(family))


def _usual_length(state: State) -> float:
    """Seconds on one rank of those families of which it is known; of work, not of what ranks cost.

    They are what is guessed of the others.
    """
    lengths = []
    for family in state.families.values():
        measured = _all_measured(family)
        if measured:
            lengths.append(speedup.predict((1,), measured).seconds[1])
    return sum(lengths) / len(lengths) if lengths else UNKNOWN


# --- what is done ---


def running(state: State) -> list[Simulation]:
    """All that has cores: a suspended one has none."""
    return [*state.active.values(), *state.terminating.values()]


def _cores(state: State, ranks: int) -> int:
    """Cores that so many ranks take: more ranks than there are cores share all of them."""
    return min(ranks, max(1, int(state.cores)))


def _ranks_on(state: State, family: Family, cores: int) -> int:
    """The ranks that take so many cores: of more than there are cores, the fewest."""
    return next(r for r in allowed(family) if _cores(state, r) == cores)


def ranks_planned(state: State, best: Schedule) -> dict[str, dict[int, int]]:
    """How many of each family are to run on how many ranks, where a schedule tells of cores."""
    return {
        name: {_ranks_on(state, state.families[name], c): count for c, count in counts.items()}
        for name, counts in best.widths_planned.items()
    }


def _task(state: State, family: Family) -> Task:
    sim = state.sims[family.queue[0][1]]
    by_cores: dict[int, float] = {}
    seconds, part = seconds_on(state, family), _part_left(state, family)
    for ranks in allowed(family):
        by_cores.setdefault(_cores(state, ranks), part * seconds[ranks])
    deadline = None if sim.planned.deadline is None else sim.planned.deadline - state.t
    memory = max(
        state.memory_of(sim),
        *(state.memory_on(sim.planned, ranks) for ranks in allowed(family)),
    )
    return Task(
        family.spec.family,
        len(family.queue),
        by_cores,
        memory,
        family.spec.objective,
        deadline,
        sim.index,
    )


def _part_left(state: State, family: Family) -> float:
    """What part of a whole run those that are queued still need: some stopped at a checkpoint."""
    queued = [state.sims[name] for _, name in family.queue]
    over = sum(min(sim.most, family.length) for sim in queued if sim.stops)
    return max(LEAST_LEFT, 1.0 - over / (len(queued) * family.length)) if over else 1.0


def _start(state: State, family: Family, cores: int) -> bool:
    """Start the next of a family on so many cores; False if there is no room for it now."""
    sim = state.sims[family.queue[0][1]]
    ranks = _ranks_on(state, family, cores)
    if not state.fits(sim, ranks) or state.full:
        state.tell_lack(sim, ranks)
        return False
    beside = f"beside {len(state.active)} running" if state.active else "nothing else runs"
    state.note(
        "admit",
        f"{sim.spec.name} starts on {in_ranks(ranks)}, {beside}",
        name=sim.spec.name,
        n=len(state.active) + 1,
        ranks=ranks,
    )
    state.launch(sim, ranks)
    return True


def _explore(state: State, free: int) -> int:
    """Start one of a long queue on other ranks than the fewest, to know them; returns its cores.

    A curve that is only predicted never shows that more ranks are faster, as where a part fits
    into a cache. What this may cost, by the prediction and `EXPLORING`, is at most `harm` of the
    queue, which a queue of a few simulations does not have; the work itself counts.
    """
    taken = 0
    for family in state.families.values():
        few, *others = allowed(family)
        if not others or not family.queue or _known(family) or len(family.queue) < family.total:
            continue
        seconds = seconds_on(state, family)
        left = state.settings.harm * family.total
        for ranks in others:
            cost = max(0.0, ranks * seconds[ranks] / (few * seconds[few]) - 1.0) + EXPLORING
            fits = ranks <= free - taken and ranks <= state.cores
            if cost <= left and fits and _start(state, family, ranks):
                left -= cost
                taken += ranks
    return taken


def _explore_fewer(state: State, best: Schedule, free: int) -> int:
    """Start one on fewer ranks than decided, to know them; returns its cores.

    Of a program that was measured on many ranks, or not at all, it is predicted that it takes
    longer on fewer nearly in proportion, though it may hardly gain by ranks. One tries fewer if the
    queue is to end earlier by `predicted_gain`, should they be as fast, and should they be as
    predicted, later by no more than `harm`, all tries together. The choice goes by what is then
    measured.
    """
    found = _on_fewer(state, best) if best.chooser.plain else None
    if found is None or found[2] > free:
        return 0
    task, cores, fewer = found
    as_fast = {c: task.seconds[max(c, cores)] for c in task.seconds}
    if best.makespan < state.settings.predicted_gain * _end(state, best, task, fewer, as_fast):
        return 0
    lost = max(0.0, _end(state, best, task, fewer, task.seconds) / best.makespan - 1.0)
    if state.explored + lost > state.settings.harm:
        return 0
    if not _start(state, state.families[task.kind], fewer):
        return 0
    state.families[task.kind].tried = True
    state.explored += lost
    return fewer


def _on_fewer(state: State, best: Schedule) -> tuple[Task, int, int] | None:
    """Of which task one may try fewer cores than it is to start on, these cores, and the fewer.

    It is the one that could save most, if that is enough, of those that were never started on
    fewer. The fewer are at most half, if there are such, and with them one is done in the first
    half of what is left.
    """
    starts = dict(sorted(best.starts_now, reverse=True))  # the fewest of each
    most, found = best.makespan * (1.0 - 1.0 / state.settings.predicted_gain), None
    for task in best.chooser.tasks:
        cores, family = starts.get(task.kind, 0), state.families[task.kind]
        narrower = [c for c in task.seconds if c < cores]
        if not narrower or _ranks_on(state, family, cores) > family.least > 0:
            continue
        fewer = max((c for c in narrower if 2 * c <= cores), default=min(narrower))
        saved = (task.count - 1) * (cores - fewer) * task.seconds[cores] / best.chooser.cores
        if saved > most and 2.0 * task.seconds[fewer] <= best.makespan:
            most, found = saved, (task, cores, fewer)
    return found


def _end(
    state: State, best: Schedule, task: Task, fewer: int, seconds: Mapping[int, float]
) -> float:
    """When the queue is done if one of a task starts on fewer cores, and takes such seconds."""
    one = Busy(fewer, seconds[fewer], task.memory)
    rest = replace(task, count=task.count - 1, seconds=seconds)
    tasks = [rest if other is task else other for other in best.chooser.tasks]
    return _chosen(state, tasks, [*best.chooser.running, one]).makespan


def _fill(state: State, free: int) -> None:
    """Start what there is on free cores, each on the fewest: there is nothing to wait for."""
    for family in sorted(state.families.values(), key=lambda one: one.queue[:1]):
        cores = _cores(state, allowed(family)[0])
        while family.queue and cores <= free and _start(state, family, cores):
            free -= cores


def _tell(state: State, best: Schedule) -> None:
    """Say what was decided, once for each decision, with what else there was."""
    left = {*best.widths_planned, *(sim.spec.family for sim in state.active.values())}
    measured = all(_known(f) for name, f in state.families.items() if f.queue or name in left)
    decided = [(n, ranks) for n, counts in best.widths_planned.items() for ranks in counts]
    key = ("choice", tuple(sorted(decided)), measured)
    if key in state.noted:
        return
    planned_on = ranks_planned(state, best)
    plan = [
        f"{count} {name} on {in_ranks(ranks)} each"
        for name, by_ranks in planned_on.items()
        for ranks, count in sorted(by_ranks.items())
    ]
    more = f" and {len(plan) - TOLD} more kinds" if len(plan) > TOLD else ""
    other = {one.name: one.makespan for one in best.alternatives if one.name != best.name}
    words = "nothing is measured yet"
    if measured:
        words = f"{units.rounded(best.makespan)} s for what is left, predicted"
        if choice.SEQUENTIAL in other:
            words += f"; {choice.SEQUENTIAL} {units.rounded(other[choice.SEQUENTIAL])} s"
    uncounted = {sim.spec.family for sim in state.sims.values() if sim.measure != "iterations"}
    data = {
        "cores": max(1, int(state.cores)),
        "measured": measured,
        "way": best.name,
        "predicted": best.makespan,
        "alternatives": [[one.name, one.makespan] for one in best.alternatives],
        "seconds": {
            name: by_text(seconds_on(state, family))
            for name, family in state.families.items()
            if _known(family)
        },
        "widths": {name: by_text(counts) for name, counts in planned_on.items()},
        "open": {
            name: {
                "iterations": 0 if name in uncounted else family.length,
                "measured": sorted(_all_measured(family)),
            }
            for name, family in state.families.items()
            if name in left and len(family.spec.widths) > 1
        },
    }
    state.choices.take(data)
    state.note_once(key, "choice", f"decided: {', '.join(plan[:TOLD])}{more}: {words}", **data)


def by_text(values: Mapping[int, Number]) -> dict[str, Number]:
    """Something by number of ranks, as JSON has it."""
    return {str(ranks): value for ranks, value in values.items()}


def in_ranks(count: int) -> str:
    """A number of ranks, in words."""
    return units.counted(count, "rank")
