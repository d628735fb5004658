# SPDX-License-Identifier: LGPL-3.0-or-later
"""Large plans: the cost of a decision grows no faster than the plan."""

from __future__ import annotations

import pytest
from dovetail.bench.scale.ranks import bench_scale
from dovetail.core.protocol import Node, Spec
from dovetail.executors.simulated.executor import Work
from dovetail.run.simulate import run_simulated
from support.calls import calls_of

pytestmark = pytest.mark.unit


def test_ten_times_the_ranks_cost_about_ten_times_the_calls():
    bench_scale([100])  # imports and caches
    small, large = calls_of(lambda: bench_scale([100])), calls_of(lambda: bench_scale([1000]))
    assert large <= 12 * small


def test_every_size_ends_with_everything_running():
    rows = bench_scale([50, 500])
    assert [row["ranks"] for row in rows] == [50, 500]
    for row in rows:
        assert row["running"] >= row["simulations"]


def test_a_queue_of_three_hundred_on_twenty_nodes_is_worked_off():
    specs = [Spec(f"s{i}", "a", "c", 4, (1.0, 1.0, 1.0, 1.0), ("run",)) for i in range(300)]
    nodes = [Node(f"n{i}", 8000, 0) for i in range(20)]
    result = run_simulated(specs, {"a": Work((0.2,) * 4, 10)}, nodes, dt=0.25)
    assert all(view.state == "done" for view in result.controller.views())
    assert max(n for _, n in result.running) == 40
    assert result.gain > 20
