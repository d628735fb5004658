# SPDX-License-Identifier: LGPL-3.0-or-later
"""`delegate` in a prolog and an epilog: of jobs of one user that share a machine.

A failed epilog drains the node, so that nobody's jobs run there.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from support.clusters import ROOT, SETUP, USER, as_user

MOUNTS = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
GROUPS = sorted({Path(m[1]) / f"dovetail-{USER}" for m in MOUNTS if m[2] == "cgroup"})

pytestmark = [
    pytest.mark.kube,
    pytest.mark.skipif(not ROOT, reason="root gives groups away"),
    pytest.mark.skipif(not GROUPS, reason="control groups version 1 is not here"),
]


@pytest.fixture
def delegated():
    delegate()
    yield GROUPS
    assert delegate("--remove") == ""
    assert there() == []


def delegate(*words):
    """What it says."""
    line = [SETUP / "delegate", str(USER), *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stderr


def there():
    return [group for group in GROUPS if group.exists()]


@contextlib.contextmanager
def one_process(uid, *words):
    """Whose first word comes when it runs."""
    words = as_user(uid, "sh", "-c", f"{' '.join(words)} echo; read _")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        made.stdout.readline()
        yield made
        made.stdin.close()


def test_what_a_killed_job_left_in_the_groups_goes_with_them(delegated):
    for group in delegated:
        (group / "f-0123abcd-0" / "pods").mkdir(parents=True)
    assert delegate("--remove") == ""
    assert there() == []


def test_the_groups_stay_whole_while_a_process_of_a_cluster_is_in_one(delegated):
    last = delegated[-1] / "f-0123abcd-0"
    last.mkdir()
    with one_process(0, f"echo $$ >{last}/cgroup.procs;", f"exec setpriv --reuid={USER + 1}",
                     "sh -c 'echo; read _';"):  # fmt: skip
        assert f"user {USER} has processes here; the control groups stay" in delegate("--remove")
        assert there() == delegated


def test_the_groups_stay_while_another_job_has_put_nothing_into_them_yet(delegated):
    with one_process(USER):
        assert f"user {USER} has processes here" in delegate("--remove")
        assert there() == delegated
        assert delegate() == ""


def test_a_number_that_no_user_has_leaves_no_group():
    done = subprocess.run([SETUP / "delegate", "4294967295"], capture_output=True, text=True)
    said = "delegate: 4294967295 is more than a user id can be\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert not [one for one in GROUPS if one.with_name("dovetail-4294967295").exists()]


def test_what_is_not_there_is_removed_already(delegated):
    assert delegate("--remove") == ""
    assert delegate("--remove") == ""


def test_the_prologs_and_epilogs_of_several_jobs_at_once_all_end_well(delegated):
    words = [("--remove",), ()] * 8
    many = [subprocess.Popen([SETUP / "delegate", str(USER), *more]) for more in words]
    assert [one.wait() for one in many] == [0] * len(many)
    assert there() in ([], delegated)


def test_the_groups_are_for_all_to_look_at_whatever_roots_umask(delegated):
    """A kubelet of another user walks the whole tree, and ends where it may not look."""
    assert delegate("--remove") == ""
    subprocess.run(["sh", "-c", 'umask 077; exec "$@"', "sh", SETUP / "delegate", str(USER)],
                   check=True)  # fmt: skip
    assert {group.stat().st_mode & 0o777 for group in delegated} == {0o755}
