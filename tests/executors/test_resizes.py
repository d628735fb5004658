# SPDX-License-Identifier: LGPL-3.0-or-later
"""The transaction over several pods as a state machine, by tables of what happens.

A table's steps: `go` (poll), `ok`/`no` (the API's answer to a patch), `sees` (the pod as its node
left it), `gone`, `late` (the limit is over), `given_up` (so
is the patience with the slow). After each step come the patches sent by then.
"""

from __future__ import annotations

import time

import pytest
from dovetail.executors.kubernetes import pod_status
from dovetail.executors.kubernetes.resizes import (
    LIMIT,
    SLOW,
    Change,
    Progress,
    Resizes,
    Transaction,
    progress,
)

pytestmark = pytest.mark.unit
A, B = Change("a", 1000, 400), Change("b", 500, 1100)


def pod(cpu, generation=2, conditions=(), observed=2, phase="Running", **limits):
    """A pod as the API shows it."""
    has = [{"name": "main", "resources": {"requests": {"cpu": f"{cpu}m"}, **limits}}]
    return {
        "metadata": {"name": "a", "generation": generation},
        "status": {
            "phase": phase,
            "observedGeneration": observed,
            "conditions": list(conditions),
            "containerStatuses": has if phase == "Running" else [],
        },
    }


def pending(reason, observed=2):
    return {"type": "PodResizePending", "status": "True", "reason": reason,
            "message": f"{reason} indeed", "observedGeneration": observed}  # fmt: skip


class Play:
    """A transaction, and the patches that it sent."""

    def __init__(self, *changes):
        self.it = Transaction(changes)
        self.now = 100.0
        self.sent = []
        self.go()

    def go(self):
        new = [(p.pod, p.cpu, p.limit)[: 3 if p.limit else 2] for p in self.it.poll(self.now)]
        self.sent += new
        return self

    def ok(self, name, cpu, generation=2):
        self.it.accepted(name, cpu, generation)
        return self.go()

    def no(self, name, cpu, why="refused"):
        self.it.declined(name, cpu, why)
        return self.go()

    def sees(self, name, cpu, **more):
        self.it.seen(name, pod(cpu, **more))
        return self.go()

    def does(self, name, cpu):
        return self.ok(name, cpu).sees(name, cpu)

    def late(self):
        self.now += LIMIT + 1
        return self.go()

    def given_up(self):
        self.now += SLOW
        return self.go()


def test_decreases_reach_their_nodes_before_any_increase_is_sent():
    play = Play(A, B)
    assert play.sent == [("a", 400)]
    assert play.ok("a", 400).sent == [("a", 400)], "accepted is not yet done"
    assert play.sees("a", 400).sent == [("a", 400), ("b", 1100)]
    assert not play.it.finished
    play.does("b", 1100)
    assert (play.it.finished, play.it.refused) == (True, "")


def test_nothing_to_change_is_over_at_once():
    play = Play(Change("a", 500, 500))
    assert (play.it.finished, play.it.refused, play.sent) == (True, "", [])


SETBACKS = {
    "an increase that the node can never give": (
        lambda p: p.does("a", 400).ok("b", 1100).sees("b", 500, conditions=[pending("Infeasible")]),
        "b: Infeasible",
        [("a", 1000), ("b", 500)],
    ),
    "an increase that the quota forbids": (
        lambda p: p.does("a", 400).no("b", 1100, "exceeded quota"),
        "b: exceeded quota",
        [("a", 1000), ("b", 500)],
    ),
    "an increase that waits for room too long": (
        lambda p: (
            p.does("a", 400).ok("b", 1100).sees("b", 500, conditions=[pending("Deferred")]).late()
        ),
        "b: not done after 8 s: Deferred",
        [("a", 1000), ("b", 500)],
    ),
    "a decrease that nobody answers": (
        lambda p: p.late().given_up(), "a: not done after 60 s: no answer", []),
    "a decrease that its node never applies": (
        lambda p: p.ok("a", 400).sees("a", 1000, observed=1).late().given_up(),
        "a: not done after 60 s: its node has not looked yet",
        [("a", 1000)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SETBACKS)
def test_a_setback_gives_every_touched_pod_its_old_request_back(what):
    happens, why, undone = SETBACKS[what]
    play = Play(A, B)
    happens(play)
    answered = 0
    while answered < len(play.sent):  # answering one sends the next
        if play.sent[answered] in undone:
            play.does(*play.sent[answered])
        answered += 1
    back = [one for one in play.sent if one in undone]
    assert play.it.refused.startswith(why), play.it.refused
    assert sorted(back) == sorted(undone)
    if undone:
        assert play.it.finished


def test_a_slow_node_is_waited_for():
    play = Play(A, B).late().ok("a", 400).late().sees("a", 1000, observed=1).late().sees("a", 400)
    play.late().does("b", 1100)
    assert play.sent == [("a", 400), ("b", 1100)]
    assert (play.it.finished, play.it.refused) == (True, "")


def test_what_grew_shrinks_first_on_the_way_back():
    play = Play(Change("a", 500, 800), Change("b", 500, 800), Change("c", 900, 300))
    play.does("c", 300).does("a", 800).no("b", 800)
    assert play.sent[-2:] == [("b", 500), ("a", 500)]
    play.does("b", 500).does("a", 500)
    assert play.sent[-1] == ("c", 900)
    assert not play.it.finished
    play.does("c", 900)
    assert (play.it.finished, play.it.refused) == (True, "b: refused")


def test_a_pod_gets_no_second_patch_before_the_first_was_answered():
    play = Play(A).given_up()
    assert play.sent == [("a", 400)]
    play.ok("a", 400)
    assert play.sent == [("a", 400), ("a", 1000)], "and then it is set back"


def test_a_way_back_that_waits_for_an_answer_keeps_nobody_awake():
    play = Play(Change("a", 1000, 400), Change("b", 1000, 400)).no("b", 400).late()
    assert play.it.deadline > play.now
    play.late()
    assert play.it.deadline > play.now
    assert not play.it.finished
    play.ok("a", 400)
    assert play.sent[2:] == [("b", 1000), ("a", 1000)]


def test_a_way_back_that_fails_ends_all_the_same_and_says_so():
    play = Play(A, B).does("a", 400).no("b", 1100, "full").no("b", 500, "gone mad")
    play.no("a", 1000, "away").go()
    assert play.it.finished
    assert play.it.refused == (
        "b: full; b could not be set back: gone mad; a could not be set back: away"
    )


def test_a_pod_that_goes_away_holds_nothing_up():
    play = Play(A, B)
    play.it.gone("a")
    assert play.go().sent[-1] == ("b", 1100)
    play.it.gone("b")
    play.go()
    assert (play.it.finished, play.it.refused) == (True, "")


@pytest.mark.parametrize(
    ("thing", "wanted"),
    [
        (pod(400), Progress.DONE),
        (pod(1000), Progress.OPEN),
        (pod(400, generation=1), Progress.OPEN),
        (pod(400, observed=1), Progress.OPEN),
        (pod(1000, conditions=[pending("Deferred")]), Progress.DEFERRED),
        (pod(1000, conditions=[pending("Infeasible")]), Progress.INFEASIBLE),
        (pod(400, conditions=[pending("Infeasible", observed=1)]), Progress.DONE),
        (pod(400, conditions=[{"type": "PodResizeInProgress", "status": "True"}]), Progress.OPEN),
        (pod(0, phase="Pending", observed=0), Progress.DONE),
    ],
)
def test_progress_is_read_from_generation_conditions_and_what_the_pod_has(thing, wanted):
    assert progress(thing, 2, 400)[0] is wanted


def test_a_limit_goes_with_its_request_both_ways():
    a, b = Change("a", 500, 300, 1000, 600), Change("b", 300, 500, 600, 1000)
    play = Play(a, b).ok("a", 300)
    assert play.sees("a", 300).sent == [("a", 300, 600)], "its limit is not there yet"
    play.sees("a", 300, limits={"cpu": "600m"})
    assert play.sent[1:] == [("b", 500, 1000)]
    play.no("b", 500)
    assert play.sent[2:] == [("b", 300, 600)], "what grew first"
    play.ok("b", 300).sees("b", 300, limits={"cpu": "600m"})
    assert play.sent[3:] == [("a", 500, 1000)]


def test_a_limit_that_alone_changes_is_a_change():
    play = Play(Change("a", 500, 500, 1000, 600), Change("b", 500, 500, 600, 600))
    assert play.sent == [("a", 500, 600)]
    play.ok("a", 500).sees("a", 500, limits={"cpu": "600m"})
    assert play.it.finished
    assert play.it.refused == ""


def test_a_limit_that_nobody_asked_for_is_the_sites():
    assert progress(pod(400, limits={"cpu": "1"}), 2, 400)[0] is Progress.DONE


@pytest.mark.parametrize("beside", [{}, {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}])
def test_a_container_that_a_site_has_put_into_pods_is_not_the_resized_one(beside):
    thing = pod(400, limits={"cpu": "800m"})
    thing["status"]["containerStatuses"].insert(0, {"name": "istio-proxy", "resources": beside})
    assert progress(thing, 2, 400, 800)[0] is Progress.DONE
    assert progress(thing, 2, 1000, 2000)[0] is Progress.OPEN
    real = thing["status"]["containerStatuses"][1]["resources"]
    parts = [{"name": "istio-proxy", "resources": beside}, {"name": "main", "resources": real}]
    assert pod_status.born_with({"spec": {"containers": parts}}) == (400, 800)


def test_a_resize_that_was_asked_for_is_sent_at_once_and_the_next_waits_for_its_end():
    sent, ended = [], []

    class Calls:
        def submit(self, work, then):
            sent.append(work)

    resizes = Resizes(None, Calls())
    assert resizes.deadline == 0.0
    for change in (A, B):
        resizes.add(lambda change=change: [change], ended.append)
    assert 0.0 < resizes.deadline < time.monotonic(), "due now"
    resizes.poll(time.monotonic())
    assert len(sent) == 1
    assert resizes.deadline > time.monotonic()
    resizes.gone("a")
    resizes.poll(time.monotonic())
    assert (len(sent), ended) == (2, [""])
