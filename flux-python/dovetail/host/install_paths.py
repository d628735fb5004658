# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where the installed files lie: packages, shared data, profiling libraries, what is for Flux.

Inputs: DOVETAIL_LIBDIR, which wins if set, and this file's own place, which is one of

    TOP/flux-python/dovetail/host/               a checkout, built in TOP or in TOP/build
    PREFIX/lib/python3.x/site-packages/dovetail/host/        `make install`

Outputs: absolute paths. Invariant: nobody else computes such a path; only the files that Flux
itself loads, before they can import anything of ours, find their package on their own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dovetail.core.errors import BadInput

MPIS = ("openmpi", "mpich")
PACKAGES = Path(__file__).resolve().parents[2]
"""The folder in which Python finds `dovetail`."""
TOP = PACKAGES.parent
"""The checkout; where there is none, a folder that has nothing of ours."""


def shared(name: str) -> Path:
    """`operator-manifests`, `usernetes-setup` or `examples`, in the checkout or installed."""
    for folder in (TOP, *(up / "share" / "dovetail" for up in PACKAGES.parents)):
        if (folder / name).is_dir():
            return folder / name
    raise BadInput(f"{name}/ was not found beside the installation of dovetail")


def flux_plugin(name: str) -> Path:
    """What is for Flux itself: a file or folder below `dovetail/flux/plugins`."""
    return PACKAGES / "dovetail" / "flux" / "plugins" / name


def python_command(statement: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """The words that run a statement which imports our packages, and nothing of the user's."""
    path = f"import sys; sys.path.insert(0, {str(PACKAGES)!r})"
    return [*python, "-I", "-S", "-c", f"{path}; {statement}"]


def dovetail_command(python: Sequence[str]) -> list[str]:
    """The words that run this `dovetail`, with the packages that this Python finds beside ours.

    Nothing in the folder where it runs is taken for one of them, nor for a module of Python's.
    """
    path = f"sys.path[:] = [{str(PACKAGES)!r}, *filter(None, sys.path), *{others()}]"
    return [
        *python,
        "-c",
        f"import sys; {path}; from dovetail.cli.main import main; sys.exit(main())",
    ]


def others() -> list[str]:
    """Where packages of others are, for a Python that would not look there."""
    return [folder for folder in sys.path if folder.endswith("-packages")]


def package_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which Python finds our packages, installed or in a checkout."""
    environment = dict(os.environ if base is None else base)
    checkout = TOP / "usernetes-setup"
    folders = [PACKAGES, *([checkout] if (checkout / "usernetes_setup").is_dir() else [])]
    paths = [*map(str, folders), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def directories() -> Iterator[Path]:
    """Where a profiling library may be, best first."""
    wish = os.environ.get("DOVETAIL_LIBDIR")
    if wish:
        yield Path(wish)
        return
    yield TOP / "pmpi" / ".libs"
    yield TOP / "build" / "pmpi" / ".libs"
    # PREFIX/lib/python3.x/site-packages beside PREFIX/lib[/TRIPLET]/dovetail
    for parent in PACKAGES.parents:
        if parent.name in ("lib", "lib64"):
            yield parent / "dovetail"
            yield from sorted(parent.glob("*-linux-*/dovetail"))
            yield parent.parent / "lib64" / "dovetail"


def library(mpi: str) -> Path:
    """The profiling library for `openmpi` or `mpich`.

    Raises BadInput where it is not built, or cannot be preloaded from where it is.
    """
    name = f"libdovetail-{mpi}.so"
    for directory in directories():
        if (directory / name).is_file():
            path = (directory / name).absolute()
            if set(str(path)) & set(" \t\n:"):
                raise BadInput(
                    f"{path}: LD_PRELOAD takes no path with a space or a colon: put it into "
                    "another folder, and that into DOVETAIL_LIBDIR"
                )
            return path
    looked = os.environ.get("DOVETAIL_LIBDIR", "the build tree and beside the package")
    raise BadInput(f"no {name} in {looked}: run ./configure and make with that MPI installed")


def libraries() -> dict[str, str]:
    """The MPI that each profiling library is for, and its file; what is not built is left out."""
    found = {}
    for mpi in MPIS:
        with contextlib.suppress(BadInput):
            found[mpi] = str(library(mpi))
    return found


def why_unmeasured(mpi: str) -> str:
    """Why programs of that MPI are not measured, in words; empty if they are, or there is none."""
    try:
        if mpi:
            library(mpi)
        return ""
    except BadInput as error:
        return f"programs of {mpi} are not measured: {error}"


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


def commands() -> Path:
    """The folder with the commands of ours; raises BadInput where that for Flux is not there."""
    folder = Path(sys.argv[0]).resolve().parent
    if not (folder / "flux-dovetail").exists():
        raise BadInput(f"there is no flux-dovetail in {folder}: install Dovetail first")
    return folder


def beside(paths: str, folder: str) -> list[str]:
    """The folders of a path, but for ours below `flux/plugins` and that of any other Dovetail.

    Flux loads each file that it finds on some of its paths, and ours can only be one version's.
    """
    parts = [part for part in paths.split(":") if part]
    end = f"/dovetail/flux/plugins/{folder}"
    return [part for part in parts if not part.rstrip("/").endswith(end)]


def for_flux() -> dict[str, str]:
    """The environment in which Flux finds its commands and plugins of ours, and all it has now.

    Of another Dovetail it keeps the commands, which ours come before, and no plugins.
    """
    ours, prepended = str(commands()), os.environ.get("FLUX_EXEC_PATH_PREPEND", "")
    others = [part for part in prepended.split(":") if part not in ("", ours)]
    plugins = beside(os.environ.get("FLUX_CLI_PLUGINPATH", ""), "cli")
    return {
        "FLUX_EXEC_PATH_PREPEND": ":".join([ours, *others]),
        "FLUX_CLI_PLUGINPATH": ":".join([str(flux_plugin("cli")), *plugins]),
    }
