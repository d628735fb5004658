# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cluster of an ordinary user's on hosts that share only a network, and runs on it."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
from dovetail.executors.kubernetes import placement
from usernetes_setup.preflight import report

from support import hosts, known_programs
from support.clusters import LIMIT, SETUP, eventually

HOME = "/home/alice"
KUBECONFIG = f"/tmp/dovetail-kube-{hosts.ALICE}/default/kubeconfig"
BUSY = f"{HOME}/bin/busy"
PROGRAMS = {"openmpi": BUSY, "mpich": f"{BUSY}.mpich"}
ENOUGH = f"{HOME}/bin/enough"  # which pods see, on every host


class HostCluster:
    """Hosts with a cluster on all, and a plan's case on the first; `shared` is on all."""

    kubectl = f"$DOVETAIL_CACHE/kube/*/bin/kubectl --kubeconfig {KUBECONFIG}"

    def __init__(self, made, shared, network):
        self.made, self.shared = made, shared
        self.first, self.second = made[:2]
        for host in made:
            self.begin(host)
        words = f"--cpus 0-0 --json --timeout {2 * LIMIT} --network {network}"
        self.first.out(f"{SETUP}/up --address {self.first.address} {words}", limit=3 * LIMIT)
        for number, host in enumerate(made[1:], 1):
            self.join(host, number)
        self.count = 0

    def begin(self, host):
        """Have the plan's program there."""
        host.out("mkdir bin case")
        for mpi, program in PROGRAMS.items():
            shutil.copy(known_programs.build(mpi, "known/busy.c"), f"{host.root}{program}")

    def join(self, host, number=1):
        """Have a host in the cluster, with one of the machine's two cores."""
        cpu = number % 2
        invite = f"{SETUP}/join --invite join.json --node {host.name} >/dev/null && cat join.json"
        host.write("join.json", self.first.until(invite, bool))  # again where the API was busy
        words = f"--cpus {cpu}-{cpu} --json --timeout {2 * LIMIT} join.json"
        host.out(f"{SETUP}/join --address {host.address} {words}", limit=3 * LIMIT)

    def start(self, entry, home=HOME, words="", path=""):
        """Start a run of such simulations on the first host; its directory there.

        With more words to `dovetail run`, and another PATH.

        It is started anew if it began while one of the hosts was not ready, on a busy machine.
        """
        for host in self.made:
            host.out(f"rm -f {ENOUGH}")
        for more in (2, 1, 0):
            assert eventually(lambda: len(self.nodes()) == len(self.made)), self.nodes()
            out = self.begun(entry, home, words, path)
            if not more or self.has_all(out):
                break
            self.first.out("kill $(cat run.pid)")
            self.run.wait(LIMIT)
        return out

    def has_all(self, out):
        """Whether a run began with all hosts, or has ended."""

        def head():
            text = self.first.run(f"head -n 1 {out}/events.jsonl", code=None).stdout
            return json.loads(text) if text.endswith("\n") else {}

        assert eventually(lambda: head() or self.run.poll() is not None), self.said(out)
        nodes = head().get("capacity", {}).get("nodes", ())
        return len(nodes) == len(self.made) or self.run.poll() is not None

    def begun(self, entry, home, more, path):
        """Start such a run with the nodes that there are."""
        self.count += 1
        out = f"{home}/out-{self.count}"
        plan = {"simulations": [{"name": "sim", "case": f"{home}/case", **entry}]}
        self.first.write(f"{out}.yaml", json.dumps(plan))
        words = f"python -m dovetail run {out}.yaml -o {out} --json --kubeconfig {KUBECONFIG}"
        before = f"PATH={path}; " if path else ""
        self.run = self.first.start(f"{before}echo $$ >run.pid; exec {words} {more} 2>{out}.log")
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
        """Those that are ready, and take pods."""
        listed = json.loads(self.first.out(f"{self.kubectl} get nodes -o json"))["items"]
        return {one["metadata"]["name"] for one in listed if placement.usable(one)}

    def enough(self, out):
        """Let the ranks end."""
        for host in self.made:
            host.out(f"touch {ENOUGH}")
        return self.over(out)


def busy(*milliseconds, **more):
    """An entry of ranks that sleep so long in each iteration, and meet; see known/busy.c."""
    return {
        "ranks": len(milliseconds),
        "command": [BUSY, "sleep", "0", *map(str, milliseconds)],
        "environment": {"BUSY_UNTIL": ENOUGH},
        **more,
    }


@contextlib.contextmanager
def started(count, binaries, shared, network="host"):
    """A cluster of so many hosts, on that network; nothing is left of it."""
    if errors := report.errors():
        pytest.skip(f"cannot run here: {errors[0]}")
    cache = binaries.parents[1]
    with hosts.started(count, read=[cache], shared=shared) as made:
        for host in made:
            host.environment["DOVETAIL_CACHE"] = str(cache)
        found = HostCluster(made, shared, network)
        assert eventually(lambda: len(found.nodes()) == count)
        yield found
        if found.run.poll() is None:
            found.first.out("kill $(cat run.pid)")
            found.run.wait(LIMIT)
        for host in made:
            host.until(f"{SETUP}/down --all >/dev/null && echo down", lambda text: text == "down")
        hosts.nothing_left(made)
