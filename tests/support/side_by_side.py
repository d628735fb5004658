# SPDX-License-Identifier: LGPL-3.0-or-later
"""Tests side by side, in the workers of pytest-xdist: which stay together, which want to be alone.

Input: `-n WORKERS --dist loadgroup --no-loadscope-reorder`; without workers this changes nothing
but that the tests marked `alone` come last.

Tests that share something of their module, such as a cluster, run in one worker, one after the
other. A test marked `alone`, since it measures time or looks at the whole machine, runs while no
other worker is within a test, and no cluster of another stands idle. So all such tests come last,
in one worker: while one of them waits for the others' last tests, none can start that would make
it wait longer. Those marked `first` take minutes and begin first: the others fill the time until
they are through.
"""

from __future__ import annotations

import collections
import fcntl
import functools
import os
from pathlib import Path

import pytest

_ALONE = "alone"


@functools.cache
def _lock(checkout: Path) -> int:
    """What all hold who run a test of this checkout: its folder, which has a lock like a file."""
    return os.open(checkout, os.O_RDONLY)


def _group(item: pytest.Item) -> str:
    """Which tests have to run in the same worker as this one; nothing if it does not matter."""
    if item.get_closest_marker(_ALONE):
        return _ALONE
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    shares = any(fixture.scope == "module" for found in fixtures for fixture in found)
    return item.path.stem if shares else ""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Put groups together, the largest first, as the others fill the time until it is through."""
    groups = {item: _group(item) for item in items}
    sizes = collections.Counter(groups.values())
    for item, group in groups.items():
        if group and config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group(group))
    # Sorting is stable: within a group, and of those without one, the order stays.
    items.sort(key=lambda item: (
        groups[item] == _ALONE, not item.get_closest_marker("first"),
        -sizes[groups[item]] * bool(groups[item]), groups[item]))  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Run a test, with its fixtures' beginnings and ends, while it may.

    The lock is kept until what the module's tests share is gone.
    """
    alone, lock = item.get_closest_marker(_ALONE), _lock(item.config.rootpath)
    fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            fcntl.flock(lock, fcntl.LOCK_UN)
