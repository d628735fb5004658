# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs programs of other projects' test suites: bare, and under the library in each wait mode.

In: an MPI, a number of ranks, a command, a mode. Out: how the command ended and what it printed.
Invariants: the runs differ in the library alone, which is put there as `dovetail` does it; nothing
that a run has started outlives it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.protocol import WaitPolicy
from dovetail.host import processes
from dovetail.mpi import launcher
from dovetail.mpi.control_page import Control

from support import known_programs

BARE = "bare"
MODES = ("off", "yield", "doorbell")
HANG = 1200  # seconds; a limit for hangs, not an expectation


@dataclass(frozen=True)
class Ended:
    """How a command ended, None if it did not, and what it printed."""

    code: int | None
    output: str


def mpi4py_environment(mpi: str, folder: Path) -> dict[str, str]:
    """What makes mpi4py take this MPI; `folder` is empty and will have a library."""
    # The package is built for MPICH's own name of its library, which Debian calls otherwise.
    for library in Path("/usr/lib").glob("*/libmpich.so.12"):
        (folder / "libmpi.so.12").symlink_to(library)
    return {"MPI4PY_MPIABI": mpi, "LD_LIBRARY_PATH": str(folder)}


def run(mpi: str, ranks: int, words: list[str], mode: str, **more: str) -> Ended:
    """Run a command on these ranks; `mode` is BARE or one of MODES, `more` its environment."""
    library = known_programs.library(mpi)
    with tempfile.TemporaryDirectory(prefix="dovetail-suites-", dir="/dev/shm") as directory:
        environment = launcher.environment({**os.environ, **more}, directory, directory)
        if mode != BARE:
            Control.create(Path(directory), WaitPolicy(mode)).close()
            environment = launcher.preload(environment, str(library))
        process = subprocess.Popen(
            launcher.command_line(words, ranks, os.environ["PATH"], mpi),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        code = None
        try:
            output = process.communicate(timeout=HANG)[0]
            code = process.returncode
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode(errors="replace")
        finally:
            process.kill()
            processes.end_all(lambda: processes.members(f"DOVETAIL_DIR={directory}"))
            process.wait()
    return Ended(code, output)
