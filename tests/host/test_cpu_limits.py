# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a limit of CPU does to a simulation under it is seen, and said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dovetail.core import contention, protocol
from dovetail.host import cgroups, cpu_limits
from support.local_runs import share, site  # noqa: F401

pytestmark = pytest.mark.unit

FILES = {"cpu.cfs_quota_us": "10000", "cpu.max": "10000 100000"}
WORK = "i=0; while [ $i -lt 150000 ]; do i=$((i + 1)); done"


@pytest.fixture
def limited():
    """A control group that may use a tenth of a core."""
    top = cgroups.find()
    if not top.weight:
        pytest.skip("no control groups")
    path = Path(top.weight, f"dovetail-limit-{os.getpid()}")
    path.mkdir()
    try:
        file = next((path / name for name in FILES if (path / name).exists()), None)
        if file is None:
            pytest.skip("this kernel has no limits of CPU")
        file.write_text(FILES[file.name])
        made = cgroups.Group(str(path), str(path) if top.weight == top.control else top.control)
        made.share_out()
        yield made
    finally:
        path.rmdir()


def test_a_simulation_that_a_limit_around_the_run_stops_is_told_so(limited, site):  # noqa: F811
    executor = site.executor(place=limited)
    executor.launch(site.spec("sim", WORK), share())
    assert site.until(executor, "sim").code == 0
    seen = [one for one in site.events if isinstance(one, protocol.Counted)][-1].contention
    stops = seen.throttling
    assert stops.limit == 100
    assert 0 < stops.throttled <= stops.periods
    assert 0.0 < stops.share <= 1.0
    assert (seen.voluntary, seen.queued) == ((), ()), "it has no ranks that tell"
    (one,) = contention.hindrances(seen, own_limit=False)
    assert one.words.startswith("throttled ")
    assert one.words.endswith(": the limit of 0.1 cores around it is too small")


def test_what_the_kernel_does_not_tell_is_not_zero(tmp_path):
    assert cpu_limits.throttling([str(tmp_path)]) == {}
    assert cpu_limits.pressure([str(tmp_path)]) is None
    assert cpu_limits.hardest({}, {}, 2) is None


def test_both_versions_are_read_alike(tmp_path):
    old, new = tmp_path / "1", tmp_path / "2"
    for folder in (old, new):
        folder.mkdir()
    (old / "cpu.cfs_quota_us").write_text("150000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    (old / "cpu.stat").write_text("nr_periods 20\nnr_throttled 9\nthrottled_time 1200000000\n")
    (new / "cpu.max").write_text("150000 100000\n")
    (new / "cpu.stat").write_text("nr_periods 20\nnr_throttled 9\nthrottled_usec 1200000\n")
    (new / "cpu.pressure").write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"
    )
    one, other = cpu_limits.throttling([str(old), str(new)]).values()
    assert one == other == contention.Throttling(1500, 20, 9, 1.2, 2.0)
    assert cpu_limits.pressure([str(old), str(new)]) == pytest.approx(2.5)
    assert cpu_limits.hardest({"x": one}, {}, 2).share == pytest.approx(0.3)
