# SPDX-License-Identifier: LGPL-3.0-or-later
"""A MiniCluster does all that a Job does.

Whole runs by `dovetail run`, as an ordinary user where that is possible. See `fluxoperator`.
"""

from __future__ import annotations

import base64
import json
import re
import signal
from pathlib import Path

import pytest
import yaml
from dovetail.executors.kubernetes import manifests
from dovetail.run import resume
from support import cluster_checkpoints
from support.cluster_checkpoints import (
    installed,
    lammps_stops_and_goes_on,
    stops_and_goes_on,
)
from support.cluster_runs import TOP, containers, ends, running, two
from support.clusters import ROOT
from support.flux_operator import with_operator
from support.other_users import WHY_NOT

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def site(binaries):
    # Every user may open it, and clusters of other tests may offer it too.
    yield from with_operator(binaries, not ROOT or not WHY_NOT, "--devices", "/dev/null=4")


def became_miniclusters(site, out):
    """They, and not Jobs."""
    assert site.summary(out)["versions"]["launcher"].startswith("MiniClusters")


def as_service_account(site):
    """A kubeconfig that may do what operator-manifests/access.yaml says, once that is there."""
    site.kubectl("apply", "-k", str(TOP / "operator-manifests"))
    content = yaml.safe_load(Path(site.kubeconfig).read_text())
    token = site.kubectl("create", "token", "dovetail-controller").strip()
    content["users"][0]["user"] = {"token": token}
    path = site.folder / "service-account"
    path.write_text(json.dumps(content))
    path.chmod(0o644)
    return str(path)


def test_a_run_becomes_miniclusters_several_pods_on_a_node_and_is_packed(site, out):
    file, waiting = ends(site, out)
    devices = {"devices": {"/dev/null": 1}}
    run = running(site, out, two(site, ranks_per_pod=1, **devices, **waiting))
    assert "simulations become MiniClusters of the Flux Operator" in site.errors(out)
    jobs = [one["metadata"] for one in site.get("jobs")["items"]]
    assert {one["ownerReferences"][0]["kind"] for one in jobs} == {"MiniCluster"}
    found = site.pods()
    assert len(found) == 4
    for one in found:
        parts = one["spec"]["containers"] + one["spec"]["initContainers"]
        assert {part["image"] for part in parts} == {manifests.IMAGE}, "nothing was pulled"
        assert one["status"]["qosClass"] == "Burstable"
        limits = one["spec"]["containers"][0]["resources"]["limits"]
        assert limits == {"dovetail/dev.null": "1"}
    site.until(lambda: site.of("Resized", out), out)  # the requests follow the load
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert site.summary(out)["n_max"] == 2
    became_miniclusters(site, out)
    assert resume.replay(site.folder / out / "events.jsonl") is None


def test_the_service_account_may_do_all_that_it_takes(site, out):
    real, site.kubeconfig = site.kubeconfig, as_service_account(site)
    try:
        run = site.start(site.plan(site.busy(10, 30, iterations=100)), out)
        assert site.end(run) == 0, site.errors(out)
    finally:
        site.kubeconfig = real
    assert set(site.states(out).values()) == {"done"}


def test_the_certificate_is_in_no_log_and_no_object_but_its_secret(site, out):
    run = running(site, out, two(site, ranks_per_pod=1))
    (secret,) = [one for one in site.get("secrets")["items"] if "curve" in one["data"]]
    text = base64.b64decode(secret["data"]["curve"]).decode()
    (key,) = re.findall(r'secret-key = "(.{40})"', text)
    said = [site.operator.log.read_text(), site.kubectl("get", "-o", "yaml", ",".join(
        kind for kind in site.kinds if kind != "secrets"))]  # fmt: skip
    for one in site.pods():
        said.append(site.kubectl("logs", one["metadata"]["name"], "--all-containers"))
    assert all(said), "they say something"
    assert not [text for text in said if key in text]
    assert site.end(run, signal.SIGTERM) == 130


@installed
def test_it_stops_at_a_checkpoint_and_goes_on_there(site, out):
    stops_and_goes_on(site, out, ranks_per_pod=1)
    became_miniclusters(site, out)


def test_time_steps_of_lammps_go_on(site, out):
    lammps_stops_and_goes_on(site, out, ranks_per_pod=1)


def test_a_plan_with_images_is_refused_where_miniclusters_were_asked_for(site, out):
    plan = site.plan(site.busy(10, 10), site.busy(10, 10, name="other", image="localhost/a:1"))
    assert site.end(site.start(plan, out, "--launcher", "minicluster")) == 2
    assert "those of the plan that have images run as Jobs alone" in site.errors(out)
    # Else they become Jobs, if their image is of use.
    assert site.end(site.start(plan, out)) == 2
    assert "image localhost/a:1 cannot be pulled by node" in site.errors(out)


@installed
def test_the_last_one_is_widened_and_goes_on_on_fewer_ranks_in_the_next_run(site, out):
    cluster_checkpoints.is_widened_and_narrowed(site, out, ranks_per_pod=1)
    became_miniclusters(site, out)


@installed
def test_uneven_ranks_are_cut_anew(site, out):
    cluster_checkpoints.is_cut_anew(site, out, ranks_per_pod=1)
    became_miniclusters(site, out)


@pytest.mark.parametrize("victim", cluster_checkpoints.VICTIMS)
def test_a_pod_or_what_is_in_it_is_lost_as_its_simulation_stops(site, out, victim):
    """By default a pod; with `DOVETAIL_FAULTS=100` also each of its processes."""
    cluster_checkpoints.loses_as_it_stops(site, out, victim, ranks_per_pod=1)
    became_miniclusters(site, out)


def test_a_controller_is_killed_as_a_simulation_stops_for_more_ranks(site, out):
    cluster_checkpoints.is_killed_as_one_stops(site, out, ranks_per_pod=1)
    became_miniclusters(site, out)


def test_a_commands_exit_code_is_the_simulations(site, out):
    entry = {"ranks": 2, "ranks_per_pod": 1, "command": ["sh", "-c", "exit 7"]}
    run = site.start(site.plan(entry), out)
    assert site.end(run) == 1
    assert {one["code"] for one in site.of("Finished", out)} == {7}
    assert set(site.states(out).values()) == {"failed"}


@pytest.mark.parametrize("group", [0, 1])
def test_a_lost_pod_is_no_success_whichever_broker_it_had(site, out, group):
    file, waiting = ends(site, out)
    run = running(site, out, two(site, ranks_per_pod=1, **waiting))
    (victim,) = [one for one in site.pods("sim-1")
                 if one["metadata"]["labels"][manifests.INDEX] == str(group)]  # fmt: skip
    site.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false")
    site.until(lambda: site.of("Finished", out), out)
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    (lost,) = [one for one in site.of("Finished", out) if one["reason"]]
    assert lost["reason"].startswith("pod lost")
    assert lost["code"] != 0
    restarts = {one["name"]: one["restarts"] for one in site.summary(out)["simulations"]}
    assert restarts == {"sim-1": 1, "sim-2": 0}, "it ran once more, from its beginning"


def test_an_interrupt_ends_all_and_says_so(site, out):
    run = running(site, out, two(site, ranks_per_pod=1))
    assert site.end(run, signal.SIGINT) == 130
    assert set(site.states(out).values()) == {"failed"}


def test_a_killed_controller_is_resumed_and_adopts_what_runs(site, out):
    file, waiting = ends(site, out)
    plan = two(site, ranks_per_pod=1, **waiting)
    run = running(site, out, plan)
    before = containers(site)
    run.kill()
    site.end(run)
    run = site.start(plan, out, "--resume")
    site.until_iterating("sim-1", "sim-2", out=out)
    assert containers(site) == before
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert {one["restarts"] for one in site.summary(out)["simulations"]} == {0}
    assert sorted(one["name"] for one in site.of("Started", out)) == ["sim-1", "sim-2"]


def test_what_a_dead_run_left_is_removed_by_the_next(site, out):
    run = running(site, out, two(site, ranks_per_pod=1), DOVETAIL_ORPHAN_S="3")
    run.kill()
    site.end(run)
    ended = lambda: all(one["status"]["phase"] in ("Failed", "Succeeded") for one in site.pods())  # noqa: E731
    site.until(ended, out)
    for name in ("-next", "-last"):  # the lease is the dead run's until the first of them
        run = site.start(site.plan(site.busy(10, 10, iterations=20)), out + name)
        assert site.end(run) == 0, site.errors(out + name)
