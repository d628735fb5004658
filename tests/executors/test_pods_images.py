# SPDX-License-Identifier: LGPL-3.0-or-later
"""Pods of an image, which has an MPI of its own and no Python: here its files are another root."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest
from dovetail.executors import pods
from dovetail.executors.pods import messages
from dovetail.host import borrowed_python, install_paths
from support import images
from support.local_runs import wait_for
from support.pod_processes import ADDRESSES, Cluster

pytestmark = pytest.mark.mpi

LAYOUTS = {
    "one pod": [("one", 0, 2)],
    "two pods on one node": [("one", 0, 1), ("one", 0, 1)],
    "a pod on each of two nodes": [("one", 0, 1), ("two", 1, 1)],
}


@pytest.fixture(scope="module", params=["openmpi", "mpich"])
def image(request, tmp_path_factory):
    """An MPI, and the folder of its image."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("another root needs mounts of its own, which this user may not make")
    root = tmp_path_factory.mktemp(request.param)
    words = 'tar -x -O -f "$0" layer.tar | tar -x -C "$1"'
    subprocess.run(["sh", "-c", words, images.archive(request.param), root], check=True)
    return request.param, root


class Pods(Cluster):
    """Entrypoints begin in the image's root, as a runtime would have them."""

    def __init__(self, directory, root):
        super().__init__(directory)
        ours = [
            str(install_paths.PACKAGES / "dovetail"),
            str(install_paths.library("openmpi").parent),
        ]
        same = ["/dev", "/proc", "/sys", "/etc/hosts", *ours, str(directory)]
        seen = [*borrowed_python.mounts(), *((name, name) for name in same)]
        lines = ["set -e", "mount --make-rprivate /"]
        for source, target in seen:
            place = shlex.quote(f"{root}{target}")
            make = "mkdir -p" if os.path.isdir(source) else "touch"
            lines.append(f"{make} {place}; mount --rbind {shlex.quote(source)} {place}")
        script = "\n".join([*lines, f'exec /usr/sbin/chroot {shlex.quote(str(root))} "$@"'])
        self.inside = ("unshare", "-m", "sh", "-c", script, "sh")

    def command(self, module, *words):
        found = super().command(module, *words)
        if module != "entrypoint":
            return found
        own = pods.command("executors.pods.entrypoint", borrowed_python.words())
        return [*own, "--run", self.run, *words]


def iterations(cluster):
    """By rank, as the agents have told so far; one of another node may tell after the result."""
    cluster.heard += cluster.hub.take()
    told = [one.ranks for _, one in cluster.heard if isinstance(one, messages.Sample)]
    return {rank: page[0] for ranks in told for rank, page in ranks.get("sim", {}).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_run_from_the_image_alone_and_are_measured(image, tmp_path, monkeypatch, layout):
    mpi, root = image
    token = f"DOVETAIL_TEST={tmp_path}"
    monkeypatch.setenv("DOVETAIL_TEST", str(tmp_path))
    cluster = Pods(tmp_path, root)
    own = ("env", "-i", token, "HOME=/", "PATH=/usr/local/bin:/usr/bin:/bin")
    try:
        for node in {place[0] for place in LAYOUTS[layout]}:
            cluster.agent(node)
        for group, (node, _, _) in enumerate(LAYOUTS[layout]):
            cluster.entrypoint("sim", group, node, *own, *cluster.inside)
        for _ in LAYOUTS[layout]:
            cluster.until(messages.Pod, "sim")
        config = cluster.config("sim", ("busy", "sleep", "20", "20", "40"), 2, f"cat {images.MARK}")
        del config["environment"]["PATH"]
        hosts = [{"address": ADDRESSES[at], "ranks": n} for _, at, n in LAYOUTS[layout]]
        cluster.hub.tell(messages.Run("sim", config, hosts))
        assert cluster.until(messages.Started, "sim").mpi == mpi
        result = cluster.until(messages.Result, "sim")
        assert result.code == 0, (result, cluster.log("sim"))
        wait_for(lambda: iterations(cluster) == {"0": 20, "1": 20}, lambda: str(cluster.heard))
        assert cluster.log("sim").startswith(f"{mpi}\n")
        cluster.end("sim")
    finally:
        cluster.close()
