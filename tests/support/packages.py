# SPDX-License-Identifier: LGPL-3.0-or-later
"""A wheel or a Debian package, unpacked, finds all of its own: `packages.py FILE...`.

In: the packages, and the Python that runs this, with the packages that Dovetail needs. Out: a line
for each, or what is wrong, and exit code 1. Invariant: nothing is installed on this machine.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

LOOK = """
import os, sys
top, packages, others = sys.argv[1:]
sys.path[:0] = [packages]
sys.path += [others]
import usernetes_setup.cluster
from dovetail.host import install_paths as paths
found = [*paths.libraries().values(), paths.bench("openmpi"), paths.bench("mpich")]
assert len(found) == 4, found
found += [paths.shared(name) for name in ("operator-manifests", "usernetes-setup", "examples")]
found += [paths.flux_plugin(name) for name in ("cli", "completion.bash", "modprobe/modprobe.d")]
for one in found:
    assert str(one).startswith(top), one
    assert os.path.exists(one), one
sys.argv[:] = [top + "/bin/dovetail"]
assert str(paths.commands()) == top + "/bin"
from dovetail.cli.main import main
sys.exit(main(["predict", "--help"]))
"""


def unpacked(package: Path, folder: Path) -> tuple[Path, Path]:
    """The prefix, and the folder of packages, of one that is put into a folder."""
    if package.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        return folder / "usr", folder / "usr" / "lib" / "python3" / "dist-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--prefix", folder, package], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return folder, folder / "lib" / version / "site-packages"


def check(package: Path) -> None:
    """Raise what is wrong with one."""
    with tempfile.TemporaryDirectory() as folder:
        top, packages = unpacked(package, Path(folder))
        module = top / "share" / "modulefiles" / "dovetail" / "0.1.0"
        assert module.exists() == (package.suffix == ".deb"), "it names the place where all is"
        if package.suffix == ".deb":
            text = module.read_text()
            assert ' PATH "/usr/bin"' in text
            assert ' FLUX_CLI_PLUGINPATH "/usr/lib/python3/dist-packages/dovetail/' in text
        pages = top / "share" / "man" / "man1"
        assert len(list(pages.glob("dovetail-kube-*"))) == 8
        others = sysconfig.get_path("purelib")
        # In a folder of its own, without the variables by which our checkout may be found.
        words = [sys.executable, "-I", "-S", "-c", LOOK, top, packages, others]
        subprocess.run(words, cwd=folder, env={}, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(Path(name))
        print(f"{name}: all is found")
