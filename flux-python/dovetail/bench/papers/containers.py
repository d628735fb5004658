# SPDX-License-Identifier: LGPL-3.0-or-later
"""A container without Kubernetes: all ranks of a program in one, on the host's network.

Inputs: a program and a number of ranks. Output: what it prints. The container has namespaces of its
own for mounts, processes and messages, a control group, and this machine's folders in place of an
image, as pods have; it is made by the runc that nodes use, as an ordinary user in a user namespace
too. Invariant: it is gone when `run` returns.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from usernetes_setup.build import programs

from dovetail.bench import hybrid
from dovetail.bench.harness import Progress
from dovetail.core.errors import WorkFailed

_OWN = ("proc", "sys", "dev")  # that every container has by itself
_SHARED = ("network", "uts", "cgroup")  # namespaces that stay the host's
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""In a user namespace everybody is."""
_PATIENCE = 600.0  # seconds


def runc(progress: Progress) -> Path:
    """The program that makes containers, built if it is not there. Raises BadInput, WorkFailed."""
    return Path(programs.built() or programs.build(progress)) / "bin/runc"


def run(engine: Path, scratch: Path, words: Sequence[str], ranks: int) -> str:
    """What a program prints, on ranks that mpirun starts in a container. Raises WorkFailed."""
    name = f"dovetail-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="container-", dir=scratch) as folder:
        bundle = Path(folder)
        made = [str(engine), "spec", f"--bundle={bundle}"]
        subprocess.run(made if os.getuid() == 0 else [*made, "--rootless"], check=True)
        file = bundle / "config.json"
        command, environment = hybrid.mpi_command(words, scratch, ranks)
        config = _configured(json.loads(file.read_text()), bundle / "rootfs")
        variables = [f"{name}={value}" for name, value in {**environment, **_ROOT}.items()]
        config["process"].update(args=command, cwd=str(scratch), env=variables, terminal=False)
        file.write_text(json.dumps(config))
        line = [str(engine), f"--root={bundle}/state"]
        try:
            done = subprocess.run(
                [*line, "run", f"--bundle={bundle}", name], stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=_PATIENCE,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise WorkFailed(f"in a container: no end in {_PATIENCE:.0f} s") from None
        finally:
            subprocess.run([*line, "delete", "--force", name], capture_output=True)
            shutil.rmtree(bundle / "state", ignore_errors=True)
    if done.returncode:
        raise WorkFailed(f"in a container: {(done.stderr + done.stdout).strip()[-1000:]}")
    return done.stdout


def _configured(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """runc's example, with this machine's folders; `root` gets a place for each."""
    root.mkdir()
    config["root"] = {"path": str(root), "readonly": False}
    mounts = [one for one in config["mounts"] if one["destination"] != "/sys/fs/cgroup"]
    for entry in sorted(os.scandir("/"), key=lambda one: one.name):
        if entry.is_symlink():
            (root / entry.name).symlink_to(os.readlink(entry.path))
        elif entry.is_dir() and entry.name not in _OWN and os.access(entry.path, os.X_OK):
            mounts.append({"destination": entry.path, "type": "bind", "source": entry.path,
                           "options": ["rbind", "rw"]})  # fmt: skip
    config["mounts"] = mounts
    config.pop("hostname", None)
    spaces = config["linux"]["namespaces"]
    spaces[:] = [space for space in spaces if space["type"] not in _SHARED]
    return config
