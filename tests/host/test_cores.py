# SPDX-License-Identifier: LGPL-3.0-or-later
"""Processes that are bound to a core each, with all their threads, and are free again after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dovetail.host import cores, processes

pytestmark = pytest.mark.unit

ALL = os.sched_getaffinity(0)
two = pytest.mark.skipif(len(ALL) < 2, reason="with one core all are bound to it")

SLEEPERS = """
import threading, sys, time
threading.Thread(target=sys.stdin.read, daemon=True).start()
print("ready", flush=True)
while True: pass
"""
SPINNERS = """
import threading, hashlib, time
data = bytes(1 << 22)
def spin():
    while True: hashlib.sha256(data)  # without the lock of the interpreter
threading.Thread(target=spin, daemon=True).start()
print("ready", flush=True)
spin()
"""
PARENT = """
import subprocess, sys
print("ready", flush=True)
sys.stdin.readline()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def start():
    """Starts Python programs, and ends them with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", program]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ranks(*started: subprocess.Popen[str]) -> dict[int, int]:
    return {one.pid: processes.start_ticks(one.pid) for one in started}


def affinities(pid: int) -> list[set[int]]:
    """Of each thread."""
    return [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


@two
def test_each_rank_has_a_core_of_its_own_with_all_its_threads(start):
    a, b = start(SLEEPERS), start(SLEEPERS)
    here = cores.Cores(ALL)
    here.bind("a", ranks(a))
    here.bind("b", ranks(b))
    (one,), (other,) = ({frozenset(cpus) for cpus in affinities(p.pid)} for p in (a, b))
    assert len(affinities(a.pid)) == 2
    assert len(one) == len(other) == 1
    assert one != other
    here.release("a", lambda: ranks(a))
    assert affinities(a.pid) == [ALL, ALL]
    assert affinities(b.pid) == [other, other]


@two
def test_what_a_rank_started_while_bound_is_unbound_with_it(start):
    parent = start(PARENT)
    here = cores.Cores(ALL)
    here.bind("a", ranks(parent))
    parent.stdin.write("\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    assert len(os.sched_getaffinity(child)) == 1
    here.release("a", lambda: [parent.pid, child])
    assert os.sched_getaffinity(child) == ALL


@two
def test_a_rank_that_computes_in_two_threads_is_left_alone(start):
    process = start(SPINNERS)
    while cores.busy_threads(process.pid) < 2:
        assert process.poll() is None
    with pytest.raises(OSError, match="more than one thread"):
        cores.Cores(ALL).bind("a", ranks(process))
    assert affinities(process.pid) == [ALL, ALL]


@two
def test_who_is_bound_already_is_left_alone(start):
    process = start(SLEEPERS)
    mine = {max(ALL)}
    os.sched_setaffinity(process.pid, mine)
    here = cores.Cores(ALL)
    with pytest.raises(OSError, match="already"):
        here.bind("a", ranks(process))
    here.release("a", lambda: ranks(process))
    assert os.sched_getaffinity(process.pid) == mine


def test_a_process_that_is_another_by_now_is_not_touched(start):
    process = start(SLEEPERS)
    with pytest.raises(OSError, match="gone"):
        cores.Cores(ALL).bind("a", {process.pid: 1})
    assert os.sched_getaffinity(process.pid) == ALL


def test_nothing_is_bound_where_too_few_cores_are_free(start):
    many = [start(SLEEPERS) for _ in range(len(ALL) + 1)]
    with pytest.raises(OSError, match="fewer cores"):
        cores.Cores(ALL).bind("a", ranks(*many))
    assert [os.sched_getaffinity(one.pid) for one in many] == [ALL] * len(many)


@pytest.mark.parametrize(
    ("what", "now", "taken", "threads", "chosen"),
    [
        ("each stays where it runs", [5, 2], [], 1, [5, 2]),
        ("two on one core: the nearest is taken", [3, 3], [], 1, [3, 2]),
        ("another simulation has it", [3], [3], 1, [2]),
        ("threads of one core are apart", [0, 1], [], 2, [0, 2]),
        ("as long as there are such", [0, 2], [4, 6], 2, [0, 2]),
        ("and share it where there are not", [1], [0, 2, 4, 6], 2, [1]),
    ],
)
def test_cores_are_chosen_by_where_ranks_run_now(what, now, taken, threads, chosen):
    def siblings(core: int) -> set[int]:
        first = core - core % threads
        return set(range(first, first + threads))

    assert cores.choose(now, range(8), taken, siblings) == chosen, what


def test_the_machine_says_which_threads_are_of_one_core():
    assert all(cpu in cores.siblings(cpu) for cpu in ALL)
