# SPDX-License-Identifier: LGPL-3.0-or-later
"""Pods that one simulation has left, and the next: who may have them, and what is told to whom."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dovetail.core import protocol
from dovetail.core.protocol import Cause, Result
from dovetail.executors.kubernetes import manifests, spare_pods
from dovetail.executors.kubernetes.api import NotFound, Refused
from dovetail.executors.kubernetes.lifecycle import (
    HAND_OVER,
    LABEL,
    PATIENT,
    Launched,
    Lifecycle,
    Pending,
    Running,
    Spare,
    Terminating,
)
from dovetail.executors.kubernetes.nodes import Nodes
from dovetail.executors.kubernetes.placement import Room
from dovetail.executors.kubernetes.resizes import Change, Resizes
from dovetail.executors.pods import messages

pytestmark = pytest.mark.unit

SPEC = protocol.Spec("one", "family", "/case", 2, (1.0, 1.0), ("program",), ranks_per_pod=1)
NODE = {
    "metadata": {"name": "n"},
    "spec": {},
    "status": {
        "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "100"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


def pod(group, cpu=500, limit=0, memory=64 << 20, node="n", **status):
    resources = {"requests": {"cpu": f"{cpu}m", "memory": str(memory)}, **manifests.cap(limit)}
    labels = {manifests.INDEX: str(group), manifests.JOB: "one-r"}
    return {
        "metadata": {"name": f"one-r-{group}", "uid": f"u{group}", "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "main", "resources": resources}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1", **status},
    }


@pytest.mark.parametrize(
    ("how", "same"),
    [
        ({"name": "two", "family": "another", "weights": (3.0, 1.0), "memory": 1 << 30}, True),
        ({"ranks": 3}, False),
        ({"ranks_per_pod": 2}, False),
        ({"image": "registry/program:1"}, False),
        ({"pull_secret": "key"}, False),
        ({"devices": (("gpu", 1),)}, False),
        ({"pull_policy": "Always"}, False),
    ],
)
def test_pods_that_are_made_alike_can_be_each_others(how, same):
    assert spare_pods.alike(SPEC, replace(SPEC, **how)) is same


def test_whoever_wants_its_image_pulled_each_time_gets_new_pods():
    always = replace(SPEC, image="i", pull_policy="Always")
    assert not spare_pods.alike(always, always)


@pytest.mark.parametrize(
    ("cpu", "more"),
    [
        pytest.param((500, 500), 0, id="the same"),
        pytest.param((900, 100), 0, id="divided otherwise, on the same node"),
        pytest.param((500, 501), 1, id="more than was there"),
        pytest.param((100, 100), -800, id="less"),
    ],
)
def test_what_pods_are_to_ask_for_besides_is_told_of_each_node(cpu, more):
    assert spare_pods.more({0: pod(0), 1: pod(1)}, cpu, 0) == [Room("n", more, 0, 0)]


def test_what_one_node_has_is_not_wanted_of_another():
    apart = {0: pod(0), 1: pod(1, node="m")}
    wanted = [Room("n", 100, 36 << 20, 0), Room("m", -100, 36 << 20, 0)]
    assert spare_pods.more(apart, (600, 400), 100 << 20) == wanted


@pytest.mark.parametrize(
    ("has", "needs", "more"),
    [(64, 0, 0), (64, 100, 36), (1024, 600, 0), (1024, 400, -624), (1024, 0, 64 - 1024)],
)
def test_memory_is_asked_for_where_it_lacks_and_given_back_where_it_is_far_too_much(
    has, needs, more
):
    assert spare_pods.more_memory(pod(0, memory=has << 20), needs << 20) == more << 20


class Place:
    """A lifecycle whose requests of the API wait for `answer`; what the hub was told is kept."""

    def __init__(self):
        self.asked, self.told, self.ended, self.news, self.patched = [], [], [], [], []
        self.silent = False
        self.hub = SimpleNamespace(
            nodes=lambda: {"n"}, tell=self.told.append,
            copies=SimpleNamespace(shut=lambda key: None, open=lambda *words: None),
        )  # fmt: skip
        self.api = SimpleNamespace(
            silent=lambda: self.silent,
            patch=lambda where, body, *words, **more: self.patched.append((where, body)),
            delete=lambda where, **more: None,
            get=lambda where, **more: {"items": []},
        )
        session = SimpleNamespace(
            api=self.api, hub=self.hub, run="r", store="",
            launcher=SimpleNamespace(kind="Job", kinds=("Job",)),
            news=SimpleNamespace(put=self.news.append),
        )  # fmt: skip
        calls = SimpleNamespace(submit=lambda work, then: self.asked.append((work, then)))
        self.nodes = Nodes((None, None))
        self.nodes.listed([NODE], [])
        self.resizes = Resizes(self.api, calls)
        self.life = Lifecycle(
            session, calls, self.nodes, self.resizes,
            SimpleNamespace(forget=lambda key: None), "/out", 0,
            lambda job: self.ended.append((job.spec.name, job.result)), lambda job, why: None,
            lambda job: None,
        )  # fmt: skip
        self.job = Launched(
            SPEC, protocol.Share((500, 500)), "one", Running(begun=True, spread=True), [1, 1],
            [500, 500], {0: pod(0), 1: pod(1)}, {0: "n", 1: "n"}, True, seen=True, made="one-r",
        )  # fmt: skip
        self.life.jobs["one"] = self.job

    def answer(self):
        """Everything that the API was asked so far is answered."""
        while self.asked:
            work, then = self.asked.pop(0)
            then(work())

    def hand_over(self):
        """The pods are there for the next; returns what they are called."""
        self.life.heard(self.job, Result(Cause.DONE))
        self.answer()
        (end,) = self.told
        self.told.clear()
        assert (end.simulation, end.code) == ("one", 0)
        self.turn()
        assert not self.ended, "something of it may still run"
        self.life.of(end.next).connected.update({0: "n", 1: "n"})
        self.turn()
        assert self.ended == [("one", Result(Cause.DONE))]
        return end.next

    def turn(self, later=0.0):
        for job in self.life.all():
            self.life.advance(job, time.monotonic() + later)

    def launch(self, **how):
        spec = replace(SPEC, name="two", **how)
        share = protocol.Share((500,) * spec.ranks)
        self.life.jobs["two"] = Launched(spec, share, "two", Pending(0.0))
        return self.life.jobs["two"]


@pytest.fixture
def place():
    return Place()


def test_the_next_simulation_runs_in_the_pods_of_the_one_before(place):
    key = place.hand_over()
    two = place.launch()
    place.turn()
    assert isinstance(two.state, Running)
    runs = [told for told in place.told if isinstance(told, messages.Run)]
    assert [run.simulation for run in runs] == [key]
    assert runs[0].config["name"] == "two"
    assert not place.life.spares
    assert place.life.of(key) is two
    assert place.life.of_pod(pod(0)) is two
    place.patched.clear()
    place.answer()
    assert [where.rpartition("/")[2] for where, _ in place.patched] == ["one-r"], "who resumes it"
    place.turn(later=LABEL + 1)
    ((_, then),) = place.asked
    place.asked.clear()
    then(Refused(500, "Internal", "later"))
    place.turn(later=2 * LABEL + 2)
    place.answer()
    place.turn(later=4 * LABEL)
    assert not place.asked
    paths = [where.rpartition("/")[2] for where, _ in place.patched[1:]]
    assert paths == ["one-r", "one-r-0", "one-r-1"]
    labels = {manifests.SIMULATION: "two", manifests.KEY: key}
    assert all(body == {"metadata": {"labels": labels}} for _, body in place.patched)


def test_nobody_who_resumes_the_run_takes_the_pods_for_those_of_the_one_before(place):
    place.life.heard(place.job, Result(Cause.DONE))
    assert not place.told, "they are told only once that is sure"
    place.answer()
    (where, body) = place.patched[0]
    assert where.endswith("/jobs/one-r")
    assert body["metadata"]["labels"][manifests.SIMULATION] == ""


def test_pods_of_which_nobody_knows_yet_whose_they_are_go(place):
    """Else what is said of them last might be what was asked for first."""
    place.hand_over()
    two = place.launch()
    place.turn()
    place.told.clear()
    place.life.heard(two, Result(Cause.DONE))
    assert place.told == [messages.End(two.key, 0)]
    assert not place.life.spares


def test_requests_that_are_divided_otherwise_are_those_of_the_next(place):
    place.hand_over()
    two = place.launch()
    two.share = protocol.Share((800, 200))
    place.turn()
    assert isinstance(two.state, Running)
    assert two.cpu == place.nodes.divided([1, 1], (800, 200))
    place.resizes.poll(0.0)
    assert [*place.life._at_birth(two)] == [
        Change.between(f"one-r-{group}", (500, 0), (cpu, 0)) for group, cpu in enumerate(two.cpu)
    ]


def test_pods_that_nobody_wants_at_once_go_and_room_is_looked_for_once_they_have(place):
    key = place.hand_over()
    three = place.launch(ranks=3, weights=(1.0,) * 3)
    place.turn()
    assert isinstance(place.life.spares[key].state, Terminating)
    assert messages.End(key, 0) in place.told
    place.turn()
    assert isinstance(three.state, Pending)
    place.life.pod(place.life.spares[key], "DELETED", pod(0))
    place.life.pod(place.life.spares[key], "DELETED", pod(1))
    place.answer()
    place.turn()
    place.answer()  # no pod is left
    assert not place.life.spares
    assert place.ended == [("one", Result(Cause.DONE))], "once"
    place.turn()
    assert place.asked, "now for room"


def test_pods_that_do_not_go_hold_nobody_up_for_long(place, monkeypatch):
    """Their room counts as taken: as for any that go slowly."""
    key = place.hand_over()
    place.launch(ranks=3, weights=(1.0,) * 3)
    place.turn()
    place.answer()
    place.turn()
    assert place.life.in_between
    assert not place.asked
    later = time.monotonic() + PATIENT + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    place.turn()
    assert key in place.life.spares
    assert not place.life.in_between
    assert place.asked, "for room"


@pytest.mark.parametrize("result", [Result(Cause.FAILED, 1, "no"), Result(Cause.POD_LOST, 1)])
def test_pods_of_what_did_not_end_well_go(place, result):
    place.job.heard = True
    place.life.terminate(place.job, result)
    assert not place.life.spares
    assert place.told == [messages.End("one", 1)]


def test_pods_of_what_was_stopped_go(place):
    place.life.stop(place.job, "why", Cause.CANCELLED)
    place.life.heard(place.job, Result(Cause.DONE))
    assert not place.life.spares


@pytest.mark.parametrize(
    "error", [Refused(403, "Forbidden", "no"), NotFound(404, "NotFound", "no")]
)
def test_what_may_not_be_handed_over_ends_as_before(place, error):
    place.life.heard(place.job, Result(Cause.DONE))
    ((_, then),) = place.asked
    place.asked.clear()
    then(error)
    assert place.told[0] == messages.End("one", 0)
    assert place.life.hands_over is (error.status != 403)
    told = "each simulation gets new pods: no; an administrator gives access with: kubectl apply -k"
    assert [line.partition(" /")[0] for line in place.news] == [told] * (error.status == 403)
    (spare,) = place.life.spares.values()
    for group in (0, 1):
        place.life.pod(spare, "DELETED", pod(group))
    place.turn()
    place.answer()
    place.turn()
    place.answer()
    place.turn()
    assert place.ended == [("one", Result(Cause.DONE))]


def test_a_pod_that_does_not_come_back_is_not_waited_for_for_ever(place):
    place.life.heard(place.job, Result(Cause.DONE))
    place.answer()
    (spare,) = place.life.spares.values()
    spare.connected[0] = "n"
    place.turn()
    assert isinstance(spare.state, Spare)
    place.turn(later=HAND_OVER + 1)
    assert isinstance(spare.state, Terminating)
    assert not place.ended


@pytest.mark.parametrize("how", ["it ends", "it is deleted", "its agent misses it"])
def test_pods_of_which_one_goes_meanwhile_are_not_handed_over(place, how):
    key = place.hand_over()
    two = place.launch()
    spare = place.life.spares[key]
    if how == "it ends":
        place.life.pod(spare, "MODIFIED", pod(1, phase="Failed"))
    elif how == "it is deleted":
        place.life.pod(spare, "DELETED", pod(1))
    else:
        place.life.vanished(spare, 1, "n")
    place.turn()
    assert isinstance(two.state, Pending)
    assert isinstance(spare.state, Terminating)


@pytest.mark.parametrize(
    ("memory", "taken"), [(6 << 30, True), (8 << 30, False), (100 << 20, True)]
)
def test_pods_have_more_memory_for_the_next_simulation_if_their_node_has(place, memory, taken):
    """Of 8 GiB the agent has 64 MiB; what these ask for they have already."""
    place.hand_over()
    two = place.launch(memory=memory)
    place.turn()
    assert isinstance(two.state, Running) is taken
    place.patched.clear()
    place.answer()
    asked = [
        (where.rpartition("/pods/")[2], body["spec"]["containers"][0]["resources"]["requests"])
        for where, body in place.patched
        if where.endswith("/resize")
    ]
    needs = max(memory // 2, 64 << 20)
    wanted = {"memory": str(needs)}
    grows = taken and needs > 64 << 20
    assert asked == ([(f"one-r-{n}/resize", wanted) for n in (0, 1)] if grows else [])


@pytest.mark.parametrize(("cpu", "taken"), [(1900, True), (2100, False)])
def test_pods_have_more_cpu_for_the_next_simulation_if_their_node_has(place, cpu, taken):
    """A family that was measured to need little leaves them to one that needs more."""
    place.hand_over()
    two = place.launch()
    two.share = protocol.Share((cpu, cpu))
    place.turn()
    assert isinstance(two.state, Running) is taken
    place.resizes.poll(0.0)
    wanted = [
        Change.between(f"one-r-{group}", (500, 0), (now, 0)) for group, now in enumerate(two.cpu)
    ]
    assert [*place.life._at_birth(two)] == (wanted if taken else [])


def test_what_another_is_promised_is_not_given_to_pods_that_have_less(place):
    """Its pods are not there yet, and so are not seen to have it."""
    place.hand_over()
    two = place.launch()
    two.share = protocol.Share((600, 600))
    place.life._placing = Launched(replace(SPEC, name="three"), two.share, "three", Pending(0.0))
    place.turn()
    assert isinstance(two.state, Pending)


def test_a_quota_that_has_no_more_is_told_of_once_and_the_simulation_runs(place):
    place.hand_over()
    two = place.launch(memory=1 << 30)
    two.share = protocol.Share((600, 600))
    place.turn()
    place.resizes.poll(0.0)

    def refuse(where, body, *words, **more):
        raise Refused(403, "Forbidden", "exceeded quota")

    place.api.patch = refuse
    while place.asked:
        work, then = place.asked.pop(0)
        try:
            found = work()
        except Refused as error:
            found = error
        then(found)
        place.resizes.poll(0.0)
    assert isinstance(two.state, Running)
    assert {line.partition(":")[0] for line in place.news} == {
        "two runs with less than it is to ask for"
    }


@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_a_pod_without_a_limit_gets_none_nor_loses_one(place, limit):
    """Kubernetes does not let it."""
    place.job.share = protocol.Share((500, 500), limit=limit)
    place.hand_over()
    two = place.launch(limit=2.0)
    place.turn()
    assert isinstance(two.state, Running) is bool(limit)


def test_a_node_that_takes_no_more_simulations_gets_no_next_one(place):
    key = place.hand_over()
    place.nodes.listed([{**NODE, "spec": {"unschedulable": True}}], [])
    two = place.launch()
    place.turn()
    assert isinstance(two.state, Pending)
    assert isinstance(place.life.spares[key].state, Terminating)


def test_what_has_ended_is_over_though_the_api_says_nothing(place):
    place.life.heard(place.job, Result(Cause.DONE))
    place.silent = True
    place.turn()
    assert place.ended == [("one", Result(Cause.DONE))]
    place.answer()
    assert place.told == [messages.End("one", 0, next(iter(place.life.spares)))]


def test_no_resize_begins_beside_pods_that_nobody_has(place):
    place.resizes.held = True
    done = []
    place.resizes.add(lambda: [Change("p", 100, 200)], done.append)
    place.resizes.poll(0.0)
    assert (place.asked, place.resizes.deadline) == ([], 0.0)
    place.resizes.held = False
    assert place.resizes.deadline > 0.0
    place.resizes.poll(0.0)
    assert len(place.asked) == 1
