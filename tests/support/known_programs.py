# SPDX-License-Identifier: LGPL-3.0-or-later
"""Builds and runs the programs of pmpi/known under each MPI, for the tests.

Those of version 5, which Debian does not have, are in NEWER_MPIS or build/mpi, or their tests are
skipped: `openmpi` and `mpich` there are what `./bootstrap check` installs, each with its own `bin`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from dovetail.host import install_paths
from dovetail.host import processes as ours
from dovetail.mpi import page

TOP = Path(__file__).resolve().parents[2]
MPIS = ("openmpi", "mpich")
NEWER = {"openmpi5": "openmpi", "mpich5": "mpich"}
NEWER_BIN = {
    name: Path(os.environ.get("NEWER_MPIS") or TOP / "build" / "mpi", mpi, "bin")
    for name, mpi in NEWER.items()
}
LAUNCHERS = {
    "openmpi": "mpirun.openmpi",
    "mpich": "mpiexec.mpich",
    **{name: str(folder / "mpirun") for name, folder in NEWER_BIN.items()},
}
LIMIT = 120  # seconds; a limit for hangs, not an expectation


def environment(**more: str) -> dict[str, str]:
    """What launchers need as root, in a container, with more ranks than cores."""
    return {
        **os.environ,
        "PYTHONPATH": str(TOP / "flux-python"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        **more,
    }


def library(mpi: str) -> Path:
    """The profiling library; skips where it is not built or the MPI is missing."""
    if shutil.which(LAUNCHERS[mpi]) is None:
        pytest.skip(f"no {LAUNCHERS[mpi]} here")
    return install_paths.library(NEWER.get(mpi, mpi))


@functools.cache
def _build_directory() -> Path:
    import atexit

    directory = tempfile.mkdtemp(prefix="dovetail-known-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@functools.cache
def build(mpi: str, source: str, *flags: str) -> str:
    """Compile one known-answer program with the wrapper compiler of an MPI."""
    library(mpi)
    compiler = ("mpifort." if source.endswith(".F90") else "mpicc.") + mpi
    compiler = str(NEWER_BIN[mpi] / "mpicc") if mpi in NEWER else compiler
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    program = _build_directory() / "-".join((Path(source).name, mpi, *flags))
    words = [compiler, "-O1", "-pthread", *flags, "-o", str(program), str(TOP / "pmpi" / source)]
    done = subprocess.run(words, cwd=_build_directory(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(program)


@functools.cache
def preload_with_handlers() -> str:
    """A library for LD_PRELOAD that takes the ending signals for itself, as UCX and others do."""
    source, built = _build_directory() / "handlers.c", _build_directory() / "handlers.so"
    source.write_text(
        "#include <signal.h>\n#include <unistd.h>\n"
        "static void end(int number) { _exit(128 + number); }\n"
        "__attribute__((constructor)) static void install(void)\n"
        "{ signal(SIGHUP, end); signal(SIGINT, end); signal(SIGTERM, end); }\n"
    )
    words = ["cc", "-shared", "-fPIC", "-o", str(built), str(source)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(built)


@dataclass
class Run:
    """One run under the library: how it ended, what it printed, and its pages."""

    code: int
    output: str
    errors: str
    pages: list[page.RankPage]


def start(
    mpi: str, ranks: int, words: list[str], directory: Path, **more: str
) -> subprocess.Popen[str]:
    """Start a program with the library preloaded; the pages appear in `directory`."""
    return subprocess.Popen(
        [LAUNCHERS[mpi], "-np", str(ranks), *words],
        env=environment(LD_PRELOAD=str(library(mpi)), DOVETAIL_DIR=str(directory), **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(mpi: str, ranks: int, words: list[str], directory: Path, **more: str) -> Run:
    """Run a program to its end, with `more` in its environment."""
    process = start(mpi, ranks, words, directory, **more)
    try:
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        # MPICH's starter may leave a rank behind that waits for ever, and takes a core.
        ours.end_all(lambda: ours.members(f"DOVETAIL_DIR={directory}"))
    return Run(process.returncode, output, errors, page.read_pages(directory))


def plain(mpi: str, ranks: int, words: list[str]) -> str | None:
    """The output of a program without the library, None if it fails."""
    words = [LAUNCHERS[mpi], "-np", str(ranks), *words]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    return done.stdout if done.returncode == 0 else None


def counts(one: page.RankPage) -> dict[str, int]:
    """How often each MPI function was called."""
    return {name: count for name, (count, _) in one.calls.items()}


def dovetail(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`dovetail profile` with these arguments."""
    code = (
        "import argparse, sys; from dovetail.cli import main; main.COMMANDS = ('profile',); "
        "sys.exit(main.main(['profile', *sys.argv[1:]]))"
    )
    words = (os.sys.executable, "-c", code, *words)
    return subprocess.run(
        words, env=environment(**more), capture_output=True, text=True, timeout=LIMIT
    )


def saved(path: Path) -> dict[str, object]:
    """Our own part of a profile file."""
    return json.loads(path.read_text())["dovetail"]
