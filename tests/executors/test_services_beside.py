# SPDX-License-Identifier: LGPL-3.0-or-later
"""A service beside packed simulations answers, and has the CPU that it asks for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import urllib.request
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.executors.kubernetes.placement import asked
from support import cluster_runs, flux_operator
from support.clusters import LIMIT, container_group, eventually, pod
from support.driven_executor import Driver, shares

pytestmark = pytest.mark.kube
WINDOWS, WINDOW = 4, 1.0  # looks, and seconds of CPU on one core that each lasts
PORT = 8080  # on the node's own address, which nobody else has


@pytest.fixture(scope="module")
def site(binaries):
    """One core, so that all that runs there wants the same one."""
    found = cluster_runs.made(binaries, os.getuid() != 0, "--cpus", "1")
    yield found
    found.close()


@pytest.fixture(params=["Job", "MiniCluster"])
def driver(site, request, monkeypatch):
    """Its simulations are of one kind; with the operator beside it, where that takes it."""
    with contextlib.ExitStack() as operator:
        if request.param == "MiniCluster":
            operator.enter_context(flux_operator.beside(site))
            monkeypatch.setenv("PATH", site.machine.environment["PATH"])  # it is of this process
        made = Driver(site, f"services-{request.param}")
        assert made.session.launcher.kind == request.param
        yield made
        made.executor.close()
        site.nothing_left()


@pytest.fixture
def service(site, driver):
    """A Deployment whose pod answers requests, and burns all the CPU that it gets besides."""
    address = site.made["node"]
    command = (
        "while :; do :; done & cd /usr/share && "
        f"exec /usr/bin/python3 -m http.server --bind {address} {PORT}"
    )
    template = json.loads(pod("service", command, "500m", priorityClassName="dovetail-service"))
    ports = [{"containerPort": PORT, "hostPort": PORT, "hostIP": address}]
    template["spec"]["containers"][0]["ports"] = ports
    thing = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "service"},
        "spec": {
            "selector": {"matchLabels": {"app": "service"}},
            "template": {"metadata": {"labels": {"app": "service"}}, "spec": template["spec"]},
        },
    }  # fmt: skip
    site.kubectl("apply", "-f", "-", text=json.dumps(thing))
    words = ("--for=condition=Available", "deployment/service", f"--timeout={LIMIT}s")
    site.kubectl("wait", *words)
    yield f"http://{address}:{PORT}/"
    site.kubectl("delete", "deployment", "service", "--now", "--wait=false")
    assert eventually(lambda: not site.get("pods", "-l", "app=service")["items"])


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=LIMIT) as answer:
            return answer.status == 200
    except OSError:
        return False


def used(site, things):
    """CPU seconds that pods have had."""
    files = [container_group(site.made, one, "cpuacct") / "cpuacct.usage" for one in things]
    return [int(Path(file).read_text()) / 1e9 for file in files]


@pytest.mark.alone
def test_a_service_answers_and_keeps_its_share_beside_packed_simulations(site, driver, service):
    simulations = [
        dataclasses.replace(spec, command=(spec.command[0], "burn", *spec.command[2:]))
        for spec in driver.specs()
    ]
    for spec in simulations:
        driver.launch(spec, 100, 100)
    for spec in simulations:
        driver.until_started(spec.name)
        driver.until(lambda: driver.of(protocol.Sampled, spec.name))  # noqa: B023
    (serving,) = site.get("pods", "-l", "app=service")["items"]
    assert eventually(lambda: answers(service))
    check_share(site, driver, service, serving)
    # What simulations ask for changes; what the service has changes with it.
    assert driver.resize(one=shares(200, 40), two=shares(40, 200)) == ""
    check_share(site, driver, service, serving)
    (now,) = site.get("pods", "-l", "app=service")["items"]
    before, after = (one["status"]["containerStatuses"][0] for one in (serving, now))
    assert (after["restartCount"], after["containerID"]) == (0, before["containerID"])
    assert {one.name for one in driver.of(protocol.Finished)} == set(), "nobody was put out"


def check_share(site, driver, url, serving):
    """For a while it answers, and gets its part of the CPU by what all ask for."""
    things = [serving, *site.pods()]
    requests = [asked({"spec": one["spec"]})[0] for one in things]
    assert len(things) == 3
    before = used(site, things)
    for number in range(1, WINDOWS + 1):
        aim = sum(before) + number * WINDOW
        driver.until(lambda: sum(used(site, things)) > aim)  # noqa: B023
        assert answers(url)
    had = [now - then for now, then in zip(used(site, things), before)]
    share, due = had[0] / sum(had), requests[0] / sum(requests)
    assert share == pytest.approx(due, rel=0.15), (had, requests)
