# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations in pods: what runs on the nodes.

On each node an `agent`, in each pod an `entrypoint`, in each rank that is not in its starter's pod
a go-between (`rsh_agent`); they talk to the controller's hub in `messages`. In the pods of a
MiniCluster entrypoints are tasks of Flux, for which `flux_broker` prepares it.
Those on the nodes need Python alone, none of the packages that the controller needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from dovetail.host import borrowed_python, install_paths

PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where an entrypoint looks for programs; a simulation's own path is its plan's."""
HOME = "/mnt/flux"
"""A folder of a MiniCluster's pod alone, where the operator's script works."""
START = f"{HOME}/dovetail-start"
"""What the first broker of a MiniCluster runs."""
CURVE = "/run/dovetail/curve"
"""Where such a pod has the brokers' certificate, in a file `curve`."""


def command(module: str, python: Sequence[str] = (borrowed_python.PYTHON,)) -> list[str]:
    """The words that run a module, such as `executors.pods.agent`; its arguments follow."""
    return install_paths.python_command(f"from dovetail.{module} import main; main()", python)


def orphan_limit() -> float:
    """Seconds that agents and entrypoints wait for a controller, and go on without one."""
    try:
        return float(os.environ.get("DOVETAIL_ORPHAN_S", ""))
    except ValueError:
        return 600.0
