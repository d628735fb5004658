# SPDX-License-Identifier: LGPL-3.0-or-later
"""Says whether user-space Kubernetes can run here, and how to fix what is missing.

Input: this machine, this user. Output: a line for each check, or JSON; exit code 1 if there is
an error. What is checked is in `kernel.py` and `machine.py`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict

from dovetail.core.errors import BadInput

from usernetes_setup.node import namespaces
from usernetes_setup.preflight import kernel as kernel
from usernetes_setup.preflight import machine as machine
from usernetes_setup.preflight import usernetes as usernetes
from usernetes_setup.preflight.finding import Check

CHECKS: tuple[Callable[[], Check], ...] = (
    kernel.user_namespaces, kernel.process_handles, kernel.subordinate_ids, kernel.control_groups,
    kernel.linger, kernel.runtime_folder, kernel.modules, kernel.tunnels, kernel.reverse_paths,
    machine.locked_memory, machine.fuse, machine.disk, machine.ports, machine.time_skew,
    machine.clock, machine.engine, machine.huge_pages, machine.fabrics, machine.devices,
    machine.openssl, machine.node_programs,
    usernetes.usernetes,
)  # fmt: skip


def checks() -> list[Check]:
    """Every check, in order; one that cannot even be made is a warning."""
    found = []
    for check in CHECKS:
        try:
            found.append(check())
        except (OSError, ValueError, BadInput) as error:
            name = check.__name__.replace("_", " ")
            level = "error" if isinstance(error, BadInput) else "warning"
            found.append(Check(name, level, f"could not be checked: {error}"))
    return found


def errors() -> list[str]:
    """Why no cluster can run here; that the programs are not built yet is no reason."""
    wanted = (kernel.user_namespaces, kernel.process_handles, kernel.control_groups, machine.disk,
              machine.ports, machine.clock, machine.openssl, machine.node_programs)  # fmt: skip
    found = [check() for check in wanted]
    return [f"{check.name}: {check.found}" for check in found if check.level == "error"]


def main(as_json: bool) -> int:
    """Print the findings; 0 if a cluster can run here, else 1."""
    found = checks()
    can = not any(check.level == "error" for check in found)
    fits = usernetes.choice([f"{one.name}: {one.found}" for one in found if one.level == "error"])
    if as_json:
        host = f"{platform.system()} {platform.release()} {platform.machine()}"
        print(json.dumps({"can_run": can, "user": namespaces.user_name(), "machine": host, **fits,
                          "checks": [asdict(check) for check in found]}, indent=1))  # fmt: skip
        return 0 if can else 1
    for check in found:
        print(f"{check.level:<7} {check.name:<17} {check.found}")
        if check.fix:
            print(f"        {check.who} types:       {check.fix}")
    how = "as root" if os.getuid() == 0 else "rootless"
    print(f"user-space Kubernetes {'can run' if can else 'cannot run'} here, {how}")
    print(f"provider {fits['provider'] or 'none'}: {fits['why']}")
    return 0 if can else 1
