# SPDX-License-Identifier: LGPL-3.0-or-later
"""Packages for sites ask for what the project needs, and the module sets what `dovetail env` does.

That a wheel and a Debian package can be built and hold all is checked in tier `build`.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from dovetail import __version__
from dovetail.cli import env
from dovetail.host import install_paths

pytestmark = pytest.mark.unit

TOP = Path(__file__).resolve().parents[1]
PACKAGING = TOP / "packaging"
RELEASE = "dovetail-0.1.0.tar.gz"
BUNDLED = {"jinja2": "Python-bundle-PyPI", "numpy": "SciPy-bundle"}
"""Packages of EasyBuild that have more than one of Python's."""
WHEELS = {
    "PyYAML==6.0.2": 13, "PyYAML==6.0.3": 14, "pydantic==2.11.7": 13, "pydantic==2.12.5": 14,
    "numpy==2.0.2": 12, "numpy==2.3.5": 14,
}  # fmt: skip
"""The newest Python 3 for which one that is compiled has wheels, so that none needs a compiler."""


def needs() -> set[str]:
    """The packages of Python that are needed at run time, in small letters."""
    lines = (TOP / "flux-python" / "requirements.txt").read_text().splitlines()
    found = {re.match(r"[\w-]+", line)[0].lower() for line in lines if line[0] != "#"}
    assert len(found) > 7
    return found


@pytest.mark.parametrize("minor", range(9, 15))
def test_each_python_gets_one_version_of_each_package_and_compiles_none(minor):
    lines = (TOP / "flux-python" / "requirements.txt").read_text().splitlines()
    found = []
    for line in lines:
        pin, marker = re.match(r"([^\s;#]*)(?:; python_version (\S+ \S+))?", line).groups()
        sign, version = (marker or '>= "3.9"').split()
        before = minor < int(version.strip('"').split(".")[1])
        if pin and before == (sign == "<"):
            found.append(pin)
    assert {re.match(r"[\w-]+", pin)[0].lower() for pin in found} == needs()
    assert len(found) == len(needs())
    compiled = [pin for pin in found if pin.startswith(("PyYAML", "pydantic", "numpy"))]
    assert [pin for pin in compiled if WHEELS[pin] < minor] == []


def test_a_wheel_has_the_services_that_their_list_says_how_to_install():
    assert "dovetail[services]" in (TOP / "flux-python/requirements-services.txt").read_text()
    _, told, _ = runpy.run_path(str(PACKAGING / "build_wheel.py"))["metadata"]()
    assert "\nProvides-Extra: services\n" in told
    assert re.search(r"^Requires-Dist: river==\S+ .* and extra == 'services'$", told, re.M)
    asked = {name.lower() for name in re.findall(r"^Requires-Dist: ([\w-]+)", told, re.M)}
    assert asked == {*needs(), "river"}


def test_the_debian_package_depends_on_what_is_needed():
    control = (PACKAGING / "debian" / "control").read_text().partition("\nPackage: ")[2]
    found = set(re.findall(r"^ python3-([\w-]+)", control, re.M))
    assert found == {{"pyyaml": "yaml"}.get(name, name) for name in needs()}


def test_the_spack_recipe_depends_on_what_is_needed():
    recipe = (PACKAGING / "spack" / "package.py").read_text()
    assert set(re.findall(r'depends_on\("py-([\w-]+)', recipe)) == needs()
    assert f'version("{__version__}")' in recipe


def test_the_easybuild_file_has_what_is_needed():
    (file,) = (PACKAGING / "easybuild").iterdir()
    found = {
        name.lower().replace("_", "-")
        for name in re.findall(r"^    \('([\w-]+)'", file.read_text(), re.M)
    }
    assert {BUNDLED.get(name, name).lower() for name in needs()} <= found
    assert file.name.startswith(f"dovetail-{__version__}-")


def test_the_debian_package_has_the_same_version():
    first, *_ = (PACKAGING / "debian" / "changelog").read_text().splitlines()
    assert first.startswith(f"dovetail ({__version__}-1) ")


def test_the_module_sets_what_env_prints(tmp_path, monkeypatch):
    (tmp_path / "flux-dovetail").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "dovetail")])
    for name in ("FLUX_EXEC_PATH_PREPEND", "FLUX_CLI_PLUGINPATH"):
        monkeypatch.delenv(name, raising=False)
    text = (PACKAGING / "modulefile.in").read_text()
    text = text.replace("@bindir@", str(tmp_path))
    text = text.replace("@pythondir@", str(install_paths.PACKAGES))
    found = dict(re.findall(r'^(?:ap|pre)pend-path (\w+) "(.*)"$', text, re.M))
    assert found == {**install_paths.for_flux(), "PATH": str(tmp_path)}
    assert text.startswith("#%Module")


@pytest.mark.parametrize("names", [["control"], ["build.log", "control"], ["build.log", RELEASE]])
def test_a_folder_with_something_else_is_not_emptied_for_a_package(tmp_path, names):
    """As packaging/debian is, where the guide's line is typed in packaging/."""
    folder = tmp_path / "debian"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    release = (folder if RELEASE in names else tmp_path) / RELEASE
    release.touch()
    done = subprocess.run(
        [PACKAGING / "build-deb", release, folder], capture_output=True, text=True
    )
    assert release.exists()
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{folder} holds something else" in line


@pytest.mark.parametrize("folders", [1, 4])
@pytest.mark.parametrize(
    ("command", "function"),
    [("dovetail", "cli/main.py:entry"), ("flux-dovetail", "flux/entry.py:main")],
)
def test_a_command_runs_however_long_the_path_of_its_python_is(
    tmp_path, command, function, folders
):
    """Linux takes 127 bytes, or 255, in the first line of a script."""
    python = Path(tmp_path, *["environment" * 6] * folders, "python")
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    text = (TOP / "flux-python/Makefile.am").read_text()
    known = f"MKDIR_P = mkdir -p\nPYTHON = {python}\npythondir = {tmp_path}\n"
    module = tmp_path / "dovetail" / function.partition(":")[0]
    module.parent.mkdir(parents=True)
    (tmp_path / "dovetail/__init__.py").touch()
    module.write_text(f"import sys\ndef {function.partition(':')[2]}(): print(sys.argv[1:])\n")
    found = re.findall(rf"^(?:first_line =.*\n|bin/{command}:.*\n)(?:\t.*\n)+", text, re.M)
    (tmp_path / "Makefile").write_text(known + "".join(found))
    subprocess.run(["make", "-s", f"bin/{command}"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "bin" / command, "a  b", "'"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{['a  b', chr(39)]}\n", "")


@pytest.mark.parametrize(
    ("makefile", "target"),
    [("flux-python/Makefile.am", "bin/dovetail"), ("Makefile.am", "packaging/$(PACKAGE_VERSION)")],
)
def test_what_a_full_disk_has_cut_short_is_no_file_of_the_build(tmp_path, makefile, target):
    """An empty command would be taken for a whole one, and do nothing without a word."""
    text = (TOP / makefile).read_text()
    (rule,) = re.findall(rf"^{re.escape(target)}:.*\n(?:\t.*\n)+", text, re.M)
    special = "".join(re.findall(r"^\.[A-Z_]+:.*\n", text, re.M))
    known = f"MKDIR_P = mkdir -p\nPACKAGE_VERSION = 0\nSED = sed\nsrcdir = {TOP}\nVPATH = {TOP}\n"
    rule = rule.replace(">$@", ">$@; exit 1")
    (tmp_path / "Makefile").write_text(known + special + rule)
    words = ["make", target.replace("$(PACKAGE_VERSION)", "0")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / words[1]).exists()


def test_plugins_of_another_version_leave_the_paths_of_flux(tmp_path, monkeypatch):
    """Flux runs each that it finds, and the packages are those of the first."""
    old = "/opt/0.1.0/lib/python3.9/site-packages/dovetail/flux/plugins/cli"
    (tmp_path / "flux-dovetail").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "dovetail")])
    monkeypatch.setenv("FLUX_CLI_PLUGINPATH", f"/site/cli:{old}/:")
    monkeypatch.setenv("FLUX_EXEC_PATH_PREPEND", f"/opt/0.1.0/bin:{tmp_path}")
    assert install_paths.for_flux() == {
        "FLUX_CLI_PLUGINPATH": f"{install_paths.flux_plugin('cli')}:/site/cli",
        "FLUX_EXEC_PATH_PREPEND": f"{tmp_path}:/opt/0.1.0/bin",
    }


@pytest.mark.parametrize(
    ("folder", "package"), [("flux-python", "dovetail"), ("usernetes-setup", "usernetes_setup")]
)
def test_of_a_package_that_was_removed_nothing_can_be_imported(tmp_path, folder, package):
    """Nor is a file of anybody else's removed, as automake has removed all of ours by then."""
    text = (TOP / folder / "Makefile.am").read_text()
    (rule,) = re.findall(r"^uninstall-hook:\n(?:\t.*\n)+", text, re.M)
    (tmp_path / "Makefile").write_text(f"pythondir = /site packages\nDESTDIR = {tmp_path}\n{rule}")
    words = ["make", "uninstall-hook"]
    subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    site = tmp_path / "site packages"
    for name in ("flux/__pycache__/load.cpython-39.pyc", "bench/mine.txt"):
        (site / package / name).parent.mkdir(parents=True)
        (site / package / name).touch()
    subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert [path.name for path in site.rglob("*")] == [package, "bench", "mine.txt"]
    (site / package / "bench/mine.txt").unlink()
    subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert [*site.iterdir()] == []


def env_path(monkeypatch, folder, path):
    """What `dovetail env` of a folder's commands makes of a PATH."""
    monkeypatch.setattr(sys, "argv", [str(folder / "dovetail")])
    monkeypatch.setattr(env.programs, "built", lambda: None)
    monkeypatch.setenv("PATH", path)
    return env.path()


def test_commands_of_env_come_before_those_of_another_version_and_after_the_systems(
    tmp_path, monkeypatch
):
    """Else `dovetail` would be the one, and `flux dovetail` the other."""
    old, new = tmp_path / "0.1.0/bin", tmp_path / "0.2.0/bin"
    for folder in (old, new):
        folder.mkdir(parents=True)
        for name in ("dovetail", "flux-dovetail"):
            (folder / name).touch(0o755)
    system = "/usr/local/bin:/usr/bin"
    assert env_path(monkeypatch, old, system) == f"{system}:{old}"
    both = f"{system}:{new}:{old}"
    assert env_path(monkeypatch, new, f"{system}:{old}") == both
    assert env_path(monkeypatch, new, both) == both
    assert env_path(monkeypatch, new, f"{system}:{old}:{new}") == both
    (tmp_path / "current").symlink_to("0.2.0")
    current = f"{tmp_path}/current/bin:/usr/bin"
    assert env_path(monkeypatch, new, current) == f"{current}:{new}"
