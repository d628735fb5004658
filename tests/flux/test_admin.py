# SPDX-License-Identifier: LGPL-3.0-or-later
"""The guide for administrators: its policies do what it says, its upgrade what it promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import flux_lua, guides
from support.flux_lua import Instance

pytestmark = pytest.mark.flux

TOP = Path(__file__).resolve().parents[2]
LONG = "--setattr=system.exec.test.run_duration=1000s"
KUBERNETES = '--setattr=user.dovetail={"nodes": 1, "cores": 1}'
WHOLE = '--setattr=user.dovetail={"nodes": 1, "cores": "all"}'


@pytest.fixture(scope="module")
def running() -> Iterator[Instance]:
    with flux_lua.instance(2) as one:
        yield one


@pytest.fixture
def flux(running: Instance) -> Iterator[Instance]:
    yield running
    running.clear()


def policy(name: str) -> str:
    """A plugin as the guide has it."""
    blocks = guides.blocks("dovetail-admin.7", "Policies in Lua")
    (found,) = [block for block in blocks if block.startswith(f"-- {name}.lua\n")]
    return found


def test_a_user_has_at_most_so_many_jobs_with_kubernetes(flux):
    before = flux.submit(LONG, KUBERNETES, "true")
    with flux.plugin("few-each", policy("few-each")):
        second = flux.submit(LONG, KUBERNETES, "true")
        refused = flux.run("submit", LONG, KUBERNETES, "true")
        assert refused.returncode != 0
        assert "you have 2 jobs with Kubernetes; one has to end first" in refused.stderr
        flux.submit(LONG, "true")
        flux.ok("cancel", before)
        flux.wait(before, "clean")
        flux.submit(LONG, KUBERNETES, "true")
        assert flux.query("few-each")["errors"] == 0
    with flux.plugin("few-each", policy("few-each"), "most=1"):
        refused = flux.run("submit", LONG, KUBERNETES, "true")
        assert "you have 1 jobs with Kubernetes" in refused.stderr
    assert second


def test_one_without_a_limit_gets_one(flux):
    with flux.plugin("default-time", policy("default-time")):
        limits = {}
        for name, options in {
            "none": (KUBERNETES,), "own": (KUBERNETES, "-t", "60s"), "other": (),
        }.items():  # fmt: skip
            job = flux.submit(LONG, *options, "true")
            flux.wait(job, "alloc")
            limits[name] = flux.ok("jobs", "-no", "{duration}", job)
        assert flux.query("default-time")["errors"] == 0
    assert {name: float(seconds) for name, seconds in limits.items()} == {
        "none": 28800.0, "own": 60.0, "other": 0.0,
    }  # fmt: skip


def test_one_that_wants_whole_nodes_waits_behind_all_others(flux):
    with flux.plugin("behind", policy("behind")):
        flux.ok("queue", "stop", "--all")
        jobs = [flux.submit(LONG, *words, "true") for words in ((WHOLE,), (KUBERNETES,), ())]
        for job in jobs:
            flux.wait(job, "priority")
        shown = [flux.ok("jobs", "-no", "{priority}", job) for job in jobs]
        flux.ok("queue", "start", "--all")
        assert flux.query("behind")["errors"] == 0
    assert shown == ["8", "16", "16"]


def test_what_env_says_stays_with_the_version_that_said_it(tmp_path):
    """The link may be turned while a job runs."""
    commands = Path(sys.executable).parent
    link = tmp_path / "current"
    link.symlink_to(commands.parent)
    said = subprocess.run(
        [link / "bin" / "dovetail", "env"], env={"PATH": os.environ["PATH"]},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert str(link) not in said
    assert str(commands) in said


def test_the_installation_of_the_guide_works_and_is_removed_with_its_folder(tmp_path):
    """All but the packages of Python, which are those of this installation."""
    steps = [c.line for c in guides.commands("dovetail-admin.7") if c.section == "Installation"]
    source, place = tmp_path / "source", tmp_path / "opt"
    listed = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if (TOP / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, source / name)
    lines = [step.replace("/opt/dovetail", str(place)) for step in steps[:7]]
    assert lines[-1].startswith("ln ")
    script = "\n".join(line for line in lines if "pip install" not in line)
    script = script.replace("-m venv ", "-m venv --without-pip ")
    script = script.replace("/usr/bin/python3 -m", f"{sys.executable} -m", 1)
    done = subprocess.run(
        ["bash", "-ec", script], cwd=source, capture_output=True, text=True, umask=0o077
    )
    assert done.returncode == 0, done.stderr
    typo = ["./configure", "--quiet", "FLUX=/none/flux"]
    refused = subprocess.run(typo, cwd=source, capture_output=True, text=True)
    assert "FLUX='/none/flux' is not the whole path of a command" in refused.stderr
    assert refused.returncode == 1
    closed = [path for path in place.rglob("*") if path.stat().st_mode & 0o044 != 0o044]
    assert closed == [], "which users are to run"
    libraries = Path(sys.modules["pydantic"].__file__).parents[1]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    there = place / "0.1.0" / "lib" / version / "site-packages"
    for package in libraries.iterdir():  # in place of pip
        if not (there / package.name).exists() and "dovetail" not in package.name:
            (there / package.name).symlink_to(package)
    said = subprocess.run(
        [place / "current" / "bin" / "dovetail", "--version"], capture_output=True, text=True
    )
    assert said.stdout == "dovetail 0.1.0\n", said.stderr
    assert (place / "0.1.0" / "lib" / "dovetail" / "jobtap" / "carve.so").exists()
    assert not list(tmp_path.glob("opt/0.1.0/**/__editable__*"))
    named = re.findall(
        r"/opt/dovetail/(current/[\w./-]+)", (TOP / "doc/dovetail-admin.7").read_text()
    )
    assert "current/share/dovetail/usernetes-setup/delegate" in named
    assert [name for name in named if not (place / name).exists()] == []
