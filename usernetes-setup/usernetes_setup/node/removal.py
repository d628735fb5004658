# SPDX-License-Identifier: LGPL-3.0-or-later
"""Removes a node with all that it leaves: processes, control groups, files.

From outside, by its monitor or by a verb, or from inside, by its supervisor when the monitor has
gone. Invariants: the node's record goes last, so that what one try leaves another finds; nothing
but the node's own is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

from dovetail.host.session import sweep_sessions

from usernetes_setup.node import cgroups, namespaces
from usernetes_setup.node_record import Node, cluster_folder, wait_unlocked

LIMIT = 8.0  # seconds for everything to be gone


def from_outside(node: Node, deadline: float = 0.0) -> list[str]:
    """End the node's processes, then remove its groups and files; returns what is left."""
    deadline = deadline or time.monotonic() + LIMIT
    folder = node.folder  # asking for it anew would make the folder of all clusters again
    if node.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.supervisor, signal.SIGKILL)  # the kernel kills the whole namespace
    left = cgroups.remove(node.group, deadline)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    sweep_sessions()  # of simulations whose pods were just killed
    if left:
        return left  # with the node's record, by which `down` can try again
    try:
        discard(node)
    except OSError as error:
        left.append(str(error))
    if folder.exists():
        left.append(str(folder))
    return left


def from_inside(node: Node) -> None:
    """Kill everything in this process namespace, then remove the node's groups and files."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    with contextlib.suppress(OSError):
        if cgroups.unified():
            namespaces.unmount(str(cgroups.ROOT))  # ours; below it is the machine's
        cgroups.leave(node.group)
    left = cgroups.remove(node.group, time.monotonic() + 5)
    sweep_sessions()  # of simulations whose pods were just killed
    if not left:  # else `down` can try again, by the node's record
        discard(node)
    wait_unlocked(node.cluster)


def discard(node: Node) -> None:
    """Remove a node's files, and the cluster's when it was the last or the control node."""
    namespaces.remove_folder(node.folder, node.user)
    top = cluster_folder(node.cluster)
    if node.control:
        shutil.rmtree(top / "pki", ignore_errors=True)
        (top / "kubeconfig").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (top / "nodes").rmdir()
        top.rmdir()
