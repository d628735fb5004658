# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where a node's memory runs out, simulations end with the reason, and the others go on."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from support.cluster_runs import WHY_NOT, made
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
