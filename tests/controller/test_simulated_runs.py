# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whole runs of the controller with the simulated executor.

Each case is a plan with the work it means; what must hold is said in its name.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from dovetail.controller.settings import Settings
from dovetail.core import protocol
from dovetail.core.protocol import Capacity, Node, Spec
from dovetail.executors.simulated.executor import Fault, Simulated, Work, fill
from dovetail.run.simulate import SimulatedRun, run_simulated

pytestmark = pytest.mark.unit

GIB = 1 << 30
TWO_CORES = [Node("n0", 2000, 8 * GIB)]
IMBALANCED = Work((0.01, 0.03), 300)
BALANCED = Work((0.03, 0.03), 300)


def specs(family: str, count: int, weights: tuple[float, ...], **more) -> list[Spec]:
    return [
        Spec(f"{family}-{i}", family, "case", len(weights), weights, ("run",), **more)
        for i in range(count)
    ]


def states(result: SimulatedRun) -> list[str]:
    return [view.state for view in result.controller.views()]


def restarts(result: SimulatedRun) -> int:
    return sum(view.restarts for view in result.controller.views())


def n_max(result: SimulatedRun) -> int:
    return max(n for _, n in result.running)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_imbalanced_queue_packs_and_gains(seed):
    result = run_simulated(specs("a", 8, (1, 3)), {"a": IMBALANCED}, TWO_CORES, seed)
    assert states(result) == ["done"] * 8
    assert n_max(result) == 2
    assert result.gain >= 1.28  # with start, profile and trial; 1.36 once it is packed


@pytest.mark.parametrize(
    ("what", "weights", "work"),
    [
        ("two busy ranks on two cores", (1, 1), BALANCED),
        ("slightly uneven ranks", (9, 10), Work((0.027, 0.03), 300)),
        ("as many ranks as cores, noisy", (1, 1), Work((0.03, 0.03), 300, noise=0.1)),
        ("weights that promise an imbalance that is none", (1, 3), BALANCED),
        ("slow iterations", (1, 1), Work((1.0, 1.0), 20)),
        ("short simulations", (1, 1), Work((0.03, 0.03), 40)),
    ],
)
def test_a_full_queue_takes_as_long_as_one_after_the_other(what, weights, work):
    result = run_simulated(specs("a", 6, weights), {"a": work}, TWO_CORES, dt=0.05)
    assert states(result) == ["done"] * 6
    assert result.makespan <= 1.03 * result.sequential, what


def test_more_ranks_than_cores_wait_politely_even_alone():
    work = Work((0.015,) * 4, 300)
    result = run_simulated(specs("a", 3, (1, 1, 1, 1)), {"a": work}, TWO_CORES)
    assert n_max(result) == 1
    assert [note.data["wait"] for note in result.notes("profile")] != ["off"]
    assert result.makespan < result.sequential


def test_simulations_with_cores_to_spare_start_without_a_trial():
    result = run_simulated(specs("a", 8, (1,)), {"a": Work((0.03,), 300)}, [Node("n", 4000, 0)])
    assert n_max(result) == 4
    assert not result.notes("policy")
    assert result.gain > 2.5


def test_a_mixed_queue_packs_what_pays_and_only_that():
    plan = specs("balanced", 3, (1, 1)) + specs("imbalanced", 4, (1, 3))
    works = {"balanced": BALANCED, "imbalanced": IMBALANCED}
    result = run_simulated(plan, works, TWO_CORES)
    assert states(result) == ["done"] * 7
    assert result.gain > 1.08
    assert [note.data["mix"] for note in result.notes("keep")] == [[["imbalanced", 2]]]
    assert {str(note.data["mix"]) for note in result.notes("policy")} == {"[['imbalanced', 2]]"}


def test_a_family_that_fits_beside_what_runs_may_overtake():
    plan = specs("large", 3, (1, 3), memory=5 * GIB) + specs("small", 3, (1, 3), memory=GIB)
    result = run_simulated(plan, {"large": IMBALANCED, "small": IMBALANCED}, TWO_CORES)
    assert states(result) == ["done"] * 6
    assert n_max(result) == 2
    assert result.memory <= 8 * GIB


def test_waits_are_off_whenever_a_simulation_runs_alone():
    result = run_simulated(specs("a", 3, (1, 3)), {"a": IMBALANCED}, TWO_CORES)
    last = [a for _, a in result.actions if isinstance(a, (protocol.Resize, protocol.Launch))][-1]
    shares = last.shares.values() if isinstance(last, protocol.Resize) else [last.share]
    assert [share.wait.mode for share in shares] == ["off"]


@pytest.mark.parametrize(("budget", "n"), [(1.1, 1), (1.4, 1), (1.7, 2)])
def test_the_slowdown_budget_is_respected(budget, n):
    plan = specs("a", 4, (1, 3), slowdown=budget)
    result = run_simulated(plan, {"a": IMBALANCED}, TWO_CORES)
    assert states(result) == ["done"] * 4
    assert n_max(result) == n


def test_memory_is_respected():
    plan = specs("a", 4, (1, 3), memory=5 * GIB)
    result = run_simulated(plan, {"a": IMBALANCED}, TWO_CORES)
    assert n_max(result) == 1
    assert result.memory <= 8 * GIB


def test_what_never_fits_into_memory_is_not_started_and_holds_nobody_up():
    plan = specs("huge", 1, (1, 3), memory=9 * GIB) + specs("a", 2, (1, 3))
    result = run_simulated(plan, {"a": IMBALANCED, "huge": IMBALANCED}, TWO_CORES)
    assert states(result) == ["not started", "done", "done"]
    assert "memory" in result.controller.view("huge-0").reason


def test_a_deadline_keeps_others_away():
    plan = specs("a", 1, (1, 3), deadline=16.0, iterations=300) + specs("b", 3, (1, 3))
    alone = 300 * 0.03 * 1.05
    assert alone < 12
    result = run_simulated(plan, {"a": IMBALANCED, "b": IMBALANCED}, TWO_CORES)
    ended = result.controller.view("a-0").ended
    assert ended is not None
    assert ended <= 16.0


def test_a_deadline_that_cannot_be_met_is_said_once():
    plan = specs("a", 4, (1, 3), deadline=3.0, iterations=300)
    result = run_simulated(plan, {"a": IMBALANCED}, TWO_CORES)
    assert states(result) == ["done"] * 4
    told = [note.data for note in result.notes("fail")]
    said = [name for one in told for name in one.get("names") or [one["name"]]]
    assert set(said) == {f"a-{i}" for i in range(4)}
    assert len(said) == len(set(said))


@pytest.mark.parametrize("open_ranks", [(), (1, 2)])
def test_who_waits_is_told_too_that_its_deadline_cannot_be_met(open_ranks):
    plan = specs("a", 6, (1, 1), deadline=20.0, iterations=300, widths=open_ranks)
    work = replace(BALANCED, cuts={1: (0.06,)})
    result = run_simulated(plan, {"a": work}, TWO_CORES)
    told = [(t, a) for t, a in result.actions if isinstance(a, protocol.Note) and a.what == "fail"]
    (at, note), *_ = told
    starts = {a.name: t for t, a in result.actions if isinstance(a, protocol.Launch)}
    names = note.data["names"]
    assert len(names) > 1
    assert at < min(starts[name] for name in names)
    assert f"{len(names)} of a that wait cannot meet their deadline" in note.why
    about = [name for _, one in told for name in one.data.get("names") or [one.data["name"]]]
    assert len(about) == len(set(about))


def test_a_deadline_that_is_over_is_told_though_nobody_knew_how_long_it_takes():
    silent = replace(IMBALANCED, publishes=False)
    plan = specs("a", 3, (1, 3), deadline=1.0) + specs("b", 1, (1, 3))
    result = run_simulated(plan, {"a": silent, "b": IMBALANCED}, TWO_CORES)
    assert states(result) == ["done"] * 4
    at, note = next(
        (t, a) for t, a in result.actions if isinstance(a, protocol.Note) and a.what == "fail"
    )
    assert at < min(result.controller.view(f"a-{i}").ended for i in range(3))
    assert "3 of a did not meet their deadline, 1 s after" in note.why
    assert (note.data["names"], len(result.notes("fail"))) == (["a-0", "a-1", "a-2"], 1)


def test_a_program_without_iterations_runs_alone():
    silent = replace(IMBALANCED, publishes=False)
    plan = specs("a", 3, (1, 3)) + specs("b", 2, (1, 3))
    result = run_simulated(plan, {"a": silent, "b": IMBALANCED}, TWO_CORES)
    assert states(result) == ["done"] * 5
    assert result.controller.view("a-0").iterations == 0
    assert result.notes("admit")[1].data["n"] == 1


def test_a_rank_ten_times_longer_than_its_peers_gets_the_request_for_it():
    work = Work((0.003, 0.003, 0.003, 0.03), 200)
    plan = specs("a", 1, (1, 1, 1, 1))
    result = run_simulated(plan, {"a": work}, [Node("n", 4000, 0)])
    requests = [a for _, a in result.actions if isinstance(a, protocol.Resize)][-1].shares["a-0"]
    assert requests.requests[3] > 8 * requests.requests[0]


FAULTS = [
    ("a rank dies", [Fault(6.0, "death", "a-1")], {"failed": 1, "done": 5}),
    ("the first dies while it is profiled", [Fault(1.0, "death", "a-0")], {"failed": 1, "done": 5}),
    ("one fails before it iterates", [Fault(0.6, "fail", "a-0")], {"failed": 1, "done": 5}),
    ("one stalls", [Fault(8.0, "stall", "a-0")], {"failed": 1, "done": 5}),
    ("resizes are refused", [Fault(0.0, "refuse", "", 60.0)], {"done": 6}),
    ("resizes are refused for ever", [Fault(0.0, "refuse", "", 1e9)], {"done": 6}),
    ("resizes take two seconds", [Fault(0.0, "delay", "", 2.0)], {"done": 6}),
    ("the clock jumps by a day", [Fault(7.0, "clock", "", 86400.0)], {"done": 6}),
    ("the clock goes back", [Fault(7.0, "clock", "", -5.0)], {"done": 6}),
    ("the only node is lost", [Fault(7.0, "node", "n0")], {"not started": 6}),
]


@pytest.mark.parametrize(("what", "faults", "expected"), FAULTS, ids=[f[0] for f in FAULTS])
def test_every_simulation_is_accounted_for_when(what, faults, expected):
    result = run_simulated(specs("a", 6, (1, 3)), {"a": IMBALANCED}, TWO_CORES, faults=faults)
    assert result.ended, what
    counts = {state: states(result).count(state) for state in set(states(result))}
    assert counts == expected
    for view in result.controller.views():
        assert bool(view.reason) == (view.state != "done")


@pytest.mark.parametrize("seconds", [0.5, 2.0, 10.0])
def test_while_no_node_is_ready_nothing_is_decided_and_what_runs_goes_on(seconds):
    """As where the only node's kubelet was killed, or does not answer for a while."""
    away = [Fault(8.0, "away", "", seconds)]
    result = run_simulated(specs("a", 4, (1, 3)), {"a": IMBALANCED}, TWO_CORES, faults=away)
    assert states(result) == ["done"] * 4
    assert [n for t, n in result.running if t < 8.0][-1] == 2, "two were packed"
    meanwhile = [a for t, a in result.actions if 8.0 < t < 8.0 + seconds]
    records = (protocol.Note, protocol.Ended)  # what runs on may end, and the log says so
    assert [a for a in meanwhile if not isinstance(a, records)] == []
    assert restarts(result) == 0


@pytest.mark.parametrize("fault", ["delay", "refuse"])
def test_a_profile_is_taken_alone_though_others_are_suspended_late(fault):
    plan = [one for i in range(2) for one in (*specs("a", 1, (1, 3)), *specs("b", 1, (1, 6)))]
    plan = [replace(one, name=f"{one.family}-{i}") for i, one in enumerate(plan)]
    works = {"a": Work((0.01, 0.03), 1000), "b": Work((0.01, 0.06), 1000)}
    result = run_simulated(plan, works, TWO_CORES, faults=[Fault(0.0, fault, "", 6.0)])
    assert states(result) == ["done"] * 4
    rates = {note.data["family"]: note.data["rate"] for note in result.notes("profile")
             if "rate" in note.data}  # fmt: skip
    assert rates == pytest.approx({"a": 1 / 0.03, "b": 1 / 0.06}, rel=0.05)


@pytest.mark.parametrize("at", [3.0, 6.0, 8.0, 12.0])
def test_one_that_is_cancelled_and_ends_slowly_spoils_no_verdict(at):
    class SlowToEnd(Simulated):
        """Its first simulation is cancelled, and uses CPU for 3 s more."""

        over = float("inf")

        def observe(self, t):
            cancelled = self.over == float("inf") and self.clock >= at
            unwanted = [protocol.Unwanted(self.now, "a-0", "cancelled")] if cancelled else []
            return [*super().observe(t), *unwanted]

        def stop(self, name, why, cause=protocol.Cause.CANCELLED):
            self.over = self.clock + 3.0

        def advance(self, dt):
            super().advance(dt)
            if self.over <= self.clock:
                super().stop("a-0", "cancelled")

    def run(executor):
        plan, work = specs("a", 5, (1, 3)), replace(IMBALANCED, iterations=600)
        return run_simulated(plan, {"a": work}, TWO_CORES, executor=executor)

    result, undisturbed = run(SlowToEnd), run(Simulated)
    assert states(result) == ["failed"] + ["done"] * 4
    assert all(note.data["throughput"] > 1.25 for note in result.notes("policy"))
    assert result.makespan < undisturbed.makespan


def test_a_profile_is_not_taken_while_no_node_is_ready():
    away = [Fault(1.5, "away", "", 20.0)]  # the first simulation ends meanwhile
    result = run_simulated(specs("a", 4, (1, 3)), {"a": IMBALANCED}, TWO_CORES, faults=away)
    assert states(result) == ["done"] * 4
    assert [note.why for note in result.notes("profile") if "of 0 cores" in note.why] == []


def test_who_is_paused_for_a_profile_is_resumed_while_no_node_is_ready():
    def run(*faults):
        plan = specs("a", 3, (1, 3)) + specs("b", 3, (1, 3))
        return run_simulated(plan, {"a": IMBALANCED, "b": IMBALANCED}, TWO_CORES, faults=faults)

    (begun, *_) = [t for t, a in run().actions if getattr(a, "what", "") == "profile"
                   and "are suspended while" in a.why]  # fmt: skip
    result = run(Fault(begun + 0.3, "away", "", 20.0))
    assert states(result) == ["done"] * 6
    soon = [a for t, a in result.actions if begun + 0.2 < t < begun + 1.0]
    (thawed,) = [a.shares for a in soon if isinstance(a, protocol.Resize)]
    assert not any(share.suspended for share in thawed.values())


def test_a_lost_node_costs_a_restart_and_no_simulation():
    nodes = [Node("n0", 2000, 8 * GIB), Node("n1", 2000, 8 * GIB)]
    result = run_simulated(
        specs("a", 6, (1, 3)), {"a": IMBALANCED}, nodes, faults=[Fault(9.0, "node", "n0")]
    )
    assert states(result) == ["done"] * 6
    assert restarts(result) >= 1


def test_a_simulation_that_hangs_as_soon_as_it_has_started_holds_nobody_up():
    queue = [Spec(f"f-{k}", "f", "case", 2, (1.0, 1.0), ("run",)) for k in range(2)]
    works = {"f": Work((0.01, 0.01), 20)}
    stalled = [Fault(0.0, "stall", "f-0")]
    result = run_simulated(queue, works, [Node("n0", 2000, GIB)], 1, stalled, limit=4000.0)
    first, second = result.controller.views()
    assert (first.state, second.state) == ("failed", "done")
    assert "no first iteration" in first.reason


def test_a_hung_simulation_is_ended_with_the_reason():
    result = run_simulated(
        specs("a", 2, (1, 3)), {"a": IMBALANCED}, TWO_CORES, faults=[Fault(8.0, "stall", "a-0")]
    )
    assert result.controller.view("a-0").reason.startswith("hung: no iteration for 30")


def test_it_settles_and_does_not_oscillate():
    long = replace(IMBALANCED, iterations=3000)
    result = run_simulated(specs("a", 4, (1, 3)), {"a": long}, TWO_CORES)
    assert not result.notes("rollback")
    assert result.count(protocol.Resize) <= 12
    assert len(result.notes("policy")) <= 3


@pytest.mark.parametrize(("iterations", "tried"), [(400, False), (20000, True)])
def test_spinning_beside_others_is_tried_where_the_queue_is_long_enough(iterations, tried):
    never = Settings(near_bound=2.0)  # no other way of waiting is ever good enough
    work = {"a": replace(IMBALANCED, iterations=iterations)}
    plan = specs("a", 4, (1, 3), iterations=iterations)  # told, as by a case of OpenFOAM
    result = run_simulated(plan, work, TWO_CORES, settings=never)
    assert ("off" in {note.data["wait"] for note in result.notes("policy")}) is tried


@pytest.mark.parametrize(
    ("cores", "weights"),
    [
        (4, (1, 1, 1, 9)),
        (4, (1, 3)),
        (4, (1, 9)),
        (8, (1, 1, 1, 9)),
        (8, (1, 1, 2, 4, 4, 9)),
        (8, (1, 3)),
    ],
)
def test_the_prediction_for_an_n_not_yet_run_is_within_eight_percent(cores, weights):
    work = Work(tuple(0.03 * w / max(weights) for w in weights), 500)
    plan = specs("a", 9, weights, slowdown=9.0)
    models = run_simulated(plan, {"a": work}, [Node("n", 1000 * cores, 0)]).notes("model")
    assert models
    for note in models:
        assert note.data["predicted"] == pytest.approx(note.data["measured"], rel=0.08)


@pytest.mark.parametrize(
    ("what", "groups", "cores", "expected"),
    [
        ("nobody is refused what is free", [(1, 1.0), (1, 9.0)], 4.0, [1.0, 1.0]),
        ("weights divide what is short", [(2, 1.0), (2, 3.0)], 2.0, [0.5, 1.5]),
        ("what one cannot use goes to the other", [(1, 9.0), (4, 1.0)], 3.0, [1.0, 2.0]),
        ("who wants nothing gets nothing", [(0, 5.0), (2, 1.0)], 1.0, [0.0, 1.0]),
    ],
)
def test_weighted_fair_sharing(what, groups, cores, expected):
    assert fill(groups, cores) == pytest.approx(expected), what


@pytest.mark.parametrize(
    ("work", "mode", "low", "high"),
    [
        (IMBALANCED, "doorbell", 1.30, 1.45),
        (BALANCED, "doorbell", 0.83, 0.92),
        (IMBALANCED, "yield", 0.88, 1.0),
        (IMBALANCED, "off", 0.45, 0.60),
        (BALANCED, "off", 0.45, 0.60),
    ],
)
def test_two_at_once_do_as_was_measured_on_two_cores(work, mode, low, high):
    executor = Simulated(TWO_CORES, {"a": work})
    share = protocol.Share((500, 500), protocol.WaitPolicy(mode))
    for spec in specs("a", 2, (1, 1)):
        executor.launch(spec, share)
    ended: list[float] = []
    while len(ended) < 2:
        executor.advance(0.05)
        ended += [e.t for e in executor.observe(0.0) if isinstance(e, protocol.Finished)]
    alone = max(work.seconds) * work.iterations + work.startup
    assert low <= 2 * alone / max(ended) <= high


def test_the_same_seed_gives_the_same_run():
    runs = [run_simulated(specs("a", 4, (1, 3)), {"a": IMBALANCED}, TWO_CORES, 7) for _ in "ab"]
    assert runs[0].actions == runs[1].actions


def test_capacity_of_a_simulated_machine_is_its_nodes():
    assert Simulated(TWO_CORES, {}).capacity() == Capacity(tuple(TWO_CORES), checkpoints=True)


def test_a_simulated_checkpoint_is_gone_on_from():
    (spec,) = specs("a", 1, (1.0, 1.0), checkpoint=True)
    machine = Simulated(TWO_CORES, {"a": Work((0.1, 0.1), 30, noise=0.0)})
    share = protocol.Share((1000, 1000))
    machine.launch(spec, share)
    machine.advance(2.0)
    machine.resize({"a-0": replace(share, suspended=True)})
    machine.checkpoint("a-0")
    machine.advance(1.0)
    *_, sample, end = machine.observe(machine.now)
    done = min(sample.ranks.iterations)
    assert end.cause is protocol.Cause.CHECKPOINTED
    assert 0 < done < 30
    machine.launch(spec, share)
    machine.advance(10.0)
    start, *_, sample, end = machine.observe(machine.now)
    assert (start.iterations, end.cause) == (done, protocol.Cause.DONE)
    assert done + min(sample.ranks.iterations) == 30
