# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where the installed files lie, in a checkout and under a prefix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import dovetail
import pytest
import usernetes_setup
from dovetail.core.errors import BadInput
from dovetail.host import install_paths

pytestmark = pytest.mark.unit

SHARED = ("operator-manifests", "usernetes-setup", "examples")
ASK = """
import json
from dovetail.host import install_paths as paths
print(json.dumps([str(paths.PACKAGES), str(paths.library("openmpi")),
                  *(str(paths.shared(name)) for name in %r)]))
"""


@pytest.mark.skipif(
    not (install_paths.TOP / "flux-python").is_dir(),
    reason="the installed packages are tested, not the checkout's; `make check` takes those",
)
def test_a_checkout_has_all_its_shared_folders():
    for name in SHARED:
        assert install_paths.shared(name) == install_paths.TOP / name
    assert install_paths.flux_plugin("cli/dovetail_cli.py").is_file()
    with pytest.raises(BadInput, match="no-such-folder/ was not found"):
        install_paths.shared("no-such-folder")


def test_an_isolated_python_finds_our_packages_and_none_of_the_users(tmp_path):
    (tmp_path / "dovetail.py").write_text("raise SystemExit('the wrong one')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = install_paths.python_command("import dovetail.host; print(dovetail.host.__file__)")
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(install_paths.PACKAGES / "dovetail/host/__init__.py")


def test_nothing_where_a_command_runs_is_taken_for_a_module(tmp_path):
    for name in ("queue.py", "dovetail.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')")
    words = install_paths.dovetail_command((sys.executable,))
    done = subprocess.run([*words, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "dovetail")


@pytest.mark.parametrize("libraries", ["lib", "lib64", "lib/x86_64-linux-gnu"])
def test_what_is_installed_under_a_prefix_is_found_beside_the_package(tmp_path, libraries):
    packages = tmp_path / "lib" / "python3.9" / "site-packages"
    (packages / "dovetail").mkdir(parents=True)
    shutil.copy(install_paths.PACKAGES / "dovetail" / "__init__.py", packages / "dovetail")
    for part in ("core", "host"):
        shutil.copytree(install_paths.PACKAGES / "dovetail" / part, packages / "dovetail" / part)
    (tmp_path / libraries / "dovetail").mkdir(parents=True)
    (tmp_path / libraries / "dovetail" / "libdovetail-openmpi.so").touch()
    for name in SHARED:
        (tmp_path / "share" / "dovetail" / name).mkdir(parents=True)
    environment = {name: os.environ[name] for name in os.environ if name != "DOVETAIL_LIBDIR"}
    done = subprocess.run(
        [sys.executable, "-c", ASK % (SHARED,)],
        env={**environment, "PYTHONPATH": str(packages)}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    shared = [str(tmp_path / "share" / "dovetail" / name) for name in SHARED]
    library = str(tmp_path / libraries / "dovetail" / "libdovetail-openmpi.so")
    assert json.loads(done.stdout) == [str(packages), library, *shared]
    assert all(Path(name).exists() for name in shared)


@pytest.mark.parametrize("folder", ["my tools", "a:b"])
def test_a_library_that_cannot_be_preloaded_from_where_it_is_is_told(folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "libdovetail-openmpi.so").touch()
    monkeypatch.setenv("DOVETAIL_LIBDIR", str(tmp_path / folder))
    with pytest.raises(
        BadInput, match=f"{folder}/libdovetail-openmpi.so: LD_PRELOAD takes no path"
    ):
        install_paths.library("openmpi")
    assert install_paths.libraries() == {}


@pytest.mark.parametrize("found", [None, "__version__ = '1.10.4'"])
def test_a_python_without_the_packages_that_are_needed_is_told_in_a_line(tmp_path, found):
    """As the system's, after a plain ./configure: it has none, or older ones."""
    if found:
        (tmp_path / "pydantic.py").write_text(found)
    for package in (dovetail, usernetes_setup):  # by themselves, wherever they are installed
        folder = Path(package.__file__).parent
        (tmp_path / folder.name).symlink_to(folder)
    script = (f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
              "sys.argv[1:] = ['run', 'plan.yaml']; "
              "from dovetail.cli.main import entry; entry()")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("dovetail: ")
    assert f"{sys.executable} needs the packages of flux-python/requirements.txt" in line
