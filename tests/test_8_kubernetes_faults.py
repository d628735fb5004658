# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 8: runs on a cluster that goes wrong: every simulation ends done, or failed with a reason.

Parts of the cluster are killed and come back; the API misbehaves, by a proxy in between; the
controller dies and is resumed; bad input is told before anything starts.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import json
import os
import random
import re
import signal
import ssl
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import kuberun
import pytest
import yaml
from clusters import eventually
from dovetail import replay

pytestmark = pytest.mark.kube
PARTS = ("kubelet", "containerd", "kube-apiserver", "kube-scheduler", "etcd",
         "kube-controller-manager")  # fmt: skip


@pytest.fixture(scope="module")
def site(binaries):
    """As an ordinary user where that is possible."""
    rootless = os.getuid() != 0 or not kuberun.WHY_NOT
    found = kuberun.made(binaries, rootless)
    yield found
    found.close()


@pytest.fixture
def out(site, request):
    """A name for a run's directory; afterwards nothing of the run is left."""
    yield f"{request.node.name.split('[')[0][5:35]}-{len(site.runs)}"
    for run in site.runs:
        if run.poll() is None:
            site.end(run, signal.SIGTERM)
    site.nothing_left()


def two(site, **more):
    """A plan of two simulations that fit beside each other and never end by themselves."""
    return site.plan(site.busy(20, 30, count=2, **more))


def running(site, out, plan, *words, **environment):
    run = site.start(plan, out, *words, **environment)
    site.until(lambda: run.poll() is not None or len(site.of("Started", out)) == 2, out)
    assert run.poll() is None, site.errors(out)
    site.until_iterating("sim-1", "sim-2", out=out)
    return run


def containers(site):
    states = [one["status"]["containerStatuses"][0] for one in site.pods()]
    return sorted((one["containerID"], one["restartCount"]) for one in states)


def check_log(site, out):
    """The log replays to the same decisions."""
    assert replay.replay(site.folder / out / "events.jsonl") is None


def test_parts_of_the_cluster_that_are_killed_in_mid_run_disturb_no_simulation(site, out):
    run = running(site, out, two(site, iterations=2000))
    before = containers(site)
    for part in PARTS:
        (old,) = site.machine.pids(site.made, part)
        os.kill(old, signal.SIGKILL)
        site.until_iterating("sim-1", "sim-2", out=out)
        assert eventually(lambda: site.machine.pids(site.made, part) not in ([], [old])), part  # noqa: B023
        assert eventually(lambda: site.kubectl("get", "--raw", "/readyz", check=False))
    site.until_iterating("sim-1", "sim-2", out=out)
    assert containers(site) == before, "no container was restarted"
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert {one["restarts"] for one in site.summary(out)["simulations"]} == {0}
    check_log(site, out)


def test_a_killed_controller_is_resumed_and_adopts_what_runs(site, out):
    plan = two(site, iterations=1500)
    run = running(site, out, plan)
    before = containers(site)
    run.kill()
    site.end(run)
    have = site.iterations("sim-1", out)
    run = site.start(plan, out, "--resume")
    site.until_iterating("sim-1", "sim-2", out=out)
    assert containers(site) == before
    assert site.iterations("sim-1", out) > have
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert {one["restarts"] for one in site.summary(out)["simulations"]} == {0}
    starts = [one["name"] for one in site.of("Started", out)]
    assert sorted(starts) == ["sim-1", "sim-2"], "nothing ran twice"
    check_log(site, out)


def test_what_ended_while_the_controller_was_dead_is_not_run_again(site, out):
    plan = two(site, iterations=200)
    run = running(site, out, plan)
    run.kill()
    site.end(run)
    label = "dovetail/part=rank-group"
    time.sleep(10)  # both come to their end, and wait there to be heard
    assert len(site.get("pods", "-l", label)["items"]) == 2
    run = site.start(plan, out, "--resume")
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert len(site.of("Started", out)) == 2


def test_simulations_whose_controller_never_comes_back_are_ended(site, out):
    plan = two(site)
    run = running(site, out, plan, DOVETAIL_ORPHAN_S="5")
    run.kill()
    site.end(run)
    gone = lambda: all(one["status"]["phase"] in ("Failed", "Succeeded") for one in site.pods())  # noqa: E731
    assert eventually(gone), site.pods()
    run = site.start(site.plan(site.busy(10, 10, iterations=20)), out + "-next")
    assert site.end(run) == 0, site.errors(out + "-next")
    run = site.start(site.plan(site.busy(10, 10, iterations=20)), out + "-last")
    assert site.end(run) == 0, site.errors(out + "-last")


def test_a_deleted_pod_sends_its_simulation_back_to_the_queue(site, out):
    run = running(site, out, two(site, iterations=600))
    (victim,) = site.pods("sim-1")
    site.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false")
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    restarts = {one["name"]: one["restarts"] for one in site.summary(out)["simulations"]}
    assert restarts == {"sim-1": 1, "sim-2": 0}
    (lost,) = [one for one in site.of("Finished", out) if one["reason"]]
    assert lost["reason"].startswith("pod lost")
    check_log(site, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_pods_and_writes_the_summary(site, out, number):
    run = running(site, out, two(site))
    assert site.end(run, number) == 130
    assert set(site.states(out).values()) == {"failed"}
    assert "interrupted by" in site.summary(out)["simulations"][0]["reason"]


# --- an API that misbehaves ---


class Proxy(http.server.ThreadingHTTPServer):
    """Between the controller and the API: plain HTTP here, and faults as `rate` says."""

    daemon_threads = True

    def __init__(self, kubeconfig):
        super().__init__(("127.0.0.1", 0), Handler)
        content = yaml.safe_load(Path(kubeconfig).read_text())
        folder = Path(kubeconfig).parent
        self.upstream = urlsplit(content["clusters"][0]["cluster"]["server"])
        self.context = ssl.create_default_context(cafile=str(folder / "pki/ca.crt"))
        self.context.load_cert_chain(folder / "pki/admin.crt", folder / "pki/admin.key")
        self.random = random.Random(7)
        self.rate = 0.0
        self.done: dict[str, int] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def kubeconfig(self, path):
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {
                "server": f"http://127.0.0.1:{self.server_address[1]}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        path.write_text(json.dumps(content))
        return str(path)


FAULTS = {
    "busy": (429, "TooManyRequests"),
    "broken": (500, "InternalError"),
    "conflict": (409, "Conflict"),
    "silent": (0, ""),
    "lost": (0, ""),
}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        draw, proxy = self.server.random.random(), self.server
        fault = proxy.random.choice(list(FAULTS)) if draw < proxy.rate else ""
        if fault:
            proxy.done[fault] = proxy.done.get(fault, 0) + 1
        if fault == "silent":  # nothing is done, and nobody answers
            time.sleep(12)
            self.close_connection = True
            return
        if fault and FAULTS[fault][0]:
            code, reason = FAULTS[fault]
            self.reply(code, json.dumps({"kind": "Status", "code": code, "reason": reason,
                                         "message": f"injected {fault}"}).encode())  # fmt: skip
            return
        link = http.client.HTTPSConnection(
            proxy.upstream.hostname, proxy.upstream.port, context=proxy.context
        )
        with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
            kind = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            link.request(self.command, self.path, body or None, kind)
            answer = link.getresponse()
            if "watch=1" in self.path:
                return self.stream(answer)
            text = answer.read()
            if fault == "lost":  # it was done, and the answer is lost
                self.close_connection = True
                return
            self.reply(answer.status, text)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = forward

    def reply(self, code, text):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self, answer):
        self.send_response(answer.status)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while chunk := answer.read1(65536):
            self.wfile.write(chunk)
            self.wfile.flush()
            if self.server.random.random() < self.server.rate:
                return  # watches break too


def test_an_api_that_answers_with_errors_or_not_at_all_is_outlasted(site, out):
    proxy = Proxy(site.kubeconfig)
    real, site.kubeconfig = site.kubeconfig, proxy.kubeconfig(site.folder / "proxy")
    Path(site.kubeconfig).chmod(0o644)
    try:
        run = site.start(site.plan(site.busy(20, 30, count=3, iterations=200)), out)
        site.until(lambda: site.of("Launch", out), out)
        proxy.rate = 0.15
        assert site.end(run) == 0, site.errors(out)
    finally:
        site.kubeconfig = real
        proxy.shutdown()
        proxy.server_close()
    assert set(site.states(out).values()) == {"done"}
    assert len(site.of("Started", out)) == 3, "nothing ran twice"
    assert sum(proxy.done.values()) >= 5, proxy.done
    check_log(site, out)


# --- bad input ---


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
}  # fmt: skip


def other_authority():
    return base64.b64encode(made_certificate("other")[0]).decode()


def made_certificate(name, authority=None):
    """A certificate and its key, by openssl: its own, or an authority's that ended yesterday."""
    with tempfile.TemporaryDirectory(prefix="dk-cert-") as folder:
        key, asked, made = (f"{folder}/{part}" for part in ("key", "asked", "made"))
        new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
               "-nodes", "-subj", f"/O=system:masters/CN={name}", "-keyout", key]  # fmt: skip
        if authority is None:
            lines = [[*new, "-x509", "-days", "1", "-out", made]]
        else:
            sign = ["openssl", "x509", "-req", "-in", asked, "-CA", f"{authority}.crt",
                    "-CAkey", f"{authority}.key", "-set_serial", "7", "-days", "-1",
                    "-out", made]  # fmt: skip
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


def test_the_service_account_may_do_all_that_a_run_needs(site, out):
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
