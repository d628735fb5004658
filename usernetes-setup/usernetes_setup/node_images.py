# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the verb `image` does: container images of a cluster's nodes on this machine.

Inputs: a file with an image, or an image's name. Outputs: the container runtimes' stores, which end
with their nodes. Invariants: a file is checked before any node is touched; what Dovetail's own pods
need is never removed.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host.progress import Progress

from usernetes_setup import cluster, node_record
from usernetes_setup.build import image_archive, oci_image
from usernetes_setup.control import api_client
from usernetes_setup.node_record import Node
from usernetes_setup.upstream import record as usernetes

OWN = (oci_image.HOST, oci_image.PAUSE)


def load(name: str, source: Path, wanted: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Put the images of a file on all nodes here; `wanted` is a name for the only one in it."""
    nodes = _nodes(name)
    with Progress(say, f"reading {source}"):
        found = image_archive.Source(source)
        images = found.images()
    with found:
        several = len({image.manifest for image in images})  # each may have more than one name
        if wanted and several > 1:
            raise BadInput(f"--image {wanted}: {source} has {several} images, not one")
        images = images[:1] if wanted else images
        names = [image_archive.full_name(wanted) if wanted else one.name for one in images]
        if not all(names):
            raise BadInput(f"{source}: its image has no name; give one with --image NAME")
        for called in names:
            _not_own(called)
        for node in nodes:
            for image, called in zip(images, names):
                what = f"loading {called} on node {node.name}"
                say(what)
                with Progress(say, what) as progress:
                    _import(node, functools.partial(found.write, image, called), progress)
    for other in _elsewhere(name, nodes):
        say(f"node {other} is on another machine: load it there as well")
    return {"images": names, "nodes": [node.name for node in nodes]}


def listed(name: str) -> list[dict[str, Any]]:
    """The images on the nodes here, each with the nodes that have it."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for node in _nodes(name):
        for image, digest, size in _images(node):
            entry = {"image": image, "digest": digest, "size": size, "nodes": []}
            found.setdefault((image, digest), entry)["nodes"].append(node.name)
    return [found[key] for key in sorted(found)]


def remove(name: str, image: str) -> dict[str, Any]:
    """Take an image from all nodes here; pods that run from it go on."""
    called = image_archive.full_name(image)
    _not_own(called)
    removed = []
    for node in _nodes(name):
        there = _images(node, hidden=True)
        digests = {digest for other, digest, _ in there if other == called}
        if not digests:
            continue
        shared = {digest for other, digest, _ in there if other != called and _shown(other)}
        # The runtime has each image once more, by its configuration; without any name it goes.
        hidden = [other for other, digest, _ in there
                  if digest in digests - shared and not _shown(other)]  # fmt: skip
        _ctr(node, "images", "remove", "--sync", called, *hidden)
        removed.append(node.name)
    if not removed:
        raise BadInput(
            f"image {called}: is on no node of cluster {name} here; see `dovetail kube image list`"
        )
    return {"image": called, "nodes": removed}


def _not_own(called: str) -> None:
    if called in OWN:
        raise BadInput(f"image {called}: is a part of the cluster itself")


def _nodes(name: str) -> list[Node]:
    node_record.checked_name(name, "cluster", 20)
    if usernetes.here(name):
        raise BadInput(f"cluster {name}: image is not for clusters of provider usernetes")
    found = [node for node in node_record.nodes(name) if node.alive()]
    if not found:
        raise BadInput(f"cluster {name}: has no node that runs here; see `dovetail kube status`")
    return found


def _elsewhere(name: str, here: list[Node]) -> list[str]:
    """The cluster's nodes on other machines, as far as that can be known here."""
    with contextlib.suppress(OSError, api_client.Refused, http.client.HTTPException, BadInput):
        nodes = cluster.client(name).call("GET", api_client.NODES)["items"]
        return sorted({one["metadata"]["name"] for one in nodes} - {node.name for node in here})
    return []


def _images(node: Node, hidden: bool = False) -> list[tuple[str, str, str]]:
    """Name, digest and size of each; `hidden` with those that the runtime adds for itself."""
    rows = [line.split() for line in _ctr(node, "images", "list").splitlines()[1:]]
    found = [(row[0], row[2], " ".join(row[3:5])) for row in rows if len(row) >= 5]
    return [one for one in found if hidden or _shown(one[0])]


def _shown(image: str) -> bool:
    return not image.startswith("sha256:")


def _words(node: Node, *words: str) -> list[str]:
    socket = f"{node.folder}/run/containerd.sock"
    return [f"{node.binaries}/bin/ctr", "--address", socket, "--namespace", "k8s.io", *words]


def _ctr(node: Node, *words: str) -> str:
    done = subprocess.run(_words(node, *words), capture_output=True, text=True)
    _checked(node, done.returncode, done.stderr)
    return str(done.stdout)


def _import(node: Node, write: Callable[[IO[bytes], Progress], None], progress: Progress) -> None:
    settings = (node.folder / "containerd.toml").read_text()
    kind = re.search(r'^snapshotter = "(\w+)"', settings, re.M)
    words = _words(node, "images", "import", "--snapshotter", kind[1] if kind else "overlayfs", "-")
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stdin
    assert process.stderr
    try:
        with contextlib.suppress(BrokenPipeError):  # it says why
            write(process.stdin, progress)
            process.stdin.close()
        progress.turn(f"node {node.name} unpacks it")
    except BaseException:
        process.kill()
        raise
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        said = process.stderr.read().decode(errors="replace")
        code = process.wait()
    _checked(node, code, said)


def _checked(node: Node, code: int, said: str) -> None:
    if code:
        lines = said.strip().splitlines() or [f"exit code {code}"]
        raise WorkFailed(f"node {node.name}: {lines[-1].removeprefix('ctr: ')}")
