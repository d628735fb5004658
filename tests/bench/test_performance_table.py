# SPDX-License-Identifier: LGPL-3.0-or-later
"""The README's table of performance and `dovetail bench all` hold the same comparisons."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from dovetail.bench.moldable import restarted
from dovetail.cli import bench
from dovetail.cli.main import main
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


SHARE = protocol.Share((1000,))
ASKED = (protocol.Launch("a", SHARE), protocol.Checkpoint("a", "to be cut anew"))


def sampled(t: float, done: int) -> protocol.Sampled:
    return protocol.Sampled(t, "a", protocol.Ranks((done,), *[(t,)] * 4, (1,)))


def logged(path: Path, *events: protocol.Event | protocol.Action) -> Path:
    spec = protocol.Spec("a", "a", "case", 1, (1.0,), ("run",))
    head = eventlog.header([spec], protocol.Capacity(()), {})
    with eventlog.Log.create(path, head) as log:
        for one in events:
            log.write(one)
    return path


def whole(path: Path) -> Path:
    """The log of a restart of 1.75 s."""
    return logged(
        path,
        ASKED[0],
        sampled(2.0, 5),
        ASKED[1],
        sampled(2.5, 6),
        protocol.Finished(3.0, "a", Cause.CHECKPOINTED),
        protocol.Launch("a", SHARE, True),
        sampled(3.5, 0),
        sampled(3.75, 1),
    )


def test_a_restart_is_measured_from_the_decision_to_new_iterations(tmp_path):
    claim = restarted([whole(tmp_path / "log")])
    assert (claim.row.values, claim.why, claim.met) == ((1.75,), "", True)


def test_a_restart_that_never_iterates_again_is_told_and_not_kept(tmp_path):
    stopped = protocol.Finished(3.0, "a", Cause.CHECKPOINTED)
    logs = [whole(tmp_path / "log"), logged(tmp_path / "lost", *ASKED, stopped)]
    claim = restarted(logs)
    assert (claim.row.values, claim.met) == ((1.75,), False)
    assert claim.why == "1 of 2 had no new iterations (a)"


def test_where_no_restart_came_its_claim_is_not_measured_and_not_kept(
    tmp_path, monkeypatch, capsys
):
    ended = protocol.Finished(3.0, "a", Cause.DONE)  # before it came to its checkpoint
    claim = restarted([logged(tmp_path / "log", *ASKED, ended)])
    why = "no simulation was stopped to be cut anew"
    assert (claim.row.values, claim.why, claim.met) == ((), why, False)
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    monkeypatch.setitem(bench.COMPARISONS, "jobtap", ("x", lambda *_: [claim]))
    assert main(["bench", "jobtap"]) == 1
    assert f"new iterations: not measured: {why}" in capsys.readouterr().out
    assert main(["bench", "jobtap", "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["jobtap"]
    assert (told["median"], told["met"], told["why"]) == (None, False, why)
