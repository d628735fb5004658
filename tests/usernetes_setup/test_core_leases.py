# SPDX-License-Identifier: LGPL-3.0-or-later
"""Cores are given out on the host, not by each user for itself."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys

import pytest
from support.clusters import Machine, as_user, modes
from support.other_users import TOP, needs_nobody
from usernetes_setup.node import core_leases

_FIRST = random.randrange(10**6, 10**9)
CORES = range(_FIRST, _FIRST + 4)
"""Cores that no machine has, so that no cluster beside the test changes what is leased."""

HOLD = (
    "import sys; from usernetes_setup.node import core_leases\n"
    "taken = core_leases.take([int(word) for word in sys.argv[2:]], int(sys.argv[1]))\n"
    "print(*taken[0], flush=True); sys.stdin.read()"
)


class Holder:
    """Another process that leases so many of the cores, and says which."""

    def __init__(self, number, uid=None):
        line = [sys.executable, "-c", HOLD, str(number), *map(str, CORES)]
        environment = {**os.environ, "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup",
                       "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        self.process = subprocess.Popen(
            as_user(uid, *line) if uid else line, env=environment, cwd="/", text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self):
        return [int(word) for word in self.process.stdout.readline().split()]

    def __exit__(self, *_):
        self.process.communicate()


def mine(number):
    """What this process would get; it is given back at once."""
    cores, held = core_leases.take(CORES, number)
    for lease in held:
        lease.close()
    return cores


@pytest.mark.unit
@pytest.mark.parametrize("uid", [None, pytest.param(65534, marks=needs_nobody)])
def test_what_another_process_was_given_comes_last(uid):
    with Holder(1, uid) as first, Holder(2, uid) as second:
        assert sorted([*first, *second]) == [*CORES[:3]]
        assert mine(1) == [CORES[3]]
        assert mine(2) == [CORES[0], CORES[3]], "and then what is used least, in order"
    assert mine(4) == [*CORES]
    assert mine(1) == [CORES[0]], "all were given back"


@pytest.mark.unit
def test_a_core_that_many_share_is_taken_after_one_that_few_do():
    with Holder(4), Holder(3):
        assert mine(1) == [CORES[3]]


@pytest.mark.unit
def test_those_who_choose_at_the_same_moment_get_different_cores():
    with contextlib.ExitStack() as stack:
        holders = [Holder(1) for _ in CORES]  # none waits for another
        given = [core for one in holders for core in stack.enter_context(one)]
    assert sorted(given) == [*CORES]


@pytest.mark.alone
@pytest.mark.kube
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_clusters_of_two_users_get_cores_of_their_own(binaries):
    if len(modes()) < 2:
        pytest.skip("clusters of one user alone can run here")
    machines = [Machine(rootless, binaries) for rootless in (False, True)]
    try:
        cores = [one.up("--name", "one", "--cpus", "1")["cpus"] for one in machines]
        assert cores[0] != cores[1]
    finally:
        for one in machines:
            one.verb("down", "--name", "one")
            one.close()


@pytest.mark.unit
def test_a_socket_of_somebody_may_have_a_name_that_is_no_text():
    with socket.socket(socket.AF_UNIX) as other, Holder(1) as first:
        other.bind(b"\0dovetail-test-\xe9-%d" % _FIRST)
        assert first[0] in core_leases.leased()
