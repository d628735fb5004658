# SPDX-License-Identifier: LGPL-3.0-or-later
"""A container without Kubernetes: all ranks of a program in one, on the host's network.

Inputs: a program and a number of ranks. Output: what it prints. The container has namespaces of its
own for mounts, processes and messages, a control group, and this machine's folders in place of an
image, as pods have; it is made by the runc that nodes use, as an ordinary user in a user namespace
too. Run as a module it is one rank of a program, whose other ranks Flux starts elsewhere:

    flux run -N2 -n2 python -m dovetail.bench.papers.containers lmp -in in.lj

Invariant: the container is gone when `run` returns, and when the process that made it was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
_PMI = "PMI_FD"  # names the descriptor by which a rank finds the others
_PASSED = 3  # the first descriptor that runc passes on
_REMOVE = 'read -r _; "$@"; rm -rf --one-file-system "$0"'


def runc(progress: Progress) -> Path:
    """The program that makes containers, built if it is not there. Raises BadInput, WorkFailed."""
    return Path(programs.built() or programs.build(progress)) / "bin/runc"


def run(engine: Path, scratch: Path, words: Sequence[str], ranks: int) -> str:
    """What a program prints, on ranks that mpirun starts in a container. Raises WorkFailed."""
    command, environment = hybrid.mpi_command(words, scratch, ranks)
    with _container(engine, scratch, command, environment) as line:
        try:
            done = subprocess.run(
                line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired:
            raise WorkFailed(f"in a container: no end in {_PATIENCE:.0f} s") from None
    if done.returncode:
        raise WorkFailed(f"in a container: {(done.stderr + done.stdout).strip()[-1000:]}")
    return done.stdout


def main(words: Sequence[str]) -> int:
    """Run one rank that Flux started in a container; its exit code."""
    built = programs.built()
    if built is None:
        print(f"{socket.gethostname()}: run `dovetail kube build` there", file=sys.stderr)
        return 1
    environment = dict(os.environ)
    passed: tuple[int, ...] = ()
    if _PMI in environment:
        os.dup2(int(environment[_PMI]), _PASSED)
        environment[_PMI], passed = str(_PASSED), (_PASSED,)
    scratch = Path(tempfile.gettempdir())
    with _container(Path(built) / "bin/runc", scratch, words, environment, passed) as line:
        return subprocess.run(line, stdin=subprocess.DEVNULL, pass_fds=passed).returncode


@contextlib.contextmanager
def _container(
    engine: Path, scratch: Path, command: Sequence[str], environment: Mapping[str, str],
    passed: Sequence[int] = (),
) -> Iterator[list[str]]:  # fmt: skip
    """The words that run a command in a container, which gets the descriptors `passed`."""
    name = f"dovetail-{secrets.token_hex(4)}"
    bundle = Path(tempfile.mkdtemp(prefix="dovetail-container-", dir=scratch))
    line = [str(engine), f"--root={bundle}/state"]
    # It reads until we have ended, however that happens; then it removes what there is.
    keeper = subprocess.Popen(
        ["sh", "-c", _REMOVE, str(bundle), *line, "delete", "--force", name],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        made = [str(engine), "spec", f"--bundle={bundle}"]
        made += [] if os.getuid() == 0 else ["--rootless"]
        done = subprocess.run(made, capture_output=True, text=True)
        if done.returncode:
            raise WorkFailed(f"a container cannot be made: {done.stderr.strip()}")
        file = bundle / "config.json"
        config = _configured(json.loads(file.read_text()), bundle / "rootfs")
        variables = [f"{key}={value}" for key, value in {**environment, **_ROOT}.items()]
        config["process"].update(args=[*command], cwd=str(scratch), env=variables, terminal=False)
        file.write_text(json.dumps(config))
        asked = [f"--preserve-fds={len(passed)}", f"--bundle={bundle}", name]
        yield ["setpriv", "--pdeathsig", "KILL", *line, "run", *asked]
    finally:
        keeper.communicate()


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
