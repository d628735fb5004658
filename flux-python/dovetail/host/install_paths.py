# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where the parts lie that others load: profiling libraries, what is for Flux.

In: DOVETAIL_LIBDIR, which wins if set, and this file's own place. Out: absolute paths.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dovetail.core.errors import BadInput

MPIS = ("openmpi", "mpich")
PACKAGE = Path(__file__).resolve().parents[1]


def package_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which Python finds our packages, installed or in a checkout."""
    environment = dict(os.environ if base is None else base)
    checkout = PACKAGE.parents[1] / "usernetes-setup"
    folders = [PACKAGE.parent, *([checkout] if (checkout / "usernetes_setup").is_dir() else [])]
    paths = [*map(str, folders), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def directories() -> Iterator[Path]:
    """Where a profiling library may be, best first."""
    wish = os.environ.get("DOVETAIL_LIBDIR")
    if wish:
        yield Path(wish)
        return
    top = PACKAGE.parents[1]  # of the source tree, built in place or in build/
    yield top / "pmpi" / ".libs"
    yield top / "build" / "pmpi" / ".libs"
    # PREFIX/lib/python3.x/site-packages/dovetail beside PREFIX/lib[/TRIPLET]/dovetail
    for parent in PACKAGE.parents:
        if parent.name in ("lib", "lib64"):
            yield parent / "dovetail"
            yield from sorted(parent.glob("*-linux-*/dovetail"))
            yield parent.parent / "lib64" / "dovetail"


def library(mpi: str) -> Path:
    """The profiling library for `openmpi` or `mpich`; raises BadInput where it is not built."""
    name = f"libdovetail-{mpi}.so"
    for directory in directories():
        if (directory / name).is_file():
            return (directory / name).absolute()
    looked = os.environ.get("DOVETAIL_LIBDIR", "the build tree and beside the package")
    raise BadInput(f"no {name} in {looked}: run ./configure and make with that MPI installed")


def libraries() -> dict[str, str]:
    """The MPI that each profiling library is for, and its file; what is not built is left out."""
    found = {}
    for mpi in MPIS:
        with contextlib.suppress(BadInput):
            found[mpi] = str(library(mpi))
    return found


def bench(mpi: str, program: str = "bench_calls") -> Path:
    """A program that measures something; raises BadInput where it is not built for this MPI."""
    name = f"{program}.{mpi}"
    for directory in directories():
        built, installed = directory.parent, directory.parent.parent / "libexec" / "dovetail"
        for place in (built, installed):
            if (place / name).is_file():
                return (place / name).absolute()
    raise BadInput(f"no {name} beside the profiling libraries: run `make` with that MPI installed")


def jobtap(name: str) -> Path:
    """The jobtap plugin `carve`, `gate` or `release`; raises BadInput where it is not built."""
    for directory in directories():
        built = directory.parent.parent / "jobtap" / ".libs"
        for place in (built, directory / "jobtap"):
            if (place / f"{name}.so").is_file():
                return (place / f"{name}.so").absolute()
    raise BadInput(f"no jobtap plugin {name}.so: run ./configure and make with Flux and Lua there")


def for_flux() -> dict[str, str]:
    """The environment in which Flux finds its commands and plugins of ours, and all it has now."""
    commands = Path(sys.argv[0]).resolve().parent
    if not (commands / "flux-dovetail").exists():
        raise BadInput(f"there is no flux-dovetail in {commands}: install Dovetail first")
    plugins = PACKAGE / "flux" / "plugins" / "cli"
    found = {}
    for name, folder in (("FLUX_EXEC_PATH_PREPEND", commands), ("FLUX_CLI_PLUGINPATH", plugins)):
        parts = [part for part in os.environ.get(name, "").split(":") if part]
        found[name] = ":".join([str(folder), *(part for part in parts if part != str(folder))])
    return found
