# SPDX-License-Identifier: LGPL-3.0-or-later
"""A recipe for Spack: `packages/dovetail/package.py` in a repository of the site's.

A release, `dovetail-VERSION.tar.gz`, is in the folder where `spack install --no-checksum dovetail`
is typed, or in a mirror.
"""

import os

from spack_repo.builtin.build_systems.autotools import AutotoolsPackage

from spack.package import *


class Dovetail(AutotoolsPackage):
    """A queue of MPI simulations through the cores that there are, as fast as they allow: it
    chooses ranks, packs, and shares CPU time by measured load."""

    homepage = "https://flux-framework.org"  # Dovetail has none of its own
    url = f"file://{os.getcwd()}/dovetail-0.1.0.tar.gz"
    manual_download = True

    license("LGPL-3.0-or-later")

    version("0.1.0")

    variant("flux", default=True, description="Build the plugins of Flux's job manager")

    depends_on("c", type="build")
    depends_on("mpi@3:")
    extends("python@3.9:")

    with default_args(type=("build", "run")):
        depends_on("py-jinja2")
        depends_on("py-kubernetes")
        depends_on("py-numpy")
        depends_on("py-prometheus-client")
        depends_on("py-pydantic@2:")
        depends_on("py-pyyaml")
        depends_on("py-rich")
        depends_on("py-urllib3@2.3:")

    with when("+flux"):
        depends_on("pkgconfig", type="build")
        depends_on("flux-core@0.84:", type=("build", "link", "run"))
        depends_on("jansson")
        depends_on("lua@5.3:5.4")

    def configure_args(self):
        mpi = self.spec["mpi"]
        ours, other = ("OPENMPI", "MPICH") if mpi.satisfies("openmpi") else ("MPICH", "OPENMPI")
        flux = self.spec["flux-core"].prefix.bin.flux if self.spec.satisfies("+flux") else "no"
        return [
            f"MPICC_{ours}={mpi.mpicc}",
            f"MPICC_{other}=no",
            f"PYTHON={self.spec['python'].command.path}",
            f"FLUX={flux}",
        ]

    def setup_run_environment(self, env):
        # As `dovetail env` says it.
        env.prepend_path("FLUX_EXEC_PATH_PREPEND", self.prefix.bin)
        plugins = join_path(python_purelib, "dovetail", "flux", "plugins", "cli")
        env.prepend_path("FLUX_CLI_PLUGINPATH", plugins)
