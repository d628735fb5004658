# SPDX-License-Identifier: LGPL-3.0-or-later
"""What profiling costs: a wrapped MPI call, and a whole program.

Inputs: a small program that calls MPI through the wrapper and past it. The
whole program is balanced, so that ranks hardly wait and CPU time is work.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail.bench.cases import copies, mpirun
from dovetail.bench.harness import (
    Claim,
    Progress,
    Row,
    interleave,
    plain,
    plain_environment,
    ratios,
)
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.protocol import WaitPolicy
from dovetail.host import install_paths
from dovetail.host.session import temporary_session
from dovetail.mpi.control_page import Control

LAUNCH = {
    "openmpi": ("mpirun", "--bind-to", "none", "-np", "1"),
    "mpich": ("mpiexec", "-n", "1"),
}


def calls(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Nanoseconds per wrapped call under each MPI, and the CPU time of a whole program."""
    claims = []
    for mpi in LAUNCH:
        with contextlib.suppress(BadInput):  # not built for this MPI
            words = [*starter(mpi), str(install_paths.bench(mpi))]
            row = Row(f"added to a call, {mpi}", tuple(added(mpi, words) for _ in range(repeat)))
            progress(f"{row.name}: {row.median:.1f} ns")
            claims.append(Claim(row, "ns", "<=", 25.0))
    if not claims:
        raise BadInput("no MPI that Dovetail was built for: run `make` with one installed")
    case = copies(scratch, (1, 1), 40, 1)
    with temporary_session(f"bench-{secrets.token_hex(4)}") as session:
        Control.create(Path(session), WaitPolicy("off"))
        on = ["env", f"LD_PRELOAD={install_paths.library('openmpi')}", f"DOVETAIL_DIR={session}"]
        rows = interleave(
            {
                "CPU without": lambda: cpu(lambda: plain(case, mpirun(2), 1)),
                "CPU with": lambda: cpu(lambda: plain(case, [*on, *mpirun(2)], 1)),
            },
            max(3 * repeat, 5),  # CPU time scatters by some percent from run to run
            progress,
        )
    whole = ratios(rows["CPU with"], rows["CPU without"], "CPU of a whole program, with / without")
    return [*claims, Claim(whole, "x", "<=", 1.01)]


def starter(mpi: str) -> list[str]:
    """How a rank is started; only where there may be several MPIs their names are in it."""
    program, *more = LAUNCH[mpi]
    return [shutil.which(f"{program}.{mpi}") or program, *more]


def added(mpi: str, words: Sequence[str]) -> float:
    """Run the small program with the library; nanoseconds that the wrapper adds to a call."""
    with temporary_session(f"bench-{secrets.token_hex(4)}") as session:
        Control.create(Path(session), WaitPolicy("off"))
        env = {
            **plain_environment(),
            "LD_PRELOAD": str(install_paths.library(mpi)),
            "DOVETAIL_DIR": session,
        }
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkFailed(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
    return float(json.loads(done.stdout)["added_ns"])


def cpu(run: Callable[[], object]) -> float:
    """CPU seconds of all processes that `run` started and waited for."""
    before = os.times()
    run()
    after = os.times()
    return (after[2] + after[3]) - (before[2] + before[3])
