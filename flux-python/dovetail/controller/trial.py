# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phase C, pack: measure what runs at once; keep it, or take the newest back.

Inputs: the state. Outputs: wait policies to measure, freezes and stops, with notes that say why.

Invariants: a mix is judged once, by measured throughput and slowdowns; no work is thrown away
but that of a young simulation that cannot be paused.
"""

from __future__ import annotations

from dovetail.controller import settings
from dovetail.controller.baseline_run import complete
from dovetail.controller.knowledge import Measure, Outcome
from dovetail.controller.meter import Window
from dovetail.controller.settings import Mix, Part
from dovetail.controller.simulation import Simulation
from dovetail.controller.state import State
from dovetail.core.protocol import WaitPolicy


def parts(state: State, mix: Mix) -> list[Part]:
    """A mix as the prediction sees it."""
    result = []
    for name, count in mix:
        family = state.families[name]
        need = settings.expected_need(family.spec)
        if family.profile is not None:
            need = family.packed or family.profile.need
        result.append(Part(count, family.spec.ranks, need, family.packed is not None))
    return result


def predicted(state: State, mix: Mix) -> list[float]:
    """Slowdowns by family, in the order of the mix."""
    beta, cost = state.knowledge.beta, state.settings.wait_cost
    return settings.slowdowns(parts(state, mix), state.cores, beta, cost)


def next_policy(state: State, mix: Mix) -> WaitPolicy:
    """How the simulations of a mix shall wait: the best known, or the next to be measured.

    The candidates are measured in turn until one comes so near to the bound that no other
    could do much better. `off` is always among them, as the last: spinning ranks that share
    cores halve the throughput, so it is measured if that is still open and can be afforded.
    """
    known = state.knowledge.outcome(mix)
    todo = [p for p in _options(state, mix) if p not in known.measures]
    if known.verdict or not todo or _good_enough(state, mix, known):
        return known.best[0] if known.best else _options(state, mix)[0]
    return todo[0]


def _options(state: State, mix: Mix) -> tuple[WaitPolicy, ...]:
    ranks = sum(count * state.families[name].spec.ranks for name, count in mix)
    options = settings.candidates(ranks, sum(count for _, count in mix), state.cores)
    known = state.knowledge.outcome(mix)
    loss = 0.25 * state.settings.window  # half a window at half the throughput
    if len(options) > 1 and known.measures and not affordable(state, loss):
        return tuple(p for p in options if p != settings.OFF)
    return options


def affordable(state: State, loss: float) -> bool:
    """True if a trial that loses so many seconds of one simulation is still within bounds."""
    return state.lost + loss <= state.settings.harm * state.sequential()


def _good_enough(state: State, mix: Mix, known: Outcome) -> bool:
    """No other wait policy could gain much: the CPU is already used nearly as well as can be."""
    if known.best is None:
        return False
    need = sum(count * spun_need(state, name) for name, count in mix)
    n = sum(count for _, count in mix)
    bound = min(float(n), n * state.cores / need) if need > 0.0 else float(n)
    return known.best[1].throughput >= state.settings.near_bound * bound


def spun_need(state: State, name: str) -> float:
    """Cores that a family's simulation keeps busy alone, without what blocking waits cost."""
    profile = state.families[name].profile
    return profile.need if profile else settings.expected_need(state.families[name].spec)


def judge(state: State) -> None:
    """Measure the present mix if it is not known; keep it or take the newest back."""
    sims = list(state.active.values())
    if len(sims) < 2 or state.own_cores or state.profiling is not None:
        return
    mix = state.mix
    outcome = state.knowledge.outcome(mix)
    if outcome.verdict == "bad" and mix != state.tolerated and state.now >= state.resize_after:
        rollback(state, outcome.why)
        return
    if outcome.verdict or not all(sim.measured for sim in sims) or not state.settled():
        return
    wait = next_policy(state, mix)
    if any(sim.share is None or sim.share.wait != wait for sim in sims):
        return  # `settle` asks for it, or a refusal keeps it away for a while
    windows = [sim.meter.window() for sim in sims]
    if not _enough(state, mix, sims, windows):
        return
    measure = measured(state, sims, [w for w in windows if w is not None])
    _record(state, mix, sims, wait, measure)
    if next_policy(state, mix) in outcome.measures:
        _conclude(state, mix, sims, outcome)
    else:
        state.restart_windows(sims)


def _enough(state: State, mix: Mix, sims: list[Simulation], windows: list[Window | None]) -> bool:
    """All windows are complete, or long enough for a clear answer, or half done and hopeless."""
    whole = [w for w in windows if w is not None]
    if len(whole) < len(sims) or not all(state.baseline(sim) > 0.0 for sim in sims):
        return False
    if all(complete(state, w) for w in whole):
        return True
    s, reference = state.settings, state.knowledge.reference(mix)
    if any(w.seconds < s.window / 2 or w.iterations < s.window_iterations / 2 for w in whole):
        return False
    now = measured(state, sims, whole)
    if all(w.seconds >= s.window and w.iterations >= s.window_iterations for w in whole):
        return abs(now.throughput - s.kept_gain * reference) > 3 * now.error
    return now.throughput + 2 * now.error < s.hopeless * reference


def measured(state: State, sims: list[Simulation], windows: list[Window]) -> Measure:
    """Throughput in simulations alone, its absolute error, and each slowdown."""
    slow, total, square = [], 0.0, 0.0
    for sim, window in zip(sims, windows):
        speed = window.rate / state.baseline(sim)
        total += speed
        square += (speed * window.error) ** 2
        slow.append(1.0 / speed)
    return Measure(total, square**0.5, tuple(slow))


def _record(
    state: State, mix: Mix, sims: list[Simulation], wait: WaitPolicy, measure: Measure
) -> None:
    reference = state.knowledge.reference(mix)
    outcome = state.knowledge.outcome(mix)
    before = predicted(state, mix)
    outcome.measures[wait] = measure
    state.lost += max(0.0, reference - measure.throughput) * (state.now - state.since)
    state.note(
        "policy",
        f"{len(sims)} at once with wait policy {wait.mode}: {measure.throughput:.2f} times one "
        f"alone, against {reference:.2f} without the newest",
        mix=[[name, count] for name, count in mix],
        wait=wait.mode,
        throughput=measure.throughput,
        error=measure.error,
        slowdowns=list(measure.slowdowns),
        before=reference,
    )
    if wait.mode == "doorbell":
        _learn_needs(state, sims)
    if outcome.best and outcome.best[0] == wait:
        _learn(state, mix, measure, before)


def _learn_needs(state: State, sims: list[Simulation]) -> None:
    """CPU per iteration under blocking waits is what a simulation needs once it is packed."""
    seen: dict[str, list[float]] = {}
    for sim in sims:
        cpu = sim.meter.loads("cpu")
        if cpu and sum(cpu) > 0.0:
            seen.setdefault(sim.spec.family, []).append(sum(cpu) * state.baseline(sim))
    for name, needs in seen.items():
        state.families[name].packed = sum(needs) / len(needs)


def _learn(state: State, mix: Mix, measure: Measure, before: list[float]) -> None:
    """Fit the model again, and say how well it had predicted this mix."""
    mean = sum(measure.slowdowns) / len(measure.slowdowns)
    counts = [count for _, count in mix]
    n = sum(counts)
    guess = sum(count * slow for count, slow in zip(counts, before)) / n
    pieces = parts(state, mix)
    need = sum(p.count * p.need for p in pieces)
    if need > mean * state.cores:
        # Faster than the cores allow proves that the need was overestimated.
        for name, _ in mix:
            family = state.families[name]
            if family.packed is not None:
                family.packed *= mean * state.cores / need
        need = mean * state.cores
    bound = max(1.0 + state.settings.wait_cost, need / state.cores)
    load = sum(p.count * (state.ranks - p.ranks) for p in pieces) / n / state.cores
    state.knowledge.learn(mix, load, bound, mean)
    known = state.knowledge
    state.note(
        "model",
        f"beta is {known.beta:.3f}; {n} at once were predicted {guess:.2f} times slower than "
        f"alone and are {mean:.2f}",
        beta=known.beta,
        beta_error=known.beta_error,
        error=known.error,
        n=n,
        predicted=guess,
        measured=mean,
        needs=[p.need for p in pieces],
    )


def _conclude(state: State, mix: Mix, sims: list[Simulation], outcome: Outcome) -> None:
    assert outcome.best is not None
    wait, best = outcome.best
    reference = state.knowledge.reference(mix)
    need = reference * state.settings.kept_gain
    over = [slow / state.budget(sim) for sim, slow in zip(sims, best.slowdowns)]
    figures = {
        "mix": [[name, count] for name, count in mix],
        "wait": wait.mode,
        "throughput": best.throughput,
        "error": best.error,
        "before": reference,
        "slowdowns": list(best.slowdowns),
    }
    if best.throughput < need or best.throughput - reference < best.error:
        outcome.verdict = "bad"
        outcome.why = (
            f"{len(sims)} at once do {best.throughput:.2f} times the work of one alone, without "
            f"the newest {reference:.2f}: it does not pay"
        )
    elif min(over) > 1.0 + state.settings.margin or max(over) > 1.25:
        outcome.verdict = "bad"
        outcome.why = f"{len(sims)} at once slow a simulation to {max(over):.2f} times its budget"
    else:
        outcome.verdict = "good"
        outcome.why = (
            f"{len(sims)} at once do {best.throughput:.2f} times the work of one alone "
            f"({reference:.2f} before), wait policy {wait.mode}"
        )
        state.note("keep", outcome.why, **figures)
        state.restart_windows(sims)
        return
    rollback(state, outcome.why, **figures)


def rollback(state: State, why: str, **figures: object) -> None:
    """Take the newest admission back without losing its work where that can be done."""
    newest = list(state.active.values())[-1]
    name = newest.spec.name
    state.hold_until = state.now + state.settings.cooldown
    figures["name"] = name
    if state.capacity.suspend:
        state.note("rollback", f"{why}; {name} stands still until there is room", **figures)
        state.freeze(newest, f"take {name} back")
    elif state.now - newest.thawed_at <= state.settings.young:
        state.note("rollback", f"{why}; {name} goes back to the queue", **figures)
        state.stop(newest, "taken back, to run again later", requeue=True)
    else:
        state.tolerated = state.mix
        state.note("hold", f"{why}; {name} cannot be paused and is too old to be run again")
        return
    state.totals["rollbacks"] += 1
    state.replan = True
