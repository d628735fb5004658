# SPDX-License-Identifier: LGPL-3.0-or-later
"""Tests run side by side, together where they share something, and alone where they ask for it.

What fails beside others is run again alone, by tests/check.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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


FAILING = """
import os
import re
import pytest

pytestmark = pytest.mark.unit
BESIDE = "PYTEST_XDIST_WORKER" in os.environ

@pytest.fixture(scope="module")
def late():
    assert not BESIDE, "it is not up in time"

@pytest.fixture
def untidy():
    yield
    assert not BESIDE, "something is left"

@pytest.mark.parametrize("number", range(4))
def test_late(late, number):
    pass

def test_fails_and_is_untidy(untidy):
    assert not BESIDE

def test_is_untidy(untidy):
    pass

def test_is_good():
    pass
"""
ALONE_IT_PASSES = "passed: 7 tests, 6 of them only alone, when run again: "
ONE_MORE = FAILING + "def test_one_more():\n    assert not BESIDE\n"
ALWAYS = FAILING.replace("(untidy):\n    assert not BESIDE", "(untidy):\n    assert False")


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (FAILING, ALONE_IT_PASSES),
        (ALWAYS, "failed: 1 of 7 tests: test_fails_and_is_untidy; passed only alone"),
        (ONE_MORE, "failed: 7 of 8 tests: test_fails_and_is_untidy test_is_untidy "),
    ],
    ids=["three causes", "always one", "four"],
)
def test_what_fails_for_three_causes_is_run_again_alone(tmp_path, tests, said):
    """A cluster that is not ready fails many tests; one test may fail and leave something too."""
    pytest.importorskip("xdist")
    for name in ("tests/check", "flux-python/pyproject.toml"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(TOP / name, tmp_path / name)
    (tmp_path / "tests/test_failing.py").write_text(tests)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run([tmp_path / "tests/check", "unit"], env={**environment, "PATH": path},
                          capture_output=True, text=True)  # fmt: skip
    assert f"unit       {said}" in done.stdout, done.stdout
    assert done.returncode == (said != ALONE_IT_PASSES)


def test_every_file_of_tests_is_of_a_tier():
    """What is of none is never run, and nobody misses it."""
    files = [*(TOP / "tests").rglob("test_*.py")]
    assert len(files) > 100
    tier = re.compile(r"pytest\.mark\.(unit|mpi|kube|flux|machines)\b")
    assert [file.name for file in files if not tier.search(file.read_text())] == []
