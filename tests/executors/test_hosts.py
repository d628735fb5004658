# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs on hosts that share a network and nothing else: no folder, no shared memory, no process ids.

An ordinary user has a cluster of two, each with a core of its own. Clocks are the same, as no
namespace has a real-time clock of its own; see test_cluster_nodes.py for one that is wrong.
"""

from __future__ import annotations

import json
import shutil
import socket
import time

import pytest
from dovetail.executors.kubernetes.lifecycle import FETCH
from dovetail.executors.pods import staging
from support import hosts, known_programs
from support.clusters import LIMIT, SETUP, eventually
from usernetes_setup.preflight import report

pytestmark = [pytest.mark.kube, pytest.mark.first]  # they mostly wait, for minutes

HOME = "/home/alice"
KUBECONFIG = f"/tmp/dovetail-kube-{hosts.ALICE}/default/kubeconfig"
BUSY = f"{HOME}/bin/busy"
PROGRAMS = {"openmpi": BUSY, "mpich": f"{BUSY}.mpich"}
ENOUGH = f"{HOME}/bin/enough"  # which pods see, on every host
LISTENERS = "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" { print $2 }'"
# A rank says what of the prepared case it sees, and where it is.
SAY = '{ cat prepared; hostname; } >rank.$OMPI_COMM_WORLD_RANK; exec "$@"'


class Pair:
    """Two hosts with a cluster on both, and a plan's case on the first; `shared` is on both."""

    def __init__(self, made, shared):
        self.made = self.first, self.second = made
        self.shared = shared
        for host in made:
            self.begin(host)
        wide = "--json --timeout 120"
        self.first.out(f"{SETUP}/up --address {self.first.address} --cpus 0-0 {wide}")
        self.join()
        self.count = 0

    def begin(self, host):
        """Have the plan's program there."""
        host.out("mkdir bin case")
        for mpi, program in PROGRAMS.items():
            shutil.copy(known_programs.build(mpi, "known/busy.c"), f"{host.root}{program}")

    def join(self):
        """Have the second host in the cluster."""
        first, second = self.made
        first.out(f"{SETUP}/join --invite join.json --node {second.name}")
        second.write("join.json", first.out("cat join.json"))
        second.out(f"{SETUP}/join --address {second.address} --cpus 1-1 --json join.json")

    def start(self, entry, home=HOME):
        """Start a run of such simulations on the first host; its directory there."""
        self.count += 1
        for host in self.made:
            host.out(f"rm -f {ENOUGH}")
        out = f"{home}/out-{self.count}"
        plan = {"simulations": [{"name": "sim", "case": f"{home}/case", **entry}]}
        self.first.write(f"{out}.yaml", json.dumps(plan))
        words = f"python -m dovetail run {out}.yaml -o {out} --json --kubeconfig {KUBECONFIG}"
        self.run = self.first.start(f"echo $$ >run.pid; exec {words} 2>{out}.log")
        return out

    def log(self, out, kind):
        """What events of a kind the run has written so far."""
        text = self.first.run(f"cat {out}/events.jsonl", code=None).stdout
        found = [json.loads(line) for line in text.split("\n")[:-1]]
        return [one for one in found if one.get("type") == kind]

    def until(self, out, question, limit=2 * LIMIT):
        """Wait for an answer while the run goes on."""
        answer = eventually(lambda: question() or self.run.poll() is not None, limit)
        assert answer, self.said(out)
        assert self.run.poll() is None, self.said(out)
        return question()

    def iterations(self, out, name="sim"):
        seen = [one for one in self.log(out, "Sampled") if one["name"] == name]
        return min(seen[-1]["ranks"]["iterations"]) if seen else 0

    def goes_on(self, out, *names):
        """Wait until these simulations have some more iterations."""
        have = {name: self.iterations(out, name) for name in names}
        self.until(out, lambda: all(self.iterations(out, n) >= have[n] + 3 for n in names))

    def said(self, out):
        """What the run said; and of its simulations what went wrong."""
        return self.first.out(
            f"cat {out}.log; grep -h -e Finished -e Note {out}/events.jsonl | tail"
        )

    def over(self, out):
        """Wait for the run's end; its simulations by name."""
        self.run.wait(2 * LIMIT)
        assert self.run.returncode == 0, self.said(out)
        found = json.loads(self.first.out(f"cat {out}/summary.json"))["simulations"]
        assert {one["state"] for one in found} == {"done"}, self.said(out)
        return {one["name"]: one for one in found}

    def nodes(self):
        """Those that are ready."""
        kubectl = f"$DOVETAIL_CACHE/kube/*/bin/kubectl --kubeconfig {KUBECONFIG}"
        listed = self.first.out(f"{kubectl} get nodes --no-headers").splitlines()
        return {line.split()[0] for line in listed if line.split()[1] == "Ready"}

    def enough(self, out):
        """Let the ranks end."""
        for host in self.made:
            host.out(f"touch {ENOUGH}")
        return self.over(out)


def busy(*milliseconds, **more):
    """An entry of ranks that are busy for so long in each iteration; see known/busy.c."""
    return {
        "ranks": len(milliseconds),
        "command": [BUSY, "burn", "0", *map(str, milliseconds)],
        "environment": {"BUSY_UNTIL": ENOUGH},
        **more,
    }


@pytest.fixture(scope="module")
def pair(binaries, tmp_path_factory):
    if errors := report.errors():
        pytest.skip(f"cannot run here: {errors[0]}")
    cache, shared = binaries.parents[1], tmp_path_factory.mktemp("shared")
    with hosts.started(2, read=[cache], shared=shared) as made:
        for host in made:
            host.environment["DOVETAIL_CACHE"] = str(cache)
        found = Pair(made, shared)
        assert eventually(lambda: len(found.nodes()) == 2)
        yield found
        if found.run.poll() is None:
            found.first.out("kill $(cat run.pid)")
            found.run.wait(LIMIT)
        for host in made:
            host.out(f"{SETUP}/down --all")
        hosts.nothing_left(made)


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
        host.until(f"ls -d {staging.STORES}* 2>&1", lambda text: "No such" in text, 30)


def test_programs_that_a_host_has_not_are_told_in_one_line_before_anything_starts(pair):
    pair.first.out("mkdir -p here; cp bin/busy here")
    out = pair.start({**busy(20, 30), "command": [f"{HOME}/here/busy", "burn", "1", "1", "1"]})
    assert pair.run.wait(LIMIT) == 2
    (line,) = pair.first.out(f"cat {out}.log").splitlines()
    assert f"node h2 does not see the folder {HOME}/here, where programs of the plan are" in line
    assert pair.second.run("ls here", code=2).stdout == "", "no folder is made there"


@pytest.mark.parametrize("mpi", PROGRAMS)
def test_nothing_listens_but_on_the_hosts_own_address_and_loopback(pair, mpi):
    entry = busy(20, 30)
    entry["command"][0] = PROGRAMS[mpi]
    out = pair.start(entry)
    pair.goes_on(out, "sim")
    for host in pair.made:
        numbers = {line.split(":")[0] for line in host.out(LISTENERS).split()}
        own = socket.inet_aton(host.address)[::-1].hex().upper()
        loopback = {"0100007F", f"{1 << 24:032X}"}
        assert own in numbers
        assert numbers - loopback == {own}
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
    (lost,) = pair.until(out, lambda: pair.log(out, "Finished"))
    assert [lost["name"]] == there
    assert lost["reason"].startswith(("node lost: ", "pod lost: ")), lost
    pair.until(out, lambda: second.name not in pair.nodes())
    if parted:
        second.heal()
    else:
        second.end()
        second.boot()
        pair.begin(second)
        pair.join()
    pair.until(out, lambda: second.name in pair.nodes())
    pair.goes_on(out, *names)
    ranks = sum(int(host.out("pgrep -c busy || true")) for host in pair.made)
    assert ranks == 2, "none is left of what was given up"
    found = pair.enough(out)
    assert {name: one["restarts"] for name, one in found.items()} == {
        name: int(name in there) for name in names
    }
