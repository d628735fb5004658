# SPDX-License-Identifier: LGPL-3.0-or-later
"""The rules of which package may import which are seen when they are broken.

That they are kept is for the linter, see `tests/check`; that each of them can be broken is for
these tests, and so are the plugins that Flux loads by path, which are in no package.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
PROJECT = TOP / "flux-python" / "pyproject.toml"
PLUGINS = TOP / "flux-python" / "dovetail" / "flux" / "plugins"
FORBIDDEN = {
    "dovetail/core/units.py": "import dovetail.host.cgroups",
    "dovetail/executors/pods/messages.py": "import dovetail.executors.kubernetes.api",
    "dovetail/executors/kubernetes/api.py": "import dovetail.executors.local.executor",
    "dovetail/bench/cases.py": "import dovetail.bench.demo",
    "dovetail/run/loop.py": "import flux, kubernetes, prometheus_client, usernetes_setup.cluster",
    "dovetail/controller/trial.py": "import time",
    "dovetail/host/cgroups.py": "import yaml",
    "usernetes_setup/cluster.py": "import dovetail.core.units",
}
"""Imports that break every rule once."""

pytestmark = pytest.mark.unit


def test_every_rule_is_broken_by_an_import_that_it_forbids(tmp_path):
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    for package in ("flux-python/dovetail", "usernetes-setup/usernetes_setup"):
        copy = tmp_path / Path(package).name
        shutil.copytree(TOP / package, copy, copy_function=shutil.copyfile)
    for name, line in FORBIDDEN.items():
        with open(tmp_path / name, "a") as file:
            file.write(f"{line}\n")
    done = subprocess.run(
        [linter, "--no-cache", "--config", PROJECT], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    names = re.findall(r'^name = "(.+)"$', PROJECT.read_text().partition("importlinter")[2], re.M)
    said = re.findall(r"^(.+) (KEPT|BROKEN)(?: \(.*\))?$", done.stdout, re.M)
    assert (said, done.returncode) == ([(name, "BROKEN") for name in names], 1), done.stdout


@pytest.mark.parametrize("path", sorted(PLUGINS.rglob("*.py")), ids=lambda path: path.name)
def test_a_plugin_of_flux_imports_what_is_for_flux(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "no relative import: the plugin is in no package"
            imported.add(node.module)
    allowed = re.compile(r"(flux|dovetail\.(core|flux|host))(\..+)?")
    others = {name.partition(".")[0] for name in imported if not allowed.fullmatch(name)}
    assert others <= {"__future__", "importlib", "json", "pathlib", "sys", "typing"}
