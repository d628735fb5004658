# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whether upstream Usernetes (Gen 2) can make a node here, and which provider fits this machine.

Its own preflight asks too, when a node is made; here is what can be known without a container.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from usernetes_setup.node import cgroups, components, namespaces
from usernetes_setup.preflight import finding
from usernetes_setup.preflight.finding import Check, read
from usernetes_setup.preflight.kernel import ENOUGH_IDS

ENGINES = {"dockerd-rootless.sh": "docker", "containerd-rootless.sh": "nerdctl", "podman": "podman"}
"""Container engines by the program whose presence makes upstream take them, in its order."""
MODULES = (
    "overlay",
    "br_netfilter",
    "ip6_tables",
    "ip6table_nat",
    "ip_tables",
    "iptable_nat",
    "vxlan",
)
COMPOSE = (1, 0, 6)  # of podman-compose: from there on networks have the subnets that are asked for
CORES, MEMORY = 2, 1700 << 20  # what kubeadm insists on


def chosen() -> tuple[str, str]:
    """Container engine and compose command, as upstream chooses them; "" where there is none."""
    engine = os.environ.get("CONTAINER_ENGINE", "")
    if not engine:
        engine = next((name for program, name in ENGINES.items() if shutil.which(program)), "")
    compose = "podman-compose" if "podman" in engine else f"{engine} compose"
    return engine, os.environ.get("COMPOSE", "") or (compose if engine else "")


def problems() -> list[str]:
    """Why no node can be made here, each with its fix; empty if one can."""
    return [f"{why}; {who} types: {fix}" if fix else why for why, fix, who in _problems()]


def usernetes() -> Check:
    """One line about it all: nobody needs it."""
    found = [*_problems()]
    program, compose = chosen()
    if not found:
        return Check("usernetes", "note", f"can run here, by {program} and {compose}")
    why, fix, who = found[0]
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return Check("usernetes", "note", f"cannot run here: {why}{more}", fix, who)


def choice(own: list[str]) -> dict[str, str]:
    """Which provider fits this machine, and why; `own` is what keeps Dovetail's from running."""
    other = problems()
    also = f"usernetes cannot: {other[0]}" if other else "usernetes can run here too"
    if own:
        why = f"dovetail's own cannot run here: {own[0]}; {also}"
        return {"provider": "" if other else "usernetes", "why": why}
    why = "needs no container engine and no images, and pods run this machine's programs"
    return {"provider": "dovetail", "why": f"{why}; {also}"}


def _problems() -> Iterator[tuple[str, str, str]]:
    """What is wrong, what fixes it, and who types that."""
    if os.getuid() == 0:
        yield "it is for ordinary users, and this is root", "", ""
    if not cgroups.unified():
        yield "control groups are of version 1", "", ""
    elif lacking := cgroups.problems():
        yield lacking[0], "", ""  # which the check of control groups says how to fix
    program, compose = chosen()
    if not program:
        yield "no container engine", "apt-get install podman slirp4netns uidmap", "admin"
    elif not shutil.which(program):
        yield f"no {program}, as CONTAINER_ENGINE says", "unset CONTAINER_ENGINE", "user"
    elif compose == "podman-compose":
        version = _version(compose)
        if version < COMPOSE:
            found = ".".join(map(str, version)) or "none"
            wanted = ".".join(map(str, COMPOSE))
            yield (f"podman-compose {wanted} or later is needed, and there is {found}",
                   "PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --user podman-compose && "
                   "export PATH=~/.local/bin:$PATH", "user")  # fmt: skip
    if missing := [name for name in ("make", "jq", "ip") if not shutil.which(name)]:
        yield f"no {' '.join(missing)}", "apt-get install make jq iproute2", "admin"
    ranges = [
        namespaces.subordinate_ids(namespaces.user_name(), f"/etc/sub{kind}id") for kind in "ug"
    ]
    if not all(found and found[1] >= ENOUGH_IDS for found in ranges):
        yield "too few subordinate ids", "", ""  # see the check of these
    if names := [name for name in MODULES if not _loaded(name)]:
        yield (
            f"kernel modules are not loaded: {' '.join(names)}",
            f"modprobe -a {' '.join(names)}",
            "admin",
        )
    if read(finding.PROC / "sys/net/ipv4/conf/default/rp_filter") == "1":
        yield ("rp_filter is strict for new interfaces",
               "sysctl -w net.ipv4.conf.default.rp_filter=2", "admin")  # fmt: skip
    if len(os.sched_getaffinity(0)) < CORES or components.host_memory() < MEMORY:
        yield f"kubeadm wants {CORES} cores and {MEMORY >> 20} MiB of memory", "", ""


def _version(program: str) -> tuple[int, ...]:
    """Of podman-compose; () where it is not there."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"compose\w* version:?\s*v?(\d+)\.(\d+)\.(\d+)", done.stdout + done.stderr)
    return tuple(map(int, found.groups())) if found else ()


def _loaded(name: str) -> bool:
    """Whether a kernel module is there, loaded or built in."""
    if (finding.SYS / "module" / name).exists():
        return True
    built = Path("/lib/modules") / platform.release() / "modules.builtin"
    return f"/{name}.ko" in read(built)
