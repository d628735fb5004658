# SPDX-License-Identifier: LGPL-3.0-or-later
"""A good plan, and a place where it can be loaded, for the tests of plan files."""

from __future__ import annotations

from pathlib import Path

import pytest
from dovetail.plan import schema

GOOD = """\
cpus: 2
memory: 8G
max_packed: 4
simulations:
  - name: channel
    case: cases/channel
    ranks: 2
    weights: [1, 3]
    command: solver -parallel
    prepare: [mesh, "decompose --ranks 2"]
    count: 2
    slowdown: 1.5
    memory: 500M
    deadline: 10m
    iterations: 300
    ranks_per_pod: 1
    limit: 2.5
    environment: {KEY: value}
    devices: {gpu: 1, /dev/fuse: 2, rdma/hca_shared_devices_a: 1}
"""


ONE = """\
simulations:
  - name: a
    case: cases/channel
    ranks: 2
    command: solver
"""


def entry(key, value):
    """The plan ONE, with one key more in its simulation."""
    return f"{ONE}    {key}: {value}\n"


@pytest.fixture
def where(tmp_path, monkeypatch):
    """A directory with a case, and nothing on PATH but three programs."""
    (tmp_path / "cases" / "channel").mkdir(parents=True)
    for name in ("bin/solver", "bin/mesh", "bin/decompose", "cases/channel/Allrun"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text):
    data = text if isinstance(text, bytes) else text.encode()
    Path("plan.yaml").write_bytes(data)
    return schema.load("plan.yaml")
