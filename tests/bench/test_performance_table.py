# SPDX-License-Identifier: LGPL-3.0-or-later
"""The README's table of performance and `dovetail bench all` hold the same comparisons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dovetail.bench.moldable import restarts
from dovetail.cli import bench
from dovetail.core import eventlog, protocol
from dovetail.core.protocol import Cause

pytestmark = pytest.mark.unit

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def rows() -> list[str]:
    """What each row of the table is about."""
    section = README.partition("\n## Performance\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.split("|")[1].strip() for line in lines[2:]]


def commands(row: str) -> list[str]:
    return re.findall(r"`bench (\w+)[^`]*`", row)


def test_each_row_names_the_command_that_measures_it():
    nameless = [row for row in rows() if len(commands(row)) != 1]
    assert [row for row in nameless if not row.startswith("the same")] == []
    assert commands(rows()[0]), "the first can be the same as nothing"


def test_all_runs_what_the_table_holds_and_nothing_else():
    named = {name for row in rows() for name in commands(row)}
    assert named == set(bench.every())


def test_what_all_cannot_measure_is_told_and_the_rest_goes_on(monkeypatch, capsys):
    def missing(*_: object) -> list[bench.Claim]:
        raise bench.BadInput("no flux")

    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    monkeypatch.setattr(bench, "APART", tuple(set(bench.COMPARISONS) - {"jobtap", "scale"}))
    monkeypatch.setitem(bench.COMPARISONS, "jobtap", ("x", missing))
    monkeypatch.setitem(bench.COMPARISONS, "scale", ("y", lambda *_, **__: []))
    args = bench.argparse.Namespace(
        what="all", repeat=1, queues=None, output=None, kubernetes=False, json=False,
        names=[], executor=None, scale=None, price=None,
    )  # fmt: skip
    assert bench.run(args) == 1
    told = capsys.readouterr()
    assert "jobtap: not measured: no flux" in told.out
    assert "scale: y" in told.err


def test_a_restart_is_measured_from_the_decision_to_new_iterations(tmp_path):
    share = protocol.Share((1000,))

    def sampled(t: float, done: int) -> protocol.Sampled:
        return protocol.Sampled(t, "a", protocol.Ranks((done,), *[(t,)] * 4, (1,)))

    spec = protocol.Spec("a", "a", "case", 1, (1.0,), ("run",))
    head = eventlog.header([spec], protocol.Capacity(()), {})
    with eventlog.Log.create(tmp_path / "log", head) as log:
        for one in (
            protocol.Launch("a", share),
            sampled(2.0, 5),
            protocol.Checkpoint("a", "to be cut anew"),
            sampled(2.5, 6),
            protocol.Finished(3.0, "a", Cause.CHECKPOINTED),
            protocol.Launch("a", share, True),
            sampled(3.5, 0),
            sampled(4.25, 1),
        ):
            log.write(one)
    assert restarts(tmp_path / "log") == [2.25]
