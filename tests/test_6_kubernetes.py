# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 6, resize: shares of pods on the real cluster, seen on disk, and resizes that fail.

The executor is driven here without a controller, so that every share is known.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path

import kuberun
import pytest
from clusters import LIMIT, pod
from dovetail import core, manifests
from dovetail.errors import BadInput
from dovetail.executors import cluster
from dovetail.executors.kubernetes import KubernetesExecutor

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def site(binaries):
    """As whoever runs the tests, because the executor runs in their process."""
    found = kuberun.made(binaries, os.getuid() != 0, "--cpus", "1")
    yield found
    found.close()


class Driver:
    """An executor, and all that it said."""

    def __init__(self, site, name):
        self.site = site
        self.out = site.folder / name
        self.out.mkdir()
        self.begun = time.monotonic()
        api = cluster.connect(Path(site.kubeconfig))
        self.session = cluster.Session(api, self.out, self.specs(), False)
        self.executor = KubernetesExecutor(self.session, self.out)
        self.events = []

    def specs(self, **more):
        entry = self.site.busy(5, 5)
        case = str(self.site.case)
        return [
            core.Spec(name, "sim", case, 2, (1.0, 1.0), tuple(entry["command"]), **more)
            for name in ("one", "two")
        ]

    def launch(self, spec, *requests):
        self.executor.launch(spec, core.Share(tuple(requests)))

    def until(self, question, limit=2 * LIMIT):
        deadline = time.monotonic() + limit
        while not (answer := question()):
            assert time.monotonic() < deadline, (self.events[-5:], self.site.pods())
            self.executor.wait(0.25)
            self.events += self.executor.observe(time.monotonic() - self.begun)
        return answer

    def of(self, kind, name=""):
        return [e for e in self.events if isinstance(e, kind) and (not name or e.name == name)]

    def until_started(self, name):
        return self.until(lambda: self.of(core.Started, name))

    def resize(self, **shares):
        before = len(self.of(core.Resized))
        self.executor.resize(shares)
        self.until(lambda: len(self.of(core.Resized)) > before)
        return self.of(core.Resized)[-1].refused

    def weights(self, name):
        """What is on disk for each rank group, in their order: shares or weight."""
        found = {}
        for thing in self.site.pods(name):
            index = int(thing["metadata"]["labels"][manifests.INDEX])
            top = Path(f"/sys/fs/cgroup/cpu{self.site.made['group']}")
            group = next(top.rglob(f"pod{thing['metadata']['uid']}"))
            file = group / "cpu.shares"
            found[index] = int((file if file.exists() else group / "cpu.weight").read_text())
        return [found[index] for index in sorted(found)]

    def identities(self, name):
        def known():  # a kubelet may tell of a container after its processes have told us
            states = [one["status"]["containerStatuses"][0] for one in self.site.pods(name)]
            return all("containerID" in one for one in states) and sorted(
                (one["containerID"], one["restartCount"]) for one in states
            )

        return self.until(known)


@pytest.fixture
def driver(site, request):
    made = Driver(site, request.node.name[:30].replace("[", "-"))
    yield made
    made.executor.close()
    site.nothing_left()


def shares(*requests, **more):
    return core.Share(tuple(requests), **more)


def test_each_pod_is_born_with_its_own_request_and_resized_without_a_restart(driver):
    spec, _ = driver.specs(ranks_per_group=1)
    driver.launch(spec, 150, 450)
    driver.until_started("one")
    light, heavy = driver.weights("one")
    assert heavy / light == pytest.approx(3, rel=0.05)
    before = driver.identities("one")
    assert driver.resize(one=shares(450, 150)) == ""
    driver.until(lambda: driver.weights("one") == [heavy, light])
    assert driver.identities("one") == before
    assert {one["status"]["qosClass"] for one in driver.site.pods("one")} == {"Burstable"}
    rows = driver.until(lambda: status(driver.out, [heavy, light]))
    for row in rows:
        assert row["real"] == pytest.approx(row["wanted"], abs=0.01)


def status(out, values):
    """The rows of the status file, once they have these values."""
    path = out / "status.json"
    rows = json.loads(path.read_text())["groups"] if path.exists() else []
    return rows if [row["value"] for row in rows] == values else None


def test_pods_that_the_policy_missed_are_resized_after_birth(driver):
    driver.site.kubectl("delete", "mutatingadmissionpolicybinding", "dovetail-requests")
    try:
        spec, _ = driver.specs(ranks_per_group=1)
        driver.launch(spec, 150, 450)
        driver.until_started("one")
        driver.until(lambda: driver.weights("one")[1] > 2.8 * driver.weights("one")[0])
    finally:
        cluster.install(driver.session.api)


def test_a_resize_beyond_the_node_is_taken_back_as_a_whole(driver):
    spec, _ = driver.specs(ranks_per_group=1)
    driver.launch(spec, 600, 200)
    driver.until_started("one")
    # The admission policy, just made anew, may have missed them at birth.
    driver.until(lambda: driver.weights("one")[0] > 2.8 * driver.weights("one")[1])
    before, pods = driver.weights("one"), driver.identities("one")
    why = driver.resize(one=shares(100, 50_000))
    # By its node, by a newer API server, or too slow on a machine that is busy with other things.
    assert "Infeasible" in why or "allocatable" in why or "not done after" in why
    driver.until(lambda: driver.weights("one") == before)
    assert driver.identities("one") == pods


def test_a_resize_that_finds_no_room_in_time_is_taken_back(driver):
    spec, _ = driver.specs(ranks_per_group=1)
    driver.launch(spec, 200, 200)
    driver.until_started("one")
    before = driver.weights("one")
    driver.site.kubectl("apply", "-f", "-", text=pod("filler", "exec sleep 1000", "450m"))
    driver.site.kubectl("wait", "--for=condition=Ready", "pod/filler", f"--timeout={LIMIT}s")
    assert "Deferred" in driver.resize(one=shares(100, 700))
    driver.until(lambda: driver.weights("one") == before)
    driver.site.kubectl("delete", "pod", "filler", "--now")
    assert driver.resize(one=shares(100, 700)) == "", "once there is room it is done"


def test_a_quota_holds_up_launches_and_refuses_resizes(driver):
    site = driver.site
    one, two = driver.specs()
    driver.launch(one, 100, 100)
    driver.until_started("one")
    before = driver.weights("one")
    quota(site, "0.3")
    try:
        assert "exceeded quota" in driver.resize(one=shares(300, 300))
        assert driver.weights("one") == before
        driver.launch(two, 200, 200)
        told = driver.until(lambda: driver.of(core.Delayed, "two"))
        assert "quota dovetail has" in told[0].why
    finally:
        quota(site, "100000")
    driver.until_started("two")


def quota(site, cpu):
    """Set the quota, and wait until it counts."""
    change = {"spec": {"hard": {"requests.cpu": cpu}}}
    site.kubectl("patch", "resourcequota", "dovetail", "--patch", json.dumps(change))
    assert kuberun.eventually(
        lambda: site.get("resourcequota", "dovetail")["status"]["hard"]["requests.cpu"]
        == ("300m" if cpu == "0.3" else "100k")
    )


def test_what_does_not_fit_waits_and_says_why_and_can_be_stopped(driver):
    one, two = driver.specs()
    driver.launch(one, 400, 400)
    driver.until_started("one")
    driver.launch(two, 200, 200)
    told = driver.until(lambda: driver.of(core.Delayed, "two"))
    assert "asks for 392m of CPU" in told[0].why
    driver.executor.stop("two", "enough")
    (end,) = driver.until(lambda: driver.of(core.Finished, "two"))
    assert (end.code, end.reason) == (143, "stopped: enough")
    assert driver.of(core.Started, "two") == []


def test_ranks_are_frozen_and_go_on_in_pods(driver):
    spec, _ = driver.specs()
    driver.launch(spec, 100, 100)
    driver.until_started("one")

    def iterations():
        seen = driver.of(core.Sampled, "one")
        return min(seen[-1].ranks.iterations) if seen else 0

    driver.until(lambda: iterations() > 5)
    assert driver.resize(one=shares(10, 10, frozen=True)) == ""
    time.sleep(1.0)  # that nothing happens can only be seen by waiting
    driver.until(lambda: True)
    still = iterations()
    time.sleep(1.0)
    driver.until(lambda: True)
    assert iterations() <= still + 1
    assert driver.resize(one=shares(100, 100)) == ""
    driver.until(lambda: iterations() > still + 5)


def test_an_image_that_is_missing_fails_the_simulation_with_its_name(driver, monkeypatch):
    lacking = functools.partial(manifests.job, image="localhost/dovetail/none:1")
    monkeypatch.setattr(manifests, "job", lacking)
    spec, _ = driver.specs()
    driver.launch(spec, 100, 100)
    (end,) = driver.until(lambda: driver.of(core.Finished, "one"))
    assert end.reason.startswith("image localhost/dovetail/none:1 is not on node")


def test_a_pod_that_is_deleted_ends_its_simulation_alone(driver):
    one, two = driver.specs()
    for spec in (one, two):
        driver.launch(spec, 100, 100)
        driver.until_started(spec.name)
    (victim,) = driver.site.pods("one")
    driver.site.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false")
    (end,) = driver.until(lambda: driver.of(core.Finished, "one"))
    assert end.reason.startswith("pod lost")
    assert driver.of(core.Finished, "two") == []


def test_a_second_controller_is_refused(driver):
    with pytest.raises(BadInput, match=f"is used by run {driver.session.run} on "):
        Driver(driver.site, "second")
    spec, _ = driver.specs()
    driver.launch(spec, 100, 100)
    driver.until_started("one")
