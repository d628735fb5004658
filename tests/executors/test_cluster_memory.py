# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where a node's memory runs out, simulations end with the reason, and the others go on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from support.cluster_runs import WHY_NOT, made
from support.clusters import eventually
from support.memory_limits import EAT

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def small(binaries):
    """A cluster whose pods have 600 MiB together, which the kernel sees to."""
    found = made(binaries, os.getuid() != 0 or not WHY_NOT, "--memory", "600Mi")
    yield found
    found.close()


def entrypoint(site, name):
    """The process on this machine that is the first of a simulation's pod."""
    word = f"--simulation\0{name}\0".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_bytes() and site.pods(name):
                return int(path.parent.name)
        except OSError:
            continue
    return 0


def test_who_the_kernel_killed_has_failed_and_is_not_run_again(small):
    site = small
    eat = shlex.join((sys.executable, "-c", EAT))
    # The kernel kills what the first one runs, and then somebody its whole pod, as the kernel does
    # on other clusters: what is left is what the API says of the pod.
    whole = f"{eat}; touch ../../starved; while :; do sleep 1; done"
    plan = site.plan(
        {"name": "rank", "ranks": 1, "command": shlex.split(eat)},
        {"name": "pod", "ranks": 1, "command": ["sh", "-c", whole]},
        {"name": "after", "ranks": 1, "command": ["true"]},
        cpus=1,
    )
    run = site.start(plan, "out")
    site.until(lambda: run.poll() is not None or (site.folder / "out/starved").exists(), "out")
    os.kill(site.until(lambda: entrypoint(site, "pod"), "out"), signal.SIGKILL)
    assert site.end(run) == 1, site.errors("out")
    found = {one["name"]: one for one in site.summary("out")["simulations"]}
    assert {name: one["state"] for name, one in found.items()} == {
        "rank": "failed", "pod": "failed", "after": "done",
    }  # fmt: skip
    assert "was killed by the kernel; the limit of its control group is" in found["rank"]["reason"]
    assert found["pod"]["reason"].startswith("out of memory: pod pod-")
    assert {one["restarts"] for one in found.values()} == {0}
    site.nothing_left()


def kubelet_with(site, **more):
    """Have the kubelet start again with other words in its configuration; waits until it serves."""
    (path,) = site.machine.folder.rglob("kubelet.json")
    content = json.loads(path.read_text())
    (old,) = eventually(lambda: site.machine.pids(site.made, "kubelet"))
    path.write_text(json.dumps({**content, **more}))
    os.kill(old, signal.SIGKILL)
    assert eventually(lambda: site.machine.pids(site.made, "kubelet") not in ([], [old]))


def evict(site):
    """Have the kubelet find that the machine has too little memory, and end pods."""
    kubelet_with(
        site, evictionSoft={"memory.available": "1Pi"},
        evictionSoftGracePeriod={"memory.available": "1s"}, evictionPressureTransitionPeriod="1s",
    )  # fmt: skip


def tell_to_end(site):
    """What the kubelet does first; where a simulation ends quickly, the API knows of it later."""
    os.kill(site.until(lambda: entrypoint(site, "sim")), signal.SIGTERM)


@pytest.mark.parametrize("end", [evict, tell_to_end])
def test_a_simulation_whose_pod_the_node_ends_is_run_again(small, end):
    site, out = small, end.__name__
    enough = site.folder / out / "enough"
    command = f"echo Time = 1; until [ -e {enough} ]; do sleep 0.1; done"
    run = site.start(site.plan({"name": "sim", "ranks": 1, "command": ["sh", "-c", command]}), out)
    site.until(lambda: run.poll() is not None or site.of("Started", out), out)
    end(site)
    try:
        site.until(lambda: run.poll() is not None or site.of("Finished", out), out)
    finally:
        kubelet_with(site, evictionSoft={}, evictionSoftGracePeriod={})
    enough.touch()
    assert site.end(run) == 0, site.errors(out)
    (lost,) = [one for one in site.of("Finished", out) if one["reason"]]
    assert lost["reason"].startswith("pod lost")
    (found,) = site.summary(out)["simulations"]
    assert (found["state"], found["restarts"]) == ("done", 1)
