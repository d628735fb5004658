# SPDX-License-Identifier: LGPL-3.0-or-later
"""What simulations become where the Flux Operator is installed, and its manager does not run."""

from __future__ import annotations

import json

import pytest
from dovetail.executors.kubernetes.workload_kinds import _flux
from support.cluster_runs import two

pytestmark = pytest.mark.kube

DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "miniclusters.flux-framework.org"},
    "spec": {
        "group": "flux-framework.org", "scope": "Namespaced",
        "names": {"kind": "MiniCluster", "plural": "miniclusters", "singular": "minicluster",
                  "listKind": "MiniClusterList"},
        "versions": [{
            "name": "v1alpha2", "served": True, "storage": True,
            "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        }],
    },
}  # fmt: skip
"""The operator's, as far as it takes whatever we make."""


@pytest.fixture(scope="module")
def abandoned(site):
    """The site, with the definition and nobody who does anything about it."""
    if not (flux := _flux()):
        pytest.skip("there is no flux on this machine, so there are no MiniClusters")
    site.machine.environment["PATH"] += f":{flux}"
    site.kubectl("apply", "-f", "-", text=json.dumps(DEFINITION))
    site.kubectl("wait", "--for=condition=Established", "--all", "crd", "--timeout=30s")
    site.kinds = ("miniclusters", *site.kinds)
    return site


def test_without_the_definition_nobody_gets_miniclusters(site, out):
    run = site.start(site.plan(site.busy(10, 10)), out, "--launcher", "minicluster")
    assert site.end(run) == 2
    assert "MiniClusters: the Flux Operator is not installed there" in site.errors(out)


def test_simulations_become_jobs_and_start_at_once(abandoned, out):
    site = abandoned
    run = site.start(two(site, iterations=100), out)
    assert site.end(run) == 0, site.errors(out)
    first = site.errors(out).splitlines()[0]
    assert "become Jobs; the Flux Operator is there, but nobody makes pods" in first
    assert site.of("Delayed", out) == []
    assert set(site.states(out).values()) == {"done"}


def test_who_asks_for_miniclusters_is_told_before_anything_starts(abandoned, out):
    site = abandoned
    run = site.start(site.plan(site.busy(10, 10)), out, "--launcher", "minicluster")
    assert site.end(run) == 2
    assert "nobody makes pods of MiniClusters there" in site.errors(out)
    assert site.errors(out).count("\n") == 1
    assert not (site.folder / out / "events.jsonl").exists()


def test_who_asks_for_jobs_gets_them(abandoned, out):
    site = abandoned
    plan = site.plan(site.busy(10, 10, iterations=20))
    run = site.start(plan, out, "--launcher", "job")
    assert site.end(run) == 0, site.errors(out)
    assert "simulations become Jobs, as asked" in site.errors(out)
