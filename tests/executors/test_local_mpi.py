# SPDX-License-Identifier: LGPL-3.0-or-later
"""The local executor runs real MPI programs and reads their ranks while they run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.core.errors import BadInput
from dovetail.host import install_paths
from support import known_programs
from support.local_runs import scripts, share, site, wait_for  # noqa: F401

pytestmark = pytest.mark.mpi

PITZ_DAILY = Path(
    "/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily"
)  # fmt: skip

PROGRAM = """
#include <mpi.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int rank, sum;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (;;) {
        MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        if (rank == 0) { printf("Time = 1\\n"); fflush(stdout); }
        usleep(20000);
        if (rank == 1 && argc > 1 && !strcmp(argv[1], "abort")) MPI_Abort(MPI_COMM_WORLD, 7);
    }
}
"""

SLURM = (
    *((name, "7") for name in ("SLURM_JOBID", "SLURM_JOB_ID")),
    *((name, "2") for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    *((name, "other[1-2]") for name in ("SLURM_NODELIST", "SLURM_JOB_NODELIST")),
    *((name, "1(x2)") for name in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")),
)


@pytest.fixture(scope="module", params=["openmpi", "mpich"])
def program(request, tmp_path_factory):
    """A program whose ranks exchange messages for ever, under either MPI."""
    try:
        install_paths.library(request.param)
    except BadInput as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "exchange.c").write_text(PROGRAM)
    compiler = f"mpicc.{request.param}"
    subprocess.run([compiler, "-o", "exchange", "exchange.c"], cwd=directory, check=True)
    return str(directory / "exchange")


def launch(site, executor, program, *arguments, environment=()):  # noqa: F811
    """Start it on two ranks; returns the spec."""
    spec = site.spec("sim", "", ranks=2, command=(program, *arguments))
    spec = protocol.Spec(**{**vars(spec), "environment": environment})
    executor.launch(spec, protocol.Share((1000, 1000), protocol.WaitPolicy("yield")))
    return spec


def rank_pids(executor):
    """Rank to process id, once both have published their pages."""
    pages = list(Path(executor.session, "sim").glob("rank.*.*"))
    ranks = {int(one.name.split(".")[1]): int(one.name.split(".")[2]) for one in pages}
    return ranks if len(ranks) == 2 else None


def test_a_rank_killed_with_9_is_named(site, program):  # noqa: F811
    executor = site.executor()
    launch(site, executor, program)
    os.kill(wait_for(lambda: rank_pids(executor))[1], signal.SIGKILL)
    who = "a rank" if "mpich" in program else "rank 1"  # its peers are killed the same way
    assert site.until(executor, "sim").reason == f"{who} killed by signal 9"


@pytest.mark.parametrize("quiet", ["0", "1"], ids=["told by its starter", "not told"])
def test_a_rank_that_aborts_is_named(site, program, quiet):  # noqa: F811
    executor = site.executor()
    silence = (("OMPI_MCA_orte_execute_quiet", quiet),)
    launch(site, executor, program, "abort", environment=silence)
    finished = site.until(executor, "sim")
    assert finished.code == 7
    assert finished.reason.startswith("rank 1: exit code 7")


@pytest.mark.parametrize("mpi", known_programs.LAUNCHERS)
def test_ranks_are_here_in_a_job_of_a_batch_system(site, mpi):  # noqa: F811
    """A stand-in for a job of Slurm that has two other nodes; the starters go by its variables."""
    starter = known_programs.LAUNCHERS[mpi]
    if shutil.which(starter) is None:
        pytest.skip(f"no {starter} here")
    executor = site.executor()
    launch(site, executor, starter, "-np", "2", "echo", "here", environment=SLURM)
    assert site.until(executor, "sim").reason == ""
    assert site.log("sim").count("here\n") == 2


def test_iterations_are_counted_and_a_hang_can_be_stopped(site, program):  # noqa: F811
    executor = site.executor()
    launch(site, executor, program)

    def counted():
        site.until(executor, "sim", protocol.Sampled)
        return site.events[-1].ranks.iterations[0] >= 3

    wait_for(counted)
    executor.stop("sim", "enough")
    assert site.until(executor, "sim").reason == "stopped: enough"
    seen = [one for one in site.events if isinstance(one, protocol.Counted)][-1].contention
    assert len(seen.voluntary) == len(seen.queued) == 2
    assert sum(seen.voluntary) > 0
    assert all(0 <= queued <= elapsed for queued, elapsed in zip(seen.queued, seen.elapsed))


@pytest.mark.skipif(not PITZ_DAILY.is_dir(), reason="needs OpenFOAM's examples")
def test_openfoam_runs_to_its_end_and_every_iteration_is_seen(site, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WM_PROJECT_DIR", "/usr/share/openfoam")
    try:
        install_paths.library("openmpi")
    except BadInput as error:
        pytest.skip(str(error))
    decompose = (
        "printf 'FoamFile{version 2.0;format ascii;class dictionary;object decomposeParDict;}"
        "numberOfSubdomains 2;method hierarchical;hierarchicalCoeffs{n (2 1 1);delta 0.001;"
        "order xyz;}' > system/decomposeParDict && decomposePar"
    )
    shorten = "sed -i 's/^endTime .*/endTime 40;/' system/controlDict"
    mesh = "cp -rL /usr/share/doc/openfoam-examples/examples/resources . || true; blockMesh"
    executor = site.executor(origin=0.0)
    spec = protocol.Spec(
        "pitz", "pitz", str(PITZ_DAILY), 2, (1.0, 1.0), ("simpleFoam", "-parallel"),
        scripts(shorten, mesh, decompose),
    )  # fmt: skip
    executor.launch(spec, protocol.Share((1000, 1000), protocol.WaitPolicy("yield")))
    finished = site.until(executor, "pitz")
    assert (finished.code, finished.reason) == (0, ""), site.log("pitz")[-2000:]
    samples = [event.ranks for event in site.events if isinstance(event, protocol.Sampled)]
    assert samples[-1].iterations == (40, 40)
    assert all(cpu > 0 for cpu in samples[-1].cpu)
    assert all(memory > 1 << 20 for memory in samples[-1].memory)
    assert os.listdir(executor.session) == ["owner"]


@pytest.mark.skipif(not PITZ_DAILY.is_dir(), reason="needs OpenFOAM's examples")
@pytest.mark.parametrize("starter", [(), ("mpirun.openmpi", "-np", "1")], ids=["bare", "mpirun"])
def test_every_iteration_of_a_serial_solver_is_seen(site, monkeypatch, starter):  # noqa: F811
    """Without `-parallel` it never calls MPI_Init, though it is linked with an MPI."""
    monkeypatch.setenv("WM_PROJECT_DIR", "/usr/share/openfoam")
    try:
        install_paths.library("openmpi")
    except BadInput as error:
        pytest.skip(str(error))
    shorten = "sed -i 's/^endTime .*/endTime 40;/' system/controlDict"
    mesh = "cp -rL /usr/share/doc/openfoam-examples/examples/resources . || true; blockMesh"
    executor = site.executor(origin=0.0)
    spec = protocol.Spec(
        "pitz", "pitz", str(PITZ_DAILY), 1, (1.0,), (*starter, "simpleFoam"), scripts(shorten, mesh)
    )
    executor.launch(spec, protocol.Share((1000,), protocol.WaitPolicy("yield")))
    finished = site.until(executor, "pitz")
    log = site.log("pitz")
    assert (finished.code, finished.reason) == (0, ""), log[-2000:]
    samples = [event.ranks for event in site.events if isinstance(event, protocol.Sampled)]
    assert samples[-1].iterations == (log.count("\nTime = "),) == (40,)
    # One is told again when the log, which is read a few times a second, tells its residual.
    told = {(one.iterations, one.stamp): one for one in samples if one.iterations[0] > 0}
    for counts in zip(*told):
        assert [*counts] == sorted(set(counts))
    computed = [float(seconds) for seconds in re.findall(r"ExecutionTime = ([\d.]+) s", log)]
    assert samples[-1].cpu[0] >= computed[-1] - computed[0]
