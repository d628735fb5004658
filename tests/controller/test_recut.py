# SPDX-License-Identifier: LGPL-3.0-or-later
"""Who is stopped at a checkpoint to be cut anew, and by which weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dovetail.controller.recut import load_balance, weights_for
from dovetail.core import protocol
from dovetail.core.protocol import Node, Spec
from dovetail.executors.simulated.executor import Fault, Simulated, Work
from dovetail.run.simulate import SimulatedRun, run_simulated

pytestmark = pytest.mark.unit

TWO_CORES = [Node("n0", 2000, 0)]
ONE = Spec("a-0", "a", "case", 2, (1.0, 3.0), ("run",), checkpoint=True, iterations=900,
           application="openfoam")  # fmt: skip
UNEVEN = Work((0.01, 0.03), 900)


def run(count: int, work: Work = UNEVEN, executor=Simulated, faults=(), **more) -> SimulatedRun:
    specs = [replace(ONE, name=f"a-{i}", **more) for i in range(count)]
    result = run_simulated(
        specs, {"a": work}, TWO_CORES, faults=faults, limit=3000, executor=executor
    )
    assert {view.state for view in result.controller.views()} == {"done"}
    ends = [a.name for _, a in result.actions if isinstance(a, protocol.Ended)]
    assert sorted(ends) == [spec.name for spec in specs]
    return result


def stopped(result: SimulatedRun) -> list[str]:
    return [a.name for _, a in result.actions if isinstance(a, protocol.Checkpoint)]


def test_load_balance_is_mean_over_largest():
    assert load_balance((1.0, 3.0)) == pytest.approx(2 / 3)
    assert load_balance((2.0, 2.0)) == load_balance(()) == load_balance((0.0,)) == 1.0


def test_cells_that_cost_more_are_fewer_and_what_a_user_cut_is_cut_evenly():
    ours = replace(ONE, weights=(1.0, 1.0), widths=(1, 2))
    assert weights_for(ours, (1.0, 3.0)) == (1.5, 0.5)
    assert weights_for(replace(ours, weights=(1.0, 3.0)), (1.0, 3.0)) == (1.0, 1.0)
    assert weights_for(replace(ours, weights=(1.0, 1.0)), (1.0, 1000.0))[1] >= 0.09
    assert weights_for(replace(ours, application="lammps"), (1.0, 3.0)) == (1.0, 1.0)
    assert weights_for(ours, (0.0, 1.0)) == weights_for(ONE, (1.0, 9.0)) == (1.0, 1.0)


def test_the_first_is_cut_anew_and_the_others_from_the_beginning():
    result = run(4)
    assert stopped(result) == ["a-0"]
    launches = [(a.name, a.continued) for _, a in result.actions if isinstance(a, protocol.Launch)]
    assert launches[:2] == [("a-0", False), ("a-0", True)]
    assert len(launches) == 5
    assert result.controller.spec("a-3").recut
    assert result.controller.spec("a-3").weights == (1.0, 1.0)
    kept = run(4, rebalance=False)
    assert stopped(kept) == []
    assert result.makespan < kept.makespan, "though the simulated machine packs without loss"
    assert run(1).makespan < 0.85 * run(1, rebalance=False).makespan
    assert kept.controller.spec("a-3").weights == (1.0, 3.0)


def test_what_balances_itself_is_stopped_for_that():
    result = run(3, application="lammps")
    assert stopped(result) == ["a-0"]
    assert result.controller.spec("a-2").recut


def test_where_too_little_is_left_of_the_first_the_others_are_cut_anew():
    result = run(4, replace(UNEVEN, iterations=270), iterations=270)
    assert stopped(result) == []
    assert not result.controller.spec("a-0").recut
    assert result.controller.spec("a-3").recut


def test_ranks_that_only_seemed_even_on_a_busy_node_are_looked_at_again():
    """Others slow the rank that has less to do, while it is measured."""
    result = run(4, faults=[Fault(0.5, "busy", "a-0", 9.0)])
    profiles = [n.data for n in result.notes("profile") if "load" in n.data]
    first, again = [one["load"] for one in profiles if one["name"] == "a-0"][:2]
    assert load_balance(first) > 0.9
    assert again == pytest.approx([1 / 3, 1.0], rel=0.1)
    assert stopped(result) == ["a-0"]


def test_on_a_node_that_stays_busy_nothing_is_measured_twice():
    result = run(1, faults=[Fault(0.5, "busy", "a-0", 10**4)])
    assert len([n for n in result.notes("profile") if "load" in n.data]) == 1


@pytest.mark.parametrize(
    ("work", "more"),
    [
        (Work((0.02, 0.022), 900), {}),
        (Work((0.01, 0.03), 120), {"iterations": 120}),
        (UNEVEN, {"checkpoint": False}),
        (UNEVEN, {"iterations": 0}),
        (UNEVEN, {"application": "generic"}),
    ],
    ids=[
        "it is balanced",
        "it is nearly over",
        "it may not be stopped",
        "its length is unknown",
        "nobody knows how it is cut",
    ],
)
def test_what_would_not_pay_is_left_alone(work, more):
    assert stopped(run(1, work, **more)) == []


class CrashesAsItStops(Simulated):
    def checkpoint(self, name):
        self._end(self._sims[name], protocol.Cause.FAILED, 1, "no space left")


class NeverStops(Simulated):
    def checkpoint(self, name):
        pass


class CutsBadly(Simulated):
    """What is cut anew is as uneven as before."""

    def launch(self, spec, share):
        super().launch(replace(spec, recut=False), share)


@pytest.mark.parametrize("executor", [CrashesAsItStops, NeverStops, CutsBadly])
def test_each_is_stopped_at_most_once(executor):
    names = stopped(run(3, executor=executor))
    assert len(names) == len(set(names))


class CannotGoOn(Simulated):
    """So often it is not made ready, as where its case cannot be cut."""

    fails = 0

    def launch(self, spec, share):
        super().launch(spec, share)
        if spec.name in self._kept and self.fails:
            self.fails -= 1
            self._end(self._sims[spec.name], protocol.Cause.LAUNCH_FAILED, 75, "no space left")


@pytest.mark.parametrize(("fails", "state"), [(0, "done"), (3, "done"), (9, "failed")])
def test_what_cannot_be_made_ready_is_kept_and_tried_some_more(fails, state, monkeypatch):
    monkeypatch.setattr(CannotGoOn, "fails", fails)
    works = {"a": UNEVEN}
    result = run_simulated([ONE], works, TWO_CORES, limit=3000, executor=CannotGoOn)
    assert stopped(result) == ["a-0"]
    (view,) = result.controller.views()
    assert (view.state, view.restarts) == (state, min(fails, 3))
    assert view.reason == ("no space left" if state == "failed" else "")
    launches = [a.continued for _, a in result.actions if isinstance(a, protocol.Launch)]
    assert launches == [False, True, *[True] * min(fails, 3)]


class RefusesTheCut(Simulated):
    """As where the user's own cut kept some faces together, which the solver relies on."""

    cause = protocol.Cause.FAILED

    def launch(self, spec, share):
        super().launch(spec, share)
        if spec.recut:
            self._end(self._sims[spec.name], self.cause, 1, "FOAM FATAL ERROR")


@pytest.mark.parametrize("cause", [protocol.Cause.FAILED, protocol.Cause.LAUNCH_FAILED])
def test_none_is_lost_where_no_solver_starts_on_the_new_cut(cause, monkeypatch):
    monkeypatch.setattr(RefusesTheCut, "cause", cause)
    for iterations in (900, 270):  # the first is stopped, or it is not, and the others are cut
        work = replace(UNEVEN, iterations=iterations)
        result = run(4, work, iterations=iterations, executor=RefusesTheCut)
        assert sum(view.restarts for view in result.controller.views()) == 1
        assert not result.controller.spec("a-3").recut
        (told,) = [note.why for note in result.notes("hold") if "uncut" in note.data]
        assert told.startswith("those of a are cut as before: a-")
        assert told.endswith(" failed, cut anew: FOAM FATAL ERROR")


class TakesMemory(Simulated):
    """Of which the plan says nothing."""

    def observe(self, t):
        for event in super().observe(t):
            if isinstance(event, protocol.Sampled):
                event = replace(event, ranks=replace(event.ranks, memory=(6 << 30,) * 2))
            yield event


def test_memory_that_was_seen_counts_for_those_that_are_cut_anew():
    specs = [replace(ONE, name=f"a-{i}", iterations=400) for i in range(4)]
    nodes = [Node("n0", 8000, 20 << 30)]
    works = {"a": replace(UNEVEN, iterations=400)}
    result = run_simulated(specs, works, nodes, limit=3000, executor=TakesMemory)
    assert {view.state for view in result.controller.views()} == {"done"}
    assert stopped(result) == ["a-0"]
    (at,) = [t for t, a in result.actions if isinstance(a, protocol.Checkpoint)]
    assert max(n for t, n in result.running if t > at) <= 1


def test_a_restart_costs_what_a_start_took_also_once_others_are_cut_anew():
    specs = [replace(ONE, name=f"a-{i}") for i in range(2)]
    result = run_simulated(specs, {"a": UNEVEN}, [Node("n0", 4000, 0)], limit=3000)
    costs = [note.data["restart"] for note in result.notes("hold") if "restart" in note.data]
    assert len(costs) == 2
    assert min(costs) >= UNEVEN.startup


@pytest.mark.parametrize("case", ["case", "another"])
def test_a_restart_costs_the_cut_also_of_an_entry_that_took_it_from_another(case):
    first = replace(ONE, checkpoint=False, iterations=100)
    later = replace(ONE, name="b-0", family="b", case=case, iterations=12000)
    works = {
        "a": Work((0.01, 0.03), 100, startup=20.0),
        "b": Work((0.01, 0.03), 12000, startup=0.5),
    }
    result = run_simulated([first, later], works, TWO_CORES, limit=3000)
    (note,) = [note for note in result.notes("hold") if note.data.get("name") == "b-0"]
    least = 20.0 if case == "case" else 0.0
    assert least < note.data["restart"] < least + 30.0
