# SPDX-License-Identifier: LGPL-3.0-or-later
"""What cannot work is told in one line before anything starts."""

from __future__ import annotations

import base64
import http.server
import json
import re
import signal
import ssl
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
import yaml
from dovetail.executors.kubernetes import manifests
from support.cluster_runs import running, two

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module", autouse=True)
def installed(site):
    """What an administrator applies once, so that a service account can run simulations."""
    site.apply("operator-manifests")


def refused(site, out, *words, plan=None, kubeconfig=None):
    """What `dovetail run` says on one line, having started nothing."""
    real, site.kubeconfig = site.kubeconfig, kubeconfig or site.kubeconfig
    try:
        run = site.start(plan or site.plan(site.busy(10, 10)), out, *words)
        assert site.end(run) == 2, site.errors(out)
    finally:
        site.kubeconfig = real
    said = site.errors(out)
    assert said.count("\n") == 1, said
    assert not (site.folder / out / "events.jsonl").exists()
    return said


def changed(site, name, change):
    """A copy of the kubeconfig with a change."""
    content = yaml.safe_load(Path(site.kubeconfig).read_text())
    change(content)
    path = site.folder / name
    path.write_text(json.dumps(content))
    path.chmod(0o644)
    return str(path)


def server(content):
    return content["clusters"][0]["cluster"]


def user(content):
    return content["users"][0]["user"]


KUBECONFIGS = {
    "nobody listens": (
        lambda c: server(c).update(server="https://127.0.0.1:9"),
        "cannot be reached (Connection refused)",
    ),
    "a token that is not valid": (
        lambda c: (user(c).clear(), user(c).update(token="nonsense")),
        "its credentials are not valid there",
    ),
    "another authority": (
        lambda c: server(c).update({"insecure-skip-tls-verify": False,
                                    "certificate-authority-data": other_authority()}),
        "cannot be reached (",
    ),
    "no kubeconfig at all": (lambda c: c.clear(), "is no"),
    "a context that is a word": (
        lambda c: c["contexts"][0].update(context="word"),
        "is no usable kubeconfig",
    ),
}  # fmt: skip


def other_authority():
    return base64.b64encode(made_certificate("other")[0]).decode()


def made_certificate(name, authority=None):
    """A certificate and its key, by openssl: its own, or an authority's that ended yesterday."""
    with tempfile.TemporaryDirectory(prefix="dk-cert-") as folder:
        key, asked, made = (f"{folder}/{part}" for part in ("key", "asked", "made"))
        new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
               "-nodes", "-subj", f"/O=system:masters/CN={name}", "-keyout", key,
               "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
        if authority is None:
            lines = [[*new, "-x509", "-days", "1", "-out", made]]
        else:
            sign = ["openssl", "x509", "-req", "-in", asked, "-CA", f"{authority}.crt",
                    "-CAkey", f"{authority}.key", "-set_serial", "7", "-days", "-1",
                    "-copy_extensions", "copy", "-out", made]  # fmt: skip
            lines = [[*new, "-out", asked], sign]
        for line in lines:
            subprocess.run(line, check=True, capture_output=True)
        return Path(made).read_bytes(), Path(key).read_bytes()


@pytest.mark.parametrize("what", KUBECONFIGS)
def test_a_kubeconfig_of_no_use_is_told_in_one_line(site, out, what):
    change, said = KUBECONFIGS[what]
    path = changed(site, f"{out}.kubeconfig", change)
    found = refused(site, out, kubeconfig=path)
    assert said in found
    assert path in found


def test_an_expired_certificate_is_named_with_its_day(site, out):
    certificate, key = made_certificate("late", Path(site.kubeconfig).parent / "pki/ca")

    def change(content):
        user(content).clear()
        user(content)["client-certificate-data"] = base64.b64encode(certificate).decode()
        user(content)["client-key-data"] = base64.b64encode(key).decode()

    found = refused(site, out, kubeconfig=changed(site, f"{out}.kubeconfig", change))
    assert re.search(r"its certificate expired on \d{4}-\d\d-\d\d; ", found)


def test_a_server_whose_certificate_has_expired_is_its_administrators_to_mend(site, out, tmp_path):
    parts = made_certificate("late", Path(site.kubeconfig).parent / "pki/ca")
    (tmp_path / "both").write_bytes(b"".join(parts))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both")
    late = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    late.socket = context.wrap_socket(late.socket, server_side=True)
    threading.Thread(target=late.serve_forever, daemon=True).start()
    address = f"https://127.0.0.1:{late.server_address[1]}"
    path = changed(site, f"{out}.kubeconfig", lambda c: server(c).update(server=address))
    found = refused(site, out, kubeconfig=path)
    late.shutdown()
    assert f"the certificate of {address} has expired; its administrator renews it" in found


def test_a_server_that_is_too_old_is_refused(site, out):
    class Old(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = json.dumps({"major": "1", "minor": "31+"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    old = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Old)
    threading.Thread(target=old.serve_forever, daemon=True).start()
    path = changed(site, f"{out}.kubeconfig", lambda c: server(c).update(
        server=f"http://127.0.0.1:{old.server_address[1]}"))  # fmt: skip
    found = refused(site, out, kubeconfig=path)
    old.shutdown()
    assert "is Kubernetes 1.31; pods can be resized in place from 1.33 on" in found


def test_a_user_without_rights_is_told_what_an_administrator_types(site, out):
    site.machine.kubectl(site.made, "create", "serviceaccount", "nobody")
    token = site.machine.kubectl(site.made, "create", "token", "nobody").strip()
    path = changed(
        site, f"{out}.kubeconfig", lambda c: (user(c).clear(), user(c).update(token=token))
    )
    found = refused(site, out, kubeconfig=path)
    assert "kubectl apply -k " in found
    assert "operator-manifests" in found


FORBIDDEN = (
    "create pods", "create pods/exec", "create deployments.apps", "create roles",
    "escalate roles", "bind clusterroles", "create serviceaccounts/token", "impersonate users",
    "patch resourcequotas", "patch nodes", "create namespaces", "patch mutatingadmissionpolicies",
    "get secrets -n kube-system", "create jobs -n default", "patch pods/resize -n default",
)  # fmt: skip


def test_the_service_account_may_do_what_a_run_needs_and_nothing_else(site, out):
    token = site.kubectl("create", "token", "dovetail-controller").strip()
    path = changed(
        site, f"{out}.kubeconfig", lambda c: (user(c).clear(), user(c).update(token=token))
    )
    real, site.kubeconfig = site.kubeconfig, path
    try:
        run = site.start(site.plan(site.busy(10, 30, iterations=200, count=2)), out)
        assert site.end(run) == 0, site.errors(out)
    finally:
        site.kubeconfig = real
    assert set(site.states(out).values()) == {"done"}
    account = f"--as=system:serviceaccount:{manifests.NAMESPACE}:dovetail-controller"
    asked = {what: site.kubectl("auth", "can-i", *what.split(), account, check=False).strip()
             for what in ("create jobs", *FORBIDDEN)}  # fmt: skip
    assert asked == {"create jobs": "yes", **dict.fromkeys(FORBIDDEN, "no")}


PLANS = {
    "more memory than there is": ({"memory": "900G"}, {}, "MiB of memory"),
    "more cores than there are": ({}, {"cpus": 64}, "cpus: 64000m are more than"),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_plan_that_is_too_large_is_refused_before_anything_starts(site, out, what):
    entry, limits, said = PLANS[what]
    plan = site.plan({**site.busy(10, 10), **entry}, **limits)
    assert said in refused(site, out, plan=plan)


def test_a_second_run_on_a_busy_cluster_is_refused(site, out):
    run = running(site, out, two(site))
    assert "this cluster is used by run" in refused(site, out + "-second")
    assert site.end(run, signal.SIGINT) == 130


def test_a_network_that_the_cluster_has_not_is_told_before_anything_starts(site, out):
    said = refused(site, out, "--network", "bridge")
    assert f"{site.kubeconfig}: takes no pods of simulations: " in said
    assert "the pods of this cluster have no network but the machine's" in said
