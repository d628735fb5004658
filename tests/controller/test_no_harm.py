# SPDX-License-Identifier: LGPL-3.0-or-later
"""Packing does no harm: admissions that disappoint, budgets, profiles beside others, changing work.

The simulated machine has two cores; `interference` is what no profile foretells.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dovetail.controller.baseline import Alone
from dovetail.controller.controller import Controller
from dovetail.controller.knowledge import Measure, Outcome
from dovetail.controller.settings import Settings
from dovetail.core import protocol
from dovetail.core.protocol import Capacity, Node, Note, Spec
from dovetail.executors.simulated import executor as simulated
from dovetail.executors.simulated.executor import Fault, Simulated, Work
from dovetail.run.simulate import SimulatedRun, run_simulated

pytestmark = pytest.mark.unit

TWO_CORES = [Node("n0", 2000, 0)]
PAYS = Work((0.01, 0.03), 300)
EATS = Work((0.01, 0.03), 300, interference=0.3)
"""Promises a gain of 1.38; two at once really do 0.95 times the work of one."""


def specs(family: str, count: int, weights: tuple[float, ...] = (1, 3), **more) -> list[Spec]:
    return [
        Spec(f"{family}-{i}", family, "case", len(weights), weights, ("run",), **more)
        for i in range(count)
    ]


def run(plan: list[Spec], works: dict[str, Work], **more) -> SimulatedRun:
    result = run_simulated(plan, works, TWO_CORES, **more)
    assert {view.state for view in result.controller.views()} == {"done"}
    for view in result.controller.views():
        assert view.iterations == works[view.family].iterations
    return result


def told(result: SimulatedRun, *whats: str) -> list[tuple[str, object]]:
    """Notes of some kinds in order: (what, whom it is about)."""
    return [(note.what, note.data.get("name")) for note in _notes(result) if note.what in whats]


def _notes(result: SimulatedRun) -> Iterator[Note]:
    return (action for _, action in result.actions if isinstance(action, Note))


def suspended(result: SimulatedRun) -> dict[str, list[tuple[float, bool]]]:
    """By simulation, when it was suspended (True) or went on (False)."""
    found: dict[str, list[tuple[float, bool]]] = {}
    for t, action in result.actions:
        if isinstance(action, protocol.Resize):
            for name, share in action.shares.items():
                seen = found.setdefault(name, [])
                if share.suspended != (bool(seen) and seen[-1][1]):
                    seen.append((t, share.suspended))
    return {name: seen for name, seen in found.items() if seen}


def launched(result: SimulatedRun) -> list[str]:
    return [action.name for _, action in result.actions if isinstance(action, protocol.Launch)]


# --- an admission that does not pay ---


def test_what_does_not_pay_is_suspended_until_there_is_room_and_loses_nothing():
    result = run(specs("a", 4), {"a": EATS})
    assert told(result, "rollback") == [("rollback", "a-1")]
    assert launched(result) == ["a-0", "a-1", "a-2", "a-3"]
    assert sum(view.restarts for view in result.controller.views()) == 0
    ((name, changes),) = suspended(result).items()
    assert name == "a-1"
    assert [held for _, held in changes] == [True, False]
    assert changes[1][0] == pytest.approx(result.controller.view("a-0").ended, abs=0.2)


def test_what_is_suspended_keeps_the_least_request_and_makes_no_progress():
    works = {"a": EATS}
    machine = Watched(TWO_CORES, works)
    result = run_simulated(specs("a", 3), works, TWO_CORES, executor=lambda *_: machine)
    (held, again) = (t for t, _ in suspended(result)["a-1"])
    counts = {count for t, count in machine.seen["a-1"] if held + 0.2 <= t < again}
    assert len(counts) <= 1
    shares = [
        a.shares["a-1"] for t, a in result.actions if isinstance(a, protocol.Resize) and t == held
    ]
    assert [share.requests for share in shares] == [(10, 10)]


class Watched(Simulated):
    """Keeps what it said of each simulation's iterations."""

    def observe(self, t):
        events = super().observe(t)
        for event in events:
            if isinstance(event, protocol.Sampled):
                self.seen.setdefault(event.name, []).append((event.t, min(event.ranks.iterations)))
        return events

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = {}


def test_what_did_not_pay_is_not_tried_again():
    result = run(specs("a", 6), {"a": EATS})
    assert told(result, "rollback") == [("rollback", "a-1")]
    after = next(t for t, a in result.actions if isinstance(a, Note) and a.what == "rollback")
    assert max(n for t, n in result.running if t >= after) == 1
    assert result.notes("keep") == []
    assert result.makespan <= 1.03 * result.sequential


def test_what_did_not_pay_keeps_no_others_away():
    plan = specs("eats", 2) + specs("pays", 4)
    result = run(plan, {"eats": EATS, "pays": PAYS})
    assert [["eats", 2]] in [note.data["mix"] for note in result.notes("rollback")]
    assert [["pays", 2]] in [note.data["mix"] for note in result.notes("keep")]


def test_without_suspending_a_young_one_is_run_again_from_its_start():
    result = run(specs("a", 4), {"a": EATS}, suspend=False)
    assert told(result, "rollback") == [("rollback", "a-1")]
    assert launched(result) == ["a-0", "a-1", "a-1", "a-2", "a-3"]
    assert [view.restarts for view in result.controller.views()] == [0, 1, 0, 0]
    assert suspended(result) == {}
    assert result.makespan <= 1.12 * result.sequential


def test_without_suspending_an_old_one_is_kept_rather_than_its_work_thrown_away():
    slow = Work((0.1, 0.3), 150, startup=25.0, interference=0.3)
    result = run(specs("a", 3), {"a": slow}, suspend=False)
    assert told(result, "rollback") == []
    assert launched(result) == ["a-0", "a-1", "a-2"]
    (held,) = [n for n in result.notes("hold") if "cannot be suspended" in n.why]
    assert held.why.endswith("a-1 cannot be suspended and is too old to be run again")
    # Known to be bad, so after it nothing is tried beside the last.
    assert [n for _, n in result.running] == [1, 2, 1, 0]


# --- budgets ---

HURT = Work((0.01, 0.03), 1500, interference=0.25)
LIGHT = Work((0.005, 0.03), 700)


@pytest.mark.parametrize("suspend", [True, False])
def test_one_that_is_slowed_far_beyond_its_budget_gets_its_peace_at_once(suspend):
    plan = specs("a", 1, slowdown=1.45) + specs("b", 2, (1, 6), slowdown=3.0)
    result = run(plan, {"a": HURT, "b": LIGHT}, suspend=suspend)
    assert told(result, "rollback", "keep")[0] == ("rollback", "b-0")
    assert "times its budget" in result.notes("rollback")[0].why
    began, ended = result.controller.view("a-0").started, result.controller.view("a-0").ended
    alone = (ended - began) / (1500 * 0.03)
    assert alone <= 1.15
    assert len(result.notes("rollback")) == 1


@pytest.mark.parametrize("suspend", [True, False])
def test_a_larger_share_comes_before_a_rollback_and_suffices_where_it_can(suspend):
    plan = specs("a", 1, slowdown=1.6) + specs("b", 2, (1, 6), slowdown=3.0)
    result = run(plan, {"a": HURT, "b": LIGHT}, suspend=suspend)
    boosts = [n for n in result.notes("resize") if "boost" in n.data]
    assert [n.data["boost"] for n in boosts] == [1.5, 2.25]
    assert told(result, "rollback") == []
    assert result.gain > 1.2


def test_where_a_larger_share_does_not_help_the_newest_is_taken_back():
    plan = specs("a", 1, slowdown=1.5) + specs("b", 2, (1, 6), slowdown=3.0)
    settings = Settings(beta=0.0)
    result = run(plan, {"a": HURT, "b": LIGHT}, suspend=False, settings=settings)
    steps = [n.data.get("boost", n.what) for n in _notes(result) if "boost" in n.data]
    assert steps == [1.5, 2.25, 3.0]
    order = [what for what, _ in told(result, "resize", "rollback")]
    assert order.count("rollback") == 1
    assert order.index("rollback") > order.index("resize")
    assert told(result, "rollback") == [("rollback", "b-0")]
    views = {view.name: view for view in result.controller.views()}
    assert views["a-0"].restarts == 0


def test_without_weights_the_rollback_comes_at_once():
    plan = specs("a", 1, slowdown=1.6) + specs("b", 2, (1, 6), slowdown=3.0)
    result = run(plan, {"a": HURT, "b": LIGHT}, weights=False)
    assert not [n for n in result.notes("resize") if "boost" in n.data]
    assert told(result, "rollback") == [("rollback", "b-0")]


@pytest.mark.parametrize("work", [PAYS, EATS, HURT], ids=["pays", "eats", "hurt"])
@pytest.mark.parametrize("suspend", [True, False])
def test_no_flapping(work, suspend):
    """Over a long queue, each set is decided once and nobody is suspended twice."""
    result = run(specs("a", 12, slowdown=1.8), {"a": work}, suspend=suspend)
    assert len(result.notes("rollback")) <= 1
    assert len(result.notes("keep")) <= 1
    assert all(len(changes) <= 2 for changes in suspended(result).values())
    assert all(view.restarts <= 1 for view in result.controller.views())
    assert result.count(protocol.Resize) <= 4 * 12


# --- how many at once ---


@pytest.mark.parametrize(("most", "seen"), [(1, 1), (2, 2), (3, 3), (0, 4)])
def test_the_plan_may_bound_how_many_run_at_once(most, seen):
    result = run_simulated(
        specs("a", 6, (1,)),
        {"a": Work((0.03,), 200)},
        [Node("n0", 4000, 0)],
        settings=Settings(max_packed=most),
    )
    assert max(n for _, n in result.running) == seen


# --- a profile beside others ---


def test_a_new_family_is_profiled_while_the_others_are_suspended():
    plan = specs("a", 1) + specs("b", 2, (1, 6))
    works = {"a": Work((0.01, 0.03), 1000), "b": Work((0.005, 0.03), 300)}
    result = run(plan, works)
    assert any("suspended while b-0 is profiled" in n.why for n in result.notes("profile"))
    (off, on) = suspended(result)["a-0"]
    assert (off[1], on[1]) == (True, False)
    notes = [(t, a) for t, a in result.actions if isinstance(a, Note)]
    profiled = next(t for t, n in notes if n.what == "profile" and n.data.get("family") == "b")
    assert profiled == on[0]
    (profile,) = [n for n in result.notes("profile") if n.data.get("family") == "b"]
    assert profile.data["rate"] == pytest.approx(1 / 0.03, rel=0.02)
    assert profile.data["need"] == pytest.approx(7 / 6, rel=0.03)
    assert "did not run alone" not in profile.why
    assert told(result, "rollback") == []
    assert result.controller.view("a-0").restarts == 0


def test_the_others_go_on_if_the_profiled_one_dies():
    plan = specs("a", 1) + specs("b", 1, (1, 6))
    works = {"a": Work((0.01, 0.03), 600), "b": Work((0.005, 0.03), 300)}
    result = run_simulated(plan, works, TWO_CORES, faults=[Fault(3.5, "death", "b-0")])
    (off, on) = suspended(result)["a-0"]
    assert off[0] < 3.5 <= on[0] <= 3.8
    assert [v.state for v in result.controller.views()] == ["done", "failed"]


def test_where_nothing_can_be_suspended_the_profile_is_taken_again_once_alone():
    plan = specs("a", 1) + specs("b", 2, (1, 6))
    works = {"a": Work((0.01, 0.03), 400), "b": Work((0.005, 0.03), 900)}
    result = run(plan, works, suspend=False)
    rates = [n.data["rate"] for n in result.notes("profile") if n.data.get("family") == "b"]
    assert len(rates) == 2
    assert rates[0] < 0.9 / 0.03
    assert rates[1] == pytest.approx(1 / 0.03, rel=0.02)
    whys = [n.why for n in result.notes("profile") if n.data.get("family") == "b"]
    assert ["did not run alone" in why for why in whys] == [True, False]


def test_a_profile_that_other_programs_disturb_says_so():
    class Busy(Simulated):
        """Somebody else has a third of every core."""

        def _share_out(self, node: int) -> None:
            super()._share_out(node)
            for sim in self._on[node].values():
                for rank in sim.ranks:
                    rank.share *= 2 / 3
                    rank.speed *= 2 / 3

    quiet = run(specs("a", 1), {"a": PAYS})
    busy = run(specs("a", 1), {"a": PAYS}, executor=Busy)
    assert "other programs" not in quiet.notes("profile")[0].why
    assert "other programs took 33% of its CPU" in busy.notes("profile")[0].why


# --- ways to wait that change as a run goes on ---


class Fickle(Simulated):
    """Ranks that sleep wake up late once the queue has gone on for a while."""

    def advance(self, seconds):
        simulated.DOORBELL = 0.85 if self.clock < 20.0 else 0.3
        super().advance(seconds)


def test_where_a_way_to_wait_does_less_than_in_its_trial_the_next_best_one_is_taken(monkeypatch):
    monkeypatch.setattr(simulated, "DOORBELL", 0.85)
    monkeypatch.setattr(simulated, "YIELD", 1.0)
    result = run(specs("a", 6, slowdown=3.0), {"a": Work((0.005, 0.03), 900)}, executor=Fickle)
    assert result.notes("keep")[0].data["wait"] == "doorbell"
    modes = [
        (t, {share.wait.mode for share in action.shares.values()})
        for t, action in result.actions
        if isinstance(action, protocol.Resize)
    ]
    assert next(mode for t, mode in modes if t > 20.0 and mode != {"doorbell"}) == {"yield"}
    told_why = [note.why for note in result.notes("policy") if "now do only" in note.why]
    assert len(told_why) == 1
    assert told_why[0].endswith("with wait policy doorbell: yield was better")
    assert told(result, "rollback") == []


@pytest.mark.parametrize(("iterations", "policies"), [(80, 1), (4000, 3)])
def test_ways_to_wait_are_tried_where_a_queue_is_long_enough_to_gain_by_them(iterations, policies):
    """Four ranks on two cores: a window in which nothing goes on is a tenth of the short queue."""
    plan = specs("a", 3, (1, 1, 1, 1), iterations=iterations)
    result = run(plan, {"a": Work((0.02,) * 4, iterations)})
    tried = {share.wait.mode for _, action in result.actions
             if isinstance(action, (protocol.Launch, protocol.Resize))
             for share in (action.shares.values() if isinstance(action, protocol.Resize)
                           else [action.share])}  # fmt: skip
    assert len(tried) == policies


def test_a_way_to_wait_is_taken_for_better_only_beyond_what_measurements_err():
    found = Outcome()
    for wait, throughput in (("doorbell", 1.192), ("yield", 1.206), ("off", 1.3)):
        found.measures[protocol.WaitPolicy(wait)] = Measure(throughput, 0.015, (1.7, 1.7))
        best = "off" if wait == "off" else "doorbell"
        assert found.best
        assert found.best[0].mode == best


@pytest.mark.parametrize("at", [20.0, 30.0, 40.0])
def test_what_pays_is_not_taken_apart_as_all_stood_still_for_a_moment(at):
    """As where a file system does not answer: to windows it is the same as a clock that is set."""
    still = [Fault(at, "clock", "", 5.0)]
    result = run(specs("a", 4), {"a": Work((0.005, 0.03), 900)}, faults=still)
    assert told(result, "keep")
    assert told(result, "rollback") == []


# --- work that changes as a run goes on ---


@pytest.mark.parametrize("drift", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_decisions_stay_right_while_iterations_get_cheaper_or_dearer(drift):
    work = Work((0.01, 0.03), 1500, drift=drift)
    result = run(specs("a", 6, slowdown=1.7), {"a": work})
    assert told(result, "rollback") == []
    assert not [n for n in result.notes("resize") if "boost" in n.data]
    assert result.notes("keep")
    assert result.gain >= 1.33


@pytest.mark.parametrize("drift", [0.25, 0.5, 2.0])
def test_interference_is_not_taken_for_cheaper_or_dearer_iterations(drift):
    result = run(specs("a", 4), {"a": Work((0.01, 0.03), 1500, drift=drift, interference=0.3)})
    assert told(result, "rollback", "keep") == [("rollback", "a-1")]


@pytest.mark.parametrize("drift", [0.5, 2.0])
def test_a_balanced_queue_is_left_alone_whatever_its_iterations_become(drift):
    result = run(specs("a", 4, (1, 1)), {"a": Work((0.03, 0.03), 600, drift=drift)})
    assert max(n for _, n in result.running) == 1
    assert result.makespan <= 1.03 * result.sequential


def test_the_rate_alone_follows_the_heaviest_rank():
    alone = Alone(10.0, (0.02, 0.1))
    alone.follow((0.03, 0.11), cores=2.0)  # the reference: it need not be the loads alone
    assert (alone.rate, alone.loads) == (10.0, (0.02, 0.1))
    alone.follow((0.03, 0.055), cores=2.0)
    assert alone.rate == pytest.approx(20.0)
    assert alone.loads == pytest.approx((0.02, 0.05))


def test_what_interference_adds_between_two_regimes_is_nobodys_work():
    alone = Alone(10.0, (0.1,))
    alone.follow((0.1,), cores=2.0)
    alone.follow((0.2,), cores=2.0)
    alone.settle()
    alone.follow((0.3,), cores=2.0)
    assert alone.rate == pytest.approx(5.0)


def test_capacity_without_weights_or_suspending_is_what_the_executor_says():
    assert Simulated(TWO_CORES, {}, weights=False, suspend=False).capacity() == Capacity(
        tuple(TWO_CORES), False, False, checkpoints=True
    )


@pytest.mark.parametrize("deadline", [60.0, 70.0, 75.0])
@pytest.mark.parametrize("suspend", [True, False])
def test_a_deadline_is_met_beside_what_disturbs_and_without_flapping(deadline, suspend):
    plan = specs("a", 1, slowdown=3.0, deadline=deadline, iterations=1500)
    plan += specs("b", 4, (1, 6), slowdown=4.0)
    result = run(plan, {"a": HURT, "b": LIGHT}, suspend=suspend)
    assert result.controller.view("a-0").ended <= deadline
    assert len(result.notes("rollback")) <= 1
    assert result.gain >= 1.1


# --- what is taken for hung, and what is not ---


def ended_as_hung(useful):
    """Whether a simulation is ended that for four hours publishes `useful(t)` and no iteration."""
    spec = Spec("a", "a", "case", 2, (1.0, 1.0), ("run",))
    made = Controller([spec], Capacity((Node("n", 2000, 1 << 34),)))
    actions = made.handle(protocol.Tick(0.0)) + made.handle(protocol.Started(0.0, "a"))
    none = (0.0, 0.0)
    for t in range(10, 4 * 3600, 10):
        if useful is not None:
            ranks = protocol.Ranks((0, 0), none, none, (useful(t), 1.0), none, (0, 0))
            actions += made.handle(protocol.Sampled(float(t), "a", ranks))
        actions += made.handle(protocol.Tick(float(t)))
    return any(isinstance(action, protocol.Stop) for action in actions)


def test_a_program_that_publishes_nothing_is_never_taken_for_hung():
    assert not ended_as_hung(None)


def test_ranks_that_work_towards_their_first_iteration_go_on():
    assert not ended_as_hung(lambda t: t / 2)


def test_ranks_that_never_leave_mpi_are_ended():
    assert ended_as_hung(lambda t: 1.0)


def stops_after_iterations(useful):
    """When one is ended as hung that after ten iterations is at `useful(t)`; None if it is not."""
    spec = Spec("a", "a", "case", 2, (1.0, 1.0), ("run",))
    made = Controller([spec], Capacity((Node("n", 2000, 1 << 34),)))
    made.handle(protocol.Tick(0.0))
    made.handle(protocol.Started(0.0, "a"))
    stamp, k = 0.0, 0
    for t in range(1, 3600):
        if t <= 10:
            stamp, k = float(t), t
        now = useful(t) if t >= 70 else (stamp, stamp)
        ranks = protocol.Ranks((k, k), (stamp, stamp), now, now, (0.0, 0.0), (0, 0))
        actions = made.handle(protocol.Sampled(float(t), "a", ranks))
        if any(isinstance(action, protocol.Stop) for action in actions):
            return t
    return None


def test_one_rank_that_works_between_two_iterations_keeps_its_simulation_alive():
    assert stops_after_iterations(lambda t: (10.0, t / 2)) is None


def test_ranks_that_do_little_between_two_iterations_are_ended():
    assert stops_after_iterations(lambda t: (10.0, 10.0)) == 311, "after five minutes"
    assert stops_after_iterations(lambda t: (10.0 + t / 10, 10.0 + t / 10))


def test_ranks_that_stop_to_work_between_two_iterations_are_ended():
    assert 900 + 300 <= stops_after_iterations(lambda t: (10.0, min(t, 900.0))) <= 900 + 600
