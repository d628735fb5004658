# SPDX-License-Identifier: LGPL-3.0-or-later
"""Many pods and nodes: what the executor does for each is the same as with few."""

from __future__ import annotations

import copy
import select
import socket

import pytest
from dovetail.core.protocol import Share, Spec
from dovetail.executors.kubernetes import manifests, placement, pod_status
from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.kubernetes.lifecycle import Launched, Running
from dovetail.executors.kubernetes.nodes import Nodes
from dovetail.executors.kubernetes.share_report import Report
from dovetail.executors.pods import connections, messages
from support.calls import calls_of

pytestmark = pytest.mark.unit

SPEC = Spec("sim", "sim", "/case", 1, (1.0,), ("run",), ranks_per_pod=1)
SEEN = manifests.Folders(("/usr",), ("/dev/shm",))


def pod(number: int) -> dict:
    """A pod as the API shows it, with what nobody asks about."""
    template = manifests.job("r", SPEC, "sim", [1], [20], [0], SEEN)["spec"]["template"]
    made = copy.deepcopy(template)
    meta = {"name": f"sim-{number}", "namespace": "dovetail", "uid": f"u{number}",
            "generation": 3, "managedFields": [{"manager": "kubelet"}]}  # fmt: skip
    made["metadata"].update(meta)
    made["metadata"]["labels"][manifests.INDEX] = str(number)
    made["spec"]["nodeName"] = f"n{number // 100}"
    real = {"requests": {"cpu": "20m"}}
    container = {"name": "main", "resources": real, "state": {"running": {}}}
    made["status"] = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [container]}
    return made


def test_of_a_pod_is_kept_what_is_asked_about():
    whole = pod(7)
    slim = pod_status.slim(whole)
    questions = (pod_status.group_of, pod_status.node_of, pod_status.born_with, pod_status.over,
                 pod_status.deleted, pod_status.hopeless, pod_status.starved, pod_status.unplaced,
                 placement.asked, placement.asked_devices)  # fmt: skip
    for ask in questions:
        assert ask(slim) == ask(whole), ask
    assert len(str(slim)) < len(str(whole)) / 2


def test_samples_wake_nobody_and_all_else_does(tmp_path):
    hub = Hub("127.0.0.1", tmp_path / "hub")
    try:
        plain = socket.create_connection((hub.address, hub.port), 60)
        with plain, connections.stranger().wrap_socket(plain) as link:

            def say(message: messages.Message) -> None:
                link.sendall(messages.encode(message))

            say(messages.Hello("one", hub.credentials()["token"]))
            assert select.select([hub], [], [], 60)[0], "it has joined"
            hub.take()
            say(messages.Sample(1.0, {"sim": {"0": [1.0] * 7}}, {}))
            assert not select.select([hub], [], [], 0.5)[0]
            assert [type(one) for _, one in hub.take()] == [messages.Sample]
            assert hub.clocks.offset("one") > 0, "its clock is far behind ours"
            say(messages.Started("sim", "", 0))
            assert select.select([hub], [], [], 60)[0]
    finally:
        hub.close()


def test_a_node_that_says_that_it_is_well_changes_nothing():
    room = {"cpu": "4", "memory": "8Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True"}
    node = {"metadata": {"name": "n"}, "status": {"allocatable": room, "conditions": [ready]}}
    nodes = Nodes((None, None))
    nodes.news("LISTED", [node])
    before = nodes.capacity
    beat = copy.deepcopy(node)
    beat["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:00:00Z"
    nodes.news("MODIFIED", beat)
    assert nodes.capacity is before
    unwell = copy.deepcopy(beat)
    unwell["status"]["conditions"][0]["status"] = "False"
    nodes.news("MODIFIED", unwell)
    assert nodes.capacity.nodes == ()


def test_ten_times_the_pods_cost_about_ten_times_as_much_to_report(tmp_path):
    def job(count: int) -> Launched:
        sizes = [1] * count
        share = Share((20,) * count)
        made = Launched(SPEC, share, "sim", Running(), sizes, cpu=[20] * count)
        made.pods = {number: pod_status.slim(pod(number)) for number in range(count)}
        return made

    report = Report(tmp_path, "r")
    few, many = job(100), job(1000)
    report.heard({f"u{number}": {"cpu.shares": "20"} for number in range(1000)})
    rows = report.rows([many])
    assert {row["real"] for row in rows} == {row["wanted"] for row in rows} == {0.01}
    assert calls_of(lambda: report.rows([many])) <= 12 * calls_of(lambda: report.rows([few]))
