# SPDX-License-Identifier: LGPL-3.0-or-later
"""The comparisons themselves: fair turns, honest ratios, and nothing left behind (step 8)."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import time

import known
import pytest
from dovetail.bench.harness import Row, interleave, ratios
from dovetail.usernetes import preflight


@pytest.mark.unit
def test_variants_take_turns_and_each_round_begins_with_another():
    seen: list[str] = []

    def variant(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    rows = interleave({"a": lambda: variant("a"), "b": lambda: variant("b")}, 3)
    assert seen == ["a", "b", "b", "a", "a", "b"]
    assert rows["a"].values == (1.0, 4.0, 5.0)
    assert (rows["b"].median, rows["b"].spread) == (3.0, (2.0, 6.0))


@pytest.mark.unit
def test_a_ratio_is_taken_within_each_round():
    row = ratios(Row("slow", (2.0, 40.0, 3.0)), Row("fast", (1.0, 10.0, 3.0)), "ratio")
    assert row.values == (2.0, 4.0, 1.0)
    assert row.median == 2.0


@pytest.mark.mpi
def test_an_interrupted_comparison_leaves_nothing(tmp_path):
    program = known.build("openmpi", "known/life.c")
    words = [known.LAUNCHERS["openmpi"], "-np", "2", program, "hang"]
    code = (
        "import pathlib, sys\nfrom dovetail.bench.harness import plain\n"
        "plain([pathlib.Path(sys.argv[1])], sys.argv[2:], 1)"
    )
    before = set(os.listdir("/dev/shm"))
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), *words],
        env=known.environment(),
        stderr=subprocess.DEVNULL,
    )

    def new() -> set[str]:
        mine = (f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before)
        return {name for name in mine if "plain" in name or "vader" in name}

    def wait_for(condition) -> None:
        end = time.monotonic() + known.LIMIT
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)
        assert condition()

    try:
        wait_for(lambda: any(len(os.listdir(name)) > 1 for name in new() if "plain" in name))
        run.send_signal(signal.SIGINT)
        assert run.wait(known.LIMIT) != 0
    finally:
        run.kill()
    wait_for(lambda: not new())


@pytest.mark.kube
def test_the_life_of_a_cluster_is_measured_and_nothing_is_left():
    gaps = preflight.hard_gaps()
    if gaps:
        pytest.skip(f"cannot run here: {gaps[0]}")
    words = [sys.executable, "-m", "dovetail", "bench", "kube", "--repeat", "1", "--json"]
    run = subprocess.Popen(
        words, env=known.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said, errors = run.communicate()
    assert run.returncode in (0, 1), errors  # 1: a figure missed its bound, on a busy machine
    claims = json.loads(said)["kube"]
    users = {claim["name"].split(":")[0] for claim in claims if claim["bound"]}
    assert users <= {"root", "rootless"}
    assert users
    assert [claim["name"] for claim in claims if not min(claim["values"]) > 0] == []
    assert glob.glob(f"/sys/fs/cgroup/*/dovetail-{200_000 + run.pid}") == []
