# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cache that root fills for all users of a site, and one that they cannot read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from dovetail.flux import slice_agent
from support.other_users import TOP, needs_nobody
from usernetes_setup.build import programs

pytestmark = [pytest.mark.unit, pytest.mark.slow, needs_nobody]

NOBODY = 65534


class Site:
    """A folder that all can enter, a bundle in it, and what root and another user do there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "site/cache"
        (folder / "state").mkdir(mode=0o700)
        os.chown(folder / "state", NOBODY, NOBODY)
        self.build = self.cache / "kube" / programs.key()
        draft = folder / programs.key()
        (draft / "bin").mkdir(parents=True, mode=0o700)
        (draft / "bin/kube").write_text("#!/bin/sh\necho runs\n")
        (draft / "bin/kube").chmod(0o700)
        (draft / "bin/kubectl").symlink_to("kube")
        (draft / "images.tar").write_text("images")
        (draft / "images.tar").chmod(0o600)
        made = {name: {"bytes": (draft / name).stat().st_size,
                       "sha256": programs.checksum(draft / name)}
                for name in ("bin/kube", "images.tar")}  # fmt: skip
        (draft / "made.json").write_text(json.dumps(made))
        subprocess.run(["tar", "-czf", folder / "bundle.tgz", "-C", folder, draft.name], check=True)

    def run(self, uid: int, *words: str) -> subprocess.CompletedProcess[str]:
        identity = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        environment = {
            **os.environ, "DOVETAIL_CACHE": str(self.cache), "HOME": str(self.folder),
            "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup",
        }  # fmt: skip
        if uid:
            environment["DOVETAIL_STATE"] = str(self.folder / "state/s")
        return subprocess.run(
            ["setpriv", *identity, *words], env=environment, cwd="/", umask=0o077,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def verb(self, uid: int, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(uid, sys.executable, "-m", "usernetes_setup", *words)

    def fill(self) -> None:
        done = self.verb(0, "bundle", "--unpack", str(self.folder / "bundle.tgz"))
        assert done.returncode == 0, done.stderr

    def doctor(self) -> dict[str, str]:
        told = json.loads(self.verb(NOBODY, "preflight", "--json").stdout)
        (found,) = [check for check in told["checks"] if check["name"] == "programs"]
        assert found["level"] != "error" or told["can_run"] is False
        return found


@pytest.fixture
def site():
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dovetail-site-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o755)
        yield Site(folder)


def test_what_root_builds_for_a_site_its_users_can_run(site):
    site.fill()
    assert site.doctor()["level"] == "ok"
    done = site.verb(NOBODY, "build")
    assert (done.returncode, done.stdout.strip()) == (0, str(site.build)), done.stderr
    assert site.run(NOBODY, str(site.build / "bin/kubectl")).stdout == "runs\n"
    assert site.run(NOBODY, "cat", str(site.build / "images.tar")).stdout == "images"


@pytest.mark.parametrize("closed", ["kube", "kube/{}", "kube/{}/bin", "kube/{}/images.tar", ""])
def test_a_build_that_is_closed_is_told_in_one_line_and_opened_as_that_says(site, closed):
    site.fill()
    path = site.cache / closed.format(site.build.name)
    path.chmod(path.stat().st_mode & 0o700)
    reason = f"{path} is closed to this user"
    for verb in ("build", "up"):
        done = site.verb(NOBODY, verb)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        if verb == "build":
            assert reason in done.stderr
            assert f"it belongs to root; admin types: chmod -R a+rX {path}" in done.stderr
    found = site.doctor()
    assert (found["level"], found["who"]) == ("error", "admin")
    assert reason in found["found"]
    assert site.run(0, *found["fix"].split()).returncode == 0
    assert site.doctor()["level"] == "ok"


def test_a_cache_that_an_earlier_version_closed_is_opened_by_building_again(site):
    site.fill()
    (site.cache / "kube").chmod(0o700)
    assert site.verb(0, "build").returncode == 0
    assert site.doctor()["level"] == "ok"


def test_a_cache_below_a_closed_folder_is_not_opened_for_the_user(site):
    site.fill()
    (site.folder / "site").chmod(0o700)
    found = site.doctor()
    assert (found["level"], found["who"], found["fix"]) == ("error", "user", "unset DOVETAIL_CACHE")
    assert "site is closed to this user" in found["found"]


def test_a_cache_without_a_build_that_the_user_cannot_write_is_an_error(site):
    site.fill()
    shutil.rmtree(site.build)
    found = site.doctor()
    assert (found["level"], found["fix"]) == ("error", "unset DOVETAIL_CACHE")
    for words in (["build"], ["bundle", "--unpack", str(site.folder / "bundle.tgz")]):
        done = site.verb(NOBODY, *words)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert f"{site.cache}/kube" in done.stderr
        assert "Errno" not in done.stderr


def test_a_slice_says_why_the_build_is_of_no_use(site):
    site.fill()
    (site.cache / "kube").chmod(0o700)
    words = ("class Agent(agents.Agent):\n"
             "    number, name, machine_address, usernetes = 0, 'one', False, ''\n"
             "    def __init__(self): pass\n"
             "    def tell(self, **news): print(news)\n"
             "Agent().begin()\n")  # fmt: skip
    script = f"import {slice_agent.__name__} as agents\n{words}"
    done = site.run(NOBODY, sys.executable, "-c", script)
    assert f"{site.cache}/kube is closed to this user" in done.stdout, done.stderr
    assert "not built" not in done.stdout
