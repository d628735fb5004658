# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a slice's agent makes of the module's answers.

The way to Flux is a fake, since a real module cannot be made to answer so.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
from dovetail.core.errors import WorkFailed
from dovetail.flux import slice_agent as agents
from dovetail.flux.instance import messages
from dovetail.flux.instance.effects import FAILED, INVALID
from dovetail.host import processes
from support import clusters
from usernetes_setup import node_record
from usernetes_setup.upstream.record import Record

pytestmark = pytest.mark.unit


class Client:
    """Takes requests, and answers none."""

    def __init__(self):
        self.sent = []

    def send(self, topic, payload, *, stream=False):
        self.sent.append((topic, payload))
        return len(self.sent)

    def of(self, topic):
        return [payload for name, payload in self.sent if name == topic]


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.setattr(agents, "Client", Client)
    made = agents.Agent(1, "flux-12345678", machine_address=False, timeout=120.0, stop_before=20.0)
    made.take({"event": "connected", "rank": 2})
    return made


def test_a_slice_that_is_not_invited_says_why_and_ends(agent):
    agent.take({"id": agent.joining, "error": [errno.ENOSYS, "no module"]})
    assert not agent.over, "it asks again once there is one"
    agent.take({"id": agent.joining, "error": [FAILED, "no token could be made"]})
    assert agent.over
    assert agent.client.of("dovetail.tell") == [
        {"number": 1, "failed": "cannot be invited: no token could be made"}
    ]


def test_a_slice_that_greets_twice_takes_orders_all_the_same(agent):
    (first,) = agent.attached
    agent.take({"event": "loaded"})
    (second,) = agent.attached - {first}
    agent.take({"id": second, "error": [INVALID, "slice 1 is not expected"]})
    agent.take({"id": first, "value": {"keep": {"up": True}}})
    assert agent.kept == {"up": True}
    agent.take({"id": first, "value": {"end": True}})
    assert agent.over


def test_what_is_to_be_kept_is_added_to_what_is_kept_already(agent):
    (number,) = agent.attached
    for slices, gone in (([(1, 7), (2, 8)], None), ([(2, 9)], None), ([], [1])):
        told = [{"number": one, "job": job, "node": f"n{one}"} for one, job in slices]
        keep = {"keep": {"up": True, "slices": told}, **({"gone": gone} if gone else {})}
        agent.take({"id": number, "value": keep})
    agent.take({"event": "loaded"})
    kept = agent.client.of("dovetail.attach")[-1]["kept"]
    assert kept == {"up": True, "slices": [{"number": 2, "job": 9, "node": "n2"}]}


def test_an_order_that_an_agent_does_not_know_ends_nothing(agent, capfd):
    (number,) = agent.attached
    agent.take({"id": number, "value": {"dance": True}})
    agent.take({"id": number, "value": {"keep": 3}})
    assert (agent.over, agent.kept) == (False, {})
    assert capfd.readouterr().err.splitlines() == [
        "slice 1: not an order: order: none of end, invite, forget, keep, queue, run, cancel, url"
        " is there",
        "slice 1: not an order: Keep: keep is not an object",
    ]


def test_orders_do_not_wait_for_the_jobs_of_a_thousand_simulations(agent):
    """Who writes more to the relay than its pipe holds waits until that has submitted the rest."""
    launches = [{"launch": str(n), "run": 1, "name": f"sim-{n}", "log": ""} for n in range(1000)]
    for launch in launches:
        agent.submit_proxy_job(launch, ())
    most, told = agents.SUBMITS, set()
    assert len(agent.client.of(agents.SUBMIT)) == most
    while new := agent.proxy_jobs.keys() - told:
        assert len(new) <= most
        for number in sorted(new):
            answer = {"value": {"job": number}} if number % 2 else {"error": [INVALID, "no"]}
            agent.take({"id": number, **answer})
        told |= new
    assert [*agent.proxy_jobs.values()] == launches


def test_with_a_node_whose_slice_has_ended_its_pods_go_and_else_the_node_alone(agent, monkeypatch):
    """No kubelet is left that would end them, so that they would wait for one."""
    asked = []

    class Admin:
        def call(self, method, path, body=None, timeout=0.0):
            asked.append((method, path, body))
            pod = {"name": "p", "namespace": "s", "uid": "u"}
            return {"items": [{"metadata": pod}, {"metadata": {**pod, "name": "q"}}]}

    monkeypatch.setattr(agent, "admin", Admin)
    agent.obey(messages.Forget("n1", ended=False))
    assert asked == [("DELETE", "/api/v1/nodes/n1", None)]
    agent.obey(messages.Forget("n1", ended=True))
    at_once = {"gracePeriodSeconds": 0, "preconditions": {"uid": "u"}}
    assert asked[1:] == [
        ("DELETE", "/api/v1/nodes/n1", None),
        ("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1", None),
        ("DELETE", "/api/v1/namespaces/s/pods/p", at_once),
        ("DELETE", "/api/v1/namespaces/s/pods/q", at_once),
    ]
    assert [one["forgotten"] for one in agent.client.of("dovetail.tell")] == ["n1", "n1"]


def own_node(cluster, **monitor):
    return clusters.node(cluster=cluster, **monitor)


def upstreams_node(cluster, **monitor):
    return Record(cluster, "m1-0", "192.0.2.1", "podman", "podman-compose", **monitor)


@pytest.mark.parametrize("make", [own_node, upstreams_node])
@pytest.mark.parametrize("moment", ["before", "later"])
def test_a_slice_ends_when_its_node_does(agent, monkeypatch, tmp_path, moment, make):
    monkeypatch.setenv("DOVETAIL_STATE", str(tmp_path))
    tmp_path.chmod(0o700)
    with subprocess.Popen(["sleep", "1000"]) as monitor:
        ticks = processes.start_ticks(monitor.pid)
        node = make(agent.name, monitor=monitor.pid, monitor_ticks=ticks)
        node.folder.mkdir(parents=True)
        node.save()
        if moment == "before":
            monitor.kill()
            monitor.wait()
        agent.follow_node()
        if moment == "later":
            agent.look(0.0)
            assert not agent.over
            monitor.kill()
            agent.look(60.0)
    assert (agent.over, agent.failed) == (True, "its node ended")
    assert agent.client.of("dovetail.tell") == [{"number": 1, "failed": "its node ended"}]


def test_nodes_are_invited_once_the_verb_that_made_the_cluster_has_let_go_of_it(
    agent, monkeypatch, tmp_path
):
    """Upstream's node is known to be ready a moment before."""
    monkeypatch.setenv("DOVETAIL_STATE", str(tmp_path))
    tmp_path.chmod(0o700)
    agent.usernetes = "/opt/usernetes"
    ticks = processes.start_ticks(os.getpid())
    node = upstreams_node(agent.name, monitor=os.getpid(), monitor_ticks=ticks, ready=True)
    node.folder.mkdir(parents=True)
    node.save()
    node.checkout.mkdir()
    (node.checkout / "Makefile").write_text("join-command:\n\t@exit 3\n")
    agent.uninvited = {2: ("m2-2", math.inf)}
    with node_record.locked(agent.name):
        agent.invite()
    assert agent.client.of("dovetail.tell") == []
    agent.node = {"node": node.node}
    agent.invite()
    assert agent.client.of("dovetail.tell") == [], "it is tried again, as its API may be busy"
    monkeypatch.setattr(agents, "TRIED", 0.0)
    agent.invite()
    (told,) = agent.client.of("dovetail.tell")
    assert (told["invited"], told["why"][:18]) == (2, "make join-command:")


def test_a_service_on_a_network_of_its_own_is_reached_by_kubectl(agent):
    agent.usernetes = "/opt/usernetes"
    agent.obey(messages.FindService("db", 7))
    (told,) = agent.client.of("dovetail.tell")
    assert told["answer"] == 7
    assert "`flux dovetail kubectl port-forward service/db PORT` leads there" in told["why"]


def test_a_simulation_whose_job_is_cancelled_is_stopped_if_it_still_is_that_launch(agent):
    launch, stopped = {"launch": "a-1", "run": 1, "name": "sim"}, []
    agent.plans.stop = stopped.append
    agent.submit_proxy_job(launch, ())
    number = len(agent.client.sent)
    agent.take({"id": number, "value": {"job": 5}})
    assert stopped == []
    agent.take({"id": number, "value": {"cancelled": True}})
    assert stopped == [launch]


@pytest.mark.parametrize(
    ("said", "over"), [("19.5\n", True), ("21\n", False), ("4294967295\n", False), ("", False)]
)
def test_runs_end_before_the_jobs_time_does(agent, monkeypatch, said, over):
    monkeypatch.setattr(agents, "flux", lambda *words: said)
    agent.look_at_time()
    assert agent.plans.out_of_time is over
    assert (agent.next_look < math.inf) is not over, "it looks again at the time"


def full(*words, **options):
    """Where a user has as many processes as may be."""
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_an_agent_that_can_start_no_process_just_now_asks_again_for_the_jobs_time(
    agent, monkeypatch
):
    monkeypatch.setattr(subprocess, "run", full)
    agent.look_at_time()
    assert not agent.plans.out_of_time
    assert agent.next_look < math.inf


def test_a_slice_whose_node_cannot_be_started_says_why(agent, monkeypatch, tmp_path):
    monkeypatch.setattr(agents.programs, "built", lambda: tmp_path)
    monkeypatch.setattr(subprocess, "Popen", full)
    agent.begin()
    [told] = agent.client.of("dovetail.tell")
    why = "its node cannot be started: Resource temporarily unavailable"
    assert (told["failed"], agent.over) == (why, True)


def test_the_time_of_the_instance_counts_where_a_slice_has_no_limit(agent, monkeypatch):
    ours = agents.TIME_LEFT
    monkeypatch.setattr(agents, "flux", lambda *words: "4294967295" if words == ours else "19.5")
    agent.look_at_time()
    assert agent.plans.out_of_time


def test_runs_start_again_once_the_jobs_time_was_extended(agent, monkeypatch):
    left = iter(["19.5\n", "7200\n"])
    monkeypatch.setattr(agents, "flux", lambda *words: next(left))
    for over in (True, False):
        agent.look_at_time()
        assert agent.plans.out_of_time is over


@pytest.mark.parametrize("before", ["4294967295\n", "2592000\n"], ids=["no limit", "weeks"])
def test_a_jobs_time_that_is_made_shorter_ends_the_run_that_goes_on(agent, monkeypatch, before):
    told, left = [], iter([before, "19.5\n"])
    ours = agents.TIME_LEFT
    monkeypatch.setattr(agents, "flux", lambda *words: next(left) if words == ours else "")
    agent.look_at_time()
    agent.plans.running = SimpleNamespace(send_signal=told.append)
    assert agent.next_look <= time.monotonic() + 60
    agent.next_look = time.monotonic()
    agent.look(0.0)
    assert told == [signal.SIGALRM]


def test_nobody_looks_at_the_time_where_no_run_goes_on(agent, monkeypatch):
    monkeypatch.setattr(agents, "seconds_left", None)
    agent.next_look = time.monotonic()
    agent.look(0.0)
    assert agent.next_look == math.inf


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("10.77.0.1", "10.77.0.1"),
        ("127.0.1.1", "192.0.2.7"),
        ("10.77.0.2", "192.0.2.7"),
        (None, "192.0.2.7"),
    ],
    ids=["its own", "loopback", "another machine's", "none"],
)
def test_a_machines_address_is_its_names_or_that_of_the_way_out(monkeypatch, named, found):
    """The way out may be a network on which no other machine is, as in every emulated machine."""

    class Probe:
        def __init__(self, *kind):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def bind(self, address):
            if address[0] == "10.77.0.2":
                raise OSError("cannot assign requested address")

        def connect(self, address):
            pass

        def getsockname(self):
            return ("192.0.2.7", 1)

    def by_name(name):
        if named is None:
            raise OSError("no such name")
        return named

    monkeypatch.setattr(agents.socket, "gethostbyname", by_name)
    monkeypatch.setattr(agents.socket, "socket", Probe)
    assert agents.own_address() == found


def test_a_machine_that_no_other_reaches_says_so(monkeypatch):
    def nowhere(*words):
        raise OSError("network is unreachable")

    monkeypatch.setattr(agents.socket, "socket", nowhere)
    with pytest.raises(WorkFailed, match="has no address that other machines reach"):
        agents.own_address()
    monkeypatch.setattr(agents, "Client", Client)
    agent = agents.Agent(0, "flux-12345678", machine_address=True, timeout=9.0, stop_before=9.0)
    agent.begin()
    assert agent.over
    (told,) = agent.client.of("dovetail.tell")
    assert "has no address that other machines reach" in told["failed"]


def test_a_node_of_a_machine_with_a_long_name_has_room_for_its_sockets(monkeypatch):
    monkeypatch.setenv("DOVETAIL_STATE", "")  # so that it is put back
    monkeypatch.setattr(agents.os, "getuid", lambda: 2**32 - 2)
    monkeypatch.setattr(agents.socket, "gethostname", lambda: f"{'host-' * 12}.example.org")
    agents.use_folder(1234, "flux-12345678")
    name = agents.node_name(1234, "flux-12345678")
    assert node_record.checked_name(name, "node", 40).endswith("-1234")
    path = node_record.cluster_folder("flux-12345678") / "nodes" / name / node_record.SOCKET
    assert len(str(path)) == 107


@pytest.mark.parametrize(
    ("host", "name"), [("GPU_07.example.org", "gpu-07-3"), ("n1", "n1-3"), ("_", "node-3")]
)
def test_a_node_has_a_name_that_kubernetes_takes_whatever_its_machine_is_called(
    monkeypatch, host, name
):
    monkeypatch.setenv("DOVETAIL_STATE", "")  # so that it is put back
    monkeypatch.setattr(agents.socket, "gethostname", lambda: host)
    agents.use_folder(3, "flux-12345678")
    found = agents.node_name(3, "flux-12345678")
    assert node_record.checked_name(found, "node", 40) == name
