# SPDX-License-Identifier: LGPL-3.0-or-later
"""Shares of pods on the real cluster, seen on disk, and resizes that fail.

The executor is driven here without a controller, so that every share is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from dovetail.core import protocol
from dovetail.core.errors import BadInput
from dovetail.executors.kubernetes import manifests, placement, session
from dovetail.executors.kubernetes.api import Api
from dovetail.executors.kubernetes.nodes import Nodes
from dovetail.run.metrics import Metrics
from support import cluster_runs
from support.clusters import LIMIT, pod
from support.driven_executor import Driver, shares
from support.faulty_proxy import Proxy
from usernetes_setup.node import cgroups

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def site(binaries):
    """As whoever runs the tests, because the executor runs in their process."""
    found = cluster_runs.made(binaries, os.getuid() != 0, "--cpus", "1")
    yield found
    found.close()


def test_each_pod_is_born_with_its_own_request_and_resized_without_a_restart(driver):
    spec, _ = driver.specs(ranks_per_pod=1)
    driver.launch(spec, 150, 450)
    driver.until_started("one")

    def apart():  # a pod that the policy came too late for is corrected
        light, heavy = driver.weights("one")
        return heavy / light == pytest.approx(3, rel=0.05) and (light, heavy)

    light, heavy = driver.until(apart)
    before = driver.identities("one")
    assert driver.resize(one=shares(450, 150)) == ""
    driver.until(lambda: driver.weights("one") == [heavy, light])
    assert driver.identities("one") == before
    pods = driver.site.pods("one")
    assert {one["status"]["qosClass"] for one in pods} == {"Burstable"}
    for one in pods:
        driver.until(lambda: made_anew(driver.site, one) == placement.asked(one)[0])  # noqa: B023

    def as_wanted():  # the node's answer may come before what was asked for is noted
        rows = status(driver.out, [heavy, light]) or []
        near = [row["real"] == pytest.approx(row["wanted"], abs=0.01) for row in rows]
        return all(near) and rows

    rows = driver.until(as_wanted)
    shown = cli("status", str(driver.out)).splitlines()
    weight = "cpu.weight" if cgroups.unified() else "cpu.shares"
    for row in rows:
        cells = ["one", driver.site.made["node"], f"{row['cpu']}m", f"{weight} {row['value']}"]
        assert any(all(cell in line for cell in cells) for line in shown), shown
    assert json.loads(cli("status", "--json", str(driver.out)))["groups"] == rows
    metrics = Metrics(driver.out, protocol.Capacity(())).render().decode()
    for row in rows:
        first, last = row["ranks"]
        of = f'{{node="{row["node"]}",ranks="{first}-{last}",simulation="one"}}'
        assert f"dovetail_share_wanted_ratio{of} {row['wanted']}\n" in metrics
        assert f"dovetail_share_real_ratio{of} {row['real']}\n" in metrics


def test_a_simulation_whose_place_is_found_during_a_resize_has_its_part_of_it(driver):
    one, two = driver.specs(ranks_per_pod=1)
    driver.launch(one, 100, 200)
    driver.until_started("one")
    driver.launch(two, 100, 100)
    driver.look()  # from now on its place is sought
    assert driver.resize(one=shares(200, 100), two=shares(50, 150)) == ""
    driver.until_started("two")

    def asked():
        return [placement.asked(one)[0] for one in driver.site.pods("two")]

    driver.until(lambda: max(asked()) / min(asked()) == pytest.approx(3, rel=0.05))
    assert driver.resize(one=shares(100, 100), two=shares(60, 60)) == ""
    assert len(set(asked())) == 1


def made_anew(site, pod):
    """The CPU that a pod would ask for if it were made once more now."""
    meta = {"name": "again", "labels": pod["metadata"]["labels"]}
    ask = {"requests": {"cpu": "1m", "memory": "1Mi"}}
    containers = [{"name": "main", "image": manifests.IMAGE, "resources": ask}]
    spec = {"hostNetwork": True, "containers": containers}
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    words = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    return placement.asked(json.loads(site.kubectl(*words, text=json.dumps(made))))[0]


def cli(*words):
    """What the command prints."""
    line = [sys.executable, "-m", "dovetail", *words]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.check_output(line, env=environment, text=True)


def test_a_light_rank_group_leaves_the_node_that_the_heavy_one_needs(driver, worker):
    (first, _), (_, second) = driver.specs(), driver.specs(ranks_per_pod=1)
    driver.launch(first, 250, 250)
    driver.until_started("one")
    (busy,) = (one["spec"]["nodeName"] for one in driver.site.pods("one"))
    driver.until(lambda: len(driver.executor.capacity().nodes) == 2)
    driver.launch(second, 300, 700)  # the emptier node would do for either, and not for both
    driver.until_started("two")
    pods = sorted(driver.site.pods("two"), key=lambda one: one["metadata"]["name"])
    light, heavy = (one["spec"]["nodeName"] for one in pods)
    assert light == busy != heavy
    assert pods[0]["metadata"]["labels"][manifests.KEY] == "two", "at the first try"


def status(out, values):
    """The rows of the status file, once they have these values."""
    path = out / "status.json"
    rows = json.loads(path.read_text())["groups"] if path.exists() else []
    return rows if [row["value"] for row in rows] == values else None


@pytest.fixture
def older(site):
    """The way to a second API server of the same cluster, without admission policies.

    So servers are before 1.36. The policies of the first, which makes the pods, are deleted.
    """
    (first,) = site.machine.pids(site.made, "kube-apiserver")
    line = Path(f"/proc/{first}/cmdline").read_text().split("\0")[:-1]
    server = urlsplit(site.made["server"])
    with socket.create_server((server.hostname, 0)) as probe:
        port = probe.getsockname()[1]
    off = [f"{manifests.path(kind)[6:]}=false" for kind in sorted(manifests.POLICIES)]
    more = [f"--secure-port={port}", f"--runtime-config={','.join(off)}",
            "--disable-admission-plugins=MutatingAdmissionPolicy"]  # fmt: skip
    program = str(site.machine.binaries / "bin/kube-apiserver")
    with (site.folder / "older.log").open("w") as log:
        second = subprocess.Popen([*line, *more], executable=program, stdout=log, stderr=log)
    real, site.kubeconfig = site.kubeconfig, str(site.folder / "older")
    text = Path(real).read_text().replace(site.made["server"], f"https://{server.hostname}:{port}")
    Path(site.kubeconfig).write_text(text)
    policies = ("mutatingadmissionpolicy,mutatingadmissionpolicybinding", "--all")
    try:
        assert cluster_runs.eventually(lambda: ready(site)), (site.folder / "older.log").read_text()
        site.kubectl("delete", *policies, "--ignore-not-found")
        yield
    finally:
        site.kubeconfig = real
        second.terminate()
        second.wait()
        session.install(session.connect(Path(real)))


def ready(site):
    with contextlib.suppress(BadInput):
        return session.connect(Path(site.kubeconfig))


def test_a_limit_follows_the_requests_where_the_plan_asks_for_one(driver):
    spec, _ = driver.specs(ranks_per_pod=1, limit=2.5)
    driver.launch(spec, 150, 450)
    driver.until_started("one")
    driver.until(lambda: driver.limits("one") == [375, 1125])
    before = driver.identities("one")
    assert driver.resize(one=shares(450, 20)) == ""
    driver.until(lambda: driver.limits("one") == [1125, 100])
    assert driver.resize(one=shares(450, 20, limit=3.0)) == "", "as in another phase of its plan"
    driver.until(lambda: driver.limits("one") == [1350, 100])
    assert driver.identities("one") == before
    assert driver.until(lambda: stopped(driver, 1450)).periods > 0, "its agent counts those"
    pods = driver.site.pods("one")
    assert {one["status"]["qosClass"] for one in pods} == {"Burstable"}
    for one in pods:
        asked = one["spec"]["containers"][0]["resources"]
        assert placement.millicores(asked["limits"]["cpu"]) >= 2.5 * placement.millicores(
            asked["requests"]["cpu"]
        )


def stopped(driver, limit):
    """What the limits have done, once the agent has seen these of all pods, and all ranks."""
    seen = [one.contention for one in driver.of(protocol.Counted, "one")][-1:]
    if not seen or not seen[0].throttling or len(seen[0].voluntary) < 2:
        return None
    return seen[0].throttling if seen[0].throttling.limit == limit else None


def test_on_a_server_without_admission_policies_pods_are_resized_after_birth(older, driver):
    assert "too old for admission policies" in str(driver.session.launcher)
    spec, _ = driver.specs(ranks_per_pod=1)
    driver.launch(spec, 150, 450)
    driver.until_started("one")
    driver.until(lambda: driver.weights("one")[1] > 2.8 * driver.weights("one")[0])
    assert driver.site.get("mutatingadmissionpolicies")["items"] == [], "nobody made them anew"


def test_a_resize_beyond_the_node_is_taken_back_as_a_whole(driver, monkeypatch):
    # As if the node had become smaller this moment: else nobody asks it for so much.
    monkeypatch.setattr(Nodes, "fitted", lambda self, node, wanted, taken: list(wanted))
    spec, _ = driver.specs(ranks_per_pod=1)
    driver.launch(spec, 600, 200)
    driver.until_started("one")
    # The admission policy, just made anew, may have missed them at birth.
    driver.until(lambda: driver.weights("one")[0] > 2.8 * driver.weights("one")[1])
    before, pods = driver.weights("one"), driver.identities("one")
    why = driver.resize(one=shares(100, 50_000))
    assert "Infeasible" in why or "allocatable" in why, "by its node, or a newer API server"
    driver.until(lambda: driver.weights("one") == before)
    assert driver.identities("one") == pods


def test_a_resize_that_finds_no_room_in_time_is_taken_back(driver):
    spec, _ = driver.specs(ranks_per_pod=1)
    driver.launch(spec, 200, 200)
    driver.until_started("one")
    before = driver.weights("one")
    driver.site.kubectl("apply", "-f", "-", text=pod("filler", "exec sleep 1000", "450m"))
    driver.site.kubectl("wait", "--for=condition=Ready", "pod/filler", f"--timeout={LIMIT}s")
    assert "Deferred" in driver.resize(one=shares(100, 700))
    driver.until(lambda: driver.weights("one") == before)
    driver.site.kubectl("delete", "pod", "filler", "--now")
    assert driver.resize(one=shares(100, 700)) == "", "once there is room it is done"


def test_a_pod_asks_for_the_memory_that_its_like_was_seen_to_need(driver, monkeypatch):
    monkeypatch.setattr(manifests, "LEAST_MEMORY", 1 << 20)
    one, two = driver.specs()
    driver.launch(one, 100, 100)
    driver.until(lambda: driver.of(protocol.Sampled, "one"))
    driver.launch(two, 100, 100)
    driver.until_started("two")
    (first, second) = (placement.asked(driver.site.pods(name)[0])[1] for name in ("one", "two"))
    assert first == 1 << 20, "nothing is known of it"
    assert second in {sum(seen.ranks.memory) for seen in driver.of(protocol.Sampled)}


def test_no_pod_is_asked_to_grow_beyond_its_node(driver):
    one, two = driver.specs()
    driver.launch(one, 100, 100)
    driver.until_started("one")
    driver.launch(two, 200, 200)
    driver.until_started("two")
    room = driver.executor.capacity().cpu - manifests.AGENT_CPU
    assert driver.resize(one=shares(4000, 4000)) == ""
    used = sum(placement.asked(pod)[0] for pod in driver.site.pods())
    assert room - 4 <= used <= room
    assert driver.resize(one=shares(1000, 2000), two=shares(2000, 4000)) == ""
    first, second = (placement.asked(driver.site.pods(name)[0])[0] for name in ("one", "two"))
    assert room - 4 <= first + second <= room
    assert second == pytest.approx(2 * first, abs=4)


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
        told = driver.until(lambda: driver.of(protocol.Delayed, "two"))
        assert "quota dovetail has" in told[0].why
    finally:
        quota(site, "100000")
    driver.until_started("two")


def quota(site, cpu):
    """Set the quota, and wait until it counts."""
    change = {"spec": {"hard": {"requests.cpu": cpu}}}
    site.kubectl("patch", "resourcequota", "dovetail", "--patch", json.dumps(change))
    assert cluster_runs.eventually(
        lambda: site.get("resourcequota", "dovetail")["status"]["hard"]["requests.cpu"]
        == ("300m" if cpu == "0.3" else "100k")
    )


def test_all_pods_start_or_none_and_what_waits_says_why_and_can_be_stopped(driver):
    assert "asks for 392m of CPU" in driver.until_held_up((400, 400), (100, 400), "jobs")
    driver.executor.stop("two", "enough")
    (end,) = driver.until(lambda: driver.of(protocol.Finished, "two"))
    assert (end.code, end.reason) == (143, "stopped: enough")
    assert driver.of(protocol.Started, "two") == []


def test_ranks_of_mpich_meet_across_pods_and_are_suspended_and_go_on(driver):
    spec, _ = driver.specs("mpich", ranks_per_pod=1)
    driver.launch(spec, 100, 100)
    driver.until_started("one")
    driver.suspend_and_resume()


def test_an_image_that_is_missing_fails_the_simulation_with_its_name(driver):
    spec, _ = driver.specs(image="localhost/dovetail/none:1", pull_policy="Never")
    driver.launch(spec, 100, 100)
    (end,) = driver.until(lambda: driver.of(protocol.Finished, "one"))
    assert end.reason.startswith("image localhost/dovetail/none:1 is not on node")


@pytest.fixture
def proxy(site):
    """The way of the executor to the API; a fake, see there."""
    made = Proxy(site.kubeconfig)
    real, site.kubeconfig = site.kubeconfig, made.kubeconfig(site.folder / "proxy")
    yield made
    site.kubeconfig = real
    made.gate.set()
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize("deaf", [False, True], ids=["its watch tells", "its ranks tell first"])
def test_a_pod_that_is_deleted_ends_its_simulation_alone(proxy, driver, deaf):
    one, two = driver.specs()
    for spec in (one, two):
        driver.launch(spec, 100, 100)
        driver.until_started(spec.name)
    (victim,) = driver.site.pods("one")
    proxy.deaf = deaf
    driver.site.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false")
    (end,) = driver.until(lambda: driver.of(protocol.Finished, "one"))
    proxy.deaf = False
    assert end.reason.startswith("pod lost")
    assert driver.of(protocol.Finished, "two") == []
    wanted = [found.split("-")[0] for found in driver.site.left() if found.startswith("request")]
    assert set(wanted) == {"request two"}


def test_a_second_controller_is_refused(driver):
    with pytest.raises(BadInput, match=f"is used by run {driver.session.run} on "):
        Driver(driver.site, "second")
    spec, _ = driver.specs()
    driver.launch(spec, 100, 100)
    driver.until_started("one")


def test_the_cluster_is_given_back_though_an_answer_to_that_is_lost(proxy, driver):
    proxy.once = ("DELETE", "/leases/")
    driver.executor.close()
    assert proxy.once is None
    assert driver.site.left() == []


def test_an_agent_that_is_ended_as_soon_as_it_is_there_leaves_nothing(driver):
    def starting():
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = file.read_bytes()
                if b"dovetail.executors.pods.agent" in line and driver.session.run.encode() in line:
                    return int(file.parent.name)
        return 0

    begun = time.monotonic()
    while not (pid := starting()):
        assert time.monotonic() < begun + LIMIT
    os.kill(pid, signal.SIGSTOP)  # it listens to no signal yet
    go_on = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
    go_on.start()
    driver.executor.close()
    go_on.join()
    assert driver.site.left() == []


def test_the_controller_waits_for_no_answer_of_the_api(proxy, driver, monkeypatch):
    one, two = driver.specs()
    driver.launch(one, 100, 100)
    driver.until_started("one")
    asking = set()
    real = Api.call

    def call(api, *words, **more):
        asking.add(threading.current_thread())
        return real(api, *words, **more)

    monkeypatch.setattr(Api, "call", call)
    proxy.gate.clear()  # from now on nobody answers
    try:
        driver.executor.resize({"one": shares(200, 200)})
        driver.launch(two, 100, 100)
        driver.until(lambda: proxy.held > 0)
        driver.executor.stop("two", "enough")
        driver.look()
    finally:
        proxy.gate.set()
    driver.until(lambda: driver.of(protocol.Finished, "two"))
    (resized,) = driver.until(lambda: driver.of(protocol.Resized))
    assert resized.refused == ""
    assert asking
    assert threading.current_thread() not in asking
