# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cluster on a bridge whose nodes are on hosts that share a network and nothing else.

An ordinary user's; pods have addresses that are good on all hosts, and nothing else is.
"""

from __future__ import annotations

import json
import os

import pytest
from support import host_clusters
from support.clusters import LIMIT, eventually, pod
from support.host_clusters import PROGRAMS, busy
from usernetes_setup.node import namespaces

pytestmark = [
    pytest.mark.kube,
    pytest.mark.first,  # they mostly wait
    pytest.mark.skipif(not os.path.exists(namespaces.TUNNELS), reason=f"no {namespaces.TUNNELS}"),
]
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=9).read().decode())"


@pytest.fixture(scope="module")
def pair(binaries, tmp_path_factory):
    shared = tmp_path_factory.mktemp("shared")
    with host_clusters.started(2, binaries, shared, "bridge") as found:
        yield found


def kubectl(pair, words, text="", **more):
    pair.first.write("stdin", text)
    return pair.first.run(f"{pair.kubectl} {words} <stdin", **more).stdout


def test_services_and_names_lead_to_pods_on_either_host(pair):
    for host in pair.made:
        serve = f"cd $(mktemp -d); echo of {host.name} >x; exec /usr/bin/python3 -m http.server 80"
        one = json.loads(pod(host.name, serve, cpu="20m"))
        one["spec"].update(hostNetwork=False, nodeName=host.name)
        one["metadata"]["labels"] = {"app": host.name}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"at-{host.name}"},
                   "spec": {"selector": {"app": host.name}, "ports": [{"port": 80}]}}  # fmt: skip
        kubectl(pair, "apply -f -", json.dumps({"apiVersion": "v1", "kind": "List",
                                                "items": [one, service]}))  # fmt: skip
    kubectl(pair, f"wait --for=condition=Ready pod/h1 pod/h2 --timeout={LIMIT}s")
    for client in ("h1", "h2"):
        for server in ("h1", "h2"):
            words = f"exec {client} -- /usr/bin/python3 -c '{FETCH}' http://at-{server}/x"
            said = eventually(lambda w=words: kubectl(pair, w, code=None).strip())
            assert said == f"of {server}"
        assert "GET /x" in kubectl(pair, f"logs {client}"), "of either host"
    row = "top pod h2 --no-headers"
    assert eventually(lambda: len(kubectl(pair, row, code=None).split()) == 3)
    kubectl(pair, "delete pod,service --all --now")


def test_hosts_have_nothing_of_the_pods_network_and_its_keys_are_their_owners_alone(pair):
    for host in pair.made:
        assert "10.24" not in host.out("cat /proc/net/fib_trie")
        files = "$(ls -d /tmp/dovetail-kube-*/default/nodes/*/carrier.json)"
        assert host.out(f"stat -c %a {files}").split() == ["600"]


@pytest.mark.parametrize("network", ["host", "bridge"])
def test_ranks_on_both_hosts_have_their_case_and_are_resized(pair, network):
    """The agents reach the run by their node's way out, on the other host too."""
    pair.first.write("case/input", "as delivered\n")
    entry = busy(30, 90, stage="live", ranks_per_pod=1)
    say = '{ cat input; hostname; } >rank.$OMPI_COMM_WORLD_RANK; exec "$@"'
    entry["command"] = ["sh", "-c", say, "say", *entry["command"]]
    out = pair.start(entry, words=f"--network {network}")
    pair.until(out, lambda: any(not one["refused"] for one in pair.log(out, "Resized")))
    pair.enough(out)
    assert {*pair.log(out, "Placed")[-1]["nodes"]} == {"h1", "h2"}
    found = pair.first.out(f"cat {out}/sim/case/rank.*").splitlines()
    assert found.count("as delivered") == 2
    names = {*found} - {"as delivered"}
    assert names == {"h1", "h2"} if network == "host" else len(names) == 2, "each pod is a host"


KILL = """for process in /proc/[0-9]*; do
  ! grep -q "carrier[.]json" $process/cmdline || kill -9 ${process#/proc/}
done"""


@pytest.mark.parametrize("mpi", PROGRAMS)
def test_what_runs_on_both_goes_on_after_the_network_was_away(pair, mpi):
    """And after a carrier was killed: the tunnel and its socket are the node's."""
    entry = busy(20, 30, ranks_per_pod=1)
    entry["command"][0] = PROGRAMS[mpi]
    out = pair.start(entry, words="--network bridge")
    pair.goes_on(out, "sim")
    pair.second.cut()
    pair.second.out("sleep 4")
    pair.second.heal()
    pair.goes_on(out, "sim")
    for host in pair.made:
        host.out(KILL)
    pair.goes_on(out, "sim")
    pair.enough(out)


def test_a_host_that_comes_again_has_its_place(pair):
    """A later node of the same name, by a new key, is the one that the others know."""
    addresses = [kubectl(pair, "get node h2 -o 'jsonpath={.status.addresses[0].address}'").strip()]
    pair.second.out(f"{host_clusters.SETUP}/down")
    assert eventually(lambda: pair.nodes() == {"h1"}, 2 * LIMIT)
    pair.join(pair.second)
    assert eventually(lambda: pair.nodes() == {"h1", "h2"}, 2 * LIMIT)
    addresses.append(
        kubectl(pair, "get node h2 -o 'jsonpath={.status.addresses[0].address}'").strip()
    )
    assert addresses == ["10.243.0.2"] * 2
    out = pair.start(busy(20, 30, ranks_per_pod=1), words="--network bridge")
    pair.goes_on(out, "sim")
    pair.enough(out)
