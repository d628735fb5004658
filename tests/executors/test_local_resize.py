# SPDX-License-Identifier: LGPL-3.0-or-later
"""Shares change while simulations run, all of them or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.host import cgroups, processes
from support.local_runs import share, site, wait_for  # noqa: F401

pytestmark = pytest.mark.unit

COUNT = 'i=0; while :; do i=$((i+1)); echo $i > "$DOVETAIL_TEST/$0"; done'
weights = pytest.mark.skipif(not cgroups.find().weight, reason="no control groups to weigh with")


def start(site, executor, name, **options):  # noqa: F811
    """A simulation that counts as fast as it gets CPU."""
    spec = site.spec(name, "", command=("sh", "-c", COUNT, name), **options)
    executor.launch(spec, protocol.Share((1000,) * spec.ranks))
    wait_for(lambda: count(site, name))


def count(site, name):  # noqa: F811
    try:
        return int((site.directory / name).read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0


def shares(executor, name):
    group = cgroups.find().child(os.path.basename(executor.session)).child(name)
    directory = Path(group.weight)
    file = next(f for f in ("cpu.shares", "cpu.weight") if (directory / f).exists())
    return int((directory / file).read_text())


@weights
def test_weights_follow_the_requests(site):  # noqa: F811
    executor = site.executor()
    start(site, executor, "a")
    before = shares(executor, "a")
    executor.resize({"a": share(250)})
    assert site.until(executor, "a", protocol.Resized).refused == ""
    assert shares(executor, "a") == pytest.approx(before / 4, rel=0.02)


@weights
def test_each_rank_can_have_a_group_of_its_own(site):  # noqa: F811
    executor = site.executor()
    start(site, executor, "a", ranks=2, ranks_per_pod=1)
    executor.resize({"a": protocol.Share((250, 1500))})
    site.until(executor, "a", protocol.Resized)
    light, heavy = (shares(executor, f"a/r{rank}") for rank in (0, 1))
    assert heavy / light == pytest.approx(6.0, rel=0.02)


@weights
def test_a_resize_takes_effect_for_all_or_none(site):  # noqa: F811
    executor = site.executor()
    start(site, executor, "a")
    before = shares(executor, "a")
    executor.resize({"a": share(250, suspended=True), "b": share(250)})
    resized = site.until(executor, "a", protocol.Resized)
    assert "b: runs no more" in resized.refused
    assert shares(executor, "a") == before
    now = count(site, "a")
    wait_for(lambda: count(site, "a") > now)


@pytest.mark.alone
@weights
def test_weights_decide_who_gets_a_contended_core(site):  # noqa: F811
    executor = site.executor(cpus=1)
    for name in ("a", "b"):
        executor.launch(site.spec(name, "while :; do :; done"), share())
        site.until(executor, name, protocol.Started)
    wait_for(lambda: min(cpu_seconds(executor, name) for name in ("a", "b")) > 0.1)
    executor.resize({"a": share(1600), "b": share(400)})
    site.until(executor, "a", protocol.Resized)
    first = {name: cpu_seconds(executor, name) for name in ("a", "b")}
    wait_for(lambda: cpu_seconds(executor, "b") > first["b"] + 0.3)
    gained = {name: cpu_seconds(executor, name) - first[name] for name in first}
    assert 2.5 < gained["a"] / gained["b"] < 6.0  # 4, measured in slices of milliseconds


def cpu_seconds(executor, name):
    """CPU time of all processes of a simulation."""
    total = 0.0
    for pid in processes.members(f"DOVETAIL_DIR={executor.session}/{name}"):
        total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return total


@pytest.mark.parametrize("groups", [True, False])
def test_freezing_stops_progress_and_thawing_resumes_it(site, groups):  # noqa: F811
    executor = site.executor(place=None if groups else cgroups.Group("", ""))
    assert executor.capacity().weights == (groups and bool(cgroups.find().weight))
    start(site, executor, "a")
    start(site, executor, "b")
    executor.resize({"a": share(suspended=True)})
    wait_for(lambda: stands(site, "a"))
    executor.resize({"a": share(suspended=False)})
    before = count(site, "a")
    wait_for(lambda: count(site, "a") > before)


def stands(site, name):  # noqa: F811
    """Whether `name` stays where it is while its neighbour `b` gets on."""
    before, other = count(site, name), count(site, "b")
    wait_for(lambda: count(site, "b") > other + 50)
    return count(site, name) == before
