# SPDX-License-Identifier: LGPL-3.0-or-later
"""Upstream Usernetes, by its own makefiles, compose file and kubeadm, as an ordinary user.

Its node image is a stand-in that usernetes-setup/node-image/make makes, since kindest/node cannot
be pulled where there is no internet, and podman-compose is pip's, as `dovetail doctor` says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.machines import STORE, TOP

pytestmark = pytest.mark.machines

SOURCES = Path(os.environ.get("DOVETAIL_SOURCES", TOP.parent / "shared/sources"))
IMAGE = "localhost/dovetail/usernetes-node:v1.36.3"
PATH = "export PATH=/shared/compose/bin:$PATH PYTHONPATH=/shared/compose"
POD = """
apiVersion: v1
kind: Pod
metadata: {name: hello}
spec:
  restartPolicy: Never
  containers:
  - name: hello
    image: localhost/dovetail/host:1
    imagePullPolicy: Never
    command: [cat, /proc/self/uid_map]
"""
LEFT = (  # of alice's: files, containers, volumes, networks, processes, ports and services
    "ls -d /tmp/dovetail-kube-* 2>/dev/null; podman ps -aq; podman volume ls -q; "
    "podman network ls -q --filter label=com.docker.compose.project; podman pod ls -q; "
    "podman system migrate; "
    "ps -u alice -o comm= | grep -E 'conmon|kube|etcd|slirp|rootlessport|catatonit|aardvark'; "
    "ss -Htln | grep -E ':2[0-9]{4} '; systemctl --user list-units -q --plain 'dovetail-*'"
)


@pytest.fixture(scope="module")
def usernetes(machines):
    """The machines, with what a user and an administrator have prepared for upstream Usernetes."""
    archive = SOURCES / "usernetes.tar.xz"
    if not archive.exists():
        pytest.skip(f"no {archive}: DOVETAIL_SOURCES names the folder that has it")
    shared = machines[0].shared
    image = STORE.parent / "usernetes-node.tar"
    if not image.exists():
        subprocess.run([TOP / "usernetes-setup/node-image/make", image], check=True)
    subprocess.run(["cp", "--reflink=auto", image, shared / "node.tar"], check=True)
    subprocess.run(["tar", "-C", shared, "-xf", archive], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", shared / "compose"]
    subprocess.run([*pip, "podman-compose"], check=True)
    program = shared / "compose/bin/podman-compose"
    program.write_text(program.read_text().replace(sys.executable, "/usr/bin/python3"))
    subprocess.run(["chmod", "-R", "a+rX", shared], check=True)
    for machine in machines:
        while "usernetes" in (told := doctor(machine)) and told["usernetes"]["who"] == "admin":
            machine.run(told["usernetes"]["fix"], user="root")
        machine.run(f"podman image exists {IMAGE} || podman load -i /shared/node.tar", limit=1800)
    yield machines
    for machine in machines:
        machine.run(f"{PATH}; dovetail kube down --all", code=None)


def doctor(machine):
    """What is not well there, by the check's name; control groups are put right first."""
    told = json.loads(machine.run(f"{PATH}; dovetail doctor --json", code=None).stdout)
    for check in told["checks"]:
        if check["level"] == "error":
            machine.run(check["fix"], user="root")
    return {check["name"]: check for check in told["checks"] if check["fix"]}


def up(address: str) -> str:
    """The command of who starts a cluster on a machine that is so slow."""
    return (
        f"{PATH}; dovetail kube up --provider usernetes --usernetes /shared/usernetes --json "
        f"--node-image {IMAGE} --address {address} --timeout 3000"
    )


def nothing_left(machine):
    machine.until(LEFT, lambda text: text == "", 120)


def test_a_cluster_by_upstreams_makefiles_runs_pods_and_leaves_nothing(usernetes):
    machine = usernetes[0]
    made = json.loads(machine.run(up(machine.address), limit=3600).stdout)
    kubectl = (
        "podman exec -i $(podman ps -q --filter label=com.docker.compose.service=node) kubectl"
    )
    machine.run(f"{kubectl} apply -f - <<'EOF'\n{POD}\nEOF")
    machine.until(f"{kubectl} get pod hello -o jsonpath='{{.status.phase}}'",
                  lambda text: text == "Succeeded")  # fmt: skip
    assert "4294967295" not in machine.out(f"{kubectl} logs hello"), "it is in a user namespace"
    (one,) = json.loads(machine.out("dovetail kube status --json"))
    assert (one["provider"], one["state"], one["node"]) == ("usernetes", "ready", "u7s-m1")
    assert machine.out(f"stat -c %a {made['kubeconfig']} {made['folder']}").split() == [
        "600",
        "700",
    ]
    machine.run("dovetail kube down")
    nothing_left(machine)
