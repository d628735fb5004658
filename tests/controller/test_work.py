# SPDX-License-Identifier: LGPL-3.0-or-later
"""What counts nothing is measured by its work: packed where that pays, and no further."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dovetail.controller import work
from dovetail.controller.controller import Controller
from dovetail.core.protocol import Capacity, Node, Note, Ranks, Sampled, Spec, Started, Tick
from dovetail.executors.simulated.executor import Work
from dovetail.run.simulate import run_simulated

pytestmark = pytest.mark.unit

TWO_CORES = [Node("n", 2000, 0)]
MASTER = Work((0.02, 1.0), 16, tells=False)


def specs(name: str, count: int, ranks: int, **more: object) -> list[Spec]:
    one = Spec(name, name, "case", ranks, (1.0,) * ranks, ("program",), **more)
    return [replace(one, name=f"{name}-{number}") for number in range(count)]


@pytest.mark.parametrize(
    ("spins", "used", "found"),
    [
        (True, (1.0, 1.0, 0.0), 1.0),
        (True, (1.0, 0.25, 0.75), 0.25),
        (True, (0.5, 0.25, 0.75), 0.125),
        (True, (1.75, 0.75, 0.25), 1.5),
        (True, (0.0, 0.0, 0.0), 0.0),
        (False, (0.25, 0.25, 0.75), 0.25),
        (False, (0.25, 0.75, 0.25), 0.25),
        (False, (0.30, 0.25, 0.75), 0.25),
        (False, (1.75, 0.75, 0.25), 1.5),
    ],
    ids=["no MPI", "alone", "half of a core", "two threads", "nothing", "asleep in MPI",
         "waits for a core", "its waits cost CPU", "two threads, asleep"],
)  # fmt: skip
def test_cpu_time_outside_mpi(spins, used, found):
    assert work.outside(*used, spins) == pytest.approx(found)


def test_threads_are_seen_by_what_they_use_and_wait_for():
    """Two of them have one core together."""
    seen = work.Work(0)
    for second in range(4):
        t = float(second)
        none = (0.0,)
        seen.add(t, Ranks((0,), (t,), (t,), (t,), none, (0,), "work", queued=t), spins=True)
    assert (seen.threads, seen.got(2.0, spins=True)) == (2, 0.5)


def test_a_program_after_another_begins_anew():
    seen = work.Work(0)
    for t, cpu in ((0.0, 0.0), (1.0, 1.0), (2.0, 0.5), (3.0, 1.5)):
        seen.add(t, Ranks((0,), (t,), (cpu,), (t,), (0.0,), (0,), "work"), spins=True)
    assert seen.meter.iterations == 2 / work.UNIT


@pytest.mark.parametrize(
    ("cost", "scatter"), [(1.0, 0.0), (1.6, 0.0), (1.6, 0.02), (1.0, 0.2)],
    ids=["no dearer", "dearer", "not quite equal", "quite unequal"],
)  # fmt: skip
def test_what_beside_others_takes_more_cpu_time_is_known_by_its_ends(cost, scatter):
    ends = [
        (10 * (1 + scatter * sign) * cost + (1 - cost) * alone, alone)
        for alone, sign in ((8.0, 1), (2.0, -1), (0.0, 1), (8.0, -1))
    ]
    found = work.dearer(ends)
    assert 1.0 <= found <= cost
    assert (found > 1.3) == (cost > 1.0)
    assert work.dearer(ends[:1]) == 1.0


def test_a_master_with_a_worker_leaves_room_for_another():
    result = run_simulated(specs("m", 4, 2), {"m": MASTER}, TWO_CORES)
    views = result.controller.views()
    assert {(one.state, one.measure, one.iterations) for one in views} == {("done", "work", 0)}
    kept = result.notes("keep")[0].data
    assert kept["measures"] == ["work"]
    assert kept["throughput"] == pytest.approx(2.0, rel=0.05)
    assert kept["error"] >= 0.1 * kept["throughput"]
    (profile,) = result.notes("profile")
    assert (profile.data["measure"], profile.data["iterations"]) == ("work", 0)
    assert profile.data["rate"] == pytest.approx(1.02, rel=0.02)
    assert max(one.ended for one in views) < 0.7 * 4 * 16.5


@pytest.mark.parametrize("count", [1, 2])
def test_what_keeps_all_cores_busy_runs_alone(count):
    full = Work((1.0,) * count, 8, tells=False)
    result = run_simulated(specs("f", 5, count), {"f": full}, TWO_CORES)
    assert {one.state for one in result.controller.views()} == {"done"}
    most = max(note.data["n"] for note in result.notes("admit"))
    assert most == 2 // count
    assert not result.notes("rollback")


def test_a_verdict_that_the_ends_do_not_bear_out_is_taken_back():
    """Beside another each takes 2.5 times the CPU time, which its rate does not show."""
    crowded = replace(MASTER, interference=0.6)
    result = run_simulated(specs("m", 6, 2), {"m": crowded}, TWO_CORES)
    assert {one.state for one in result.controller.views()} == {"done"}
    kept, refuted = (
        result.notes("keep")[0],
        next(n for n in result.notes("model") if "cost" in n.data),
    )
    assert kept.data["throughput"] > 1.5
    assert refuted.data["cost"] > 1.5
    assert refuted.data["throughput"] < 1.0
    assert result.notes("admit")[-1].data["n"] == 1


class Driven:
    """One simulation on two ranks, whose samples come as they are told."""

    def __init__(self) -> None:
        self.controller = Controller(specs("s", 1, 2, iterations=500), Capacity(tuple(TWO_CORES)))
        self.t = 0.0
        self.notes: list[Note] = []
        self.handle(Tick(0.0))
        self.handle(Started(0.1, "s-0"))

    def handle(self, event: object) -> None:
        actions = self.controller.handle(event)
        self.notes += [one for one in actions if isinstance(one, Note)]

    def sleeps(self, seconds: float) -> None:
        """So many seconds in which nothing of it uses a core."""
        until = self.t + seconds
        while self.t < until:
            self.t += 0.2
            idle = Ranks((0,) * 2, (self.t,) * 2, (0.0,) * 2, (self.t,) * 2, *[(0.0,) * 2, (0, 0)])
            self.handle(Sampled(self.t, "s-0", replace(idle, measure="work")))
            self.handle(Tick(self.t))

    def samples(self, seconds: float, rate: float = 0.0) -> None:
        """So many seconds in which it works, and counts periods at a rate."""
        first = self.t
        while self.t < first + seconds:
            self.t += 0.2
            count = int((self.t - first) * rate)
            stamp = first + count / rate if rate else self.t
            at = (stamp, stamp), (stamp, stamp), (0.0, 0.0)
            measure = "periods" if rate else "work"
            self.handle(
                Sampled(self.t, "s-0", Ranks((count,) * 2, (stamp,) * 2, *at, (0, 0), measure))
            )
            self.handle(Tick(self.t))

    @property
    def view(self):
        return self.controller.view("s-0")


def test_a_rhythm_that_comes_late_is_gone_by_and_one_that_is_lost_again_no_more():
    run = Driven()
    run.samples(9.0)
    assert (run.view.measure, run.view.rate) == ("work", None), "it may tell more yet"
    run.samples(4.0)
    assert (run.view.measure, run.view.rate) == ("work", pytest.approx(2.0, rel=0.01))
    assert run.view.error == pytest.approx(0.1, rel=0.01)
    assert run.view.left is None, "500 are no seconds of work"
    run.samples(10.0, rate=20.0)
    assert (run.view.measure, run.view.rate) == ("periods", pytest.approx(20.0, rel=0.01))
    assert run.view.iterations > 100
    run.samples(12.0)
    assert run.view.measure == "work"
    run.samples(10.0, rate=20.0)
    assert (run.view.measure, run.view.iterations) == ("work", 0)
    told = [note.data["measure"] for note in run.notes if note.what == "hold"]
    assert told == ["work", "periods", "work"]
    measured = [note.data["measure"] for note in run.notes if note.what == "profile"]
    assert measured == ["work", "periods", "work"]


def test_what_only_sleeps_runs_once_it_is_known_to_tell_nothing():
    run = Driven()
    run.sleeps(9.0)
    assert run.view.state == "starting", "it may tell an iteration yet"
    run.sleeps(3.0)
    assert (run.view.state, run.view.measure, run.view.rate) == ("running", "work", None)
    assert run.controller.status().counts == {"running": 1}
