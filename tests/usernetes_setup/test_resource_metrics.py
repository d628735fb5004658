# SPDX-License-Identifier: LGPL-3.0-or-later
"""Who is told what pods use; on a cluster in test_features.py."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading

import pytest
from usernetes_setup.control import api_client, certificates, resource_metrics

pytestmark = pytest.mark.unit
POD = {"metadata": {"uid": "u", "name": "p", "namespace": "n"}, "spec": {"nodeName": "one"}}


class Known:
    """An API server that knows one pod, on one node."""

    def call(self, method, path):
        return {"items": [POD]} if path.endswith("pods") else POD


class Measured(resource_metrics.Source):
    """Of that pod one container was measured, and one was not yet."""

    def _summary(self, name):
        used = {"cpu": {"usageNanoCores": 7, "time": "t"}, "memory": {"workingSetBytes": 2048}}
        containers = [{"name": "main", **used}, {"name": "new", "cpu": {}, "memory": {}}]
        return {"pods": [{"podRef": {"uid": "u"}, "containers": containers}]}


def test_a_pod_has_what_its_measured_containers_use(tmp_path):
    source = Measured(Known(), tmp_path)
    (found,) = source.answer("/apis/metrics.k8s.io/v1beta1/pods")["items"]
    assert found["containers"] == [{"name": "main", "usage": {"cpu": "7n", "memory": "2Ki"}}]
    assert found == source.answer("/apis/metrics.k8s.io/v1beta1/namespaces/n/pods/p")


def test_who_asks_for_a_part_is_told_that_there_is_more(tmp_path):
    """As kubectl does, of 500 at once."""

    class Part(Known):
        def call(self, method, path):
            assert path == "/api/v1/pods?limit=1"
            return {"metadata": {"resourceVersion": "7", "continue": "here"}, "items": [POD]}

    found = Measured(Part(), tmp_path).answer("/apis/metrics.k8s.io/v1beta1/pods?limit=1")
    assert found["metadata"] == {"continue": "here"}


def test_a_node_has_used_what_its_measured_pods_have(tmp_path):
    summary = Measured(Known(), tmp_path)._summary("one")
    node = {"metadata": {"name": "one"}}
    assert resource_metrics.of_node(node, {"pods": []}) is None
    summary["pods"] *= 2
    assert resource_metrics.of_node(node, summary)["usage"] == {"cpu": "14n", "memory": "4Ki"}


def test_a_node_without_pods_has_used_nothing():
    node = {"metadata": {"name": "one", "creationTimestamp": "t"}}
    found = resource_metrics.of_node(node, {"node": {"nodeName": "one"}, "pods": []})
    assert found["usage"] == {"cpu": "0n", "memory": "0Ki"}
    assert found["timestamp"] > "2000"  # when it was asked


def test_a_node_whose_pods_were_not_measured_yet_is_not_told():
    unmeasured = {"podRef": {"uid": "u"}, "containers": [{"name": "new", "cpu": {}}]}
    summary = {"node": {"nodeName": "one"}, "pods": [unmeasured]}
    assert resource_metrics.of_node({"metadata": {"name": "one"}}, summary) is None


def test_a_node_that_has_no_address_yet_keeps_nobody_from_the_others(tmp_path, monkeypatch):
    """One that was lost is made again without, see lost_nodes; its kubelet says it later."""
    port = {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}}
    new = {"metadata": {"name": "new"}, "status": port}
    old = {"metadata": {"name": "old"}, "status": port}
    old["status"] = {**port, "addresses": [{"type": "InternalIP", "address": "127.77.0.1"}]}

    class Nodes:
        def call(self, method, path):
            one = {"new": new, "old": old}.get(path.rpartition("/")[2])
            return one or {"items": [new, old]}

    class Kubelet:
        def __init__(self, *_):
            pass

        def call(self, method, path):
            return {"node": {"nodeName": "old"}, "pods": []}

    monkeypatch.setattr(api_client, "Client", Kubelet)
    (tmp_path / "ca.crt").touch()
    source = resource_metrics.Source(Nodes(), tmp_path)
    found = source.answer("/apis/metrics.k8s.io/v1beta1/nodes")["items"]
    assert [one["metadata"]["name"] for one in found] == ["old"]


@pytest.mark.parametrize("path", ["/", "/api/v1/pods", "/apis/metrics.k8s.io/v1beta1/secrets"])
def test_nothing_else_is_told(tmp_path, path):
    with pytest.raises(api_client.Refused):
        Measured(Known(), tmp_path).answer(path)


def test_only_the_api_server_is_told(tmp_path):
    certificates.authority(tmp_path, "test")
    hosts = [resource_metrics.NAME]
    certificates.certificate(tmp_path, "metrics", "/CN=metrics", hosts)
    certificates.certificate(tmp_path, "asker", f"/CN={resource_metrics.ASKER}")
    certificates.certificate(tmp_path, "node", "/O=system:nodes/CN=system:node:n")
    server = resource_metrics.server(Known(), "127.0.0.1", 0, tmp_path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    mute = socket.create_connection(server.server_address)  # keeps nobody waiting

    def ask(who):
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        context.check_hostname = False
        if who:
            context.load_cert_chain(tmp_path / f"{who}.crt", tmp_path / f"{who}.key")
        link = http.client.HTTPSConnection(*server.server_address, timeout=20, context=context)
        try:
            link.request("GET", "/apis/metrics.k8s.io/v1beta1")
            return link.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            link.close()

    assert (ask("asker"), ask("node"), ask("")) == (200, 403, None)
    server.shutdown()
    server.server_close()
    mute.close()
