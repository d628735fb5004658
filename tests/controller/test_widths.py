# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whole simulated runs of queues whose ranks are the controller's to choose."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from dovetail.controller.controller import Controller
from dovetail.controller.settings import Settings
from dovetail.core import protocol
from dovetail.core.protocol import Capacity, Cause, Node, Ranks, Spec
from dovetail.executors.simulated.executor import Fault, Simulated, Work
from dovetail.run.simulate import SimulatedRun, run_simulated

pytestmark = pytest.mark.unit

GIB = 1 << 30
TWO_CORES = [Node("n0", 2000, 8 * GIB)]
IMBALANCED = Work((0.01, 0.03), 300, cuts={1: (0.036,)})


def specs(count: int, widths: tuple[int, ...], family: str = "a", **more) -> list[Spec]:
    most = max(widths)
    return [
        Spec(f"{family}-{i}", family, "case", most, (1.0,) * most, ("run",), widths=widths, **more)
        for i in range(count)
    ]


def even(seconds: float, most: int, iterations: int = 300, lost: float = 0.05, **more) -> Work:
    """Work that splits evenly, and loses that share of its efficiency with each doubling."""
    cuts = {r: (seconds / r * (1 + lost * (r.bit_length() - 1)),) * r for r in range(1, most + 1)}
    return Work(cuts[most], iterations, cuts=cuts, **more)


def launched(result: SimulatedRun) -> list[int]:
    """The ranks of each launch, in order."""
    return [len(a.share.requests) for _, a in result.actions if isinstance(a, protocol.Launch)]


def states(result: SimulatedRun) -> set[str]:
    return {view.state for view in result.controller.views()}


def n_max(result: SimulatedRun) -> int:
    return max(n for _, n in result.running)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_four_that_may_run_on_one_rank_run_side_by_side(seed):
    result = run_simulated(specs(4, (1, 2)), {"a": IMBALANCED}, TWO_CORES, seed)
    assert states(result) == {"done"}
    assert launched(result) == [1] * 4
    assert n_max(result) == 2
    assert result.gain >= 1.5


def test_nothing_is_predicted_of_what_has_only_just_begun():
    result = run_simulated(specs(2, (1, 2)), {"a": IMBALANCED}, TWO_CORES)
    first, *_ = [a for _, a in result.actions if getattr(a, "what", "") == "choice"]
    assert first.why == "decided: 2 a on 1 rank each: nothing is measured yet"


@pytest.mark.parametrize("widths", [(1, 2, 3, 4), (1, 4)])
def test_more_ranks_than_cores_are_not_predicted_to_be_faster_than_these(widths):
    result = run_simulated(specs(6, widths), {"a": even(0.06, 4)}, TWO_CORES)
    assert states(result) == {"done"}
    told = [a.data for _, a in result.actions if getattr(a, "what", "") == "choice"]
    seconds = [data["seconds"]["a"] for data in told if data["measured"]]
    assert seconds
    assert all(each[r] >= 0.499 * each["1"] for each in seconds for r in each)


def test_a_last_one_that_would_leave_a_core_idle_is_widened():
    result = run_simulated(specs(5, (1, 2)), {"a": even(0.06, 2)}, TWO_CORES)
    assert states(result) == {"done"}
    assert launched(result) == [1, 1, 1, 1, 2]


def test_one_alone_runs_on_all_the_cores_it_may_have():
    result = run_simulated(specs(1, (1, 2, 4)), {"a": even(0.06, 4)}, [Node("n", 8000, 0)])
    assert launched(result) == [4]


def test_where_memory_allows_one_at_a_time_it_is_wide():
    result = run_simulated(
        specs(3, (1, 2), memory=5 * GIB), {"a": even(0.06, 2)}, TWO_CORES, limit=1000
    )
    assert states(result) == {"done"}
    assert launched(result) == [2, 2, 2]
    assert result.memory <= 8 * GIB


def test_what_publishes_nothing_is_run_narrow_and_side_by_side_too():
    work = replace(IMBALANCED, publishes=False)
    result = run_simulated(specs(6, (1, 2)), {"a": work}, TWO_CORES)
    assert states(result) == {"done"}
    assert launched(result) == [1] * 6
    assert result.gain >= 1.5


def test_fixed_and_open_ranks_share_a_queue():
    fixed = [replace(one, widths=()) for one in specs(2, (2,), "b")]
    result = run_simulated(
        [*specs(4, (1, 2)), *fixed], {"a": IMBALANCED, "b": even(0.05, 2)}, TWO_CORES
    )
    assert states(result) == {"done"}
    assert sorted(launched(result)) == [1, 1, 1, 1, 2, 2]


def test_one_core_that_none_can_have_keeps_none_from_being_packed():
    packed = specs(4, (3,), "b", slowdown=4.0)
    packed = [replace(one, widths=(), weights=(3.0, 1.0, 1.0)) for one in packed]
    works = {"a": even(0.06, 2, 100), "b": Work((0.06, 0.02, 0.02), 1000)}
    result = run_simulated([*specs(4, (1, 2)), *packed], works, [Node("n", 4000, 0)])
    assert states(result) == {"done"}
    assert result.makespan < 0.7 * (6 + 4 * 60), "the open ones, and the others one after another"


def test_each_ends_once_though_a_node_dies_and_the_ranks_are_chosen_again():
    nodes = [Node("n0", 2000, 0), Node("n1", 2000, 0)]
    faults = [Fault(3.0, "node", "n1")]
    result = run_simulated(specs(8, (1, 2, 4)), {"a": even(0.06, 4)}, nodes, faults=faults)
    assert states(result) == {"done"}
    ends = [a.name for _, a in result.actions if isinstance(a, protocol.Ended)]
    assert sorted(ends) == sorted({f"a-{i}" for i in range(8)})


def test_more_ranks_than_cores_only_where_nothing_less_is_allowed():
    result = run_simulated(specs(2, (4, 8)), {"a": even(0.06, 8)}, TWO_CORES, limit=1000)
    assert states(result) == {"done"}
    assert launched(result) == [4, 4]
    first = result.notes("choice")[0]
    assert first.why.startswith("decided: 2 a on 4 ranks each: ")
    assert first.data["widths"] == {"a": {"4": 2}}


def test_what_was_decided_is_said_with_what_else_there_was():
    result = run_simulated(specs(4, (1, 2)), {"a": IMBALANCED}, TWO_CORES)
    notes = result.notes("choice")
    assert notes
    measured = [note for note in notes if note.data["measured"]]
    assert measured
    assert all(len(note.data["alternatives"]) > 1 for note in notes)
    assert all(seconds > 0 for note in notes for _, seconds in note.data["alternatives"])


def test_a_cut_that_is_uneven_is_not_predicted_to_be_as_fast_as_an_even_one():
    uneven = [replace(one, weights=(1.0, 3.0)) for one in specs(3, (1, 2))]
    result = run_simulated(uneven, {"a": Work((0.015, 0.045), 300, cuts={1: (0.06,)})}, TWO_CORES)
    first = result.notes("choice")[0].data["alternatives"]
    after_another = dict(first)["one after the other"]
    # Two ranks at 1 to 3 take three quarters of one rank's time, so that three of them take
    # longer one after the other than in two waves on one rank each.
    assert after_another > dict(first)["all narrowest"]


@pytest.mark.parametrize("expected", [0, 100])
def test_no_cores_stand_idle_for_long_beside_one_that_takes_longer_than_expected(expected):
    long = specs(1, (1,), "long", iterations=expected)
    works = {"long": Work((0.06,), 4000), "b": even(0.24, 4)}
    queue = [*long, *specs(4, (3, 4), "b", iterations=300)]
    result = run_simulated(queue, works, [Node("n", 4000, 0)], limit=1000)
    assert states(result) == {"done"}
    starts = [t for t, a in result.actions if isinstance(a, protocol.Launch)]
    assert max(starts) < 0.4 * result.makespan, "three cores are free after 79 s, the fourth at 240"


def test_of_one_that_does_more_than_expected_nobody_says_when_it_ends():
    controller, _ = begun(1, (1,), Node("n0", 2000, 0), iterations=40)
    controller.handle(protocol.Started(0.5, "a-0"))
    left = []
    for k in range(1, 60):
        controller.handle(one_rank(1.0 + 0.1 * k, "a-0", k))
        left.append(controller.view("a-0").left)
    assert left[29] == pytest.approx(1.0, rel=0.1)
    assert left[39] == 0.0
    assert left[40:] == [None] * 19


def test_what_shared_cores_tells_not_how_long_one_alone_takes():
    packed = specs(2, (2,), "b", memory=GIB, objective="turnaround")
    packed = [replace(one, widths=(), weights=(1.0, 3.0)) for one in packed]
    large = specs(2, (1, 2), memory=8 * GIB)
    result = run_simulated(
        [*packed, *large], {"a": even(0.02, 2), "b": IMBALANCED}, TWO_CORES, limit=1000
    )
    assert n_max(result) == 2
    assert states(result) == {"done"}
    told = result.notes("choice")[-1].data["seconds"]["b"]["2"]
    assert told == pytest.approx(300 * 0.03 + 0.5, rel=0.05)


class Picky(Simulated):
    """Simulations fail at once on one rank, as where a decomposer or a solver refuses it."""

    def launch(self, spec, share):
        super().launch(spec, share)
        if spec.ranks == 1:
            self._end(self._sims[spec.name], protocol.Cause.LAUNCH_FAILED, 1, "refused")


def test_ranks_on_which_none_can_start_are_left_alone_and_nothing_is_lost():
    result = run_simulated(specs(3, (1, 2)), {"a": even(0.06, 2)}, TWO_CORES, executor=Picky)
    assert states(result) == {"done"}
    assert launched(result).count(1) <= 2, "those that had been started when the first failed"
    assert launched(result).count(2) == 3


def test_one_that_can_start_on_no_ranks_fails_with_the_reason():
    result = run_simulated(specs(2, (1,), "b"), {"b": even(0.06, 1)}, TWO_CORES, executor=Picky)
    assert {view.reason for view in result.controller.views()} == {"refused"}
    assert states(result) == {"failed"}


def test_one_that_fails_after_an_iteration_is_not_run_again():
    faults = [Fault(2.0, "fail", "a-0")]
    result = run_simulated(specs(3, (1, 2)), {"a": IMBALANCED}, TWO_CORES, faults=faults)
    assert [view.state for view in result.controller.views()] == ["failed", "done", "done"]
    assert len(launched(result)) == 3


def test_a_long_queue_finds_out_that_more_ranks_are_faster_than_in_proportion():
    fits_a_cache = Work((0.025, 0.025), 100, cuts={1: (0.08,)})
    result = run_simulated(specs(24, (1, 2)), {"a": fits_a_cache}, TWO_CORES)
    assert states(result) == {"done"}
    assert launched(result).count(2) >= 22
    assert result.makespan <= 1.1 * result.sequential, "which is on two ranks, the best way"


@pytest.mark.parametrize("jump", [86400.0, 61.0, -3.0, -3600.0])
@pytest.mark.parametrize("at", [0.05, 1.0, 3.0, 5.0])
def test_a_clock_jump_while_it_finds_out_costs_no_simulation_and_little_time(at, jump):
    fits_a_cache = Work((0.025, 0.025), 100, cuts={1: (0.08,)})
    jumps = [Fault(at, "clock", seconds=jump)]
    result = run_simulated(specs(24, (1, 2)), {"a": fits_a_cache}, TWO_CORES, faults=jumps)
    assert states(result) == {"done"}
    assert launched(result).count(2) >= 20
    assert result.makespan <= 1.15 * result.sequential


def test_what_exploring_costs_is_little_of_a_long_queue_and_a_short_one_does_not():
    work = even(0.06, 2, iterations=100, lost=0.2)
    result = run_simulated(specs(24, (1, 2)), {"a": work}, TWO_CORES)
    assert launched(result).count(2) <= 2
    narrow = run_simulated(specs(24, (1,)), {"a": work}, TWO_CORES)
    assert result.makespan <= 1.03 * narrow.makespan
    assert launched(run_simulated(specs(17, (1, 2)), {"a": work}, TWO_CORES))[0] == 1
    assert launched(run_simulated(specs(18, (1, 2)), {"a": work}, TWO_CORES))[0] == 2


EIGHT_CORES = [Node("n", 8000, 8 * GIB)]


def waves(count: int, widths: tuple[int, ...], work: Work, **more) -> SimulatedRun:
    """Equal simulations on eight cores, which two on three ranks each leave idle in part."""
    result = run_simulated(specs(count, widths, **more), {"a": work}, EIGHT_CORES, limit=5000)
    assert states(result) == {"done"}
    return result


def fewer_ranks(power: float) -> Work:
    """Work of 20 s on eight ranks, and on fewer longer by that power of their number."""
    cuts = {r: (0.1 * (8 / r) ** power,) * r for r in (3, 5, 8)}
    return Work(cuts[8], 200, cuts=cuts)


@pytest.mark.parametrize("count", [6, 12])
def test_what_hardly_gains_by_ranks_is_tried_on_fewer_than_the_first_choice(count):
    work = fewer_ranks(0.15)
    chosen, widest = waves(count, (3, 5, 8), work), waves(count, (8,), work)
    assert launched(chosen).count(3) > 0.6 * count
    assert chosen.makespan < 0.65 * widest.makespan


@pytest.mark.parametrize("count", [6, 12])
@pytest.mark.parametrize("power", [0.9, 1.0])
def test_what_gains_by_ranks_goes_back_to_more_and_loses_little(count, power):
    work = fewer_ranks(power)
    chosen, widest = waves(count, (3, 5, 8), work), waves(count, (8,), work)
    assert launched(chosen)[4:] == [8] * (count - 4)
    assert chosen.makespan <= 1.04 * widest.makespan


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, {}),
        (12, {"memory": 5 * GIB}),
        (12, {"objective": "turnaround"}),
        (12, {"deadline": 4000.0}),
    ],
    ids=["few", "one at a time by memory", "turnaround", "deadline"],
)
def test_fewer_ranks_are_not_tried_where_that_could_not_pay(count, more):
    assert launched(waves(count, (3, 5, 8), fewer_ranks(0.15), **more))[0] == 8


# --- Widening what runs ---


def last_to_end(
    iterations: int, checkpoint: bool = True, application: str = "generic", **more
) -> SimulatedRun:
    """Three of 300 iterations and a fourth one that is longer, on two cores."""
    options = {"checkpoint": checkpoint, "application": application}
    long = specs(1, (1, 2), "long", iterations=iterations, **options)
    work = {"a": even(0.06, 2), "long": even(0.06, 2, iterations=iterations)}
    result = run_simulated([*long, *specs(3, (1, 2))], work, TWO_CORES, limit=1000, **more)
    assert states(result) == {"done"}
    return result


def stopped(result: SimulatedRun) -> list[str]:
    return [a.name for _, a in result.actions if isinstance(a, protocol.Checkpoint)]


def test_the_last_to_end_goes_on_on_the_cores_that_fall_free():
    result = last_to_end(2000)
    assert stopped(result) == ["long-0"]
    again = [a for _, a in result.actions if isinstance(a, protocol.Launch) and a.continued]
    assert [(a.name, len(a.share.requests)) for a in again] == [("long-0", 2)]
    (requeued,) = [a for _, a in result.actions if isinstance(a, protocol.Requeued)]
    assert requeued.cause is protocol.Cause.CHECKPOINTED
    assert result.makespan < 0.85 * last_to_end(2000, checkpoint=False).makespan


def test_a_widening_that_turns_out_wrong_is_taken_back():
    (long,) = specs(1, (1, 2), "long", checkpoint=True, iterations=3000)
    work = Work((0.08, 0.08), 3000, cuts={1: (0.06,)})
    works = {"a": even(0.06, 2), "long": work}
    result = run_simulated([long, *specs(3, (1, 2))], works, TWO_CORES, limit=1000)
    assert states(result) == {"done"}
    assert stopped(result) == ["long-0", "long-0"]
    again = [a for _, a in result.actions if isinstance(a, protocol.Launch) and a.continued]
    assert [len(a.share.requests) for a in again] == [2, 1]


def test_what_is_nearly_over_or_may_not_be_stopped_is_left_alone():
    assert stopped(last_to_end(1400))
    assert stopped(last_to_end(940)) == []
    assert stopped(last_to_end(2000, checkpoint=False)) == []
    assert stopped(last_to_end(2000, application="lammps"))
    unlike = last_to_end(2000, application="lammps", executor=CountsPeriods)
    assert stopped(unlike) == [], "its case tells of steps, and periods are counted"


class CountsPeriods(Simulated):
    def observe(self, t):
        for event in super().observe(t):
            if isinstance(event, protocol.Sampled):
                event = replace(event, ranks=replace(event.ranks, measure="periods"))
            yield event


@pytest.mark.parametrize(
    ("executor", "unit"), [(Simulated, "iterations"), (CountsPeriods, "periods")]
)
def test_rates_are_told_in_the_unit_that_is_counted(executor, unit):
    quick = {"a": Work((0.0005, 0.0005), 40000)}
    result = run_simulated(specs(1, (2,)), quick, TWO_CORES, executor=executor)
    (told, *_) = result.notes("profile")
    assert re.search(rf": \d{{4}} {unit}/s alone", told.why)


class LosesAPod(Simulated):
    lost = False

    def observe(self, t):
        if self.clock >= 5.0 and not self.lost:
            self.lost = True
            self._end(self._sims["long-0"], Cause.POD_LOST, 1, "pod lost")
        return super().observe(t)


class LosesItAtTheCheckpoint(Simulated):
    """And has it back a minute later."""

    lost = None

    def observe(self, t):
        events = super().observe(t)
        for i, event in enumerate(events):
            if getattr(event, "cause", None) is Cause.CHECKPOINTED and self.lost is None:
                self.lost = t
                lost = protocol.Finished(event.t, event.name, Cause.NODE_LOST, 1, "node lost")
                events[i : i + 1] = [protocol.CapacityChanged(t, Capacity(())), lost]
        if self.lost is not None and 50.0 < t - self.lost < 60.0:
            self.lost = -100.0
            events.append(protocol.CapacityChanged(t, self.capacity()))
        return events


def test_a_node_that_was_away_is_no_cost_of_a_restart():
    result = last_to_end(2000, executor=LosesItAtTheCheckpoint)
    assert result.controller.view("long-0").restarts == 1, "it was lost"
    costs = [family.restart for family in result.controller._state.families.values()]
    assert max(cost or 0.0 for cost in costs) < 10.0


def test_one_that_was_lost_once_is_widened_like_any_other():
    result = last_to_end(2000, executor=LosesAPod)
    assert result.controller.view("long-0").restarts == 1
    assert stopped(result) == ["long-0"]


class CrashesAsItStops(Simulated):
    def checkpoint(self, name):
        self._end(self._sims[name], protocol.Cause.FAILED, 1, "no space left")


class RefusesToGoOn(Simulated):
    """On two ranks; what had been computed is still there for one."""

    def launch(self, spec, share):
        super().launch(spec, share)
        if spec.ranks == 2:
            self._end(self._sims[spec.name], protocol.Cause.FAILED, 1, "diverged")


class NeverStops(Simulated):
    def checkpoint(self, name):
        pass


@pytest.mark.parametrize("executor", [CrashesAsItStops, RefusesToGoOn, NeverStops])
def test_one_that_cannot_be_widened_is_done_once_and_asked_once(executor):
    result = last_to_end(2000, executor=executor)
    assert stopped(result) == ["long-0"]
    ends = [a.name for _, a in result.actions if isinstance(a, protocol.Ended)]
    assert ends.count("long-0") == 1


@pytest.mark.parametrize("at", [60.0, 62.0, 64.0, 66.0])
def test_a_node_that_dies_as_one_is_widened_costs_no_simulation(at):
    nodes = [Node("n0", 1000, 8 * GIB), Node("n1", 1000, 8 * GIB)]
    long = specs(1, (1, 2), "long", checkpoint=True, iterations=2000)
    work = {"a": even(0.06, 2), "long": even(0.06, 2, iterations=2000)}
    faults = [Fault(at, "node", "n1")]
    result = run_simulated([*long, *specs(3, (1, 2))], work, nodes, limit=1000, faults=faults)
    assert states(result) == {"done"}


# --- single events, where ranks are open ---


def one_rank(t: float, name: str, k: int, memory: int = 0) -> protocol.Sampled:
    """A simulation on one rank after so many iterations of 0.1 s."""
    stamp = 1.0 + 0.1 * k
    ranks = Ranks((k,), (stamp,), (0.1 * k,), (0.1 * k,), (0.0,), (memory,))
    return protocol.Sampled(t, name, ranks)


def begun(count: int, widths: tuple[int, ...], *nodes: Node, **more) -> tuple[Controller, list]:
    """A controller, and the simulations that it launches first: name and ranks each."""
    controller = Controller(specs(count, widths, **more), Capacity(nodes))
    actions = controller.handle(protocol.Tick(0.0))
    return controller, launches_of(actions)


def launches_of(actions) -> list[tuple[str, int]]:
    return [(a.name, len(a.share.requests)) for a in actions if isinstance(a, protocol.Launch)]


@pytest.mark.parametrize("cpu", [(900,), (900, 900), (500,)])
def test_one_rank_runs_where_no_node_has_a_whole_core(cpu):
    _, launched = begun(2, (1, 2), *(Node(f"n{i}", one, 0) for i, one in enumerate(cpu)))
    assert launched == [("a-0", 1)]


def test_one_overrun_of_memory_stops_one_which_waits_until_there_is_room():
    controller, launched = begun(8, (1, 2), Node("n0", 8000, 8 * GIB))
    assert launched == [(f"a-{i}", 1) for i in range(8)]
    for name, _ in launched:
        controller.handle(protocol.Started(0.5, name))
    actions = []
    for k in range(1, 4):
        for name, _ in launched:
            if controller.view(name).state != "terminating":
                actions += controller.handle(one_rank(1.0 + k, name, k, GIB * 11 // 10))
    stopped = [a.name for a in actions if isinstance(a, protocol.Stop)]
    assert stopped == ["a-7"]
    ended = protocol.Finished(5.0, "a-7", Cause.SHORT_OF_MEMORY, 143, "memory is short")
    assert launches_of(controller.handle(ended)) == []
    actions = controller.handle(protocol.Finished(6.0, "a-0", Cause.DONE, 0, ""))
    assert [name for name, _ in launches_of(actions)] == ["a-7"]


def test_one_that_is_bad_bars_no_ranks_on_which_others_iterate():
    controller, launched = begun(8, (1, 4), Node("n0", 4000, 0))
    assert launched == [(f"a-{i}", 1) for i in range(4)]
    for name, _ in launched:
        controller.handle(protocol.Started(0.5, name))
    controller.handle(one_rank(1.5, "a-1", 1))
    actions = controller.handle(protocol.Finished(2.0, "a-0", Cause.FAILED, 1, "bad input"))
    assert controller.view("a-0").state == "failed"
    assert launches_of(actions) == [("a-4", 1)]


def test_after_the_only_one_was_cancelled_the_next_has_as_many_ranks_as_there_are_cores():
    controller, launched = begun(2, (2, 64), Node("n0", 2000, 0))
    assert launched == [("a-0", 2)]
    controller.handle(protocol.Started(0.5, "a-0"))
    controller.handle(protocol.Unwanted(1.0, "a-0", "cancelled"))
    actions = controller.handle(protocol.Finished(2.0, "a-0", Cause.CANCELLED, 143, "stopped"))
    assert launches_of(actions) == [("a-1", 2)]


@pytest.mark.parametrize(("imbalance", "packed"), [(1.0, False), (3.0, True)])
def test_who_shares_cores_does_so_on_as_many_ranks_as_the_others_of_its_kind(imbalance, packed):
    """On fewer it has less to do for each core-second, which is no gain of the set."""
    light = 0.06 / imbalance
    work = Work((0.06, light), 600, cuts={1: (0.06 + light,), 4: (0.04,) * 4})
    queue = [*specs(3, (1, 2, 4)), *specs(2, (1, 2, 4), "b")]
    result = run_simulated(queue, {"a": work, "b": work}, [Node("n", 4000, 0)])
    assert states(result) == {"done"}
    assert bool(result.notes("policy")) == packed
    assert min(launched(result)) == 2


def test_a_clock_by_which_they_take_no_time_ends_no_run():
    controller, launched = begun(4, (1, 2), Node("n0", 2000, 0))
    for _ in range(2):
        for name, _ in launched:
            controller.handle(protocol.Started(0.0, name))
        actions = [controller.handle(protocol.Finished(0.0, name, Cause.DONE, 0, ""))
                   for name, _ in launched]  # fmt: skip
        launched = [one for some in actions for one in launches_of(some)]
    assert controller.finished


def test_nobody_waits_long_for_the_cores_of_one_that_stands_still():
    stalled = [Fault(14.0, "stall", "a-1")]
    queue = specs(3, (1, 2), iterations=300)
    work = {"a": even(0.05, 2, noise=0.0)}
    result = run_simulated(queue, work, TWO_CORES, faults=stalled, limit=1000)
    assert states(result) == {"done", "failed"}
    starts = [t for t, a in result.actions if isinstance(a, protocol.Launch)]
    assert max(starts) < 30.0


class CannotBeCutAgain(Simulated):
    """What begins runs on any ranks; what has stopped on one goes on there alone."""

    def launch(self, spec, share):
        super().launch(spec, share)
        if spec.name in self._kept and spec.ranks != 1:
            self._end(self._sims[spec.name], Cause.LAUNCH_FAILED, 75, "reconstructPar failed")


def test_what_cannot_be_cut_again_goes_on_as_it_was_though_another_ran_on_these_ranks():
    queue = specs(3, (1, 2), checkpoint=True, iterations=1500)
    result = run_simulated(
        queue, {"a": even(0.06, 2, iterations=1500)}, TWO_CORES, limit=1000,
        settings=Settings(harm=1.0), faults=[Fault(70.0, "fail", "a-2")], executor=CannotBeCutAgain,
    )  # fmt: skip
    assert launched(result)[:3] == [2, 1, 1]
    assert stopped(result) == ["a-1"]
    assert [view.state for view in result.controller.views()] == ["done", "done", "failed"]
    assert launched(result)[3:] == [2, 1]


def test_what_has_stopped_at_a_checkpoint_is_predicted_to_take_what_is_left_of_it():
    here = Capacity((Node("n0", 2000, 0),), checkpoints=True)
    controller = Controller(specs(2, (1, 2), checkpoint=True, iterations=1000), here)
    controller.handle(protocol.Tick(0.0))
    for name in ("a-0", "a-1"):
        controller.handle(protocol.Started(0.5, name))
    for k in range(1, 901):
        for name in ("a-0", "a-1"):
            controller.handle(one_rank(1.0 + 0.1 * k, name, k))
    controller.handle(protocol.Interrupted(91.0, "SIGTERM", 60.0))
    for name in ("a-0", "a-1"):
        controller.handle(protocol.Finished(91.0, name, Cause.CHECKPOINTED))
    (told,) = [a for a in controller.resume(92.0, here) if getattr(a, "what", "") == "choice"]
    assert told.data["predicted"] == pytest.approx(10.0, rel=0.1)


class PreparesForAll(Simulated):
    """The first to start prepares for 20 s what the others then share."""

    def launch(self, spec, share):
        startup = 0.5 if self._sims else 20.0
        self.works[spec.family] = replace(self.works[spec.family], startup=startup)
        super().launch(spec, share)


def test_what_the_first_one_prepared_is_not_predicted_of_the_others():
    result = run_simulated(
        specs(8, (1, 2)), {"a": even(0.1, 2, noise=0.0)}, TWO_CORES, executor=PreparesForAll
    )
    assert states(result) == {"done"}
    told = [a.data for _, a in result.actions if getattr(a, "what", "") == "choice"]
    assert told[-1]["seconds"]["a"]["1"] == pytest.approx(30.5, abs=1.0)
