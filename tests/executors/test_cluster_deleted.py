# SPDX-License-Identifier: LGPL-3.0-or-later
"""Somebody deletes what a run needs on its cluster: it says so, and has it again or ends."""

from __future__ import annotations

import json
import signal

import pytest
from dovetail.executors.kubernetes import manifests
from support.cluster_runs import ends, running, two
from support.clusters import LIMIT, pod

pytestmark = pytest.mark.kube

KINDS = ("resourcequota", "serviceaccount", "role", "rolebinding", "lease", "secret", "daemonset",
         "configmap", "priorityclass", "mutatingadmissionpolicy",
         "mutatingadmissionpolicybinding")  # fmt: skip


def told(site, out, words):
    """Wait until a run says this, in upper or lower case."""
    site.until(lambda: words.lower() in site.errors(out).lower(), out)


def test_what_somebody_deletes_in_mid_run_is_made_again_and_told(site, out):
    file, waiting = ends(site, out)
    run = running(site, out, two(site, **waiting))
    for kind in KINDS:
        ours = site.get(kind)["items"]
        names = [one["metadata"]["name"] for one in ours]
        name = next(one for one in names if one.startswith("dovetail"))
        site.kubectl("delete", kind, name)
        told(site, out, f"{kind} {name} was deleted; it was made again")
        assert site.kubectl("get", kind, name, "-o", "name").strip()
    site.until_iterating("sim-1", "sim-2", out=out)
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert {one["restarts"] for one in site.summary(out)["simulations"]} == {0}


def test_the_room_of_somebodys_pod_is_the_runs_once_that_has_ended(site, out):
    file, waiting = ends(site, out)
    there = ("-n", "default")
    site.kubectl(*there, "apply", "-f", "-", text=pod("another", "sleep 600", "300m"))
    site.kubectl(*there, "wait", "--for=condition=Ready", "pod/another", f"--timeout={LIMIT}s")
    run = running(site, out, two(site, **waiting))
    site.kubectl(*there, "delete", "pod", "another", "--now", "--wait=false")

    def offered():
        return [
            sum(n["cpu"] for n in one["capacity"]["nodes"])
            for one in site.of("CapacityChanged", out)
        ]

    header = json.loads((site.folder / out / "events.jsonl").read_text().split("\n")[0])
    before = sum(node["cpu"] for node in header["capacity"]["nodes"])
    site.until(lambda: offered()[-1:] == [before + 300], out)
    file.touch()
    assert site.end(run) == 0, site.errors(out)


def test_a_namespace_that_is_deleted_in_mid_run_is_made_again(site, out):
    file, waiting = ends(site, out)
    run = running(site, out, two(site, **waiting))
    site.kubectl("delete", "namespace", manifests.NAMESPACE, "--wait=false")
    told(site, out, "Namespace dovetail is being deleted, and all in it")
    told(site, out, "Namespace dovetail was deleted; it was made again")
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}


def test_the_second_signal_ends_a_run_whose_pods_never_go(site, out):
    run = running(site, out, two(site))
    pods = [one["metadata"]["name"] for one in site.pods()]
    hold = '{"metadata":{"finalizers":["example.org/for-ever"]}}'
    for name in pods:
        site.kubectl("patch", "pod", name, "--type=merge", "-p", hold)
    run.send_signal(signal.SIGTERM)
    site.until(lambda: site.of("Interrupted", out), out)
    try:
        assert site.end(run, signal.SIGTERM) == 130, site.errors(out)
        assert "was not waited for" in site.errors(out)
        assert {one["state"] for one in site.summary(out)["simulations"]} != {"done"}
    finally:
        for name in pods:
            site.kubectl("patch", "pod", name, "--type=merge", "-p",
                         '{"metadata":{"finalizers":null}}')  # fmt: skip
        next_run = site.start(site.plan(site.busy(10, 10, iterations=20)), out + "-next")
        assert site.end(next_run) == 0, site.errors(out + "-next")
