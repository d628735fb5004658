# SPDX-License-Identifier: LGPL-3.0-or-later
"""What pods see of the machine for the programs of a plan, on the real cluster."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kube

SOLVER = """#!/bin/sh -e
here=$(dirname "$(readlink -f "$0")")
cat "$here/../lib/data" "${1#--in=}" "$OWN" "${LD_LIBRARY_PATH%%:*}/library"
touch /tmp/a-place-of-its-own
"""


def test_a_program_of_a_view_finds_its_installation_and_what_it_is_told_of(site, out):
    top = site.folder / "programs"
    for name in ("spack/bin", "spack/lib", "view/bin", "data", "own", "module"):
        (top / name).mkdir(parents=True)
    (top / "spack/bin/solver").write_text(SOLVER)
    (top / "spack/bin/solver").chmod(0o755)
    (top / "view/bin/solver").symlink_to(top / "spack/bin/solver")
    found = ["spack/lib/data", "data/mesh", "own/file", "module/library"]
    for name in found:
        (top / name).write_text(f"{name}\n")
    environment = {"PATH": f"/usr/bin:/bin:{top}/view/bin", "OWN": f"{top}/own/file"}
    words = ["mpirun", "-np", "1", "solver", f"--in={top}/data/mesh"]
    entry = {"command": words, "ranks": 1, "environment": environment}
    run = site.start(site.plan(entry), out, LD_LIBRARY_PATH=f"{top}/module:{top}/none")
    assert site.end(run) == 0, site.errors(out)
    log = (site.folder / out / "sim" / "log").read_text()
    assert log.split() == found
