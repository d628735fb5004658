# SPDX-License-Identifier: LGPL-3.0-or-later
"""The real Flux Operator beside a test's cluster: its CRD installed, its manager a process here.

FLUX_OPERATOR names a checkout of its repository in which `bin/manager` was built.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from support import cluster_runs, flux_lua
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
        site.kubectl("apply", "--server-side", "-f", str(top / "config/crd/bases"))
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
        self.manager.kill()
        self.manager.wait()


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
