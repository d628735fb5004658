# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the tests share that drive the Kubernetes executor themselves, so that shares are known."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.executors.kubernetes import manifests, session
from dovetail.executors.kubernetes.executor import KubernetesExecutor

from support.clusters import LIMIT, groups_of


def shares(*requests, **more):
    return protocol.Share(tuple(requests), **more)


class Driver:
    """An executor, and all that it said."""

    def __init__(self, site, name):
        self.site = site
        self.out = site.folder / name
        self.out.mkdir()
        self.begun = time.monotonic()
        api = session.connect(Path(site.kubeconfig))
        self.session = session.Session(api, self.out, self.specs(), False)
        self.executor = KubernetesExecutor(self.session, self.out)
        self.events = []

    def specs(self, mpi="openmpi", **more):
        entry = self.site.busy(5, 5, mpi=mpi)
        case = str(self.site.case)
        return [
            protocol.Spec(name, "sim", case, 2, (1.0, 1.0), tuple(entry["command"]), **more)
            for name in ("one", "two")
        ]

    def launch(self, spec, *requests):
        self.executor.launch(spec, protocol.Share(tuple(requests)))

    def until(self, question, limit=2 * LIMIT):
        deadline = time.monotonic() + limit
        while not (answer := question()):
            assert time.monotonic() < deadline, (self.events[-5:], self.site.pods())
            self.executor.wait(0.25)
            self.look()
        return answer

    def look(self):
        """Take in what has happened, once."""
        self.events += self.executor.observe(time.monotonic() - self.begun)

    def follow(self, seconds):
        """Take in what happens in this time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.executor.wait(0.25)
            self.look()

    def of(self, kind, name=""):
        return [e for e in self.events if isinstance(e, kind) and (not name or e.name == name)]

    def until_started(self, name):
        return self.until(lambda: self.of(protocol.Started, name))

    def resize(self, **shares):
        before = len(self.of(protocol.Resized))
        self.executor.resize(shares)
        self.until(lambda: len(self.of(protocol.Resized)) > before)
        return self.of(protocol.Resized)[-1].refused

    def until_held_up(self, first, second, kind):
        """Launch a simulation and another, for which there is no room beside it; what it says."""
        one, two = self.specs(ranks_per_pod=1)
        self.launch(one, *first)
        self.until_started("one")
        self.launch(two, *second)
        told = self.until(lambda: self.of(protocol.Delayed, "two"))
        assert self.site.pods("two") == [], "not even the one that would fit"
        assert len(self.site.get(kind)["items"]) == 1
        return told[0].why

    def iterations(self):
        seen = self.of(protocol.Sampled, "one")
        return min(seen[-1].ranks.iterations) if seen else 0

    def suspend_and_resume(self):
        """See that simulation `one` does nothing while it is suspended, and goes on afterwards."""
        self.until(lambda: self.iterations() > 5)
        assert self.resize(one=shares(10, 10, suspended=True)) == ""
        seen = [-1, self.iterations()]
        while seen[-1] != seen[-2]:  # samples of before may still come
            self.follow(1.0)
            seen.append(self.iterations())
            assert len(seen) < 10, seen
        still = self.iterations()
        assert self.resize(one=shares(100, 100)) == ""
        self.until(lambda: self.iterations() > still + 5)

    def weights(self, name):
        """What is on disk for each rank group, in their order: shares or weight."""
        return [int(text) for text in self.on_disk(name, "cpu.shares", "cpu.weight")]

    def limits(self, name):
        """The same of their limits, in millicores."""
        found = self.on_disk(name, "cpu.cfs_quota_us", "cpu.max")
        return [int(text.split()[0]) // 100 for text in found]  # of periods of 100 ms

    def on_disk(self, name, file, other):
        """A file of each rank group's control group, by its name in version 1 or 2."""
        found = {}
        for thing in self.site.pods(name):
            index = int(thing["metadata"]["labels"][manifests.INDEX])
            top = groups_of(self.site.made, "cpu")
            group = next(top.rglob(f"pod{thing['metadata']['uid']}"))
            path = group / file
            found[index] = (path if path.exists() else group / other).read_text()
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
    made = Driver(site, re.sub(r"\W+", "-", request.node.name)[-40:])
    yield made
    made.executor.close()
    site.nothing_left()
