# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which Go builds Kubernetes. The go commands here are scripts, as one machine has one."""

from __future__ import annotations

import os

import pytest
from dovetail.core.errors import WorkFailed
from usernetes_setup.build import go_toolchain

pytestmark = pytest.mark.unit


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Puts a go command of some version on PATH, alone."""

    def make(version: str) -> str:
        fetched = tmp_path / "fetched"
        (fetched / "bin").mkdir(parents=True)
        (fetched / "pkg/tool/linux").mkdir(parents=True)
        for program in ("bin/go", "pkg/tool/linux/link"):
            (fetched / program).touch(mode=0o644)
        script = tmp_path / "go"
        script.write_text(
            f"#!/bin/sh\ncase $1 in env) echo {version} ;;\n"
            f'mod) echo "$@" >{tmp_path}/asked; echo \'{{"Dir": "{fetched}"}}\' ;; esac\n'
        )
        script.chmod(0o755)
        monkeypatch.setattr(go_toolchain, "installed", lambda: str(script))
        return str(script)

    return make


@pytest.mark.parametrize("version", ["go1.21.0", "go1.26.8"])
def test_a_go_that_fetches_what_it_needs_is_taken_as_it_is(go, tmp_path, version):
    script = go(version)
    assert go_toolchain.command("1.26.0", tmp_path, print) == script
    assert not (tmp_path / "asked").exists()


def test_an_old_go_fetches_the_right_one_and_its_programs_can_be_run(go, tmp_path):
    go("go1.19.8")
    found = go_toolchain.command("1.26.0", tmp_path, print)
    assert "golang.org/toolchain@v0.0.1-go1.26.0.linux-" in (tmp_path / "asked").read_text()
    assert os.access(found, os.X_OK)
    assert os.access(tmp_path / "fetched/pkg/tool/linux/link", os.X_OK)


def test_without_go_and_without_packages_the_reason_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(go_toolchain, "installed", lambda: None)
    monkeypatch.setattr(go_toolchain.shutil, "which", lambda _: None)
    assert not go_toolchain.obtainable()
    with pytest.raises(WorkFailed, match="neither go nor apt-get"):
        go_toolchain.command("1.26.0", tmp_path, print)
