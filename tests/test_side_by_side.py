# SPDX-License-Identifier: LGPL-3.0-or-later
"""Tests run side by side, together where they share something, and alone where they ask for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.other_users import TOP

pytestmark = pytest.mark.unit
MODULE = """
import os, time
from pathlib import Path
import pytest

HERE, NAME = Path(__file__).parent, Path(__file__).stem

def there(pattern, seconds):
    end = time.monotonic() + seconds
    while not list(HERE.glob(pattern)) and time.monotonic() < end:
        time.sleep(0.01)
    return list(HERE.glob(pattern))

def begin(what):
    (HERE / f"{NAME}.{what}.{os.getpid()}").touch()

@pytest.fixture(scope="module")
def shared():
    return None

@pytest.mark.alone
def test_alone(shared):
    begin("alone")
    assert len(there("*.last.*", 0)) == 2
    assert len(list(HERE.glob("*.alone.*"))) == (NAME == "test_b") + 1

def test_first(shared):
    assert there(f"{NAME}.minutes.*", 0)
    begin("first")
    assert there("test_a.first.*", 60) and there("test_b.first.*", 60)
    if NAME == "test_b":  # the worker that is faster is given what comes next, those alone
        assert there("test_a.last.*", 60)

def test_second(shared):
    begin("second")

def test_last(shared):
    if NAME == "test_b":
        assert not there("*.alone.*", 2), "though the other worker has nothing else to do"
    begin("last")

@pytest.mark.first
def test_takes_minutes(shared):
    assert not there(f"{NAME}.first.*", 0)
    begin("minutes")
"""


def test_alone_means_alone_and_all_others_meet(tmp_path):
    pytest.importorskip("xdist")
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(MODULE)
    words = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "--rootdir", tmp_path,
             "-c", TOP / "flux-python/pyproject.toml", "-p", "no:cacheprovider",
             "-p", "support.side_by_side", tmp_path]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, "-m", "pytest", *words], env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout
    for module in ("test_a", "test_b"):
        found = [path.name for path in tmp_path.glob(f"{module}.*.*") if ".alone." not in path.name]
        assert len({name.rpartition(".")[2] for name in found}) == 1, "one worker had them all"
