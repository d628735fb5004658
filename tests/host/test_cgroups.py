# SPDX-License-Identifier: LGPL-3.0-or-later
"""Control groups are found, weighted linearly, and removed; version 2 by imitation."""

from __future__ import annotations

import os
import subprocess
import types

import pytest
from dovetail.host import cgroups
from dovetail.host import processes as process
from support.local_runs import wait_for

pytestmark = pytest.mark.unit

WEIGHTS = {
    "one core is a process's default weight": (1000, "1024", "100"),
    "ratios stay true, 15 to 1": (67, "69", "7"),
    "the other side of 15 to 1": (1005, "1029", "100"),
    "never less than the kernel takes": (1, "2", "1"),
    "never more than version 2 takes": (200000, "204800", "10000"),
}


@pytest.mark.parametrize("case", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights_are_linear_in_millicores(tmp_path, case):
    millicores, shares, weight = case
    for name, file, expected in (("v1", "cpu.shares", shares), ("v2", "cpu.weight", weight)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / file).touch()
        cgroups.Group(str(directory), str(directory)).set_weight(millicores)
        assert (directory / file).read_text() == expected


def tree(tmp_path, own, groups):
    """An imitation of a version 2 hierarchy: path to (controllers, subtree, processes)."""
    for path, (controllers, subtree, processes) in groups.items():
        directory = tmp_path / "fs" / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cgroup.controllers").write_text(controllers)
        (directory / "cgroup.subtree_control").write_text(subtree)
        (directory / "cgroup.procs").write_text(processes)
        (directory / "cgroup.type").write_text("domain\n")
    (tmp_path / "mountinfo").write_text(f"30 29 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "own").write_text(f"0::/{own}\n")
    found = cgroups.find(str(tmp_path / "mountinfo"), str(tmp_path / "own"))
    return [os.path.relpath(path, tmp_path / "fs") for path in found.directories]


def test_version_2_takes_the_nearest_group_that_shares_out_cpu(tmp_path):
    groups = {"app": ("cpu memory", "cpu", ""), "app/scope": ("memory", "memory", "1\n")}
    assert tree(tmp_path, "app/scope", groups) == ["app"]


def test_version_2_takes_no_group_that_has_processes_though_it_was_delegated(tmp_path):
    groups = {"app": ("cpu memory", "cpu", ""), "app/scope": ("cpu", "", "1\n")}
    assert tree(tmp_path, "app/scope", groups) == ["app"]
    assert (tmp_path / "fs/app/scope/cgroup.subtree_control").read_text() == ""


def test_version_2_switches_cpu_on_where_it_is_delegated(tmp_path):
    groups = {"app": ("cpu memory", "memory", ""), "app/scope": ("memory", "", "1\n")}
    assert tree(tmp_path, "app/scope", groups) == ["app"]
    assert (tmp_path / "fs/app/cgroup.subtree_control").read_text() == "+cpu"


@pytest.mark.parametrize(
    ("release", "there"), [("5.2-site-3", ["app"]), ("4.19-site-3", []), ("strange", [])]
)
def test_a_kernel_may_be_called_as_its_builder_likes(tmp_path, monkeypatch, release, there):
    kernel = types.SimpleNamespace(release=release)
    monkeypatch.setattr(cgroups.os, "uname", lambda: kernel)
    assert tree(tmp_path, "app", {"app": ("", "", "")}) == there


def test_version_1_finds_cpu_and_freezer_apart(tmp_path):
    for name in ("cpu,cpuacct", "freezer"):
        (tmp_path / name / "user").mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(
        f"1 0 0:1 / {tmp_path}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"2 0 0:2 / {tmp_path}/freezer rw - cgroup cgroup rw,freezer\n"
    )
    (tmp_path / "own").write_text("2:freezer:/user\n1:cpu,cpuacct:/user\n")
    found = cgroups.find(str(tmp_path / "mountinfo"), str(tmp_path / "own"))
    assert found.weight == f"{tmp_path}/cpu,cpuacct/user"
    assert found.control == f"{tmp_path}/freezer/user"


def test_a_mount_of_somebody_may_have_a_name_that_is_no_text(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "mountinfo").write_bytes(
        b"1 0 0:1 / /media/caf\xe9 rw - ext4 /dev/sdb rw\n"
        + f"2 0 0:2 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu\n".encode()
    )
    (tmp_path / "own").write_text("1:cpu:/\n")
    found = cgroups.find(str(tmp_path / "mountinfo"), str(tmp_path / "own"))
    assert found.weight == f"{tmp_path}/cpu"


def test_without_any_mount_there_is_no_group(tmp_path):
    (tmp_path / "mountinfo").write_text("1 0 0:1 / / rw - ext4 /dev/vda rw\n")
    (tmp_path / "own").write_text("0::/\n")
    found = cgroups.find(str(tmp_path / "mountinfo"), str(tmp_path / "own"))
    assert found.directories == []


@pytest.mark.parametrize(
    ("file", "text", "seconds"),
    [
        ("cpuacct.usage", "1500000000\n", 1.5),
        ("cpu.stat", "usage_usec 2500000\nuser_usec 1\n", 2.5),
        ("cpu.stat", "nr_periods 0\nnr_throttled 0\n", None),
        ("cpu.shares", "1024\n", None),
    ],
    ids=["version 1", "version 2", "version 1 has another file of that name", "no such file"],
)
def test_cpu_time_is_read_where_either_version_has_it(tmp_path, file, text, seconds):
    (tmp_path / file).write_text(text)
    found = cgroups.Group("", str(tmp_path)).cpu_seconds()
    assert found == (None if seconds is None else pytest.approx(seconds))


def places():
    """The control groups that this machine lets us make, version 1 and 2 apart."""
    found = cgroups.find()
    result = {"what is found": found}
    if os.access("/sys/fs/cgroup/freezer", os.W_OK):
        result["the version 1 freezer"] = cgroups.Group(found.weight, "/sys/fs/cgroup/freezer")
    return {name: place for name, place in result.items() if place.control}


@pytest.mark.parametrize("place", places().values(), ids=places().keys())
@pytest.mark.parametrize("frozen", [False, True])
def test_a_group_freezes_kills_and_vanishes(place, frozen):
    group = place.child(f"dovetail-{os.getuid()}-test{os.getpid()}").create()
    child = subprocess.Popen(["sh", "-c", "while :; do sleep 0.01; done"])
    try:
        group.add(child.pid)
        assert child.pid in group.members()
        group.freeze(frozen)
        group.kill()
        assert process.end_all(group.members) == {}
        assert child.wait() == -9
        wait_for(lambda: not group.members())
    finally:
        child.kill()
        child.wait()
        group.remove()
    assert not any(map(os.path.exists, group.directories))
