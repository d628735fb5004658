# SPDX-License-Identifier: LGPL-3.0-or-later
"""The real Flux Operator beside a test's cluster: its CRD installed, its manager a process here.

FLUX_OPERATOR names a checkout of its repository in which `bin/manager` was built.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import cluster_runs, flux_lua, host_clusters
from support.clusters import eventually


def home() -> Path:
    """The checkout; skips where there is none."""
    found = os.environ.get("FLUX_OPERATOR")
    if not found:
        pytest.skip("no Flux Operator: FLUX_OPERATOR names no checkout with bin/manager")
    for part in ("bin/manager", "config/crd/bases"):
        if not Path(found, part).exists():
            pytest.skip(f"no Flux Operator: FLUX_OPERATOR={found} has no {part}")
    return Path(found)


class Operator:
    """The operator of a site."""

    def __init__(self, site: cluster_runs.Site) -> None:
        top = home()
        self._definitions = str(top / "config/crd/bases")
        self._site, self._kinds = site, site.kinds
        site.kubectl("apply", "--server-side", "-f", self._definitions)
        ready = ("wait", "--for=condition=Established", "--all", "crd")
        assert site.until(lambda: site.kubectl(*ready, check=False))  # fails on one without status
        site.kinds = ("miniclusters", *cluster_runs.KINDS)
        self.log = site.folder / "manager.log"
        # No ports: the machine may run others.
        words = ["--metrics-bind-address", "0", "--health-probe-bind-address", "0"]
        with self.log.open("w") as log:
            self.manager = subprocess.Popen(
                [str(top / "bin/manager"), *words],
                env={**os.environ, "KUBECONFIG": site.kubeconfig},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def until_it_answers(self) -> None:
        """Wait until its workers have begun; a run that begins before may choose Jobs instead."""
        assert eventually(lambda: "Starting workers" in self.log.read_text()), self.log.read_text()

    def close(self) -> None:
        """End it; MiniClusters that are there stay."""
        self.manager.kill()
        self.manager.wait()

    def remove(self) -> None:
        """End it, and leave the site as it was."""
        self.close()
        self._site.kinds = self._kinds
        self._site.kubectl("delete", "-f", self._definitions)


@contextlib.contextmanager
def beside(site: cluster_runs.Site) -> Iterator[Operator]:
    """A site's operator for a while, and Flux on the PATH of its runs; skips without either."""
    home()
    flux = Path(flux_lua.command()).parent
    before = site.machine.environment["PATH"]
    made = Operator(site)
    try:
        made.until_it_answers()
        site.machine.environment["PATH"] = f"{before}:{flux}"
        yield made
    finally:
        site.machine.environment["PATH"] = before
        made.remove()


@contextlib.contextmanager
def on_hosts(made: host_clusters.HostCluster) -> Iterator[str]:
    """The operator of a cluster of hosts for a while, on the first; gives the folder of `flux`."""
    top, flux = home(), Path(flux_lua.command()).resolve().parent
    first, kubectl = made.first, made.kubectl
    first.out(f"{kubectl} apply --server-side -f {top}/config/crd/bases")
    first.until(f"{kubectl} wait --for=condition=Established --all crd", bool)
    words = "--metrics-bind-address 0 --health-probe-bind-address 0"
    log = "manager.log"
    manager = first.start(
        f"echo $$ >manager.pid; KUBECONFIG={host_clusters.KUBECONFIG} "
        f"exec {top}/bin/manager {words} >{log} 2>&1"
    )
    try:
        first.until(f"cat {log}", lambda text: "Starting workers" in text)
        yield str(flux)
    finally:
        first.out("kill -9 $(cat manager.pid)")
        manager.wait()
        first.out(f"{kubectl} delete -f {top}/config/crd/bases")


def with_operator(binaries: Path, rootless: bool, *words: str):
    """Yields a site and its operator; skips where either is not to be had."""
    home()
    flux = Path(flux_lua.command())
    site = cluster_runs.made(binaries, rootless, *words)
    site.machine.environment["PATH"] += f":{flux.parent}"  # or simulations become Jobs
    try:
        site.operator = Operator(site)
        with contextlib.closing(site.operator):
            site.operator.until_it_answers()
            yield site
    finally:
        site.close()
