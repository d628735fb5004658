# SPDX-License-Identifier: LGPL-3.0-or-later
"""What dovetail-kubernetes(7) tells the reader to type works as printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import guides, known_programs
from support.clusters import LIMIT, TOP, Machine, as_user, eventually, own_address
from usernetes_setup.build import oci_image
from usernetes_setup.node import components

PAGE = "dovetail-kubernetes.7"
EARLIER = "A cluster that you have already"
HERE = ("First steps", "Simulations as pods", EARLIER, "More nodes", "Machines without internet",
        "How it ends")  # fmt: skip
ELSEWHERE = {  # done for these tests, since they need it; podman is on no machine
    "Container images":
        "executors/test_cluster_images.py::"
        "test_a_simulation_runs_from_an_image_with_its_own_mpi_and_is_measured",
    "Devices":
        "executors/test_cluster_devices.py::test_the_node_tells_how_many_there_are",
    "Through the Flux Operator":
        "executors/test_minicluster_runs.py::test_a_commands_exit_code_is_the_simulations",
    "What an administrator does":
        "usernetes_setup/test_cluster.py::test_a_cluster_runs_pods_resizes_them_and_leaves_nothing",
    "Upstream Usernetes":
        "machines/test_usernetes.py::"
        "test_a_cluster_by_upstreams_makefiles_runs_pods_and_leaves_nothing",
}  # fmt: skip
NOWHERE = ("k3s", "kind")  # programs that no machine of ours has, as the guide says


@pytest.mark.unit
def test_every_feature_of_the_guides_table_is_held_by_a_test():
    """And every test of features holds a row."""
    text = (TOP / "doc" / PAGE).read_text()
    table = text.split("\n.Bl -column ")[1].split("\n.El\n")[0]
    header, *rows = table.split("\n.It ")[1:]
    assert header.startswith("Sy Feature Ta ")
    names = [re.search(r"^\.\\\" (test_\w+)$", row, re.MULTILINE)[1] for row in rows]
    tests = (TOP / "tests/usernetes_setup/test_features.py").read_text()
    assert names == re.findall(r"^def (test_\w+)\(", tests, re.MULTILINE)


def place(source: str) -> str:
    """Where the tests of a file run, by their marker, and by whether they have hosts made."""
    if "pytest.mark.machines\n" in source:
        return "machines"
    assert re.search(r"^pytestmark = .*pytest\.mark\.(kube|flux)\b", source, re.MULTILINE)
    return "hosts" if re.search(r"\bhost(s|_clusters)\.started\(", source) else "one"


@pytest.mark.unit
def test_what_the_guide_says_was_tried_where_is_tried_there():
    text = (TOP / "doc" / PAGE).read_text()
    table = text.split("\n.Ss What was tried\n")[1].split("\n.El\n")[0]
    header, *rows = table.split("\n.It ")[1:]
    assert header == "Sy Tried Ta Sy one machine Ta Sy hosts Ta Sy machines"
    for row in rows:
        cells = row.partition("\n")[0].split(" Ta ")[1:]
        tests = re.findall(r'^\.\\" (\w+) (\S+) (\w+)$', row, re.MULTILINE)
        columns = zip(("one", "hosts", "machines"), cells)
        assert [where for where, cell in columns if cell == "yes"] == [one[0] for one in tests], row
        for where, file, name in tests:
            source = (TOP / "tests" / file).read_text()
            assert f"\ndef {name}(" in source, (file, name)
            assert place(source) == where, file


@pytest.mark.unit
def test_every_command_of_the_guide_is_run_by_a_test():
    assert {command.section for command in guides.commands(PAGE)} == {*HERE, *ELSEWHERE}
    for excuse in ELSEWHERE.values():
        file, name = excuse.split("::")
        assert f"\ndef {name}(" in (TOP / "tests" / file).read_text()


class Reader:
    """A user with an empty home who types what the guide says, in one shell."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.state = Path(f"/tmp/dovetail-kube-{machine.uid}")
        home = machine.folder
        (home / "bin").mkdir()
        (home / "bin/dovetail").write_text(f'#!/bin/sh\nexec {sys.executable} -m dovetail "$@"\n')
        (home / "bin/dovetail").chmod(0o755)
        # Built already, or every run of the tests would take ten minutes more.
        own = home / ".cache/dovetail/kube" / machine.binaries.name
        shutil.copytree(machine.binaries, own, symlinks=True)
        for path in (home, *home.rglob("*")):
            os.chown(path, machine.uid, machine.uid, follow_symlinks=False)
        self.environment = {
            "PATH": f"{home}/bin:{own}/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(home),
            "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def type(self, *lines: str) -> str:
        """Type these lines; what they print. Fails at the first that fails."""
        words = ["bash", "-c", "\n".join(["set -euo pipefail", *lines])]
        if self.machine.uid != os.getuid():
            words = as_user(self.machine.uid, *words)
        done = subprocess.run(words, cwd=self.machine.folder, env=self.environment, text=True,
                              capture_output=True, timeout=4 * LIMIT)  # fmt: skip
        assert done.returncode == 0, (lines, done.stdout, done.stderr)
        return done.stdout

    def bring_plan(self) -> None:
        """Put a plan of one simulation into the home."""
        program = Path(known_programs.build("openmpi", "known/busy.c"))
        for path in (program, program.parent):
            path.chmod(0o755)
        words = [str(program), "sleep", "300", "10", "20"]
        entry = {"name": "sim", "case": "case", "ranks": 2, "weights": [1, 2], "command": words}
        (self.machine.folder / "case").mkdir()
        plan = self.machine.folder / "plan.yaml"
        plan.write_text(json.dumps({"simulations": [entry]}))
        for path in (plan, plan.with_name("case")):
            os.chown(path, self.machine.uid, self.machine.uid)

    def left(self) -> list[Path]:
        """What there is of clusters; the folder itself goes with the last one."""
        return list(self.state.glob("*"))

    def close(self) -> None:
        self.type("dovetail kube down")
        assert eventually(lambda: not self.left()), self.left()
        shutil.rmtree(self.state, ignore_errors=True)


@pytest.fixture
def reader(any_machine):
    made = Reader(any_machine)
    if any_machine.uid == os.getuid() and made.left():
        pytest.skip(f"{made.state} is in use, and the guide uses it too")
    yield made
    made.close()


def of(*sections: str, prompts: tuple[str, ...] = ("$",)) -> list[str]:
    found = guides.commands(PAGE)
    lines = [c.line for c in found if c.section in sections and c.prompt in prompts]
    assert lines
    return lines


@pytest.mark.kube
def test_the_commands_for_one_machine_work_in_the_order_of_the_guide(reader):
    if len(os.sched_getaffinity(0)) < 2 or components.host_memory() < 8 << 30:
        pytest.skip("the guide's cluster has two cores and 8 GiB")
    said = reader.type(*of("First steps", "More nodes"), "kubectl get nodes -o name")
    assert said.count(" Ready ") == 1, "of the guide's own look at its nodes"
    assert said.count("node/127.77.") == 2, "after the second one joined"
    there = of("First steps")[-2]
    assert there.startswith("export KUBECONFIG=")

    # As if it were a cluster of somebody else's, which has never heard of us.
    (reader.machine.folder / "operator-manifests").symlink_to(TOP / "operator-manifests")
    prepare = [c for c in of(EARLIER, prompts=("$", "#")) if c.split()[0] not in NOWHERE]
    for node in reader.state.glob("default/nodes/*"):
        reader.type(there, f"export CONTAINERD_ADDRESS={node}/run/containerd.sock",
                    f"ctr -n k8s.io images rm {oci_image.HOST}", *prepare,
                    f"ctr -n k8s.io images ls -q | grep -x {oci_image.HOST}")  # fmt: skip
    run, status = of("Simulations as pods")
    reader.bring_plan()
    reader.type(there, run)
    assert "sim" in reader.type(status)

    reader.type(*of("How it ends"))
    assert eventually(lambda: not reader.left()), reader.left()
    reader.machine.nothing_left(limit=10)


@pytest.mark.kube
def test_a_bundle_is_all_that_a_machine_without_internet_needs(reader):
    pack, unpack = of("Machines without internet", prompts=("$", "there$"))
    reader.type(pack)
    shutil.rmtree(reader.machine.folder / ".cache")
    # Neither Go, nor a compiler, nor a package service is there to help.
    lacks = "export PATH=$HOME/bin:$HOME/none; export HTTPS_PROXY=http://127.0.0.1:9"
    (reader.machine.folder / "none").mkdir()
    for name in ("openssl", "python3", "id", "sh", "dirname", "readlink"):
        (reader.machine.folder / "none" / name).symlink_to(shutil.which(name))
    reader.type(lacks, unpack, "dovetail kube up")
    kubectl = next(reader.machine.folder.glob(".cache/dovetail/kube/*/bin/kubectl"))
    config = reader.state / "default/kubeconfig"
    assert " Ready " in reader.type(f"{kubectl} --kubeconfig {config} get nodes")


@pytest.mark.kube
def test_the_commands_for_several_machines_work_with_this_ones_address(reader):
    address = own_address()
    if not address:
        pytest.skip("this machine has no address but loopback")
    lines = of("More nodes", prompts=("login$", "n1$"))
    assert len(lines) == 3
    reader.type(*(line.replace("192.0.2.10", address).replace("192.0.2.11", address)
                  for line in lines))  # fmt: skip
    kubectl = f"kubectl --kubeconfig {reader.state}/default/kubeconfig get nodes -o name"
    assert reader.type(kubectl).split() == ["node/login", "node/n1"]

    lost = json.loads((reader.state / "default/nodes/n1/node.json").read_text())
    os.kill(lost["supervisor"], signal.SIGKILL)
    assert eventually(lambda: reader.type(kubectl).split() == ["node/login"])
    reader.type(*(line.replace("192.0.2.11", address) for line in lines[1:]))
    assert reader.type(kubectl).split() == ["node/login", "node/n1"], "another took its name"
