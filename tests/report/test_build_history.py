# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run's history from its event log: each simulation once, no figure from two situations."""

from __future__ import annotations

import pytest
from dovetail.core import protocol
from dovetail.core.protocol import Cause
from dovetail.report.build_history import tell
from support import made_up_runs

pytestmark = pytest.mark.unit


def short(*names):
    return made_up_runs.Run([made_up_runs.spec(name, "f") for name in names], {"f": 0.1})


def states(history):
    return {track.spec.name: (track.state, len(track.attempts)) for track in history.tracks}


def never_started():
    return short("a"), {"a": ("not started", 0)}


def ends_well():
    run = short("a")
    run.launch("a")
    run.work(1)
    run.finish("a")
    return run, {"a": ("done", 1)}


def crashes():
    run = short("a", "b")
    run.launch("a")
    run.finish("a", 11)
    return run, {"a": ("failed", 1), "b": ("not started", 0)}


def hangs():
    run = short("a")
    run.launch("a")
    run.add(protocol.Stop("a", Cause.HUNG, "no progress for 60 s"))
    run.finish("a", -15, "", Cause.HUNG)
    return run, {"a": ("failed", 1)}


def log_ends():
    run = short("a", "b")
    run.launch("a")
    run.work(1)
    return run, {"a": ("unfinished", 1), "b": ("not started", 0)}


def taken_back_and_run_again():
    run = short("a")
    run.launch("a")
    run.add(protocol.Stop("a", Cause.TAKEN_BACK, "does not pay", True))
    run.finish("a", -15, "stopped", Cause.TAKEN_BACK, requeued="does not pay")
    run.launch("a")
    run.finish("a")
    return run, {"a": ("done", 2)}


def taken_back_for_good():
    run = short("a")
    run.launch("a")
    run.add(protocol.Stop("a", Cause.TAKEN_BACK, "does not pay", True))
    run.finish("a", -15, "stopped", Cause.TAKEN_BACK, requeued="does not pay")
    return run, {"a": ("not started", 1)}


def killed_and_resumed():
    run = short("a", "b")
    run.launch("a")
    run.finish("a")
    run.launch("b")
    run.work(1)
    run.resume("b")
    run.launch("b")
    run.finish("b")
    return run, {"a": ("done", 1), "b": ("done", 2)}


def killed_resumed_and_killed():
    run = short("a")
    run.launch("a")
    run.resume("a")
    return run, {"a": ("not started", 1)}


def cancelled_as_the_run_was_killed():
    run = short("a")
    run.launch("a")
    run.work(1)
    run.add(protocol.Stop("a", Cause.CANCELLED, "cancelled"))
    run.resume()
    run.add(protocol.Ended("a", "failed", Cause.CANCELLED, "cancelled"))
    return run, {"a": ("failed", 1)}


def interrupted_after_its_pod_was_lost():
    run = short("a", "b")
    run.launch("a")
    why = "pod lost: it was evicted"
    run.finish("a", 1, why, Cause.POD_LOST, requeued=why)
    run.interrupt("a", "b")
    return run, {"a": ("not started", 1), "b": ("not started", 0)}


def its_pod_is_lost_for_the_last_time():
    run = short("a")
    run.launch("a")
    run.finish("a", 1, "pod lost: it was evicted", Cause.POD_LOST)
    return run, {"a": ("failed", 1)}


@pytest.mark.parametrize(
    "case",
    [
        never_started,
        ends_well,
        crashes,
        hangs,
        log_ends,
        taken_back_and_run_again,
        taken_back_for_good,
        killed_and_resumed,
        killed_resumed_and_killed,
        cancelled_as_the_run_was_killed,
        interrupted_after_its_pod_was_lost,
        its_pod_is_lost_for_the_last_time,
    ],
    ids=lambda case: case.__name__.replace("_", " "),
)
def test_each_simulation_is_counted_once_and_accounted_for(case):
    run, expected = case()
    history = run.history()
    assert states(history) == expected
    for track in history.tracks:
        assert (track.state == "done") != bool(track.reason)
        assert track.state == "unfinished" or all(one.end is not None for one in track.attempts)


def test_a_rate_is_never_measured_over_two_situations():
    run = short("a", "b")
    run.launch("a")
    run.work(3)
    run.launch("b")
    run.work(3, 2.0)
    history = run.history()
    rates = {
        (len(spell.running), round(seconds / count, 6))
        for spell in history.spells
        for count, seconds in spell.steps.values()
    }
    assert rates == {(1, 0.1), (2, 0.2)}


def test_a_suspended_simulation_does_not_count_as_running():
    run = short("a")
    run.launch("a")
    run.work(1)
    run.resize((1000, 1000), suspended=True)
    run.t += 5
    run.resize((1000, 1000), suspended=False)
    run.work(1)
    run.finish("a")
    history = run.history()
    assert history.tracks[0].suspended == ((1.0, 6.0),)
    assert [len(spell.running) for spell in history.spells] == [1, 0, 1]


def test_a_simulation_that_is_suspended_when_it_ends_runs_no_more():
    run = short("a", "b")
    run.launch("a")
    run.resize((1000, 1000), suspended=True)
    run.t += 1
    run.finish("a", -9, "killed")
    run.launch("b")
    run.work(1)
    assert [spell.running for spell in run.history().spells] == [(), ("b",)]


@pytest.mark.parametrize(
    ("refused", "resizes", "refusals"), [("", 1, 0), ("no room on the node", 0, 1)]
)
def test_only_resizes_that_took_effect_are_counted(refused, resizes, refusals):
    run = short("a")
    run.launch("a")
    run.resize((500, 1500), refused=refused)
    history = run.history()
    assert (history.resizes, history.refused) == (resizes, refusals)


def test_a_resize_that_changes_no_request_is_none():
    run = short("a")
    run.launch("a")
    run.resize((1000, 1000), wait=made_up_runs.BELL)
    assert run.history().resizes == 0


def test_phases_follow_profile_admission_and_its_outcome():
    history = made_up_runs.packed(1).history()
    letters = {
        track.spec.name: "".join(letter for letter, _, _ in track.phases)
        for track in history.tracks
    }
    assert letters == {"pitz-1": "AD", "pitz-2": "CD"}


def test_load_is_kept_apart_by_how_ranks_wait_and_who_else_runs():
    loads = {load.kind: load for load in made_up_runs.packed(1).history().loads}
    assert set(loads) == {"spinning", "blocking", "packed"}
    assert loads["spinning"].cpu == pytest.approx([0.1, 0.1])
    assert loads["blocking"].cpu == pytest.approx([0.04, 0.1])
    assert loads["packed"].useful == pytest.approx([0.1 / 3, 0.1])


def test_names_that_are_not_in_the_plan_are_left_out():
    run = short("a")
    run.launch("a")
    stranger = (
        protocol.Started(1.0, "x"),
        protocol.Finished(2.0, "x", Cause.DONE),
        protocol.Stop("x", Cause.CANCELLED, "why"),
        protocol.Requeued("x", Cause.POD_LOST, "why"),
        protocol.Ended("x", "done", Cause.DONE),
    )
    run.add(*stranger, protocol.Note("admit", "why", {"name": ["a"], "family": 3, "names": [4]}))
    assert states(tell(made_up_runs.header(run.specs), run.log)) == {"a": ("unfinished", 1)}


def test_the_wait_for_the_first_iteration_is_no_part_of_its_speed():
    run = short("a")
    run.t = 20.0  # the run is old when it starts, and a rank without iterations has the stamp 0
    run.launch("a")
    zero = protocol.Ranks((0, 0), (0.0, 0.0), *[(0.0, 0.0)] * 3, (1, 1))
    run.add(protocol.Sampled(20.0, "a", zero), protocol.Sampled(20.2, "a", zero))
    run.work(4)
    count, seconds = run.history().tracks[0].stepping
    assert seconds / count == pytest.approx(0.1)


def test_a_clock_that_was_corrected_backwards_makes_no_negative_time():
    run = short("a")
    run.launch("a")
    run.work(4)
    back = protocol.Ranks((60, 60), (0.001, 0.001), *[(0.0, 0.0)] * 3, (1, 1))
    run.add(protocol.Sampled(run.t, "a", back))
    count, seconds = run.history().tracks[0].stepping
    assert seconds / count == pytest.approx(0.1)


def test_a_resumed_run_is_not_interrupted_any_more():
    run = short("a", "b")
    run.launch("a")
    run.work(1)
    why = "interrupted by SIGINT"
    run.interrupt("b", why=why)
    run.finish("a", 143, f"stopped: {why}", Cause.INTERRUPTED)
    assert states(run.history()) == {"a": ("failed", 1), "b": ("not started", 0)}
    run.resume("a", "b", why=why)
    assert states(run.history()) == {"a": ("not started", 1), "b": ("not started", 0)}
    for name in ("a", "b"):
        run.launch(name)
        run.work(1)
        run.finish(name)
    history = run.history()
    assert states(history) == {"a": ("done", 2), "b": ("done", 1)}
    assert history.interrupted == ""
