# SPDX-License-Identifier: LGPL-3.0-or-later
"""Sixty simulations that last moments: each is accounted for, and the controller does not grow."""

from __future__ import annotations

import os

import pytest
from support.local_runs import wait_for
from support.run_command import site  # noqa: F401

pytestmark = [pytest.mark.unit, pytest.mark.slow]

ENDS = {
    "well": ("sleep 0.1", (), "done", ""),
    "fails": ("exit 3", (), "failed", "exit code 3"),
    "killed": ("kill -9 $$", (), "failed", "killed by signal 9"),
    "unprepared": ("true", ("exit 2",), "failed",
                   "prepare step 'sh -c 'exit 2'' failed with exit code 2"),
}  # fmt: skip


def test_each_of_sixty_tiny_simulations_ends_once_with_its_reason(site):  # noqa: F811
    entries = [
        site.shell(script, *prepare, name=name, count=15)
        for name, (script, prepare, _, _) in ENDS.items()
    ]
    run = site.start(site.plan(*entries), "-o", "out")
    files = []
    for many in (10, 40):
        enough = lambda log, many=many: sum(r["type"] == "Ended" for r in log) >= many  # noqa: E731
        wait_for(lambda enough=enough: enough(site.log()) or run.poll() is not None)
        files.append(len(os.listdir(f"/proc/{run.pid}/fd")))
    code, _, _ = site.end(run)
    assert code == 1
    found = site.summary()["simulations"]
    wanted = [(f"{name}-{n}", state, why) for name, (_, _, state, why) in ENDS.items()
              for n in range(1, 16)]  # fmt: skip
    # A shell that starts ranks sometimes says itself that they were killed.
    told = [(one["name"], one["state"], one["reason"].removesuffix(": Killed")) for one in found]
    assert told == wanted
    assert site.states().keys() == {name for name, _, _ in wanted}  # and the log replays
    assert {one["restarts"] for one in found} == {0}
    for kind in ("Launch", "Finished", "Ended"):
        assert sorted(r["name"] for r in site.of_type(kind)) == sorted(n for n, _, _ in wanted)
    # Of two that run, and two that just start or end, it holds at most a few each.
    assert files[1] <= files[0] + 12, files
