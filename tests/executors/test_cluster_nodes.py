# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs on two nodes that disagree about the time; on hosts that are lost, in test_hosts.py."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
from dovetail.host.session import shared_session
from dovetail.run import resume
from support import cluster_runs, wrong_clock
from support.cluster_runs import ends
from support.other_users import WHY_NOT

pytestmark = pytest.mark.kube
HOUR = 3600
# A rank says when it is, by its own clock, and whether another of the same kind is still there.
WITNESS = (
    'rank=$OMPI_COMM_WORLD_RANK; date +%s > "../clock.$rank"; exec 9>> "../lock.$rank"; '
    'flock -n 9 || echo "$PWD $rank" >> ../../twice; exec "$@"'
)


@pytest.fixture(scope="module")
def site(binaries):
    """As an ordinary user where that is possible; nodes of one core each."""
    found = cluster_runs.made(binaries, os.getuid() != 0 or not WHY_NOT, "--cpus", "1")
    yield found
    found.close()


def witnessed(site, out, *milliseconds, **more):
    """A plan of simulations with a pod for each rank, until `enough`; see WITNESS."""
    _, waiting = ends(site, out)
    entry = site.busy(*milliseconds, ranks_per_pod=1, **waiting, **more)
    entry["command"] = ["sh", "-c", WITNESS, "witness", *entry["command"]]
    return site.plan(entry)


def enough(site, out, run):
    """Let the simulations end, and see that all did, and that none ran twice at once."""
    ends(site, out)[0].touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert not (site.folder / out / "twice").exists()
    assert resume.replay(site.folder / out / "events.jsonl") is None
    print(site.of("Requeued", out))  # where that is not what was expected
    return {one["name"]: one["restarts"] for one in site.summary(out)["simulations"]}


def started(site, out, plan, **more):
    """A run that begins when both nodes are ready, once its simulation has begun."""
    assert cluster_runs.eventually(lambda: len(site.nodes()) == 2)
    run = site.start(plan, out, **more)
    site.until(lambda: run.poll() is not None or site.of("Started", out), out)
    return run


def spread(site, out, plan, **more):
    """Run a simulation with a rank on each of two nodes, until both have some iterations.

    The run is started anew if it began while one of them was not ready, on a busy machine.
    """
    run = started(site, out, plan, **more)
    for _ in range(2):
        if run.poll() is not None or site.began_with(out) == 2:
            break
        site.end(run, signal.SIGTERM)
        site.nothing_left()
        shutil.rmtree(site.folder / out)
        run = started(site, out, plan, **more)
    assert run.poll() is None, site.errors(out)
    site.until_iterating("sim", out=out)
    assert len({one["spec"]["nodeName"] for one in site.pods()}) == 2
    return run


# --- clocks ---

# `dovetail run` whose pods have these variables besides.
WITH_VARIABLES = """
import json, sys
from dovetail.cli import main
from dovetail.executors.kubernetes import manifests
made = manifests._pod
def more(*words, **options):
    pod = made(*words, **options)
    extra = json.loads(sys.argv[1])
    pod["containers"][0]["env"] += [{"name": k, "value": v} for k, v in extra.items()]
    return pod
manifests._pod = more
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def clock(site):
    return wrong_clock.made(site.case)


@pytest.mark.parametrize("wrong", [HOUR, -HOUR], ids=["fast", "slow"])
def test_a_node_whose_clock_is_wrong_disturbs_no_run(site, worker, out, clock, wrong):
    variables, put = clock
    put(wrong)
    session = shared_session("run", worker["node"]).rpartition("run")[2]
    more = {"TEST_NODE": worker["node"], "TEST_SESSION": session}
    program = ("-c", WITH_VARIABLES, json.dumps({**variables, **more}))
    run = spread(site, out, witnessed(site, out, 20, 30), program=program)
    assert enough(site, out, run) == {"sim": 0}
    times = [int(path.read_text()) for path in (site.folder / out).glob("sim/clock.*")]
    assert max(times) - min(times) > HOUR / 2, "one rank had the wrong time"


def test_a_controllers_clock_that_jumps_in_mid_run_disturbs_nothing(site, worker, out, clock):
    variables, put = clock
    put(0)
    run = spread(site, out, witnessed(site, out, 20, 30), **variables)
    for wrong in (HOUR, 0, HOUR):
        put(wrong)
        site.until_iterating("sim", out=out)
    assert enough(site, out, run) == {"sim": 0}
    assert len(site.of("Started", out)) == 1, "nothing ran twice"
