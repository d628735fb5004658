# SPDX-License-Identifier: LGPL-3.0-or-later
"""Pods with addresses of their own, and agents that see none of the machine's network."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from dovetail.core import protocol
from dovetail.executors.kubernetes import identity, manifests, workload_kinds
from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.pods import connections, messages
from support.pod_processes import cluster  # noqa: F401

pytestmark = pytest.mark.unit
SPEC = protocol.Spec("sim", "sim", "/tmp", 2, (1.0,) * 2, ("true",))
SEEN = manifests.Folders(("/usr",), ("/dev/shm",))


@pytest.fixture
def beyond(cluster):  # noqa: F811
    """Nodes that have no way to the hub's address; its folder's name is longer than a socket's."""
    cluster.hub.close(forget=True)
    cluster.hub = Hub("127.0.0.1", cluster.directory / ("long" * 30) / "hub")
    with socket.create_server(("127.0.0.2", 0)) as nobody:
        nowhere = nobody.getsockname()
    cluster.write_credentials()
    (cluster.credentials / "address").write_text("{}:{}".format(*nowhere))
    return cluster


def test_an_agent_finds_the_hub_by_its_socket_where_no_way_leads_to_its_address(beyond):
    beyond.agent()
    beyond.launch("sim", "exit 3")
    assert beyond.until(messages.Result, "sim").code == 3
    beyond.end("sim", 3)


def test_a_hub_takes_the_place_of_one_that_was_killed_and_leaves_no_socket(beyond):
    folder = beyond.directory / ("long" * 30) / "hub"
    beyond.hub.close()
    assert not (folder / "hub.sock").exists()
    with socket.socket(socket.AF_UNIX) as left, connections.short(str(folder / "hub.sock")) as name:
        left.bind(name)
    beyond.hub = Hub("127.0.0.1", folder)
    beyond.agent()
    beyond.until(messages.Joined)
    assert beyond.hub.nodes() == {"one"}


def test_a_hub_whose_disk_takes_no_sockets_has_its_address_alone(cluster):  # noqa: F811
    cluster.hub.close()
    (cluster.directory / "hub" / "hub.sock").mkdir()
    cluster.hub = Hub("127.0.0.1", cluster.directory / "hub")
    cluster.agent()
    cluster.until(messages.Joined)


@pytest.mark.parametrize("network", ["host", "bridge"])
def test_pods_of_simulations_are_on_the_network_that_is_asked_for_and_agents_on_their_nodes(
    network,
):
    job = manifests.job("run", SPEC, "sim", [1, 1], [1, 1], [1, 1], SEEN, network=network)
    assert job["spec"]["template"]["spec"]["hostNetwork"] is (network == "host")
    assert manifests.agents("run", SEEN)["spec"]["template"]["spec"]["hostNetwork"] is True


class Operated:
    """The API of a cluster with the Flux Operator, as far as a launcher asks it."""

    path = "kubeconfig"

    def kinds(self, group):
        return {"MiniCluster"} if "flux-framework" in group else manifests.POLICIES


@pytest.mark.parametrize("network", ["host", "bridge"])
def test_the_operators_jobs_know_the_network_that_is_asked_for(tmp_path, monkeypatch, network):
    monkeypatch.setattr(workload_kinds, "_flux", lambda: "/opt/flux/bin")
    launcher = workload_kinds.Launcher(Operated(), "run", [SPEC], tmp_path, network)
    made = launcher.body(SPEC, "sim", [1, 1], [1, 1], [1, 1], 0, {})
    assert made["kind"] == "MiniCluster"
    assert made["spec"]["jobLabels"]["dovetail/network"] == network


def test_a_network_without_a_cluster_is_refused_in_one_line(tmp_path):
    plan = {"simulations": [{"name": "s", "case": str(tmp_path), "ranks": 1, "command": ["true"]}]}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    words = ["run", "--network", "host", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--kubeconfig" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_taken_up_again_keeps_its_pods_network_unless_told_otherwise(tmp_path):
    def begun(resume, network):
        found = identity.begin(tmp_path / "own", resume, network)
        return found.run, found.network

    run, network = begun(False, "")
    assert network == "host"
    assert begun(True, "bridge") == (run, "bridge")
    assert begun(True, "") == (run, "bridge")
    assert begun(True, "host") == (run, "host")
    (tmp_path / "own/run.json").write_text(json.dumps({"run": run}))  # of an earlier version
    assert begun(True, "") == (run, "host")
    assert begun(False, "")[0] != run
