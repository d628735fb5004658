# SPDX-License-Identifier: LGPL-3.0-or-later
"""Faults across hosts that nobody has chosen: each simulation is done once, or has a reason.

By default a few, always the same. `DOVETAIL_FAULTS=100 DOVETAIL_SEED=7` has so many others.
"""

from __future__ import annotations

import os

import pytest
from support import hosts, random_faults
from usernetes_setup.preflight import report

pytestmark = [pytest.mark.kube, pytest.mark.first]  # it mostly waits


def test_every_simulation_is_accounted_for_whatever_fails(binaries, tmp_path):
    if errors := report.errors():
        pytest.skip(f"cannot run here: {errors[0]}")
    count = int(os.environ.get("DOVETAIL_FAULTS", "3"))
    seed = int(os.environ.get("DOVETAIL_SEED", "213"))
    number = int(os.environ.get("DOVETAIL_HOSTS", "2"))
    cache = binaries.parents[1]
    with hosts.started(number, read=[cache], shared=tmp_path) as made:
        for host in made:
            host.environment["DOVETAIL_CACHE"] = str(cache)
        site = random_faults.Site(made, tmp_path)
        site.through(random_faults.drawn(seed, count, number), 4 if count < 10 else 12)
        print(site.states, site.reasons)
        site.end()
        hosts.nothing_left(made)
    assert not site.wrong, "\n".join(site.wrong)
