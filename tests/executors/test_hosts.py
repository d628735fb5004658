# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs on hosts that share a network and nothing else: no folder, no shared memory, no process ids.

An ordinary user has a cluster of two, each with a core of its own. Clocks are the same, as no
namespace has a real-time clock of its own; see test_cluster_nodes.py for one that is wrong.
`DOVETAIL_CUT=300` has the network between them cut for so many seconds, else until that is seen.
"""

from __future__ import annotations

import os
import socket
import time

import pytest
from dovetail.executors.kubernetes.lifecycle import FETCH
from dovetail.executors.pods import staging
from support import flux_operator, host_clusters
from support.clusters import LIMIT, eventually
from support.host_clusters import HOME, PROGRAMS, busy

pytestmark = [pytest.mark.kube, pytest.mark.first]  # they mostly wait, for minutes

LISTENERS = "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" { print $2 }'"
# Files with the brokers' key, as their owner's processes see them, and on the disk.
KEYS = """{ find /tmp /run /dev/shm -xdev -name 'curve*' -type f
  for root in /proc/[0-9]*/root; do
    ls -d $root/mnt/flux/config/curve/curve.cert $root/run/dovetail/curve/curve
  done; } 2>/dev/null"""
# A rank says what of the prepared case it sees, and where it is.
SAY = '{ cat prepared; hostname; } >rank.$OMPI_COMM_WORLD_RANK; exec "$@"'


@pytest.fixture(scope="module")
def pair(binaries, tmp_path_factory):
    with host_clusters.started(2, binaries, tmp_path_factory.mktemp("shared")) as found:
        yield found


@pytest.mark.parametrize(
    ("common", "stage"),
    [(False, "live"), (False, "end"), (True, "live")],
    ids=["no folder", "no folder, at the end", "a folder"],
)
def test_ranks_on_two_hosts_have_their_case_and_what_they_wrote_is_on_the_first(
    pair, common, stage
):
    """They meet by the hosts' addresses and are resized in place; nothing is copied in vain."""
    home = pair.shared if common else HOME
    pair.first.write(f"{home}/case/system/input", "as delivered\n")
    entry = busy(30, 90, prepare=["cp system/input prepared"], stage=stage)
    entry["command"] = ["sh", "-c", SAY, "say", *entry["command"]]
    out = pair.start(entry, home)
    pair.until(out, lambda: any(not one["refused"] for one in pair.log(out, "Resized")))
    assert ("h2 does not see" in pair.first.out(f"cat {out}.log")) is not common
    stores = [host.run(f"ls -d {staging.STORES}*", code=None).returncode for host in pair.made]
    assert stores == [2 * common] * 2
    ranks = f"cat {out}/sim/case/rank.*"
    if stage == "live":
        pair.until(out, lambda: len(pair.first.run(ranks, code=None).stdout.splitlines()) == 4)
    else:
        time.sleep(2 * FETCH)
        assert pair.first.run(ranks, code=None).stdout == ""
    pair.enough(out)
    assert {*pair.log(out, "Placed")[-1]["nodes"]} == {"h1", "h2"}
    found = pair.first.out(ranks).splitlines()
    assert sorted(found) == ["as delivered", "as delivered", "h1", "h2"]
    assert pair.first.out(f"cat {out}/sim/case/system/input") == "as delivered"
    for host in pair.made:
        host.until(f"ls -d {staging.STORES}* 2>&1", lambda text: "No such" in text)


def test_the_brokers_of_a_minicluster_meet_without_a_folder_and_nobody_else_hears_them(pair):
    """The case is copied, and what they trust each other by is open to no other user."""
    pair.first.write(f"{HOME}/case/system/input", "as delivered\n")
    entry = busy(20, 30, prepare=["cp system/input prepared"])
    entry["command"] = ["sh", "-c", SAY, "say", *entry["command"]]
    own, asked = pair.first.environment["PATH"], "--launcher minicluster"
    with flux_operator.on_hosts(pair) as flux:
        out = pair.start(entry, words=asked, path=f"{own}:{flux}")
        pair.goes_on(out, "sim")
        assert "simulations become MiniClusters" in pair.first.out(f"cat {out}.log")
        for host in pair.made:
            assert "flux-broker" in host.out("ps -e -o comm")
            listens_on_its_own(host)
            for who, reads in (("", True), ("setpriv --reuid=77777 --clear-groups", False)):
                opened = host.run(f"{KEYS} | {who} xargs -n 1 head -c 1", "root", code=None)
                assert bool(opened.stdout) is reads
        pair.enough(out)
        pair.first.out("mkdir -p other/bin; cp /bin/true other/bin/flux")
        refused = pair.start(entry, words=asked, path=f"{own}:{HOME}/other/bin")
        assert pair.run.wait(LIMIT) == 2
        (line,) = pair.first.out(f"cat {refused}.log").splitlines()
        assert f"node h2 does not see the folder {HOME}/other, where the Flux is" in line
    assert {*pair.log(out, "Placed")[-1]["nodes"]} == {"h1", "h2"}
    found = pair.first.out(f"cat {out}/sim/case/rank.*").splitlines()
    assert sorted(found) == ["as delivered", "as delivered", "h1", "h2"]


def test_programs_that_a_host_has_not_are_told_in_one_line_before_anything_starts(pair):
    pair.first.out("mkdir -p here; cp bin/busy here")
    out = pair.start({**busy(20, 30), "command": [f"{HOME}/here/busy", "burn", "1", "1", "1"]})
    assert pair.run.wait(LIMIT) == 2
    (line,) = pair.first.out(f"cat {out}.log").splitlines()
    assert f"node h2 does not see the folder {HOME}/here, where programs of the plan are" in line
    assert pair.second.run("ls here", code=2).stdout == "", "no folder is made there"


def listens_on_its_own(host):
    """Nothing there listens but on the host's address and loopback."""
    numbers = {line.split(":")[0] for line in host.out(LISTENERS).split()}
    own = socket.inet_aton(host.address)[::-1].hex().upper()
    loopback = {"0100007F", f"{1 << 24:032X}"}
    assert own in numbers
    assert numbers - loopback == {own}


@pytest.mark.parametrize("mpi", PROGRAMS)
def test_nothing_listens_but_on_the_hosts_own_address_and_loopback(pair, mpi):
    entry = busy(20, 30)
    entry["command"][0] = PROGRAMS[mpi]
    out = pair.start(entry)
    pair.goes_on(out, "sim")
    for host in pair.made:
        listens_on_its_own(host)
    pair.enough(out)
    assert {*pair.log(out, "Placed")[-1]["nodes"]} == {"h1", "h2"}


def test_what_runs_on_both_goes_on_after_one_was_away_for_seconds(pair):
    out, second = pair.start(busy(20, 30)), pair.second
    pair.goes_on(out, "sim")
    for away, back in (
        (second.cut, second.heal),
        (lambda: second.drop("from"), second.heal),
        (lambda: second.drop("to"), second.heal),
        (lambda: second.drop(percent=20), second.heal),
        (second.hang, second.go_on),
    ):
        away()
        time.sleep(3)
        back()
        pair.goes_on(out, "sim")
    assert pair.enough(out)["sim"]["restarts"] == 0
    assert len(pair.log(out, "Started")) == 1


@pytest.mark.parametrize("fault", ["is parted and healed", "hangs and is started again"])
def test_what_a_host_has_that_is_away_runs_again_once_and_the_host_comes_back(pair, fault):
    """Neither side knows what the other does meanwhile; what it still runs then is not counted."""
    parted, second = fault == "is parted and healed", pair.second
    out = pair.start(busy(20, 30) if parted else busy(20, count=2))
    names = ["sim"] if parted else ["sim-1", "sim-2"]
    pair.goes_on(out, *names)
    placed = {one["name"]: one["nodes"] for one in pair.log(out, "Placed")}
    there = [name for name in names if second.name in placed[name]]
    (second.cut if parted else second.hang)()
    since = time.monotonic()
    if parted:
        kept = "ps -C busy -o stat="
        assert eventually(lambda: {one[0] for one in second.out(kept).split()} == {"T"})
        assert not pair.log(out, "Finished"), "its ranks write no more once others may"
    (lost,) = pair.until(out, lambda: pair.log(out, "Finished"))
    assert [lost["name"]] == there
    assert lost["reason"].startswith(("node lost: ", "pod lost: ")), lost
    pair.until(out, lambda: second.name not in pair.nodes())
    if parted:
        cut = float(os.environ.get("DOVETAIL_CUT", "0"))
        time.sleep(max(0.0, since + cut - time.monotonic()))
        second.heal()
    else:
        second.end()
        second.boot()
        pair.begin(second)
        pair.join(second)
    pair.until(out, lambda: second.name in pair.nodes())
    pair.goes_on(out, *names)

    def ranks():
        return sum(int(host.out("pgrep -c busy || true")) for host in pair.made)

    assert eventually(lambda: ranks() == 2), "none is left of what was given up"
    found = pair.enough(out)
    assert {name: one["restarts"] for name, one in found.items()} == {
        name: int(name in there) for name in names
    }
