# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the broker module knows again once it is loaded anew."""

from __future__ import annotations

import pytest
from dovetail.flux.instance.effects import INVALID, Sweep
from support.broker_states import Play

pytestmark = pytest.mark.unit


def test_after_a_reload_the_agents_tell_what_there_is():
    play = Play(2).begin({0: 7, 3: 8}).ask("wait-up", "gate")
    runs = [{"number": 4, "plan": "p", "output": "o", "cwd": "/", "state": "running"}]
    play.attach(0, node="n0", kubeconfig="secret", runs=runs)
    play.attach(3, node="n3")
    assert play.told("gate") == [{"nodes": 2}]
    assert play.submits() == []
    assert play.ask("kubeconfig", "k").told("k") == [{"kubeconfig": "secret"}]
    play.ask("wait", "w")
    assert play.told("w") == []
    play.ask("tell", "t", number=0, run=4, code=0)
    assert play.told("w")[0]["runs"][0]["state"] == "done"


def test_runs_that_wait_are_there_after_a_reload_with_their_numbers():
    play = Play(1).begin({0: 7}).ask("wait", "wrong", runs=[[1]])
    play.ask("wait", "w").ask("submit", "s", plan="p", output="o3", cwd="/")
    assert play.told("w") == play.told("s") == [], "nobody knows yet what runs there are"
    run = {"plan": "p", "output": "o", "cwd": "/"}
    runs = [{"number": n, "state": s, **run} for n, s in ((1, "running"), (2, "waiting"))]
    play.attach(0, node="n0", runs=runs)
    assert play.told("s") == [{"run": 3}]
    assert play.told("wrong")[0][0] == INVALID
    for number in (1, 2, 3):
        queued = {"number": 3, **run, "output": "o3", "executor": "kubernetes"}
        due = {"queue": queued} if number == 1 else {"run": number}
        assert play.told("agent0")[-1] == due
        play.ask("tell", "t", number=0, run=number, code=0)
    assert [one["number"] for one in play.told("w")[0]["runs"]] == [1, 2]


AWAY = {  # what became of slice 1 while the module was away: events of its job, replaced, wanted
    "it was lost": ((), [0, 2, 3], 3),
    "the user cancelled it": (("cancel",), [0, 2], 2),
}


@pytest.mark.parametrize("how", AWAY)
def test_a_slice_that_ended_while_the_module_was_away(how):
    exceptions, slices, wanted = AWAY[how]
    before = Play(2).begin().ready(0, 1).ask("resize", "grow", nodes=3)
    before.do(before.state.submitted(2, 102)).ready(2)
    play = Play(2).begin({0: 100, 2: 102}).attach(2, node="n2")
    play.attach(0, node="n0", kept=before.kept())
    assert (play.watched(), play.submits(), play.state.phase) == ([0, 2, 1], [], "degraded")
    for kind in exceptions:
        play.do(play.state.excepted(1, kind, ""))
    play.do(play.state.finished(1, 9))
    assert Sweep(1, 1) in play.done
    play.do(play.state.swept(1, "")).do(play.state.cleaned(1))
    assert {"forget": "n1", "ended": True} in play.told("agent0")
    assert (list(play.state.slices), play.state.wanted) == (slices, wanted)
    assert play.state.status()["lost"][0].startswith("slice 1: ")


def test_a_slice_that_was_to_end_ends_after_a_reload():
    before = Play(2).begin().ready(0, 1).ask("resize", "shrink", nodes=1)
    play = Play(2).begin({0: 100, 1: 101}).attach(0, node="n0", kept=before.kept())
    play.attach(1, node="n1")
    assert play.told("agent1") == [{"end": True}]
    assert play.left(1).state.phase == "up"
    assert play.submits() == []


def test_who_follows_a_simulation_of_before_a_reload_is_told_where_it_is_and_how_it_ended():
    play, launches = Play(1).begin({0: 7}), {"a-1": "over", "a-2": "runs"}
    for launch, name in launches.items():  # their jobs may be quicker than the agent
        play.ask("follow", name, launch=launch)
    run = {"number": 1, "plan": "p", "output": "o", "cwd": "/", "state": "running"}
    known = [{"launch": launch, "run": 1, "name": "sim", "log": log}
             for launch, log in launches.items()]  # fmt: skip
    known[0].update(code=3, reason="bad", cause="failed")
    play.attach(0, node="n0", runs=[run], simulations=known)
    assert [told["code"] for told in play.told("over")] == [3]
    assert play.told("runs") == [{"log": "runs"}]
    play.ask(
        "tell", "t", number=0, simulation={**known[1], "code": 0, "reason": "", "cause": "done"}
    )
    assert play.told("runs")[1]["code"] == 0


LOST_MEANWHILE = {  # the control slice: what runs as the module is loaded anew, and why all ends
    "and a node's slice is there": (
        {1: 8},
        "the control slice ended while the module was not loaded",
    ),
    "and nothing is there": (None, "its run is over"),
}


@pytest.mark.parametrize("how", LOST_MEANWHILE)
def test_the_job_of_a_simulation_whose_control_slice_was_lost_meanwhile_ends(how):
    adopted, why = LOST_MEANWHILE[how]
    play = Play(1).ask("follow", "early", launch="a-1").begin(adopted)
    play.ask("follow", "late", launch="a-2")
    if adopted is None:
        play.attach(0)
    for job in ("early", "late"):
        assert play.told(job) == [{"code": 1, "reason": why, "exception": "dovetail"}]


@pytest.mark.parametrize("how", ["it is taken down", "the user cancels the control slice"])
def test_what_ran_before_a_reload_ends_where_all_ends_before_anybody_told_of_it(how):
    play = Play(1).begin({0: 7})
    if how == "it is taken down":
        play.ask("down", "d")
        why = "Kubernetes was taken down"
    else:
        play.do(play.state.excepted(0, "cancel", ""))
        why = "the control slice ended: cancel"
    run = {"plan": "p", "output": "o", "cwd": "/"}
    runs = [{"number": n, "state": s, **run} for n, s in ((1, "running"), (2, "waiting"))]
    known = {"launch": "a-1", "run": 1, "name": "sim", "log": "log"}
    play.attach(0, node="n0", runs=runs, simulations=[known])
    assert {"end": True} in play.told("agent0")
    ended = play.ask("wait", "w").told("w")[0]["runs"]
    assert [(one["state"], one["reason"]) for one in ended] == [("failed", why)] * 2
    play.ask("tell", "t", number=0, simulation={**known, "launch": "a-2"})
    for launch in ("a-1", "a-2"):
        [told] = play.ask("follow", launch, launch=launch).told(launch)
        assert (told["code"], told["reason"], told["exception"]) == (1, why, "dovetail")
