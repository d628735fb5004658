# SPDX-License-Identifier: LGPL-3.0-or-later
"""The weights of pods are found on disk, whichever way a kubelet lays them out."""

from __future__ import annotations

import pytest
from dovetail.executors.pods import messages, weights
from support.pod_processes import cluster  # noqa: F401

pytestmark = pytest.mark.unit

UID = "0a1b2c3d-1111-2222-3333-444455556666"
LAYOUTS = {
    "version 1, cgroupfs": ("cpu/kubepods/burstable/pod" + UID, "cpu.shares", "512"),
    "version 1 in a user's own group": (
        "cpu/user/dovetail-kube/n1/kubepods/pod" + UID, "cpu.shares", "512"),
    "version 2, cgroupfs": ("kubepods/besteffort/pod" + UID, "cpu.weight", "20"),
    "version 2, systemd": (
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
        + UID.replace("-", "_") + ".slice", "cpu.weight", "20"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_pods_weight_is_found(tmp_path, layout):
    path, name, value = layout
    (tmp_path / path / "container").mkdir(parents=True)
    (tmp_path / path / name).write_text(value + "\n")
    (tmp_path / path / "container" / name).write_text("9\n")
    other = tmp_path / path.replace(UID, "f" * 8)
    other.mkdir(parents=True, exist_ok=True)
    assert weights.read(str(tmp_path), [UID, "not-there"]) == {UID: {name: value}}


USED = {
    "version 1": {
        "cpuacct/POD/cpuacct.usage": "1500000000\n",
        "memory/POD/memory.stat": "cache 9\nrss 7\ntotal_rss 4096\n",
        "cpu/POD/cpu.stat": "nr_periods 0\n",
    },
    "version 2": {
        "POD/cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
        "POD/memory.stat": "anon 4096\nfile 9\n",
    },
}


@pytest.mark.parametrize("files", USED.values(), ids=USED.keys())
def test_what_a_pod_uses_is_told_where_no_page_does(files, cluster):  # noqa: F811
    root = cluster.directory / "cgroups"
    for name, text in files.items():
        file = root / name.replace("POD", "kubepods/poduid0")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    cluster.agent(cgroups=str(root))
    cluster.launch("sim", "sleep 1000")
    assert cluster.until(messages.Used).groups == {"sim": {"0": [1.5, 4096]}}
    cluster.end("sim", 1)


def test_what_a_pod_uses_is_told_while_its_log_counts(cluster):  # noqa: F811
    """As of a solver on one rank, which calls no MPI: its load is known by this alone."""
    usage = cluster.directory / "cgroups" / "cpuacct" / "kubepods" / "poduid0" / "cpuacct.usage"
    usage.parent.mkdir(parents=True)
    usage.write_text("1500000000\n")
    (usage.parent / "memory.stat").write_text("total_rss 4096\n")
    cluster.agent(cgroups=str(cluster.directory / "cgroups"))
    cluster.launch("sim", "echo Time = 1; echo Time = 2; sleep 1000")
    while cluster.until(messages.Sample).lines.get("sim", [0])[0] != 2:
        pass
    usage.write_text("2500000000\n")
    cluster.until(messages.Used, groups={"sim": {"0": [2.5, 4096]}})
    cluster.end("sim", 1)


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert weights.read(str(tmp_path), [UID]) == {}
    assert weights.read(str(tmp_path / "missing"), [UID]) == {}
    assert weights.read(str(tmp_path), []) == {}


def test_an_agent_answers_a_check(cluster, tmp_path):  # noqa: F811
    pod = tmp_path / "cgroups" / "kubepods" / f"pod{UID}"
    pod.mkdir(parents=True)
    (pod / "cpu.weight").write_text("77\n")
    cluster.agent("one", cgroups=str(tmp_path / "cgroups"))
    cluster.until(messages.Joined)
    assert cluster.hub.send("one", messages.Check([UID]))
    assert cluster.until(messages.Weights).values == {UID: {"cpu.weight": "77"}}
    assert not cluster.hub.send("two", messages.Check([UID]))
