# SPDX-License-Identifier: LGPL-3.0-or-later
"""How requests become weights on disk, and how a bent formula is straightened."""

from __future__ import annotations

import json
import time

import pytest
from dovetail.core import cgroup_weights, protocol
from dovetail.executors.kubernetes.lifecycle import Launched, Running
from dovetail.executors.kubernetes.nodes import Nodes
from dovetail.executors.kubernetes.share_report import FILE, Report

pytestmark = pytest.mark.unit

# The curve's values are those of the runtimes' own tests, and of what was seen on disk.
VALUES = [
    (1, "shares", 2), (2, "shares", 2), (100, "shares", 102), (1000, "shares", 1024),
    (1, "linear", 1), (1000, "linear", 39), (67, "linear", 3), (1005, "linear", 40),
    (1, "curve", 1), (1000, "curve", 100), (250, "curve", 35), (10**9, "curve", 10000),
    (10**9, "linear", 10000), (10**9, "shares", 262144),
]  # fmt: skip


@pytest.mark.parametrize(("cpu", "formula", "value"), VALUES)
def test_a_request_becomes_a_weight_as_kubelet_and_runtime_compute_it(cpu, formula, value):
    assert cgroup_weights.weight(cpu, formula) == value


def test_the_curve_flattens_fifteen_to_one_to_less_than_eight_to_one():
    assert 7 < cgroup_weights.weight(1005, "curve") / cgroup_weights.weight(67, "curve") < 8


@pytest.mark.parametrize("formula", ["shares", "linear", "curve"])
def test_the_formula_is_told_from_what_is_on_disk(formula):
    file = "cpu.shares" if formula == "shares" else "cpu.weight"
    found = [(cpu, file, cgroup_weights.weight(cpu, formula)) for cpu in (67, 500, 1005)]
    assert cgroup_weights.formula_of(found) == formula


@pytest.mark.parametrize(
    "found",
    [
        [],
        [(500, "cpu.weight", 7777)],
        [(500, "cpu.shares", 512), (500, "cpu.weight", 20)],
        [(500, "cpu.other", 512)],
    ],
)
def test_what_no_formula_explains_is_unknown(found):
    assert cgroup_weights.formula_of(found) == ""


def test_corrected_requests_have_weights_in_the_wanted_proportion_and_fit():
    wanted = [2000, 1500, 1005, 500, 200]
    asked = [cgroup_weights.corrected(one, "curve", 4000) for one in wanted]
    whole = cgroup_weights.weight(4000, "curve")
    for request, want in zip(asked, wanted):
        assert request <= want
        assert abs(cgroup_weights.weight(request, "curve") - whole * want / 4000) <= 1
    assert sum(asked) <= sum(wanted)


@pytest.mark.parametrize("formula", ["shares", "linear", ""])
def test_straight_formulas_need_no_correction(formula):
    assert [cgroup_weights.corrected(one, formula, 4000) for one in (1, 67, 1005, 4000)] == [
        1, 67, 1005, 4000,
    ]  # fmt: skip


def test_the_wanted_share_is_what_the_ranks_were_given_whatever_their_pods_ask_for(tmp_path):
    nodes, report = Nodes((None, None)), Report(tmp_path, "run")
    nodes.formula = "curve"
    nodes.capacity = protocol.Capacity((protocol.Node("n", 2000, 0),))
    jobs, values = [], {}
    for name, requests in {"heavy": (1000, 500), "light": (60, 40)}.items():
        spec = protocol.Spec(name, name, ".", 2, (1.0, 1.0), ("true",))
        job = Launched(spec, protocol.Share(requests), name, Running(), [1, 1])
        job.cpu = nodes.divided(job.sizes, requests)
        for group, cpu in enumerate(job.cpu):
            uid = f"{name}-{group}"
            meta = {"name": uid, "uid": uid}
            job.pods[group] = {"metadata": meta, "spec": {"nodeName": "n"}, "status": {}}
            values[uid] = {"cpu.weight": str(cgroup_weights.weight(cpu, "curve"))}
        jobs.append(job)
    assert jobs[1].cpu != list(jobs[1].share.requests), "corrected"
    report.heard(values)
    assert report.look(time.monotonic() + 1.0, jobs)
    found = json.loads((tmp_path / FILE).read_text())
    assert found["formula"] == "curve"
    wanted = [1000 / 1600, 500 / 1600, 60 / 1600, 40 / 1600]
    assert [row["wanted"] for row in found["groups"]] == pytest.approx(wanted)
    assert [row["real"] for row in found["groups"]] == pytest.approx(wanted, abs=0.01)
