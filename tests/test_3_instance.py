# SPDX-License-Identifier: LGPL-3.0-or-later
"""Steps 1 to 3 and 8 without Flux: what was asked for, and what the broker module decides."""

from __future__ import annotations

import pytest
from dovetail.errors import BadInput
from dovetail.fluxed import asked
from dovetail.fluxed.effects import (
    FAILED,
    INVALID,
    NOENT,
    Answer,
    Cancel,
    Mirror,
    Refuse,
    Submit,
    Sweep,
)
from dovetail.fluxed.instance import Instance
from dovetail.fluxed.requests import REQUESTS, STREAMS

pytestmark = pytest.mark.unit


# --- What was asked for ---


@pytest.mark.parametrize(
    ("text", "nodes", "cores"),
    [("nodes=2,cores=all", 2, 0), ("nodes=1", 1, 0), ("cores=3,nodes=4", 4, 3)],
)
def test_the_option_says_how_many_slices_of_which_size(text, nodes, cores):
    found = asked.parse(text)
    assert (found.nodes, found.cores) == (nodes, cores)
    assert asked.from_table(found.plain()) == found


BAD = {
    "": "nodes=N",
    "2": "nodes=N",
    "nodes": "nodes=N",
    "nodes=": "number from 1",
    "nodes=0": "number from 1",
    "nodes=-1": "number from 1",
    "nodes=1.5": "number from 1",
    "nodes=99999": "number from 1",
    "nodes=²": "number from 1",
    "nodes=all": "number from 1",
    "nodes=2,": "nodes=N",
    "nodes=2,nodes=3": "twice",
    "nodes=2,cores=some": "or all",
    "nodes=2,cores=0": "or all",
    "cores=all": "nodes=N is missing",
    "nodes=2,share=0.5": "nodes=N or cores",
}


@pytest.mark.parametrize("text", BAD)
def test_a_request_that_makes_no_sense_is_refused_in_one_line(text):
    with pytest.raises(BadInput, match=BAD[text]) as found:
        asked.parse(text)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"nodes": True}, "nodes"),
        ({"nodes": 1, "executor": "remote"}, "executor"),
        ({"nodes": 1, "up-timeout": 0}, "up-timeout"),
        ({"nodes": 1, "down-timeout": "long"}, "down-timeout"),
        ({"nodes": 1, "node": 2}, "no key node"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(table, word):
    with pytest.raises(BadInput, match=word):
        asked.from_table(table)


def test_whole_nodes_must_fit_into_the_allocation():
    asked.fits(asked.parse("nodes=4"), 4, "x")
    asked.fits(asked.parse("nodes=5,cores=1"), 4, "x")  # several may share a node
    asked.fits(asked.parse("nodes=5"), None, "x")
    with pytest.raises(BadInput, match="-N"):
        asked.fits(asked.parse("nodes=5"), 4, "x")


# --- What the module decides ---


class Play:
    """An instance, and what it wanted done; requests have names as their keys."""

    def __init__(self, nodes=2):
        self.state = Instance(asked.Asked(nodes))
        self.done = []
        self.jobs = 100

    def do(self, effects):
        for effect in effects:
            self.done.append(effect)
            if isinstance(effect, Submit):
                self.jobs += 1
        return self

    def ask(self, topic, key, **payload):
        known = STREAMS if topic in ("attach", "follow") else REQUESTS
        return self.do(known[topic](self.state, key, payload))

    def begin(self, adopted=None):
        self.do(self.state.start(adopted or {}))
        for number in self.submits() if not adopted else ():
            self.do(self.state.submitted(number, 100 + number))
        return self

    def attach(self, number, **news):
        return self.ask("attach", f"agent{number}", number=number, rank=number, **news)

    def ready(self, *numbers):
        for number in numbers:
            self.attach(number)
            news = {"kubeconfig": "secret"} if number == 0 else {}
            self.ask("tell", f"t{number}", number=number, node=f"n{number}", **news)
        return self

    def over(self, number, status=0):
        """A slice's job ends, and its machine is found clean."""
        self.do(self.state.finished(number, status))
        self.do(self.state.swept(number, ""))
        return self.do(self.state.cleaned(number))

    def left(self, number):
        """An agent did as it was told."""
        self.ask("tell", "bye", number=number, ended="")
        self.do(self.state.drop(lambda key: key == f"agent{number}"))
        return self.over(number)

    def submits(self):
        return [effect.number for effect in self.done if isinstance(effect, Submit)]

    def told(self, key):
        """The answers to one request: values, or (code, why)."""
        found = []
        for effect in self.done:
            if isinstance(effect, Answer) and effect.key == key:
                found.append(dict(effect.value))
            elif isinstance(effect, Refuse) and effect.key == key:
                found.append((effect.code, effect.why))
        return found


def test_a_job_that_waits_is_let_go_when_every_node_is_ready():
    play = Play().begin().ask("wait-up", "gate")
    play.ready(0)
    assert play.told("gate") == []
    play.ready(1)
    assert play.told("gate") == [{"nodes": 2}]
    assert play.ask("wait-up", "later").told("later") == [{"nodes": 2}]


def test_join_data_go_to_the_one_agent_that_asked():
    play = Play(3).begin().attach(1).ask("join", "j1", number=1)
    assert play.told("j1") == []
    play.ready(0)
    play.attach(2).ask("join", "j2", number=2)
    assert play.told("agent0") == [
        {"invite": 1, "node": ""},
        {"invite": 2, "node": ""},
    ]
    play.ask("tell", "t", number=0, invited=2, join={"token": "two"})
    play.ask("tell", "t", number=0, invited=1, why="the API is gone")
    assert (play.told("j1"), play.told("j2")) == (
        [(FAILED, "the API is gone")],
        [{"token": "two"}],
    )


def test_a_start_that_fails_ends_everything_and_tells_why():
    play = Play().begin().ask("wait-up", "gate").ready(0).attach(1)
    play.ask("tell", "t", number=1, failed="no cgroup")
    play.over(1, 256)
    assert play.told("gate") == [(FAILED, "slice 1 did not come up: no cgroup")]
    assert play.told("agent0")[-1] == {"end": True}
    assert play.state.phase == "failed"
    assert play.ask("wait-up", "late").told("late")[0][0] == FAILED
    assert play.ask("submit", "s", plan="p", output="o", cwd="/").told("s")[0][0] == FAILED


def test_a_start_that_takes_too_long_names_what_is_missing():
    play = Play().begin().ask("wait-up", "gate").ready(0)
    play.do(play.state.late())
    [(code, why)] = play.told("gate")
    assert code == FAILED
    assert "slice 1 is submitted" in why
    assert Cancel(101, "no longer wanted") in play.done


def test_the_time_to_come_up_is_no_matter_once_it_was_up():
    play = Play(1).begin().ready(0)
    play.do(play.state.late())
    assert play.state.phase == "up"


ENDS = {  # how a proven worker's job ended: is it replaced, how many nodes are wanted then
    "its agent was killed": (lambda p: p.over(1, 9), True, 2),
    "its broker died": (
        lambda p: p.do(p.state.excepted(1, "node-failure", "rank 3")).over(1, 15),
        True,
        2,
    ),
    "the user cancelled it": (
        lambda p: p.do(p.state.excepted(1, "cancel", "")).over(1, 15),
        False,
        1,
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_slice_that_is_lost_is_replaced_unless_the_user_ended_it(how):
    end, replaced, wanted = ENDS[how]
    play = Play().begin().ready(0, 1)
    play.do(play.state.drop(lambda key: key == "agent1"))
    end(play)
    assert (play.submits() == [0, 1, 2]) is replaced
    assert play.state.wanted == wanted
    assert {"forget": "n1"} in play.told("agent0")
    assert play.state.phase == ("degraded" if replaced else "up")


def test_a_machine_that_nobody_cleaned_is_swept_before_its_cores_are_given_away():
    play = Play().begin().ready(0, 1).ask("wait-down", "epilog", slice=1)
    play.do(play.state.drop(lambda key: key == "agent1"))
    play.do(play.state.finished(1, 9))
    assert Sweep(1, 1) in play.done
    assert play.told("epilog") == []
    play.do(play.state.swept(1, ""))
    assert play.told("epilog") == [{}]
    play.do(play.state.cleaned(1))
    assert 1 not in play.state.slices


def test_the_end_is_confirmed_only_when_every_slice_is_gone():
    play = Play().begin().ready(0, 1).ask("down", "down")
    assert (play.told("agent0")[-1], play.told("agent1")[-1]) == ({"end": True}, {"end": True})
    play.left(1)
    assert play.told("down") == []
    play.left(0)
    assert play.told("down") == [{}]
    assert not [effect for effect in play.done if isinstance(effect, Sweep)]
    assert play.state.phase == "down"


def test_an_end_that_takes_too_long_cancels_and_then_says_what_is_left():
    play = Play().begin().ready(0, 1).ask("down", "down")
    play.left(1)
    play.do(play.state.late_down(last=False))
    assert Cancel(100, "did not end in time") in play.done
    play.do(play.state.late_down(last=True))
    assert "slice 0" in play.told("down")[0][1]


def test_runs_wait_for_kubernetes_and_for_each_other():
    play = Play(1).begin()
    for number in (1, 2):
        play.ask("submit", f"s{number}", plan=f"p{number}", output="o", cwd="/")
    play.ask("wait", "all")
    play.ready(0)
    orders = [told["run"]["plan"] for told in play.told("agent0") if "run" in told]
    assert orders == ["p1"]
    play.ask("tell", "t", number=0, run=1, code=0)
    play.ask("tell", "t", number=0, run=2, code=1, why="bad")
    [answer] = play.told("all")
    assert [(run["state"], run["reason"]) for run in answer["runs"]] == [
        ("done", ""),
        ("failed", "bad"),
    ]


def test_a_cancelled_run_is_told_and_a_waiting_one_never_starts():
    play = Play(1).begin().ready(0)
    for number in (1, 2):
        play.ask("submit", f"s{number}", plan="p", output="o", cwd="/")
    play.ask("cancel", "c").ask("wait", "w")
    assert {"cancel": 1} in play.told("agent0")
    play.ask("tell", "t", number=0, run=1, code=130)
    assert [run["state"] for run in play.told("w")[0]["runs"]] == ["cancelled", "cancelled"]
    assert play.ask("wait", "x", runs=[7]).told("x")[0][0] == NOENT


def test_a_simulation_is_a_job_that_is_told_its_end():
    play = Play(1).begin().ready(0).ask("follow", "f", run=1, name="sim")
    play.ask("tell", "t", number=0, simulation={"run": 1, "name": "sim", "log": "o/sim/log"})
    assert Mirror(1, "sim", 100) in play.done
    play.ask("follow", "g", run=1, name="sim")
    assert play.told("g") == [{"log": "o/sim/log"}]
    play.ask("stop", "s", run=1, name="sim")
    assert {"stop": "sim", "of": 1} in play.told("agent0")
    ended = {"run": 1, "name": "sim", "log": "o/sim/log", "code": 3, "reason": "cancelled"}
    play.ask("tell", "t", number=0, simulation=ended)
    assert play.told("f") == [ended]
    assert play.ask("follow", "late", run=1, name="sim").told("late") == [ended]


def test_a_simulations_job_ends_with_its_run_whatever_was_said():
    play = Play(1).begin().ready(0).ask("submit", "s", plan="p", output="o", cwd="/")
    play.ask("tell", "t", number=0, simulation={"run": 1, "name": "sim", "log": "l"})
    play.ask("follow", "f", run=1, name="sim").ask("tell", "t", number=0, run=1, code=1)
    assert play.told("f")[-1]["reason"] == "its run is over"


def test_more_nodes_are_answered_when_ready_and_fewer_when_gone():
    play = Play(1).begin().ready(0).ask("resize", "grow", nodes=3)
    play.ready(1, 2)
    assert play.told("grow") == [{"nodes": 3}]
    play.ask("resize", "shrink", nodes=1)
    assert play.told("shrink") == []
    play.left(1).left(2)
    assert play.told("shrink") == [{"nodes": 1}]
    assert play.state.phase == "up"
    for nodes in (0, "many", None, True):
        assert play.ask("resize", f"r{nodes}", nodes=nodes).told(f"r{nodes}")[0][0] == INVALID


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


def test_the_end_before_the_beginning_starts_nothing():
    play = Play().ask("down", "down")
    assert play.told("down") == []
    play.begin()
    assert play.submits() == []
    assert play.told("down") == [{}]


def test_whoever_watches_is_told_of_changes_and_of_nothing_else():
    play = Play(1).begin()
    play.do(STREAMS["status"](play.state, "top", {}))
    play.ready(0)
    play.do(play.state.settle())
    phases = [told["phase"] for told in play.told("top")]
    assert phases == ["starting", "starting", "up"]


def test_the_loss_of_the_control_plane_is_told_to_everybody():
    play = Play().begin().ready(0, 1).ask("submit", "s", plan="p", output="o", cwd="/")
    play.ask("wait", "w").ask("url", "u", service="x")
    play.do(play.state.drop(lambda key: key == "agent0")).over(0, 9)
    assert play.told("w")[0]["runs"][0]["state"] == "failed"
    assert play.told("u")[0][0] == FAILED
    assert play.state.status()["reason"] == "the control slice ended: killed by signal 9"
    assert {"end": True} in play.told("agent1")


def test_requests_of_a_client_that_is_gone_are_forgotten():
    play = Play().begin()
    for topic in ("wait-up", "wait", "down"):
        play.ask(topic, "dead", runs=[])
    play.do(play.state.drop(lambda key: key == "dead"))
    play.done.clear()
    play.ready(0, 1)
    assert play.told("dead") == []


def test_slices_ask_for_exactly_their_cores():
    spec = asked.jobspec(asked.Asked(2, 3, "/bin/flux-dovetail"), 1, "f-1", {"A": "b"})
    [node] = spec["resources"]
    assert (node["count"], node["with"][0]["with"][0]["count"]) == (1, 3)
    whole = asked.jobspec(asked.Asked(2), 0, "f-1", {})["resources"][0]
    assert whole["exclusive"] is True
    assert spec["attributes"]["user"]["dovetail"] == {"slice": 1, "cluster": "f-1"}
