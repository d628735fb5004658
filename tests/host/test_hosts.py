# SPDX-License-Identifier: LGPL-3.0-or-later
"""The hosts of the tests: what they have in common, how they are parted, and that they end."""

from __future__ import annotations

import contextlib
import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import hosts
from support.clusters import eventually

pytestmark = pytest.mark.kube

CONNECT = "python3 -c \"import socket; socket.create_connection(('h2', 8000), 1)\""
MAKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from support import hosts
with hosts.started(2) as (first, second):
    first.start("setsid sleep 1000 & exec sleep 1000")
    print(hosts.ALICE, flush=True)
    time.sleep(1000)
"""


def test_hosts_share_a_network_and_a_folder_if_one_is_given_and_nothing_else(tmp_path):
    with hosts.started(2, shared=tmp_path) as (first, second):
        for host in (first, second):
            host.run("ls ~/mine || ls /tmp/mine", code=2)
            host.run("touch /usr/new", user="root", code=1)
            host.out(f"touch ~/mine /tmp/mine {tmp_path}/$(hostname)")
        assert sorted(second.out(f"ls {tmp_path}").split()) == ["h1", "h2"]
        server = second.start("exec python3 -m http.server 8000 --bind 10.78.0.2")

        def reaches():
            return first.run(CONNECT, code=None).returncode == 0

        assert eventually(reaches)
        for away, back in ((second.cut, second.heal), (second.hang, second.go_on)):
            away()
            if away == second.cut:
                assert not reaches()
                assert second.out("cat /sys/class/net/eth0/carrier") == "1", "it does not see it"
            else:
                assert "T" in second.out(f"ps -o stat= -u {hosts.ALICE} | head -1")
            back()
            assert eventually(reaches)
        assert any("listener" in line for line in second.left())
        second.end()
        assert server.poll() is not None
        assert not reaches()
        second.boot()
        second.run("ls ~/mine || ls /tmp/mine", code=2)
        hosts.nothing_left([second])


def test_hosts_end_with_the_process_that_made_them():
    if why := hosts.why_not():
        pytest.skip(why)
    tests = Path(hosts.__file__).parents[1]
    words = [sys.executable, "-c", MAKER, tests]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout
            alice = maker.stdout.readline().strip()
            assert eventually(lambda: len(of(alice)) == 2)
        finally:
            maker.kill()
    assert eventually(lambda: not of(alice), 30)
    assert eventually(lambda: not glob.glob(f"/sys/fs/cgroup/*/dovetail-{alice}"), 30)


def of(user):
    """A user's processes."""
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            found += [path] if os.stat(path).st_uid == int(user) else []
    return found
