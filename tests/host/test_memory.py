# SPDX-License-Identifier: LGPL-3.0-or-later
"""What memory there is, and that the kernel killed for want of it; version 2 by imitation."""

from __future__ import annotations

import subprocess
import sys

import pytest
from dovetail.host import cgroups, memory
from support.memory_limits import EAT, LIMIT_MIB, limited, within  # noqa: F401

pytestmark = pytest.mark.unit


def python(group, text, *words):
    done = subprocess.run(
        [*within(group), sys.executable, "-c", text, *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


LOOK = """
import subprocess, sys
from dovetail.host.memory import KernelKills
kills = KernelKills()
print(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode, kills.why())
"""


def test_what_the_kernel_kills_is_known_with_the_limit(limited):  # noqa: F811
    limit = f"the limit of its control group is {LIMIT_MIB} MiB"
    assert python(limited, LOOK, EAT) == f"-9 {limit}"


def test_others_that_end_by_the_same_signal_were_not_killed_by_the_kernel(limited):  # noqa: F811
    assert python(limited, LOOK, "import os; os.kill(os.getpid(), 9)") == "-9"


def test_a_limit_of_a_group_above_bounds_what_is_free(limited):  # noqa: F811
    (limited / "inner").mkdir()
    free = python(
        limited / "inner", "from dovetail.host import memory as m; print(m.free_memory())"
    )
    assert 0 < int(free) <= LIMIT_MIB << 20 < memory.free_memory()


def test_what_others_of_the_group_use_is_not_free(limited):  # noqa: F811
    hold = [*within(limited), sys.executable, "-c",
            "b = bytearray(150 << 20); print(flush=True); input()"]  # fmt: skip
    with subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        free = python(limited, "from dovetail.host import memory as m; print(m.free_memory())")
        other.stdin.close()
    assert 0 < int(free) <= (LIMIT_MIB - 150) << 20


@pytest.fixture
def version_2(tmp_path, monkeypatch):
    """An imitation: a scope without the controller for memory, in a slice that has a limit."""
    scope = tmp_path / "slice" / "scope"
    scope.mkdir(parents=True)
    files = {"memory.max": f"{256 << 20}\n", "memory.current": f"{100 << 20}\n",
             "memory.stat": f"anon 1\ninactive_file {40 << 20}\n",
             "memory.events": "low 0\noom 0\noom_kill 3\n"}  # fmt: skip
    for name, text in files.items():
        (scope.parent / name).write_text(text)
    (tmp_path / "memory.max").write_text("max\n")
    folders = [str(scope), str(scope.parent), str(tmp_path)]
    monkeypatch.setattr(cgroups, "above", lambda controller, group="": folders)
    return scope.parent


def test_version_2_counts_in_the_nearest_group_that_has_the_controller(version_2):
    kills = memory.KernelKills()
    assert kills.why() == ""
    (version_2 / "memory.events").write_text("low 0\noom 1\noom_kill 4\n")
    assert kills.why() == "the limit of its control group is 256 MiB"


def test_files_that_the_kernel_would_drop_are_free_memory(version_2):
    assert memory.free_memory() == (256 - 100 + 40) << 20
