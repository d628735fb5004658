# SPDX-License-Identifier: LGPL-3.0-or-later
"""The Flux Operator beside a cluster for as long as a comparison takes.

Inputs: FLUX_OPERATOR, a checkout in which its manager was built; a cluster. Output: a manager that
makes pods of MiniClusters there. Invariants: it is a process of this machine and listens nowhere;
it ends with what it was started for, and with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from usernetes_setup.build import programs

from dovetail.bench import jobtap
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import processes

MANAGER, DEFINITIONS = "bin/manager", "config/crd/bases"
_GROUP = "/apis/flux-framework.org/v1alpha2"
_PATIENCE = 60.0  # seconds for the API to serve what is quite new


@dataclass(frozen=True)
class Checkout:
    """Where the operator is, and the folder of the `flux` that pods see."""

    folder: Path
    flux: Path

    @contextlib.contextmanager
    def started(self, kubeconfig: Path, log: Path) -> Iterator[None]:
        """Have it there; what it says goes into `log`."""
        kubectl = [str(programs.build(print) / "bin/kubectl"), "--kubeconfig", str(kubeconfig)]
        words = [*kubectl, "apply", "--server-side", "-f", str(self.folder / DEFINITIONS)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise WorkFailed(f"the Flux Operator's definitions: {done.stderr.strip()}")
        until = time.monotonic() + _PATIENCE
        while subprocess.run([*kubectl, "get", "--raw", _GROUP], capture_output=True).returncode:
            if time.monotonic() > until:
                raise WorkFailed("the API does not serve MiniClusters")
            time.sleep(0.2)
        words = [str(self.folder / MANAGER)]
        words += ["--metrics-bind-address", "0", "--health-probe-bind-address", "0"]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        with log.open("a") as said, open(os.devnull) as nothing:
            files = {0: nothing.fileno(), 1: said.fileno(), 2: said.fileno()}
            manager = processes.start_child(words, "/", environment, files)
        try:
            yield
        finally:
            os.kill(manager, signal.SIGKILL)
            os.waitpid(manager, 0)


def checkout() -> Checkout | None:
    """What FLUX_OPERATOR names, None if it names nothing; BadInput if it is not to be used."""
    named = os.environ.get("FLUX_OPERATOR")
    if not named:
        return None
    for part in (MANAGER, DEFINITIONS):
        if not Path(named, part).exists():
            raise BadInput(f"FLUX_OPERATOR={named} has no {part}")
    flux = jobtap.command()
    if not flux:
        raise BadInput("FLUX_OPERATOR is set, and there is no flux, which MiniClusters need")
    return Checkout(Path(named), Path(flux).parent)
