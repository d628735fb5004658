# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ranks of real MPI programs on this machine are bound to a core each, and unbound again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.core.protocol import Cause, Share
from dovetail.host import cores
from dovetail.mpi import sampling
from support import known_programs
from support.local_runs import site, wait_for  # noqa: F401

ALL = os.sched_getaffinity(0)
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(len(ALL) < 2, reason="with one core all are bound to it"),
]

THREADS = """
#include <mpi.h>
#include <pthread.h>
static void *spin(void *nothing) { for (volatile long i = 0;; i++) ; return nothing; }
int main(int argc, char **argv) {
    pthread_t other;
    MPI_Init(&argc, &argv);
    pthread_create(&other, NULL, spin, NULL);
    spin(NULL);
}
"""


@pytest.fixture(params=known_programs.MPIS)
def mpi(request):
    known_programs.library(request.param)
    return request.param


def start(site, executor, name, ranks, command):  # noqa: F811
    """Start it; returns its ranks' process ids once all are there."""
    spec = site.spec(name, "", ranks=ranks, command=tuple(command))
    executor.launch(spec, Share((1000,) * ranks))
    site.until(executor, name, protocol.Started)
    pages = wait_for(lambda: sampling.complete(Path(executor.session, name), ranks))
    return [one.pid for one in pages]


def busy(mpi, ranks):
    return [known_programs.build(mpi, "known/busy.c"), "burn", "100000000", *["5"] * ranks]


def resize(site, executor, bound, **ranks):  # noqa: F811
    """Why it was refused; empty if it was not."""
    executor.resize({n: Share((1000,) * r, bound=bound) for n, r in ranks.items()})
    return site.until(executor, next(iter(ranks)), protocol.Resized).refused


def affinity(pids):
    """What all threads of these processes may run on, those that are alike once."""
    found = set()
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.add(frozenset(os.sched_getaffinity(int(task.name))))
    return found


def test_each_rank_has_a_core_and_loses_it_again(site, mpi):  # noqa: F811
    executor = site.executor()
    assert executor.capacity().binds
    pids = start(site, executor, "a", 2, busy(mpi, 2))
    assert affinity(pids) == {frozenset(ALL)}
    assert resize(site, executor, True, a=2) == ""
    assert all(len(one) == 1 for one in affinity(pids))
    assert len(affinity(pids)) == 2
    assert resize(site, executor, False, a=2) == ""
    assert affinity(pids) == {frozenset(ALL)}


def test_simulations_have_unlike_cores_until_one_is_stopped(site, mpi):  # noqa: F811
    executor = site.executor(cpus=2)
    pids = {name: start(site, executor, name, 1, busy(mpi, 1)) for name in ("a", "b")}
    assert resize(site, executor, True, a=1, b=1) == ""
    both = [affinity(pids[name]) for name in ("a", "b")]
    assert all(len(one) == 1 and len(next(iter(one))) == 1 for one in both)
    assert both[0] != both[1]
    executor.stop("a", "enough")
    assert site.until(executor, "a").cause is Cause.CANCELLED
    pids["c"] = start(site, executor, "c", 1, busy(mpi, 1))
    assert resize(site, executor, True, c=1) == ""
    assert affinity(pids["c"]) == both[0]


def test_what_is_refused_for_one_is_taken_back_for_all(site, mpi):  # noqa: F811
    executor = site.executor()
    pids = start(site, executor, "a", 1, busy(mpi, 1))
    executor.launch(site.spec("b", "while :; do :; done"), Share((1000,)))
    site.until(executor, "b", protocol.Started)
    assert "do not use MPI" in resize(site, executor, True, a=1, b=1)
    assert affinity(pids) == {frozenset(ALL)}


def test_a_rank_that_computes_in_threads_is_left_alone(site, mpi, tmp_path):  # noqa: F811
    (tmp_path / "threads.c").write_text(THREADS)
    words = [f"mpicc.{mpi}", "-pthread", "-o", "threads", "threads.c"]
    subprocess.run(words, cwd=tmp_path, check=True)
    executor = site.executor()
    pids = start(site, executor, "a", 1, [str(tmp_path / "threads")])
    wait_for(lambda: cores.busy_threads(pids[0]) > 1)
    assert "more than one thread" in resize(site, executor, True, a=1)
    assert affinity(pids) == {frozenset(ALL)}


def test_a_user_who_binds_is_left_alone(site, mpi):  # noqa: F811
    executor = site.executor()
    starter = [known_programs.LAUNCHERS[mpi], "-np", "1"]
    command = [*starter, "taskset", "-c", str(max(ALL)), *busy(mpi, 1)]
    pids = start(site, executor, "a", 1, command)
    assert "already" in resize(site, executor, True, a=1)
    resize(site, executor, False, a=1)
    assert affinity(pids) == {frozenset({max(ALL)})}
