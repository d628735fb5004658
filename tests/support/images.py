# SPDX-License-Identifier: LGPL-3.0-or-later
"""Container images for the tests: Debian's MPI and a program of ours, packed without any engine.

An image has a C library, a shell, an MPI and nothing of Python. It is made once and kept in the
user's cache, as an archive like those of `docker save`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from usernetes_setup.build import debian_packages, image_archive, programs

from support import known_programs

BASE = ("libc6", "libc-bin", "dash", "coreutils", "libacl1", "libattr1", "libselinux1",
        "libpcre2-8-0", "libgmp10", "libgcc-s1", "libstdc++6", "zlib1g", "libzstd1", "liblzma5",
        "libhwloc15", "libudev1", "libnuma1", "libfabric1", "libibverbs1", "librdmacm1",
        "libnl-3-200", "libnl-route-3-200", "libpsm2-2", "libpsm-infinipath1", "libucx0",
        "libuuid1", "libatomic1", "libgfortran5", "libquadmath0", "libxml2", "libicu72", "libcap2",
        "libpmix2", "libmunge2", "libevent-core-2.1-7", "libevent-pthreads-2.1-7")  # fmt: skip
OF_MPI = {
    "openmpi": ("openmpi-bin", "openmpi-common", "libopenmpi3"),
    "mpich": ("mpich", "libmpich12", "hwloc-nox", "libslurm38", "libncursesw6", "libtinfo6"),
}
STARTER = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.mpich"}
MARK = "/etc/image-of-the-tests"
"""A file that no machine has; its content is the MPI's name."""


def archive(mpi: str) -> Path:
    """An archive with a whole image for this machine, named localhost/test/MPI:1."""
    program = Path(known_programs.build(mpi, "known/busy.c"))
    digest = hashlib.sha256(
        repr((BASE, OF_MPI[mpi])).encode() + program.read_bytes() + Path(__file__).read_bytes()
    )
    made = programs.cache().parent / "test-images" / f"{mpi}-{digest.hexdigest()[:12]}.tar"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        for old in made.parent.glob(f"{mpi}-*.tar"):
            if old != made:  # which another worker may just have made
                old.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            root = _root(mpi, program, Path(scratch))
            draft = Path(scratch) / "draft"
            docker_archive(root, draft, f"localhost/test/{mpi}:1")
            draft.rename(made)
    return made


def _root(mpi: str, program: Path, scratch: Path) -> Path:
    """The image's files."""
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    root = debian_packages.unpack([*BASE, *OF_MPI[mpi]], scratch, say)
    for name in ("bin", "sbin", "lib", "lib64"):
        if (root / name).is_dir() and not (root / name).is_symlink():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("share/doc", "share/man", "share/locale", "share/i18n"):
        shutil.rmtree(root / "usr" / name, ignore_errors=True)
    if not os.path.lexists(root / "bin/sh"):
        (root / "bin/sh").symlink_to("dash")
    starter = root / "usr/bin/mpirun"
    if not os.path.lexists(starter):
        starter.symlink_to(STARTER[mpi])
    for name in ("dev", "proc", "sys", "tmp", "run", "usr/local/bin", "etc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy2(program, root / "usr/local/bin/busy")
    (root / "usr/local/bin/busy").chmod(0o755)
    (root / MARK[1:]).write_text(f"{mpi}\n")
    return root


def docker_archive(
    root: Path, target: Path, name: str, architecture: str = "", **config: object
) -> Path:
    """Pack a folder as an image with one layer, as `docker save` writes it."""
    layer = target.with_suffix(".layer")

    def of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = "root"
        return entry

    with tarfile.open(layer, "w") as packed:
        for path in sorted(root.iterdir()):
            packed.add(path, path.name, filter=of_root)
    with layer.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    text = json.dumps({
        "architecture": architecture or image_archive.architecture(), "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest.hexdigest()}"]},
    })  # fmt: skip
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = {"config.json": text, "manifest.json": json.dumps(manifest)}
    with tarfile.open(target, "w") as packed:
        packed.add(layer, "layer.tar")
        for part, content in parts.items():
            path = layer.with_suffix(".part")
            path.write_text(content)
            packed.add(path, part)
            path.unlink()
    layer.unlink()
    return target
