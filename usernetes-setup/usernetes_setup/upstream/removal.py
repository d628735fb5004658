# SPDX-License-Identifier: LGPL-3.0-or-later
"""Removes a node that upstream Usernetes made, with all that it leaves.

Input: its record. Outputs: no container, volume, network or pod of it in the engine, no file.
Invariants: it needs no part of the node to be alive; upstream's own `make down-v` is what removes,
after the container was killed, since a node that is shut down takes its time; the record goes last,
so that what one try leaves another finds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from dovetail.core.errors import WorkFailed

from usernetes_setup import node_record
from usernetes_setup.upstream import engine
from usernetes_setup.upstream.record import FILE, Record, here

KINDS = {"ps -a -q": "rm -f", "volume ls -q": "volume rm -f", "network ls -q": "network rm -f"}
"""How an engine lists what it has of a project, and how it removes that."""


def remove(record: Record) -> list[str]:
    """Remove it; returns what is left, which may be all, if the engine does not answer."""
    podman, silent = "podman" in record.engine, [f"{record.engine} does not answer"]
    ids = engine.listed(record, "ps", "-a", "-q")
    if ids is None:
        return silent
    if ids:
        at_once = ["-t", "0"] if podman else []
        engine.ask(record, "rm", "-f", *at_once, "-v", *ids)
    if record.subnet and record.checkout.exists():
        down(record)
    left = []
    if podman:  # podman-compose has containers in a pod
        engine.ask(record, "pod", "rm", "-f", "--ignore", f"pod_{record.project}")
    for listing, removing in KINDS.items():
        found = engine.listed(record, *listing.split())
        if found:
            engine.ask(record, *removing.split(), *found)
            found = engine.listed(record, *listing.split())
        left += silent if found is None else found
    if podman and record.alone:
        others = engine.ask(record, "ps", "-a", "-q")
        if others is not None and not others.split():  # else it would stop what is running
            engine.ask(record, "system", "migrate")  # ends the one that keeps namespaces
    if not left:
        for path in record.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != FILE:
                path.unlink()
        shutil.rmtree(record.folder)
    return left


def down(record: Record) -> None:
    """Type upstream's own verb for it."""
    child = engine.make(record, "down-v")
    try:
        child.wait(engine.LIMIT)
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def main(folder: str) -> int:
    """After the monitor, whatever ended it: what its service does last."""
    os.environ["DOVETAIL_STATE"] = str(Path(folder).parent)
    record = here(Path(folder).name)
    if record is None:
        return 0
    for line in (left := remove(record)):
        print(f"left: {line}")
    with contextlib.suppress(WorkFailed), node_record.locked(record.cluster):
        pass  # it removes what is empty; where a verb has the lock, that does
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
