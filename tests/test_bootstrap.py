# SPDX-License-Identifier: LGPL-3.0-or-later
"""What `./bootstrap flux` and `tests/check` refuse before they install, build or test anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

BOOTSTRAP = Path(__file__).resolve().parents[1] / "bootstrap"


def refused(folder: Path, *words: str) -> str:
    """What it says of such a command, run in a folder with nothing else, that it must refuse."""
    shutil.copy(BOOTSTRAP, folder)
    done = subprocess.run(
        [folder / "bootstrap", "flux", *words], env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert not (folder / ".flux").exists()
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("words", [["--sources"], ["--prefix"], ["-x"], ["flux-security"]])
def test_what_it_does_not_know_is_named(tmp_path, words):
    assert words[0] in refused(tmp_path, *words)


def test_a_folder_of_archives_must_hold_one_of_each(tmp_path):
    sources = tmp_path / "sources"
    assert f"no folder {sources}" in refused(tmp_path, "--sources", str(sources))
    sources.mkdir()
    assert "has no flux-core*.tar.*" in refused(tmp_path, "--sources", str(sources))
    for name in ("flux-core-0.86.0.tar.gz", "flux-core.tar.xz"):
        (sources / name).touch()
    both = refused(tmp_path, "--sources", str(sources))
    assert "more than one flux-core*.tar.*: flux-core-0.86.0.tar.gz flux-core.tar.xz" in both


def test_a_build_that_takes_long_says_how_far_it_is(tmp_path):
    """Of a part whose compiler waits until that was said."""
    shutil.copy(BOOTSTRAP, tmp_path)
    source, said = tmp_path / "flux-operator", tmp_path / "said"
    (source / "config/crd").mkdir(parents=True)
    subprocess.run(
        ["tar", "-czf", "flux-operator.tar.gz", "flux-operator"], cwd=tmp_path, check=True
    )
    (tmp_path / "go").write_text(
        f"#!/bin/sh\necho half of it >&2; mkdir bin; echo >bin/manager\n"
        f"for n in $(seq 300); do grep -q 'so far' {said} && exit; sleep 0.1; done; exit 1\n"
    )
    (tmp_path / "go").chmod(0o755)
    with said.open("w") as file:
        done = subprocess.run(
            [tmp_path / "bootstrap", "flux", "--sources", tmp_path, "flux-operator"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stderr=file,
        )  # fmt: skip
    lines = said.read_text().splitlines()
    assert done.returncode == 0, lines
    assert re.fullmatch(r"bootstrap: flux-operator, [1-9]\d* s so far: half of it", lines[1])
    assert (tmp_path / ".flux/flux-operator/bin/manager").exists()
    assert [line for line in lines if "erminated" in line] == []


@pytest.mark.parametrize(
    "words", [["--repeat"], ["--repeat", "0", "unit"], ["--repeat", "2", "lint"], ["slow"]]
)
def test_what_the_check_cannot_do_is_named(words):
    check = BOOTSTRAP.parent / "tests" / "check"
    done = subprocess.run([check, *words], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words[0] in line


def test_flux_without_the_plugins_for_it_is_no_tier_that_is_skipped(tmp_path):
    (tmp_path / "tests").mkdir()
    check = shutil.copy(BOOTSTRAP.parent / "tests" / "check", tmp_path / "tests")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    words = [check, "flux"]
    done = subprocess.run(
        words, env={"PATH": path, "FLUX": "/bin/true"}, capture_output=True, text=True
    )
    assert "flux       failed: the jobtap plugins were not built for /bin/true" in done.stdout
    assert done.returncode == 1
    done = subprocess.run(
        words, env={"PATH": path, "FLUX": "/none"}, capture_output=True, text=True
    )
    assert "flux       skipped: not installed" in done.stdout
    assert done.returncode == 0
