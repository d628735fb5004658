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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.machines import STORE, TOP, flux_of

pytestmark = pytest.mark.machines

SOURCES = Path(os.environ.get("DOVETAIL_SOURCES", TOP.parent / "shared/sources"))
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
# In a batch job: a pod on each machine, whose logs come by their kubelets.
BATCH = """#!/bin/bash
set -e
flux dovetail up
flux dovetail status --json >/shared/status.json
for node in m1-0 m2-1; do
  sed "s/name: hello/name: $node/; s/^spec:/&\\n  nodeName: $node/" /shared/pod.yaml |
    flux dovetail kubectl apply -f -
done
flux dovetail kubectl wait --for=jsonpath={.status.phase}=Succeeded --timeout=1800s pod --all
flux dovetail kubectl get pods -o jsonpath='{range .items[*]}at {.status.podIP}{"\\n"}{end}'
for node in m1-0 m2-1; do flux dovetail kubectl logs $node; done
flux dovetail url hello || true
"""
NODE = "podman ps -q --filter label=com.docker.compose.service=node"
LEFT = (  # of alice's: files, containers, volumes, networks, processes, ports and services
    "ls -d /tmp/dovetail-* 2>/dev/null; podman ps -aq; podman volume ls -q; "
    "podman network ls -q --filter label=com.docker.compose.project; podman pod ls -q; "
    "podman system migrate; "
    "ps -u alice -o comm= | grep -E 'conmon|kube|etcd|slirp|rootlessport|catatonit|aardvark|make'; "
    "ss -Htuln | grep -E ':2[0-9]{4} '; systemctl --user list-units -q --plain 'dovetail-*'"
)


@pytest.fixture
def prepared(machines):
    """Both with all that upstream Usernetes needs there, and the name of a node image."""
    archive = SOURCES / "usernetes.tar.xz"
    if not archive.exists():
        pytest.skip(f"no {archive}: DOVETAIL_SOURCES names the folder that has it")
    shared = machines[0].shared
    image, made_of = STORE.parent / "usernetes-node.tar", TOP / "usernetes-setup/node-image"
    newest = max(file.stat().st_mtime for file in made_of.rglob("*"))
    if not image.exists() or image.stat().st_mtime < newest:
        subprocess.run([made_of / "make", image], check=True)
    subprocess.run(["cp", "--reflink=auto", image, shared / "node.tar"], check=True)
    subprocess.run(["tar", "-C", shared, "-xf", archive], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", shared / "compose"]
    subprocess.run([*pip, "podman-compose"], check=True)
    program = shared / "compose/bin/podman-compose"
    program.write_text(program.read_text().replace(sys.executable, "/usr/bin/python3"))
    # Not all that is there: another test's key must stay its owner's.
    made = [shared / name for name in ("node.tar", "usernetes", "compose")]
    subprocess.run(["chmod", "-R", "a+rX", *made], check=True)
    with ThreadPoolExecutor() as both:
        names = {*both.map(fit, machines)}
    yield machines, names.pop()
    for machine in machines:  # of a test that failed
        machine.run(f"{PATH}; dovetail kube down --all", code=None)


def fit(machine):
    """Make a machine fit, and load the image there; returns its name."""
    doctor(machine)
    while (told := doctor(machine))["who"] == "admin":
        machine.run(told["fix"], user="root")
    loaded = machine.out("podman load -qi /shared/node.tar", limit=1800)
    return loaded.removeprefix("Loaded image: ")


def doctor(machine):
    """What it says of Usernetes there; an administrator does what else it says that is needed."""
    told = json.loads(machine.run(f"{PATH}; dovetail doctor --json", code=None).stdout)
    for check in told["checks"]:
        if check["level"] == "error":
            machine.run(check["fix"], user="root")
    (line,) = [check for check in told["checks"] if check["name"] == "usernetes"]
    return line


def nothing_left(machine):
    machine.until(LEFT, lambda text: text == "", 300)


def test_a_cluster_by_upstreams_makefiles_runs_pods_and_leaves_nothing(prepared):
    """Nor does one whose monitor was killed while upstream's verbs were at work."""
    (machine, _), image = prepared
    up = (
        f"{PATH}; dovetail kube up --provider usernetes --usernetes /shared/usernetes --json "
        f"--node-image {image} --address {machine.address} --timeout 3000"
    )
    machine.run(f"({up}; echo code $?) >/tmp/up.log 2>&1 </dev/null &")
    machine.until(NODE, lambda text: text)
    machine.run("kill -9 $(jq .monitor /tmp/dovetail-kube-1000/default/usernetes.json)")
    told = machine.until("cat /tmp/up.log", lambda text: text.endswith("code 1"))
    assert "node u7s-m1: its monitor ended" in told
    nothing_left(machine)

    made = json.loads(machine.run(up, limit=3600).stdout)
    kubectl = f"podman exec -i $({NODE}) kubectl"
    machine.run(f"{kubectl} apply -f -", text=POD)
    machine.until(f"{kubectl} get pod hello -o jsonpath='{{.status.phase}}'",
                  lambda text: text == "Succeeded")  # fmt: skip
    assert machine.out(f"{kubectl} get pod hello -o jsonpath='{{.status.podIP}}'").startswith(
        "10.244."
    ), "flannel's network"
    assert "4294967295" not in machine.out(f"{kubectl} logs hello"), "it is in a user namespace"
    (one,) = json.loads(machine.out("dovetail kube status --json"))
    assert (one["provider"], one["state"], one["node"]) == ("usernetes", "ready", "u7s-m1")
    private = machine.out(f"stat -c %a {made['kubeconfig']} {made['folder']}").split()
    assert private == ["600", "700"]
    machine.run("dovetail kube down")
    nothing_left(machine)


def test_a_batch_job_has_upstreams_nodes_on_both_and_leaves_nothing(prepared):
    """The second joins by what the first's slice hands on; pods are on flannel's network."""
    both, image = prepared
    first = both[0]
    if first.run("command -v flux", code=None).returncode:
        pytest.skip("no Flux in .flux: run ./bootstrap flux")
    first.write("/shared/pod.yaml", POD)
    first.write("/shared/batch.sh", BATCH)
    with flux_of(both, PATH) as flux:
        request = f"nodes=2,provider=usernetes,usernetes=/shared/usernetes,node-image={image}"
        patience = "--conf=dovetail.up-timeout=5400 --conf=dovetail.down-timeout=900"
        job = first.out(
            f"{flux} flux batch -N2 --dovetail={request} {patience} --output=/shared/out.txt "
            "/shared/batch.sh"
        )
        code = first.run(f"{flux} flux job status {job}", code=None, limit=7200).returncode
        printed = first.out("cat /shared/out.txt")
        assert code == 0, printed
        status = json.loads(first.out("cat /shared/status.json"))
        nodes = {one["host"]: one["node"] for one in status["slices"]}
        assert nodes == {"m1": "m1-0", "m2": "m2-1"}, status
        assert {line[:11] for line in printed.splitlines() if line.startswith("at ")} == {
            "at 10.244.0", "at 10.244.1",
        }, printed  # fmt: skip
        assert "`flux dovetail kubectl port-forward service/hello PORT` leads there" in printed
        for machine in both:
            nothing_left(machine)
